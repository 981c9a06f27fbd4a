"""Products on the host in the compiled kernels, where they are the faster ones: of few rows, and with AVX-512 on AMD's
processors, for which MKL takes its code for AVX2, of any number of rows in float32.

MKL packs all of a weight anew for each product, which for a short text takes as long as the product. The kernels read a
weight where it lies. MiniLM's forward, one thread of an AVX2 processor, ms with torch 2.13 and with the kernels: 12.6
and 10.6 for 8 tokens, 17.7 and 16.0 for 22, 20.5 and 19.8 for 32, the same from 40 on. Of 24 shapes from 1 to 4,096
rows and 256 to 10,240 inputs and outputs, on a Zen 5 their products take 0.47 to 0.58 of MKL's time, from 8 rows on.
Those of bfloat16 take 0.39 to 0.71 of oneDNN's time up to 16 rows, and from 64 on 0.94 to 1.04, with 384 to 5,632
columns; with a bias and more outputs than inputs, 0.7 to 0.99 of torch's. Convolutions of bfloat16 take 0.31 to 1.07 of
the time of oneDNN, which packs the weights at each call: the more weights for a pixel, the less. Those of float32 take
0.3 to 1.1 of it up to 16 x 16 pixels, and from 24 x 24 on, but for few channels, 1.0 to 1.3. Attention in bfloat16
takes 0.19 to 0.35 of the time of torch's, from 64 queries on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from deployments.engines.libraries.library_seam import has_hooks
from deployments.engines.native.library import ELEMENTS, load_kernels
from deployments.engines.native.operations import load_operations
from weights.platform.processor import processor_name

HOSTS: Final = ("cpu", "sim")  # a simulated accelerator computes on the host
MOST_ROWS: Final = 32
_TURNED: Final = 4  # elements; pair_product.h turns so many at once
_LEAST_WEIGHT: Final = 2**12  # elements; of a smaller one, the call takes longer than the product
_LEAST_QUERIES: Final = 64  # full_attention.h computes as many at once
_MOST_SIZE: Final = 512  # elements; of these, a thread of full_attention.h takes 0.9 MB, and of more in proportion
_MOST_FLOAT_PIXELS: Final = 16**2  # of an image; of a larger one in float32, oneDNN's convolutions are the faster ones
_VECTOR: Final = 16  # elements: dense_product.h leaves no remainder


def multiply_few(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """Return `linear(x)`, (..., columns) -> (..., outputs), without a gradient where the kernels compute it.

    There a row's result does not depend on the other rows, bit for bit.
    """
    # A layer with a hook, a LoRA's, gives something else.
    is_plain = type(linear) is nn.Linear and not has_hooks(linear)
    most = most_rows() if x.dtype == torch.float32 else MOST_ROWS
    found = multiply_rows(linear, x, takes_half=True) if is_plain and x.numel() <= most * x.shape[-1] else None
    result: torch.Tensor = linear(x) if found is None else found
    return result


def most_rows() -> int:
    """Return up to how many rows the kernels are the faster ones on this processor."""
    return sys.maxsize if are_kernels_faster() else MOST_ROWS


@functools.cache
def are_kernels_faster() -> bool:
    """Return whether the kernels are the faster ones for any number of rows on this processor."""
    kernels = load_kernels()
    return kernels is not None and kernels.variant == "avx512" and processor_name().startswith("AMD")


def multiply_any(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Return `F.linear` by the kernels where they are the faster ones for any number of rows, else None.

    Of bfloat16 they are with more outputs than inputs: torch writes the bias first, and adds to it. A row's result does
    not depend on the other rows, bit for bit; nor does the choice.
    """
    if x.dtype not in ELEMENTS or weight.numel() < _LEAST_WEIGHT or not are_kernels_faster():
        return None
    if x.dtype == torch.bfloat16 and (bias is None or len(weight) <= weight.shape[1] or not has_half_products()):
        return None
    is_fit = x.numel() > 0 and x.shape[-1] == weight.shape[1] and weight.shape[1] % _VECTOR == 0
    given = (x, weight) if bias is None else (x, weight, bias)
    is_plain = x.device.type in HOSTS and all(one.dtype == x.dtype and one.device == x.device for one in given)
    if not is_fit or not is_plain or not all(one.is_contiguous() for one in given[1:]) or _wants_gradient(x, weight):
        return None
    operations = load_operations()
    assert operations is not None  # of the kernels
    result: torch.Tensor = operations.linear(x, weight, bias)
    return result


