"""Transforms of tensors between their bytes and the model: casts, and fp8 or int8 values with scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from weights.records.errors import WeightsError

__all__ = [
    "Cast",
    "Fp8Scaled",
    "Int8Group",
    "StageTransform",
    "apply_stage",
    "dequantize_int8",
    "quantize_fp8",
    "quantize_int8",
]

DEFAULT_GROUP_SIZE = 64
_MAX_E4M3 = 448.0
_TARGETS = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}
# 8-bit floats are left out: they come with scales, and a cast would lose what they stand for.
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class StageTransform(Protocol):
    """A transform of a loaded tensor into what the model gets. `load_model(..., stage=...)` calls it once for each."""

    def __call__(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return tensors by suffix of the name ("" for the tensor's own). Must not write into `tensor`."""
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
        return {"": tensor.to(_TARGETS[self.dtype]) if tensor.dtype in _FLOATS else tensor}


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
            values, scales = quantize_int8(_as_f32(tensor), self.group_size)
        except WeightsError as error:
            raise WeightsError(f"tensor {name!r}: {error}") from None
        return {"": torch.from_numpy(values).to(tensor.device), ".scales": torch.from_numpy(scales).to(tensor.device)}


def apply_stage(stage: StageTransform, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the results of `stage` by suffix; one that still shares memory with `tensor` is copied."""
    shared = tensor.untyped_storage().data_ptr()
    return {
        suffix: value.clone() if value.untyped_storage().data_ptr() == shared else value
        for suffix, value in stage(name, tensor).items()
    }


def _is_matrix(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and tensor.dtype in _FLOATS


def _as_f32(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = tensor.to("cpu", torch.float32).numpy()
    return array


def quantize_fp8(array: npt.NDArray[np.float32]) -> tuple[bytes, float]:
    """Return the elements as F8_E4M3 in C order, rounded to nearest even, and the scale amax / 448 (1 for zeros).

    Raises WeightsError for infinities and NaNs.
    """
    values = np.ascontiguousarray(array, np.float32)
    amax = np.abs(values).max(initial=0)
    if not np.isfinite(amax):
        raise WeightsError(f"fp8 cannot express the infinities or NaNs of a tensor of shape {list(array.shape)}")
    # A tensor too small for a float32 scale keeps scale 1 and becomes zeros, as it is to 8 bits.
    scale = amax / np.float32(_MAX_E4M3) or np.float32(1)
    # Beyond 448 the cast gives NaN, and a rounded scale may lead there.
    return (values / scale).clip(-_MAX_E4M3, _MAX_E4M3).astype(ml_dtypes.float8_e4m3fn).tobytes(), float(scale)


def quantize_int8(
    array: npt.NDArray[np.float32], group_size: int = DEFAULT_GROUP_SIZE
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Quantize to int8 of the same shape and scales [size / group_size]: absmax / 127, rounded half to even.

    Raises WeightsError for a tensor that is no whole number of groups, or has infinities or NaNs.
    """
    _check_groups(array.size, group_size)
    groups = np.ascontiguousarray(array, np.float32).reshape(-1, group_size)
    absmax = np.abs(groups).max(axis=1, initial=0)
    if not np.isfinite(absmax).all():
        raise WeightsError(f"int8 cannot express the infinities or NaNs of a tensor of shape {list(array.shape)}")
    scales = absmax / np.float32(127)
    # Where the scale is 0 so is the group, or too small for a scale; near there a rounded scale may give 128.
    quotients = np.divide(groups, scales[:, None], out=np.zeros_like(groups), where=scales[:, None] > 0)
    return np.rint(quotients).clip(-127, 127).astype(np.int8).reshape(array.shape), scales


def dequantize_int8(
    values: npt.NDArray[np.int8], scales: npt.NDArray[np.float32], group_size: int = DEFAULT_GROUP_SIZE
) -> npt.NDArray[np.float32]:
    """Return float32 of the shape of `values`. Raises WeightsError when the scales are not one per group."""
    _check_groups(values.size, group_size)
    num_groups = values.size // group_size
    if scales.size != num_groups:
        raise WeightsError(f"{num_groups} groups of {group_size} elements take as many scales, {scales.size} came")
    groups = values.reshape(-1, group_size).astype(np.float32)
    return (groups * scales.reshape(-1, 1)).reshape(values.shape)


def _check_groups(size: int, group_size: int) -> None:
    if group_size <= 0 or size % group_size:
        raise WeightsError(f"{size} elements are no whole number of groups of {group_size}")
