"""Products with packed weights on CUDA: blocks are unpacked in registers, on their way to the tensor cores.

Imported only where triton is, which CUDA builds of torch bring along. Block layouts: as in `packed_weights.py`. A
decode step is bound by the bytes of W, which are read once, packed; a prefill reads them once per `_MOST_ROWS` rows of
x. Without a card the kernel runs in Triton's interpreter (TRITON_INTERPRET=1), which is how the unit tests compare it,
in float32: the interpreter multiplies bfloat16 as integers.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from deployments.engines.nn.packed_weights import Arithmetic, PackedWeight

_FEW_ROWS: Final = 16  # the least that a tensor core multiplies
_MOST_ROWS: Final = 64
_ROWS_OF_W: Final = 64
_COLUMNS: Final = 256  # of one round: whole blocks of every kind


def multiply_packed(x: torch.Tensor, weight: PackedWeight, arithmetic: Arithmetic) -> torch.Tensor:
    """Return x W^T (M, rows) in the dtype of `x` (M, columns), with sums in float32.

    Both are rounded to bfloat16, unless `arithmetic` is "exact": then products are float32's own. "deterministic" takes
    tiles of one size for any M, so that a row of the result depends on its own row of `x` alone.
    """
    kind, data, num_rows, columns, scales, group_size = weight
    y = torch.empty(len(x), num_rows, dtype=x.dtype, device=x.device)
    tile = _FEW_ROWS if len(x) <= _FEW_ROWS and arithmetic == "fast" else _MOST_ROWS
    grid = (triton.cdiv(num_rows, _ROWS_OF_W), triton.cdiv(len(x), tile))
    with torch.cuda.device(x.device):  # triton launches on the current one, which may not be that of this layer
        _product_kernel[grid](
            x, data, data if scales is None else scales, y, len(x), num_rows, columns, data.stride(0),
            max(1, group_size), KIND=kind, PRODUCT=tl.float32 if arithmetic == "exact" else tl.bfloat16,
            TILE_M=tile, TILE_N=_ROWS_OF_W, TILE_K=_COLUMNS,
        )  # fmt: skip
    return y


@triton.jit
def _product_kernel(
    x, w, scales, y, num_x, num_rows, columns, row_bytes, group_size,
    KIND: tl.constexpr, PRODUCT: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    m = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    row = tl.minimum(n, num_rows - 1).to(tl.int64)[:, None]  # rows behind the last are computed and not stored
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, columns, TILE_K):
        k = start + tl.arange(0, TILE_K)
        column = tl.minimum(k, columns - 1)[None, :]
        if KIND == "GROUP_INT8":  # groups run across the borders of rows
            flat = row * columns + column
            wide = tl.load(w + flat).to(tl.float32) * tl.load(scales + flat // group_size)
        else:
            wide = _unpacked(w + row * row_bytes, column, KIND)
        wide = tl.where((k < columns)[None, :], wide, 0.0).to(PRODUCT)
        is_x = (m < num_x)[:, None] & (k < columns)[None, :]
        given = tl.load(x + m.to(tl.int64)[:, None] * columns + k[None, :], mask=is_x, other=0.0)
        total += tl.dot(given.to(PRODUCT), tl.trans(wide), input_precision="ieee")
    at = y + m.to(tl.int64)[:, None] * num_rows + n[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=(m < num_x)[:, None] & (n < num_rows)[None, :])


@triton.jit
def _unpacked(row, k, KIND: tl.constexpr):
    """Elements `k` (1, K) of packed rows whose bytes begin at `row` (N, 1), as float32 (N, K)."""
    j = k % 32
    if KIND == "Q8_0":
        at = row + k // 32 * 34
        return _half(at) * _signed(at + 2 + j)
    if KIND == "Q4_0":
        at = row + k // 32 * 18
        return _half(at) * (_nibble(at + 2 + j % 16, j // 16) - 8).to(tl.float32)
    if KIND == "Q4_1":
        at = row + k // 32 * 20
        return _half(at) * _nibble(at + 4 + j % 16, j // 16).to(tl.float32) + _half(at + 2)
    if KIND == "Q5_0":
        at = row + k // 32 * 22
        return _half(at) * (_nibble(at + 6 + j % 16, j // 16) + _fifth(at + 2 + j // 8, j % 8) - 16).to(tl.float32)
    if KIND == "Q5_1":
        at = row + k // 32 * 24
        u = _nibble(at + 8 + j % 16, j // 16) + _fifth(at + 4 + j // 8, j % 8)
        return _half(at) * u.to(tl.float32) + _half(at + 2)
    if KIND == "Q6_K":
        at = row + k // 256 * 210
        part = k % 256 // 128
        quarter = k % 128 // 32
        low = _nibble(at + 64 * part + quarter % 2 * 32 + j, quarter // 2)
        high = (_byte(at + 128 + 32 * part + j) >> (2 * quarter)) & 3
        scale = _half(at + 208) * _signed(at + 192 + k % 256 // 16)
        return scale * (low + (high << 4) - 32).to(tl.float32)
    # Q4_K and Q5_K: eight groups of 32 with 6-bit scales and minima.
    i = k % 256 // 32
    if KIND == "Q4_K":
        at = row + k // 256 * 144
        u = _nibble(at + 16 + i // 2 * 32 + j, i % 2)
    else:
        tl.static_assert(KIND == "Q5_K", "a kind without a kernel")
        at = row + k // 256 * 176
        u = _nibble(at + 48 + i // 2 * 32 + j, i % 2) + _fifth(at + 16 + j, i)
    packed = at + 4
    first = _byte(packed + i % 4)
    second = _byte(packed + 4 + i % 4)
    both = _byte(packed + 8 + i % 4)
    scale = tl.where(i < 4, first & 63, (both & 15) | (first >> 6 << 4)).to(tl.float32)
    least = tl.where(i < 4, second & 63, (both >> 4) | (second >> 6 << 4)).to(tl.float32)
    return _half(at) * scale * u.to(tl.float32) - _half(at + 2) * least


@triton.jit
def _half(at):
    return tl.load(at.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def _signed(at):
    return tl.load(at.to(tl.pointer_type(tl.int8))).to(tl.float32)


@triton.jit
def _byte(at):
    return tl.load(at).to(tl.int32)


@triton.jit
def _nibble(at, is_high):
    return (_byte(at) >> (4 * is_high)) & 15


@triton.jit
def _fifth(at, bit):
    return ((_byte(at) >> bit) & 1) << 4
