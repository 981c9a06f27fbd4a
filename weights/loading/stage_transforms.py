"""What may happen to a tensor between its bytes and the model: another type, or integers with scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from weights.errors import WeightsError
from weights.quantization.fp8 import quantize_fp8
from weights.quantization.int8_group import DEFAULT_GROUP_SIZE, quantize

_TARGETS = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}
# 8-bit floats are left out: they come with scales, and a cast would lose what they stand for.
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class StageTransform(Protocol):
    """Makes of one loaded tensor what the model gets. `load_model(..., stage=...)` calls it once per tensor."""

    def __call__(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tensors by what is added to the name ("" for the tensor's own). Must not write into `tensor`."""
        ...


@dataclass(frozen=True, slots=True)
class Cast:
    """Floating tensors as `dtype`, rounded as `Tensor.to` does; others as they are.

    HAZARD: F8_E4M3 has no infinity, and what is beyond 448 becomes NaN; `Fp8Scaled` brings a scale.
    """

    dtype: Literal["BF16", "F16", "F32", "F8_E4M3"]

    def __post_init__(self) -> None:
        if self.dtype not in _TARGETS:
            raise WeightsError(f"cannot cast to {self.dtype!r} while staging (known: {', '.join(_TARGETS)})")

    def __call__(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"": tensor.to(_TARGETS[self.dtype]) if tensor.dtype in FLOATS else tensor}


@dataclass(frozen=True, slots=True)
class Fp8Scaled:
    """2-D floating tensors as F8_E4M3 with one f32 scale each, a scalar in `<name>.scale`; others as they are."""

    def __call__(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if not _is_matrix(tensor):
            return {"": tensor}
        try:
            data, scale = quantize_fp8(_as_f32(tensor))
        except WeightsError as error:
            raise WeightsError(f"tensor {name!r}: {error}") from None
        values = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).view(torch.float8_e4m3fn)
        return {"": values.view(tensor.shape).to(tensor.device), ".scale": torch.tensor(scale, device=tensor.device)}


@dataclass(frozen=True, slots=True)
class Int8Group:
    """2-D floating tensors as int8 with an f32 scale per `group_size` elements (row-major) in `<name>.scales`.

    Other tensors are left as they are. Raises WeightsError for a tensor of no whole number of groups.
    """

    group_size: int = DEFAULT_GROUP_SIZE

    def __call__(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if not _is_matrix(tensor):
            return {"": tensor}
        try:
            values, scales = quantize(_as_f32(tensor), self.group_size)
        except WeightsError as error:
            raise WeightsError(f"tensor {name!r}: {error}") from None
        return {"": torch.from_numpy(values).to(tensor.device), ".scales": torch.from_numpy(scales).to(tensor.device)}


def apply_stage(stage: StageTransform, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The results of `stage` by suffix, all of them private: one that still shares memory with `tensor` is copied."""
    shared = tensor.untyped_storage().data_ptr()
    return {
        suffix: value.clone() if value.untyped_storage().data_ptr() == shared else value
        for suffix, value in stage(name, tensor).items()
    }


def _is_matrix(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and tensor.dtype in FLOATS


def _as_f32(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = tensor.to("cpu", torch.float32).numpy()
    return array
