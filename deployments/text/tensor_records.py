"""torch tensors <-> what travels between processes (`cluster/encodings/packed.py`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cluster.encodings.packed import PackedTensor as PackedTensor


def pack(tensors: Mapping[str, torch.Tensor]) -> dict[str, PackedTensor]:
    """Read-only views where the tensors lie in memory in C order, copies of the others."""
    return {name: _pack(tensor.detach().cpu().contiguous()) for name, tensor in tensors.items()}


def _pack(tensor: torch.Tensor) -> PackedTensor:
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    data.flags.writeable = False
    return PackedTensor(data, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def unpack(packed: Mapping[str, PackedTensor]) -> dict[str, torch.Tensor]:
    """Copies: what arrives from Ray is read-only shared memory, and these tensors go into arithmetic."""
    return {name: _unpack(record) for name, record in packed.items()}


def _unpack(record: PackedTensor) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, record.dtype)
    if record.data.size == 0:  # an array without bytes may have stride 0, which cannot be viewed as a wider type
        return torch.empty(record.shape, dtype=dtype)
    return torch.from_numpy(record.data.copy()).view(dtype).view(record.shape)
