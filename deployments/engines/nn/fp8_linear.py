"""Linear layers whose weights stay in float8 (e4m3) with scales.

Where the hardware multiplies float8 (CUDA from 8.9 on, activations in bfloat16), it does: each row of the input is
rounded to e4m3 with a scale of its own, so that rows do not depend on each other. Elsewhere each forward makes the
weights wide and lets them go again, and the product is that of the wide weights, bit for bit. On the host a table of
the 256 values makes them: torch's own cast takes eight times as long (1536 x 1536 to bfloat16, one thread: 16.4 ms, the
table 2.0 ms, the product with 64 rows 1.9 ms).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import nn

from deployments.engines.libraries.library_seam import scaled_product
from deployments.engines.nn.batch_invariant import linear

SCALE_NAME: Final = "weight_scale"
_HOSTS: Final = ("cpu", "sim")  # a simulated accelerator computes on the host
_CAPABILITY: Final = (8, 9)
_MULTIPLE: Final = 16  # of both sizes of a weight, for torch's kernels
_MAX_E4M3: Final = 448.0
_LEAST_SCALE: Final = 2.0**-100  # of a row of zeros
_PART_ELEMENTS: Final = 2**20  # whose indices are in memory at once


class _Fp8Linear(nn.Linear):
    """`nn.Linear` with a float8 `weight` and a `weight_scale` of shape () or (rows, 1)."""

    weight_scale: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias in the dtype of x."""
        if self.weight.dtype != torch.float8_e4m3fn:  # the checkpoint has scales beside weights that are wide
            weight = self.weight.to(input.dtype)
        elif _multiplies_float8(input, self.weight):
            return _scaled_product(input, self.weight, self.weight_scale, self.bias)
        elif self.weight.device.type in _HOSTS:
            weight = _looked_up(self.weight, input.dtype)
        else:
            weight = self.weight.to(input.dtype)
        return linear(input, weight * self.weight_scale.to(input.dtype), self.bias)

    def weight_tiles(self) -> Iterator[torch.Tensor]:
        """Yield the rows of the weights in order, some at a time, in float32."""
        step = max(1, _PART_ELEMENTS // max(1, self.in_features))
        scale = self.weight_scale.float().expand(self.out_features, 1)
        for start in range(0, self.out_features, step):
            yield self.weight[start : start + step].float() * scale[start : start + step]


def _multiplies_float8(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the device of `x` multiplies it with a float8 weight (out, in) as `_scaled_product` does."""
    fits = x.dtype == torch.bfloat16 and not any(size % _MULTIPLE for size in weight.shape)
    return fits and x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= _CAPABILITY


def _scaled_product(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return x W^T + bias in bfloat16, both factors in e4m3; `weight_scale` is () or (out, 1), `weight` (out, in)."""
    rows = x.reshape(-1, x.shape[-1])
    largest = rows.abs().amax(dim=1, keepdim=True).float()
    scale = largest.clamp(min=_LEAST_SCALE * _MAX_E4M3) / _MAX_E4M3
    values = (rows.float() / scale).to(torch.float8_e4m3fn)
    out_scale = weight_scale.float().expand(len(weight), 1).reshape(1, -1).contiguous()
    product = scaled_product(values, weight.t(), scale_a=scale, scale_b=out_scale, bias=bias, out_dtype=torch.bfloat16)
    return product.view(*x.shape[:-1], len(weight))


def take_scales(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Make an `_Fp8Linear` of every linear layer whose weight has a scale beside it, among tensors of these shapes."""
    names = [name for name in shapes if name.endswith(f".{SCALE_NAME}")]
    layers = dict(module.named_modules()) if names else {}
    for name in names:
        layer = layers.get(name.removesuffix(f".{SCALE_NAME}"))
        if type(layer) is nn.Linear and shapes[name] in ((), (layer.out_features, 1)):
            layer.__class__ = _Fp8Linear
            layer.register_buffer(SCALE_NAME, torch.empty(shapes[name], device="meta"))


def _looked_up(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    table = _table(dtype).to(weight.device)
    bits = weight.view(torch.uint8)
    step = max(1, _PART_ELEMENTS // max(1, weight.shape[1]))
    parts = [
        torch.index_select(table, 0, bits[start : start + step].reshape(-1).int()).view(-1, weight.shape[1])
        for start in range(0, len(weight), step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@functools.cache
def _table(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
