"""Weights as they lie in a GGUF or Kuiper file, and their rows in float32.

Rows are unpacked by the compiled kernels, or in plain torch on any device where there are none. Block layouts:
ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from deployments.engines.native.library import PackedMatrix, load_kernels
from deployments.engines.protocol import EngineError
from weights.dtypes import BLOCK_SIZES

DENSE_KINDS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
GROUP_INT8: Final = "GROUP_INT8"
_KERNEL_CHUNK: Final = 16  # elements with one scale: a kernel cannot cut a group elsewhere


class PackedWeight(NamedTuple):
    """A [rows, columns] matrix: blocks of a ggml type as uint8 (rows, bytes), floats, or int8 with flat groups."""

    kind: str
    data: torch.Tensor
    rows: int
    columns: int
    scales: torch.Tensor | None = None
    group_size: int = 0

    def selected(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows `ids` (N,) in float32."""
        if self.kind in DENSE_KINDS:
            return self.data[ids].float()
        if self.kind != GROUP_INT8:
            return _unpack_blocks(self.kind, self.data[ids])
        return torch.cat([unpack_rows(self, row, row + 1) for row in ids.tolist()])


def packed_weight(name: str, kind: str, data: torch.Tensor) -> PackedWeight:
    """Return the weight of one tensor as stored. Raises EngineError naming what is not supported or does not fit."""
    if kind not in SUPPORTED_KINDS:
        raise EngineError(f"tensor {name!r} is {kind}; supported are {', '.join(SUPPORTED_KINDS)}")
    if kind in DENSE_KINDS:
        if data.dim() != 2 or data.dtype != DENSE_KINDS[kind]:
            raise EngineError(f"tensor {name!r} is {data.dtype} {list(data.shape)}, expected a matrix of {kind}")
        return PackedWeight(kind, data, data.shape[0], data.shape[1])
    elements, block_bytes = BLOCK_SIZES[kind]
    if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] % block_bytes or not data.is_contiguous():
        raise EngineError(f"tensor {name!r} is {data.dtype} {list(data.shape)}, expected rows of {kind} blocks")
    return PackedWeight(kind, data, data.shape[0], data.shape[1] // block_bytes * elements)


def group_int8_weight(name: str, data: torch.Tensor, scales: torch.Tensor, group_size: int) -> PackedWeight:
    """Return an int8 matrix with a scale per `group_size` consecutive elements. Raises EngineError unless they fit."""
    if data.dtype != torch.int8 or data.dim() != 2 or scales.dtype != torch.float32:
        raise EngineError(
            f"tensor {name!r} is {data.dtype} {list(data.shape)}, expected an int8 matrix, float32 scales"
        )
    if group_size < 1 or data.numel() != scales.numel() * group_size:
        raise EngineError(f"tensor {name!r} {list(data.shape)} has {scales.numel()} scales for groups of {group_size}")
    rows, columns = data.shape
    return PackedWeight(GROUP_INT8, data.contiguous(), rows, columns, scales.contiguous(), group_size)


def unpack_rows(weight: PackedWeight, start: int, stop: int) -> torch.Tensor:
    """Return rows `start` to `stop` as float32 (stop - start, columns)."""
    if weight.kind in DENSE_KINDS:
        return weight.data[start:stop].float()
    kernels = load_kernels() if weight.data.device.type == "cpu" else None
    if kernels is not None and fits_kernel(weight):
        return kernels.unpack_rows(PackedMatrix(*weight), start, stop)
    if weight.scales is not None:
        return _unpack_groups(weight.data, weight.scales, start, stop, weight.group_size)
    return _unpack_blocks(weight.kind, weight.data[start:stop])


def fits_kernel(weight: PackedWeight) -> bool:
    """Return whether the compiled kernels can take the weight: no group of scales ends inside a chunk of theirs."""
    return weight.kind != GROUP_INT8 or not (weight.columns % _KERNEL_CHUNK or weight.group_size % _KERNEL_CHUNK)


def _unpack_blocks(kind: str, packed: torch.Tensor) -> torch.Tensor:
    """Return the elements of rows of whole blocks, (..., bytes) uint8 to (..., elements) float32."""
    elements, block_bytes = BLOCK_SIZES[kind]
    blocks = packed.reshape(-1, block_bytes)
    return _UNPACK[kind](blocks).reshape(*packed.shape[:-1], packed.shape[-1] // block_bytes * elements)


def _unpack_groups(data: torch.Tensor, scales: torch.Tensor, start: int, stop: int, group_size: int) -> torch.Tensor:
    """Return rows `start` to `stop` of int8 `data` (rows, columns) whose groups run across row borders."""
    columns = data.shape[1]
    flat = torch.arange(start * columns, stop * columns, device=data.device)
    return data[start:stop].float() * scales[flat // group_size].view(stop - start, columns)


# Each of these takes blocks (N, bytes) as uint8 and returns (N, elements).


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(q: torch.Tensor) -> torch.Tensor:
    return torch.cat((q & 15, q >> 4), dim=-1)


def _fifth_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8)
    return ((blocks[:, at : at + 4, None] >> shifts & 1) << 4).flatten(1)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _halves(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _halves(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _halves(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _halves(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).float() + _halves(blocks, 2)


def _scales_and_mins(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight 6-bit scales and minima in 12 bytes, each (N, 8)."""
    first, second, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (both & 15) | (first >> 6 << 4)), dim=1)
    mins = torch.cat((second & 63, (both >> 4) | (second >> 6 << 4)), dim=1)
    return scales.float(), mins.float()


def _q4_or_5_k(blocks: torch.Tensor, high: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    u = _nibbles(q.reshape(-1, 4, 32)).view(-1, 8, 32)
    if high is not None:
        shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8)[:, None]
        u = u | ((high[:, None, :] >> shifts & 1) << 4)
    d, dmin = _halves(blocks, 0), _halves(blocks, 2)
    return ((d * scales)[..., None] * u.float() - (dmin * mins)[..., None]).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _q4_or_5_k(blocks, None, blocks[:, 16:])


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    return _q4_or_5_k(blocks, blocks[:, 16:48], blocks[:, 48:])


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], device=blocks.device, dtype=torch.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    q = ((low | (high << 4)).float() - 32).view(-1, 16, 16)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return ((_halves(blocks, 208) * scales)[..., None] * q).flatten(1)


_UNPACK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
UNPACKED_KINDS: Final = tuple(_UNPACK)
SUPPORTED_KINDS: Final = (*DENSE_KINDS, *UNPACKED_KINDS, GROUP_INT8)
