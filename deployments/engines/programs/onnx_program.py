"""An ONNX model over tensors that exist already, run by onnxruntime on the CPU.

A session has one list of weights as long as it lives, so each fine-tune of a graph has a session of its own over its
views. Inputs and outputs are handed over as they lie in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weights.errors import FormatError
from weights.manifest import Component
from weights.programs.onnx_models import graph_for_session
from weights.programs.onnx_sessions import error_text, onnxruntime, open_session, run_options
from weights.programs.signature import ProgramSignature, signature_of


@dataclass(frozen=True, slots=True, eq=False)
class OnnxProgram:
    """A session, and `weights` that it reads: it does not keep them alive."""

    signature: ProgramSignature
    session: Any
    weights: Mapping[str, Any]
    options: Any
    device: torch.device

    def __call__(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the outputs, as `ServedProgram` says. Raises RuntimeError for values that the model refuses."""
        wrap = onnxruntime().OrtValue.from_dlpack
        values = {one.name: wrap(given[one.name].detach().contiguous()) for one in self.signature.inputs}
        names = [one.name for one in self.signature.outputs]
        try:
            found = self.session.run_with_ort_values(names, values, self.options)
        except Exception as error:  # its kinds of errors have no base of their own
            text = error_text(error)
            if "Failed to allocate memory" in text or "bad_alloc" in text:
                raise MemoryError(text) from None
            raise RuntimeError(text) from None
        outputs = {name: torch.utils.dlpack.from_dlpack(value) for name, value in zip(names, found, strict=True)}
        self._check(given, outputs)
        return outputs

    def _check(self, given: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Refuse outputs that are not as the model says: onnxruntime does not insist on it."""
        sizes = self.signature.sizes_of({name: tuple(tensor.shape) for name, tensor in given.items()})
        for one in self.signature.outputs:
            shape = outputs[one.name].shape
            expected = [sizes.get(size, size) if isinstance(size, str) else size for size in one.shape]
            numbers = zip(shape, expected, strict=False)
            if len(shape) != len(expected) or any(isinstance(size, int) and size != got for got, size in numbers):
                raise RuntimeError(f"its output {one.name!r} has shape {list(shape)}, the model says {list(one.shape)}")


def open_onnx(component: Component, folder: Path, tensors: Mapping[str, torch.Tensor]) -> OnnxProgram:
    """Return the ONNX model of the skeleton `folder` over its tensors, whose memory is not copied.

    It runs on as many threads as torch does. Raises FormatError and StoreError for a graph that is damaged, whose
    operators are missing, or that takes other tensors, and for tensors on another device; WeightsError without
    onnxruntime.
    """
    signature = signature_of(component)
    if away := next((tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"), None):
        raise FormatError(f"an ONNX model runs on the CPU, the text encoders' device is {away}")
    wrap = onnxruntime().OrtValue.from_dlpack
    graph, outside = graph_for_session(component, folder, tensors)
    weights = {name: wrap(tensor.detach()) for name, tensor in outside.items()}
    session = open_session(folder, graph, weights, num_threads=torch.get_num_threads())
    return OnnxProgram(signature, session, weights, run_options(), torch.device("cpu"))
