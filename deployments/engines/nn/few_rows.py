"""Products with float32 weights on the host, in the compiled kernels, where they are the faster ones: of few rows, and
with AVX-512 on AMD's processors, for which MKL takes its code for AVX2, of many.

MKL packs all of a weight anew for each product, which for a short text takes as long as the product. The kernels read a
weight where it lies. MiniLM's forward, one thread of an AVX2 processor, ms with torch 2.13 and with the kernels: 12.6
and 10.6 for 8 tokens, 17.7 and 16.0 for 22, 20.5 and 19.8 for 32, the same from 40 on. Its products alone on a Zen 4:
10.2 and 6.1 for 32 tokens, 17.8 and 9.5 for 64, 66.5 and 39.5 for 256.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import nn

from deployments.engines.libraries.library_seam import has_hooks
from deployments.engines.native.library import load_kernels
from weights.platform.processor import processor_name

MOST_ROWS: Final = 32
MOST_BESIDE_SLOW_MKL: Final = 512
_VECTOR: Final = 16  # elements: dense_product.h leaves no remainder


def multiply_few(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """Return `linear(x)`, (..., columns) -> (..., outputs), without a gradient where the kernels compute it.

    There a row's result does not depend on the other rows, bit for bit.
    """
    # A layer with a hook, a LoRA's, gives something else.
    is_plain = type(linear) is nn.Linear and not has_hooks(linear)
    found = multiply_rows(linear, x) if is_plain and x.numel() <= most_rows() * x.shape[-1] else None
    result: torch.Tensor = linear(x) if found is None else found
    return result


@functools.cache
def most_rows() -> int:
    """Return up to how many rows the kernels are the faster ones on this processor."""
    kernels = load_kernels()
    is_slow = kernels is not None and kernels.variant == "avx512" and processor_name().startswith("AMD")
    return MOST_BESIDE_SLOW_MKL if is_slow else MOST_ROWS


def multiply_rows(linear: nn.Linear, x: torch.Tensor, num_rows: int | None = None) -> torch.Tensor | None:
    """Return the product of a layer's weight with any number of rows, and its bias; None where there is no kernel.

    With `num_rows`, only the first of all rows are computed, and the others are zeros. A row's result does not depend
    on the other rows, bit for bit.
    """
    if not _fits_kernel(linear, x) or (kernels := load_kernels()) is None:
        return None
    rows = x.reshape(-1, linear.in_features).contiguous()
    return kernels.linear(rows, linear.weight, linear.bias, num_rows).view(*x.shape[:-1], linear.out_features)


def _fits_kernel(linear: nn.Linear, x: torch.Tensor) -> bool:
    weight, columns = linear.weight, linear.in_features
    is_host = x.is_cpu and weight.is_cpu
    is_float = x.dtype == weight.dtype == torch.float32
    return is_host and is_float and x.shape[-1] == columns and columns % _VECTOR == 0 and weight.is_contiguous()
