"""Packed rows to float32 in plain torch, on any device: the path where there are no compiled kernels.

Block layouts: ggml-common.h. Each function takes blocks (N, bytes) as uint8 and returns (N, elements).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weights.dtypes import BLOCK_SIZES


def unpack_blocks(kind: str, packed: torch.Tensor) -> torch.Tensor:
    """Return the elements of rows of whole blocks, (..., bytes) uint8 to (..., elements) float32."""
    elements, block_bytes = BLOCK_SIZES[kind]
    blocks = packed.reshape(-1, block_bytes)
    return _UNPACK[kind](blocks).reshape(*packed.shape[:-1], packed.shape[-1] // block_bytes * elements)


def unpack_groups(data: torch.Tensor, scales: torch.Tensor, start: int, stop: int, group_size: int) -> torch.Tensor:
    """Return rows `start` to `stop` of int8 `data` (rows, columns) whose groups run across row borders."""
    columns = data.shape[1]
    flat = torch.arange(start * columns, stop * columns, device=data.device)
    return data[start:stop].float() * scales[flat // group_size].view(stop - start, columns)


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
UNPACKED_KINDS = tuple(_UNPACK)
