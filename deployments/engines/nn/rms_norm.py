"""Root-mean-square normalization, as Llama, Qwen and T5 use it."""

from __future__ import annotations

import torch
from torch import nn


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension; the mean is taken in float32 for any dtype of `x`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is (..., size); the result has its shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)
