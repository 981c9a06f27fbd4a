"""Q8_0 and Q4_0 of ggml: blocks of 32 elements along the rows, as gguf-py writes them, bit for bit.

Source: gguf-py 0.19, `quants.py`, classes `Q8_0` and `Q4_0` (which follow ggml's reference code).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from weights.errors import WeightsError

BLOCK_ELEMENTS: Final = 32

_Floats = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]


def quantize_blocks(kind: str, matrix: _Floats) -> _Bytes:
    """Return rows of blocks, (..., bytes), of rows (..., elements). `kind` is Q8_0 or Q4_0.

    Raises WeightsError for rows of no whole number of blocks, and for infinities and NaNs.
    """
    if not matrix.shape or matrix.shape[-1] % BLOCK_ELEMENTS:
        raise WeightsError(f"rows of shape {list(matrix.shape)} are no whole number of blocks of {BLOCK_ELEMENTS}")
    if not np.isfinite(matrix).all():
        raise WeightsError(f"{kind} cannot express the infinities or NaNs of a tensor of shape {list(matrix.shape)}")
    blocks = np.ascontiguousarray(matrix, np.float32).reshape(-1, BLOCK_ELEMENTS)
    with np.errstate(over="ignore"):  # a scale beyond float16 becomes infinite, as it does in ggml
        packed = _quantize_q8_0(blocks) if kind == "Q8_0" else _quantize_q4_0(blocks)
    if not np.isfinite(packed[:, :2].copy().view(np.float16)).all():
        raise WeightsError(f"{kind} cannot express values of {float(np.abs(matrix).max()):g}: its scales are float16")
    return packed.reshape(*matrix.shape[:-1], -1)


def dequantize_blocks(kind: str, packed: _Bytes) -> _Floats:
    """Return the float32 elements that rows of blocks stand for."""
    block_bytes = 34 if kind == "Q8_0" else 18
    blocks = packed.reshape(-1, block_bytes)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        values = blocks[:, 2:].copy().view(np.int8).astype(np.float32)
    else:
        values = np.concatenate((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), axis=1).astype(np.float32) - 8
    return (scales * values).reshape(*packed.shape[:-1], -1)


def _quantize_q8_0(blocks: _Floats) -> _Bytes:
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * _reciprocal(scales)
    whole = np.floor(np.abs(scaled))
    rounded = np.sign(scaled) * (whole + np.floor(2 * (np.abs(scaled) - whole)))  # half away from zero
    return np.concatenate((_as_half(scales), rounded.astype(np.int8).view(np.uint8)), axis=1)


def _quantize_q4_0(blocks: _Floats) -> _Bytes:
    """Return blocks whose largest element, with its sign, becomes -8."""
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scales = largest / np.float32(-8)
    values = np.trunc(blocks * _reciprocal(scales) + np.float32(8.5)).astype(np.uint8).clip(0, 15)
    half = BLOCK_ELEMENTS // 2
    return np.concatenate((_as_half(scales), values[:, :half] | values[:, half:] << np.uint8(4)), axis=1)


def _reciprocal(scales: _Floats) -> _Floats:
    """Return 1 / scales, and 0 where that is none: such a block is zeros to float16."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scales
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _as_half(scales: _Floats) -> _Bytes:
    return scales.astype(np.float16).view(np.uint8)
