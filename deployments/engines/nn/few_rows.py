"""Products of few rows with float32 weights on the host, in the compiled kernels.

MKL packs all of a weight anew for each product, which for a short text takes as long as the product. The kernels read a
weight where it lies. MiniLM's forward, one thread of an AVX2 processor, ms with torch 2.13 and with the kernels: 12.6
and 10.6 for 8 tokens, 17.7 and 16.0 for 22, 20.5 and 19.8 for 32, the same from 40 on.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from deployments.engines.library_seam import has_hooks
from deployments.engines.native.library import load_kernels

MOST_ROWS: Final = 32
_VECTOR: Final = 16  # elements: dense_product.h leaves no remainder


def multiply_few(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """Return `linear(x)`, (..., columns) -> (..., outputs), without a gradient where the kernels compute it.

    There a row's result does not depend on the other rows, bit for bit.
    """
    if x.numel() > MOST_ROWS * x.shape[-1] or not _fits_kernel(linear, x) or (kernels := load_kernels()) is None:
        result: torch.Tensor = linear(x)
        return result
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return kernels.linear(rows, linear.weight, linear.bias).view(*x.shape[:-1], -1)


def _fits_kernel(linear: Any, x: torch.Tensor) -> bool:
    """Return whether the kernels give what the layer does: one with a hook, a LoRA's, gives something else."""
    if type(linear) is not nn.Linear or has_hooks(linear):
        return False
    weight = linear.weight
    is_host = x.device.type == "cpu" and weight.device.type == "cpu"
    is_float = x.dtype == weight.dtype == torch.float32
    return is_host and is_float and weight.is_contiguous() and weight.shape[1] % _VECTOR == 0