def convolve_any(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor | None:
    """Return `F.conv2d` of one group by the kernels where they are the faster ones, else None.

    An image's result does not depend on the other images, bit for bit; nor does the choice.
    """
    if x.dtype not in ELEMENTS or x.dim() != 4 or x.numel() == 0 or weight.numel() < _LEAST_WEIGHT:
        return None
    if x.dtype == torch.float32 and x.shape[2] * x.shape[3] > _MOST_FLOAT_PIXELS:
        return None
    given = (x, weight) if bias is None else (x, weight, bias)
    is_plain = x.device.type in HOSTS and all(one.dtype == x.dtype and one.device == x.device for one in given)
    inputs, *sides = weight.shape[1:]
    is_square = sides in ([1, 1], [3, 3]) and tuple(stride) in ((1, 1), (2, 2)) and len(set(padding)) == 1
    has_room = x.shape[1] == inputs and min(x.shape[2:]) + 2 * padding[0] >= sides[0] and padding[0] >= 0
    if not (is_plain and is_square and has_room and set(dilation) == {1}) or _wants_gradient(*given):
        return None
    if not are_kernels_faster() or not has_half_products() or not _is_bias(bias, len(weight)):
        return None
    operations = load_operations()
    assert operations is not None  # of the kernels
    result: torch.Tensor = operations.conv2d(x, weight, bias, stride[0], padding[0])
    return result


def attend_any(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor | None:
    """Return `F.scaled_dot_product_attention` in bfloat16 by the kernels where they are the faster ones, else None.

    An image's result does not depend on the other images, bit for bit; nor does the choice.
    """
    if query.dtype != torch.bfloat16 or query.dim() != 4 or query.shape[2] < _LEAST_QUERIES or query.numel() == 0:
        return None
    given = query, key, value
    images, heads, _, size = query.shape
    is_plain = query.device.type in HOSTS and all((o.dtype, o.device) == (query.dtype, query.device) for o in given)
    has_keys = key.shape == value.shape == (images, heads, key.shape[2], size) and key.shape[2] > 0
    if not (is_plain and has_keys) or size % 2 or size > _MOST_SIZE or _wants_gradient(*given):
        return None
    if (scale is not None and scale <= 0) or not are_kernels_faster() or not has_half_products():
        return None
    operations = load_operations()
    assert operations is not None  # of the kernels
    result: torch.Tensor = operations.attend(*given, size**-0.5 if scale is None else scale)
    return result


def gate_any(x: torch.Tensor) -> torch.Tensor | None:
    """Return the first half of features (..., 2 N) by the GELU of the second, in bfloat16 by the kernels, else None."""
    is_plain = x.dtype == torch.bfloat16 and x.device.type in HOSTS and x.numel() > 0 and x.shape[-1] % 2 == 0
    if not is_plain or _wants_gradient(x) or not are_kernels_faster() or not has_half_products():
        return None
    operations = load_operations()
    assert operations is not None  # of the kernels
    result: torch.Tensor = operations.gate(x)
    return result


def _is_bias(bias: torch.Tensor | None, outputs: int) -> bool:
    return bias is None or (bias.shape == (outputs,) and bias.is_contiguous())


def has_half_products() -> bool:
    """Return whether the kernels multiply pairs of bfloat16 on this processor."""
    kernels = load_kernels()
    return kernels is not None and kernels.has_half_products


def add_pair(result: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, factor: float) -> bool:
    """Add `factor * up(down(x))` to the result (..., outputs), in place, if there is a kernel; else return False.

    A row's result does not depend on the other rows, bit for bit; nor does the choice.
    """
    given = (result, x, down, up)
    if x.device.type not in HOSTS or not all(one.dtype == torch.float32 and one.device == x.device for one in given):
        return False
    if down.shape[0] % _TURNED or down.shape[1] % _TURNED or not (down.is_contiguous() and up.is_contiguous()):
        return False
    if x.numel() == 0 or _wants_gradient(result, x) or (operations := load_operations()) is None:
        return False
    own = result.contiguous()
    operations.add_pair(own, x, down, up, factor)
    if own is not result:
        result.copy_(own)
    return True


def multiply_rows(
    linear: nn.Linear, x: torch.Tensor, num_rows: int | None = None, *, takes_half: bool = False
) -> torch.Tensor | None:
    """Return the product of a layer's weight with any number of rows, and its bias; None where there is no kernel.

    With `num_rows`, only the first of all rows are computed, and the others are zeros. A row's result does not depend
    on the other rows, bit for bit. `takes_half`: bfloat16 too, where the processor multiplies it.
    """
    if not _fits_kernel(linear, x) or (kernels := load_kernels()) is None:
        return None
    if x.dtype != torch.float32 and not (takes_half and kernels.has_half_products):
        return None
    return kernels.linear(x.contiguous(), linear.weight, linear.bias, num_rows)


def _fits_kernel(linear: nn.Linear, x: torch.Tensor) -> bool:
    weight, columns = linear.weight, linear.in_features
    is_host = x.is_cpu and weight.is_cpu
    is_float = x.dtype == weight.dtype and x.dtype in ELEMENTS
    return is_host and is_float and x.shape[-1] == columns and columns % _VECTOR == 0 and weight.is_contiguous()


def _wants_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
