"""LoRAs fitted to a pipeline at their registration: to its modules without weights, and without values of their own.

Which module a name of kohya's, ComfyUI's or XLabs' layout means is known to the converters of diffusers alone, so the
LoRA goes through them as a request's does: with its layers' sizes, and matrices of rank 1 that are all ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from deployments.engines.build import build_blank
from deployments.engines.diffusion.families.base import Family
from deployments.engines.diffusion.fitted_loras import FittedLoras
from deployments.engines.protocol import EngineError
from weights.adapters import LoraAdapter, parse_adapter
from weights.errors import AdapterError
from weights.formats.adapter_base import AdapterBase
from weights.formats.checkpoint import Checkpoint
from weights.formats.tensors import SourceTensor
from weights.torch_dtypes import TORCH_DTYPES

_DOWN: Final = ("down.weight", "lora_A.weight", "lora_A.default.weight")
_UP: Final = ("up.weight", "lora_B.weight", "lora_B.default.weight")


def check_lora(adapter: Checkpoint, base: AdapterBase, family: Family) -> None:
    """Raise AdapterError for what its first request would be refused for: a layer that is absent or of another size."""
    (component,) = adapter.components
    _check_ranks(adapter, component.tensors)
    lora = parse_adapter(adapter.path, _blank_tensors(component.tensors), component.metadata)
    try:
        for name in (family.denoiser_name, *family.lora_encoders):
            if name in base.components:
                _fit(lora, family, name, base)
    except EngineError as error:
        raise AdapterError(f"{error}; expected a LoRA for {base.model!r}, a {base.class_name}") from None


def _fit(lora: LoraAdapter, family: Family, name: str, base: AdapterBase) -> None:
    part = base.components[name]
    FittedLoras(family, name, build_blank(part.library, part.class_name, base.folder / name)).pairs_of(lora)


def _check_ranks(adapter: Checkpoint, tensors: Mapping[str, SourceTensor]) -> None:
    """Raise AdapterError for two matrices of unlike ranks, which go to the converters with one."""
    for name in tensors:
        end = next((end for end in _DOWN if name.endswith(end)), None)
        other = name.removesuffix(end or "") + _UP[_DOWN.index(end)] if end else ""
        down, up = tensors[name].shape, tensors[other].shape if other in tensors else ()
        if up and (len(down) < 2 or len(up) < 2 or down[0] != up[1]):
            raise AdapterError(
                f"{adapter.path}: tensor {name} has shape {list(down)}, and {other} {list(up)}: they do not go together"
            )


def _blank_tensors(tensors: Mapping[str, SourceTensor]) -> dict[str, torch.Tensor]:
    """Return tensors of these names, ones of no memory: the matrices of rank 1, all else in its shape."""
    found = {}
    for name, tensor in tensors.items():
        blank = torch.ones((), dtype=TORCH_DTYPES[tensor.dtype]).expand(tensor.shape)
        if blank.ndim > 1 and name.endswith(_DOWN):
            blank = blank[:1]
        elif blank.ndim > 1 and name.endswith(_UP):
            blank = blank[:, :1]
        found[name] = blank
    return found
