"""Linear layers and embeddings whose weights stay as they lie in a GGUF or Kuiper file: no unpacked copy is kept.

Arithmetic, by name:
- "exact": weights unpacked to float32 tile by tile, float32 products;
- "fast": activations are quantized to int8 by 32 elements, as llama.cpp does (an error of about 0.6 % of the product's
  norm on random data). A row's result is the same beside any other rows, bit for bit;
- "deterministic": the same on the CPU; on CUDA, tiles of one size for any number of rows.
On CUDA with triton (but for Q2_K, Q3_K, IQ4_NL, IQ4_XS and MXFP4), "fast" and "deterministic" are bfloat16 products and
"exact" is a float32 one, of weights unpacked on their way. Without compiled kernels all three unpack tiles and leave
the product to torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from deployments.engines.native.library import PackedMatrix, load_kernels
from deployments.engines.nn.batch_invariant import linear
from deployments.engines.nn.few_rows import multiply_any
from deployments.engines.nn.packed_weights import (
    DENSE_KINDS,
    WITHOUT_TRITON,
    Arithmetic,
    PackedWeight,
    fits_kernel,
    packed_weight,
    unpack_rows,
)
from deployments.engines.records.protocol import EngineError
from weights.platform.torch_dtypes import memory_form

_TILE_BYTES: Final = 8 * 2**20  # of unpacked float32 rows


def product_path(weight: PackedWeight, arithmetic: Arithmetic) -> str:
    """Return the name of the path that a product takes: torch, unpack, triton, int8-avx512 or int8-avx2.

    The one table of the dispatch.
    """
    if weight.kind in DENSE_KINDS:
        return "torch"
    if weight.data.is_cuda and weight.kind not in WITHOUT_TRITON and importlib.util.find_spec("triton"):
        return "triton"
    kernels = load_kernels() if weight.data.device.type == "cpu" else None
    if kernels is None or arithmetic == "exact" or not fits_kernel(weight):
        return "unpack"
    return f"int8-{kernels.variant}"


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    found = multiply_any(x, weight, None)
    return F.linear(x, weight) if found is None else found


def _multiply(
    x: torch.Tensor,
    weight: PackedWeight,
    arithmetic: Arithmetic,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _product,
) -> torch.Tensor:
    """Return x W^T (..., rows) in the dtype of `x` (..., columns); `product` is that of rows with an unpacked tile."""
    rows = x.reshape(-1, weight.columns)
    path = product_path(weight, arithmetic)
    if path == "torch" and weight.data.dtype == x.dtype:
        return product(x, weight.data)
    if path in ("torch", "unpack"):
        wide = torch.cat([product(rows.float(), tile) for tile in _tiles(weight)], dim=-1).to(x.dtype)
    elif path == "triton":
        from deployments.engines.nn.triton_products import multiply_packed  # where there is triton, and not before

        wide = multiply_packed(rows.contiguous(), weight, arithmetic)
    else:
        kernels = load_kernels()
        assert kernels is not None
        given = rows if rows.dtype in (torch.float32, torch.bfloat16) else rows.float()
        wide = kernels.matmul(PackedMatrix(*weight), given.contiguous()).to(x.dtype)
    return wide.view(*x.shape[:-1], weight.rows)


def _tiles(weight: PackedWeight) -> Iterator[torch.Tensor]:
    size = max(16, _TILE_BYTES // (4 * weight.columns))
    for start in range(0, weight.rows, size):
        yield unpack_rows(weight, start, min(start + size, weight.rows))


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
        return y if self.bias is None else (y + self.bias).to(y.dtype)

    def weight_tiles(self) -> Iterator[torch.Tensor]:
        """Yield the rows of the weights in order, some at a time, in float32."""
        return _tiles(self.packed)

    def extra_repr(self) -> str:
        path = product_path(self.packed, self.arithmetic)
        return f"in={self.in_features}, out={self.out_features}, {self.packed.kind}, {self.arithmetic}: {path}"


class _PackedLayer(nn.Linear):
    """`nn.Linear` whose `weight` (rows, bytes) has blocks of a ggml type, bound and let go as other parameters are.

    On the CPU a row's result does not depend on the rows beside it.
    """

    kind: str
    arithmetic: Arithmetic

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype that an input should have: models of diffusers ask for it where a weight is no float."""
        return None if self.bias is None else self.bias.dtype

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias, in the dtype of `input`."""
        y = _multiply(input, self._packed(), self.arithmetic, linear)
        return y if self.bias is None else (y + self.bias).to(y.dtype)

    def weight_tiles(self) -> Iterator[torch.Tensor]:
        """Yield the rows of the weights in order, some at a time, in float32."""
        return _tiles(self._packed())

    def _packed(self) -> PackedWeight:
        return packed_weight("weight", self.kind, self.weight)


def take_blocks(module: nn.Module, kinds: Mapping[str, str], arithmetic: Arithmetic) -> None:
    """Make a `_PackedLayer` of every linear layer whose weight is one of `kinds`: types by name.

    Its weight is on the meta device, in the shape of its bytes. Raises EngineError for what is no such weight.
    """
    layers = dict(module.named_modules()) if kinds else {}
    for name, kind in kinds.items():
        path, _, leaf = name.rpartition(".")
        found = layers.get(path)
        if leaf != "weight" or type(found) is not nn.Linear:
            raise EngineError(f"tensor {name!r} is {kind}, which only the weight of a linear layer can be")
        layer: Any = found
        dtype, shape = memory_form(kind, tuple(layer.weight.shape))
        vars(layer).update(kind=kind, arithmetic=arithmetic)
        layer.__class__ = _PackedLayer
        layer.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


class PackedEmbedding(nn.Module):
    """`nn.Embedding` of a packed table: only the rows that are asked for are unpacked."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = weight
        self.dtype = dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows `ids` (N,), in the compute dtype."""
        return self.packed.selected(ids).to(self.dtype)
