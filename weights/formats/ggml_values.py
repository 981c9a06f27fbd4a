"""The elements of ggml's blocks, in plain torch on any device. Block layouts: ggml-common.h."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from weights.records.dtypes import BLOCK_SIZES


def unpack_blocks(kind: str, packed: torch.Tensor) -> torch.Tensor:
    """Return the elements of rows of whole blocks, (..., bytes) uint8 to (..., elements) float32."""
    elements, block_bytes = BLOCK_SIZES[kind]
    blocks = packed.reshape(-1, block_bytes)
    return _UNPACK[kind](blocks).reshape(*packed.shape[:-1], packed.shape[-1] // block_bytes * elements)


# Each of these takes blocks (N, bytes) as uint8 and returns (N, elements).


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(q: torch.Tensor) -> torch.Tensor:
    return torch.cat((q & 15, q >> 4), dim=-1)


def _fifth_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8)
    return ((blocks[:, at : at + 4, None] >> shifts & 1) << 4).flatten(1)


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


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], device=blocks.device, dtype=torch.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    q = ((low | (high << 4)).float() - 32).view(-1, 16, 16)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return ((_halves(blocks, 208) * scales)[..., None] * q).flatten(1)


def _two_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return the elements of 64 bytes, those of four groups of 32 in as many bytes: (N, 16, 16)."""
    shifts = torch.tensor([0, 2, 4, 6], device=packed.device, dtype=torch.uint8)[:, None]
    return (packed.reshape(-1, 2, 1, 32) >> shifts & 3).view(-1, 16, 16)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    numbers = blocks[:, :16]
    d, dmin = _halves(blocks, 80), _halves(blocks, 82)
    u = _two_bits(blocks[:, 16:80]).float()
    return ((d * (numbers & 15).float())[..., None] * u - (dmin * (numbers >> 4).float())[..., None]).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8)[:, None]
    third = (blocks[:, None, :32] >> shifts & 1).view(-1, 16, 16)
    low, high = _nibbles(blocks[:, 96:104]), blocks[:, None, 104:108] >> shifts[:8:2] & 3
    scales = (low | (high.flatten(1) << 4)).float() - 32
    u = _two_bits(blocks[:, 32:96]) | (third << 2)
    return ((_halves(blocks, 108) * scales)[..., None] * (u.float() - 4)).flatten(1)


_IQ4_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_VALUES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice those of E2M1


def _looked_up(values: tuple[int, ...], nibbles: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=nibbles.device)[nibbles.long()]


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.tensor([0, 2, 4, 6], device=blocks.device, dtype=torch.uint8)
    high = (blocks[:, 2:4, None] >> shifts & 3).flatten(1)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    scales = _halves(blocks, 0) * ((low | (high << 4)).float() - 32)
    return (scales[..., None] * _looked_up(_IQ4_VALUES, _nibbles(blocks[:, 8:].reshape(-1, 8, 16)))).flatten(1)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    exponents = blocks[:, :1].int() - 128
    scales = torch.ldexp(torch.ones(exponents.shape, device=blocks.device), exponents)
    return scales * _looked_up(_FP4_VALUES, _nibbles(blocks[:, 1:]))


# Each takes blocks (N, bytes) as uint8 and returns (N, elements), as the functions above do.
_UNPACK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q8_0": lambda blocks: _halves(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float(),
    "Q4_0": lambda blocks: _halves(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8),
    "Q4_1": lambda blocks: _halves(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _halves(blocks, 2),
    "Q5_0": lambda blocks: _halves(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).float() - 16),
    "Q5_1": lambda blocks: (
        _halves(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).float() + _halves(blocks, 2)
    ),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": lambda blocks: _q4_or_5_k(blocks, None, blocks[:, 16:]),
    "Q5_K": lambda blocks: _q4_or_5_k(blocks, blocks[:, 16:48], blocks[:, 48:]),
    "Q6_K": _q6_k,
    "IQ4_NL": lambda blocks: _halves(blocks, 0) * _looked_up(_IQ4_VALUES, _nibbles(blocks[:, 2:])),
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
UNPACKED_KINDS: Final = tuple(_UNPACK)
