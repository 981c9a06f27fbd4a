"""The CUDA kernel for packed weights in Triton's interpreter, against gguf-py's dequantize and a float32 product.

Skipped where triton is not installed: CUDA builds of torch bring it along, CPU builds do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import gguf
import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng

from deployments.engines.nn.packed_weights import (
    UNPACKED_KINDS,
    WITHOUT_TRITON,
    PackedWeight,
    group_int8_weight,
    packed_weight,
)
from weights.records.dtypes import BLOCK_SIZES

HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where a block's float16 numbers stand


@pytest.fixture(scope="module")
def triton_products() -> Iterator[ModuleType]:
    """The module, interpreted: triton reads the variable when a kernel is declared, its own included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pytest.importorskip("triton", reason="triton is not installed (it comes with CUDA builds of torch)")
        from deployments.engines.nn import triton_products

        yield triton_products


def drawn(kind: str, rows: int, columns: int) -> tuple[PackedWeight, torch.Tensor]:
    """A weight of random bytes, with small scales, and what gguf-py makes of it."""
    elements, block_bytes = BLOCK_SIZES[kind]
    blocks = seeded_rng().integers(0, 256, (rows, columns // elements, block_bytes), dtype=np.uint8)
    for at in HALVES.get(kind, (0, 2) if kind.endswith("_1") else (0,)):
        halves = seeded_rng().uniform(-0.01, 0.01, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    packed = blocks.reshape(rows, -1)
    reference = torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind]))
    return packed_weight("w", kind, torch.from_numpy(packed)), reference


@pytest.mark.parametrize("kind", sorted(set(UNPACKED_KINDS) - WITHOUT_TRITON))
def test_products_equal_unpacked_ones(triton_products: ModuleType, kind: str) -> None:
    """Rows and columns that fill no whole tile, and more rows of x than one tile has."""
    weight, reference = drawn(kind, 70, 512 if kind.endswith("K") else 288)
    x = torch.randn(67, weight.columns)
    got = triton_products.multiply_packed(x, weight, "exact")
    torch.testing.assert_close(got, x @ reference.T, rtol=1e-4, atol=1e-4)
    few = triton_products.multiply_packed(x[:1].contiguous(), weight, "exact")
    torch.testing.assert_close(few, got[:1], rtol=1e-5, atol=1e-5)


def test_groups_run_across_rows(triton_products: ModuleType) -> None:
    """A Kuiper matrix whose rows are no multiple of its groups."""
    rows, columns, group = 6, 96, 64
    data = torch.from_numpy(seeded_rng().integers(-127, 128, (rows, columns), dtype=np.int8))
    scales = torch.rand(rows * columns // group)
    wide = (data.flatten().float() * scales.repeat_interleave(group)).view(rows, columns)
    x = torch.randn(3, columns)
    got = triton_products.multiply_packed(x, group_int8_weight("w", data, scales, group), "exact")
    torch.testing.assert_close(got, x @ wide.T, rtol=1e-4, atol=1e-3)
