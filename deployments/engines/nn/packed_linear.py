"""Linear layers and embeddings whose weights stay as they lie in a GGUF or Kuiper file: no unpacked copy is kept.

Arithmetic, by name:
- "exact": weights unpacked to float32 tile by tile, float32 products;
- "fast": activations are quantized to int8 by 32 elements, as llama.cpp does (an error of about 0.6 % of the product's
  norm on random data). A row's result is the same beside any other rows, bit for bit;
- "deterministic": the same on the CPU; on CUDA, tiles of one size for any number of rows.
On CUDA with triton, "fast" and "deterministic" are bfloat16 products and "exact" is a float32 one, of weights unpacked
on their way. Without compiled kernels all three unpack tiles and leave the product to torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.nn import functional as F

from deployments.engines.native.library import PackedMatrix, load_kernels
from deployments.engines.nn.unpacking import UNPACKED_KINDS, unpack_blocks, unpack_groups
from deployments.engines.protocol import EngineError
from weights.dtypes import BLOCK_SIZES

Arithmetic = Literal["fast", "deterministic", "exact"]
ARITHMETICS: Final = get_args(Arithmetic)
DENSE_KINDS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
GROUP_INT8: Final = "GROUP_INT8"
SUPPORTED_KINDS: Final = (*DENSE_KINDS, *UNPACKED_KINDS, GROUP_INT8)
_TILE_BYTES: Final = 8 * 2**20  # of unpacked float32 rows
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
            return unpack_blocks(self.kind, self.data[ids])
        return torch.cat([_unpack_rows(self, row, row + 1) for row in ids.tolist()])


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


def product_path(weight: PackedWeight, arithmetic: Arithmetic) -> str:
    """Return the name of the path that a product takes: torch, unpack, triton, int8-avx512 or int8-avx2.

    The one table of the dispatch.
    """
    if weight.kind in DENSE_KINDS:
        return "torch"
    if weight.data.is_cuda and importlib.util.find_spec("triton"):
        return "triton"
    kernels = load_kernels() if weight.data.device.type == "cpu" else None
    if kernels is None or arithmetic == "exact" or not _fits_kernel(weight):
        return "unpack"
    return f"int8-{kernels.variant}"


def _multiply(x: torch.Tensor, weight: PackedWeight, arithmetic: Arithmetic) -> torch.Tensor:
    """Return x W^T (..., rows) in the dtype of `x` (..., columns)."""
    rows = x.reshape(-1, weight.columns)
    path = product_path(weight, arithmetic)
    if path == "torch" and weight.data.dtype == x.dtype:
        return F.linear(x, weight.data)
    if path in ("torch", "unpack"):
        wide = torch.cat([F.linear(rows.float(), tile) for tile in _tiles(weight)], dim=-1).to(x.dtype)
    elif path == "triton":
        from deployments.engines.nn.triton_products import multiply_packed  # where there is triton, and not before

        wide = multiply_packed(rows.contiguous(), weight, arithmetic)
    else:
        kernels = load_kernels()
        assert kernels is not None
        given = rows if rows.dtype in (torch.float32, torch.bfloat16) else rows.float()
        wide = kernels.matmul(PackedMatrix(*weight), given.contiguous()).to(x.dtype)
    return wide.view(*x.shape[:-1], weight.rows)


def _unpack_rows(weight: PackedWeight, start: int, stop: int) -> torch.Tensor:
    """Return rows `start` to `stop` as float32 (stop - start, columns)."""
    if weight.kind in DENSE_KINDS:
        return weight.data[start:stop].float()
    kernels = load_kernels() if weight.data.device.type == "cpu" else None
    if kernels is not None and _fits_kernel(weight):
        return kernels.unpack_rows(PackedMatrix(*weight), start, stop)
    if weight.scales is not None:
        return unpack_groups(weight.data, weight.scales, start, stop, weight.group_size)
    return unpack_blocks(weight.kind, weight.data[start:stop])


def _tiles(weight: PackedWeight) -> Iterator[torch.Tensor]:
    size = max(16, _TILE_BYTES // (4 * weight.columns))
    for start in range(0, weight.rows, size):
        yield _unpack_rows(weight, start, min(start + size, weight.rows))


def _fits_kernel(weight: PackedWeight) -> bool:
    return weight.kind != GROUP_INT8 or not (weight.columns % _KERNEL_CHUNK or weight.group_size % _KERNEL_CHUNK)


class PackedLinear(nn.Module):
    """`nn.Linear` of a packed weight. Its buffers are views of what was given; nothing is copied."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.columns, weight.rows
        self.packed = weight
        self.bias = bias
        self.arithmetic: Arithmetic = arithmetic

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias, in the dtype of `x`."""
        y = _multiply(x, self.packed, self.arithmetic)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        path = product_path(self.packed, self.arithmetic)
        return f"in={self.in_features}, out={self.out_features}, {self.packed.kind}, {self.arithmetic}: {path}"


class PackedEmbedding(nn.Module):
    """`nn.Embedding` of a packed table: only the rows that are asked for are unpacked."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = weight
        self.dtype = dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows `ids` (N,), in the compute dtype."""
        return self.packed.selected(ids).to(self.dtype)
