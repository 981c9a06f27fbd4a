"""Tensors between processes: a uint8 array with dtype and shape.

Ray moves numpy arrays out of band and maps them without a copy; torch tensors it would pickle, at seconds per GiB,
and numpy itself has no bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """`data`: the tensor's bytes in C order; `dtype` by its torch name, "bfloat16" say."""

    data: npt.NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]


def pack(tensors: Mapping[str, torch.Tensor]) -> dict[str, PackedTensor]:
    return {name: _pack(tensor.detach().cpu().contiguous()) for name, tensor in tensors.items()}


def _pack(tensor: torch.Tensor) -> PackedTensor:
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return PackedTensor(data, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def unpack(packed: Mapping[str, PackedTensor]) -> dict[str, torch.Tensor]:
    """Copies: what arrives from Ray is read-only shared memory, and these tensors go into arithmetic."""
    return {name: _unpack(record) for name, record in packed.items()}


def _unpack(record: PackedTensor) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, record.dtype)
    if record.data.size == 0:  # an array without bytes may have stride 0, which cannot be viewed as a wider type
        return torch.empty(record.shape, dtype=dtype)
    return torch.from_numpy(record.data.copy()).view(dtype).view(record.shape)
