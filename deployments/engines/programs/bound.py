"""A program over tensors that exist already: of torch.export a graph without weights, called with them.

Fine-tunes of one program have one graph, so a switch between them is another list of tensors: nothing is loaded. An
ONNX model is run by onnxruntime on the CPU: a session has one list of weights as long as it lives, so each fine-tune of
a graph has a session of its own over its views. Its inputs and outputs are handed over as they lie in memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument

from deployments.engines.building.build import IMPORT_LOCK
from deployments.engines.programs.compiling import CompiledGraph, begin_compiling, has_traced_strides, is_output
from weights.platform.private_folder import cache_folder
from weights.programs.exported import bound_tensors, open_graph
from weights.programs.onnx_models import graph_for_session
from weights.programs.onnx_sessions import error_text, onnxruntime, open_session, run_options
from weights.programs.signature import ProgramSignature, signature_of
from weights.records.errors import FormatError
from weights.records.manifest import Component

MAX_GRAPHS: Final = 32


class ServedProgram(Protocol):
    """A program with its tensors, of any kind. Stateless, so threads may call it at once."""

    @property
    def signature(self) -> ProgramSignature: ...
    @property
    def device(self) -> torch.device: ...

    def __call__(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the outputs for all inputs of the signature, which have its types and sizes, on its device.

        HAZARD: an output may be a view of an input or of the weights: nobody may write to it.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class BoundProgram:
    """A program of torch.export with its tensors.

    `arguments` are those of the graph, None at the places of `inputs`, which are by name. `compiled` is the graph as
    it runs once it has been compiled.
    """

    signature: ProgramSignature
    module: fx.GraphModule
    arguments: Sequence[Any]
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    device: torch.device
    compiled: CompiledGraph | None = None

    def __call__(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the outputs, as `ServedProgram` says."""
        arguments = list(self.arguments)
        for name, place in self.inputs.items():
            arguments[place] = given[name].contiguous()
        if self.compiled is not None and self.compiled.run is not None:
            tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
            with contextlib.suppress(RuntimeError):  # of values: the graph itself says which
                return dict(zip(self.outputs, self.compiled.run(tensors), strict=True))
        with torch.no_grad():
            found = self.module(*arguments)
        return {name: found[place].detach() for name, place in self.outputs.items()}


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


@dataclass(slots=True, eq=False)
class _Graph:
    program: ExportedProgram
    compiled: CompiledGraph | None = None


class BoundPrograms:
    """The graphs of a replica on `device`, each read once for all programs that have it. Thread-safe."""

    def __init__(self, max_graphs: int = MAX_GRAPHS, packages: Path | None = None, device: str = "cpu") -> None:
        self._device = device
        self._max_graphs = max_graphs
        self._packages = packages or cache_folder() / "compiled"
        self._lock = threading.Lock()
        self._graphs: OrderedDict[tuple[str, str], _Graph] = OrderedDict()
        self._to_compile: set[str] = set()

    def bind(self, component: Component, folder: Path, tensors: Mapping[str, torch.Tensor]) -> ServedProgram:
        """Return the program of the skeleton `folder` over its tensors, on their device. Nothing is copied.

        Raises FormatError and StoreError for a graph that is damaged, whose operators are missing here, or that takes
        other tensors, WeightsError for an ONNX model without onnxruntime.
        """
        if component.format == "onnx":
            return _open_onnx(component, folder, tensors)
        signature = signature_of(component)
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        graph = self._graph(component, folder, device)
        program = graph.program
        bound = bound_tensors(folder, program, component, tensors)
        values = {**program.state_dict, **program.constants} | bound
        arguments: list[Any] = []
        inputs: dict[str, int] = {}
        for place, spec in enumerate(program.graph_signature.input_specs):
            if spec.kind != InputKind.USER_INPUT:
                arguments.append(values[str(spec.target)].detach().to(device))
                continue
            is_tensor = isinstance(spec.arg, TensorArgument)
            if is_tensor:
                inputs[spec.arg.name] = place
            arguments.append(None if is_tensor else getattr(spec.arg, "value", None))
        compiled = graph.compiled if has_traced_strides(program, arguments) else None
        outputs = _outputs(program, signature)
        return BoundProgram(signature, program.graph_module, arguments, inputs, outputs, device, compiled)

    def prepare(self, component: Component, folder: Path) -> None:
        """Read the graph before it is needed. Raises as `bind` does."""
        signature_of(component)
        if component.format == "onnx":
            onnxruntime()  # a session is of its weights
            return
        self._graph(component, folder, torch.device(self._device))

    def compile(self, component: Component) -> None:
        """Have the graph of a program compiled, for all that have it, from the next time on that it is asked for."""
        self._to_compile.add(component.config_hash)

    def graph_stats(self) -> dict[str, Any]:
        """Return the number of kept graphs, of compiled ones, and the reasons of the others."""
        with self._lock:
            asked = {key[0][:16]: graph.compiled for key, graph in self._graphs.items() if graph.compiled is not None}
        return {
            "graphs": len(self._graphs),
            "compiled": sum(one.run is not None for one in asked.values()),
            "compiling": sum(one.run is None and not one.reason for one in asked.values()),
            "not_compiled": {name: one.reason for name, one in asked.items() if one.reason},
        }

    def _graph(self, component: Component, folder: Path, device: torch.device) -> _Graph:
        graph = self._read_graph(component, folder, device)
        with self._lock:
            if component.config_hash in self._to_compile and graph.compiled is None:
                graph.compiled = begin_compiling(component, folder, device, self._packages)
        return graph

    def _read_graph(self, component: Component, folder: Path, device: torch.device) -> _Graph:
        key = component.config_hash, str(device)
        with self._lock:
            if found := self._graphs.get(key):
                self._graphs.move_to_end(key)
                return found
        with IMPORT_LOCK:
            program = open_graph(component, folder)
        if device.type != "cpu":
            _move_graph(program.graph_module, device)
        with self._lock:
            graph = self._graphs.setdefault(key, _Graph(program))
            while len(self._graphs) > self._max_graphs:
                self._graphs.popitem(last=False)
        return graph


def _open_onnx(component: Component, folder: Path, tensors: Mapping[str, torch.Tensor]) -> OnnxProgram:
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


def _outputs(program: ExportedProgram, signature: ProgramSignature) -> dict[str, int]:
    """Return the places of the named outputs among all that the graph gives."""
    places = [place for place, spec in enumerate(program.graph_signature.output_specs) if is_output(spec)]
    names = [output.name for output in signature.outputs]
    return dict(zip(names, places, strict=True))


def _move_graph(module: fx.GraphModule, device: torch.device) -> None:
    """Let the graph make its own tensors on `device`: the one that it was exported on is written into it."""
    for graph in (part for part in module.modules() if isinstance(part, fx.GraphModule)):
        for node in graph.graph.nodes:
            node.args = fx.node.map_aggregate(node.args, lambda given: _on_device(given, device))
            node.kwargs = fx.node.map_aggregate(node.kwargs, lambda given: _on_device(given, device))
        graph.recompile()


def _on_device(given: Any, device: torch.device) -> Any:
    return device if isinstance(given, torch.device) else given
