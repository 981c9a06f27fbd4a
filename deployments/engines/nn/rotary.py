"""Rotary position embedding: dimension i is paired with i + D/2, or, in GGUF's `llama`, 2i with 2i + 1.

Suffixes: T tokens, H heads, D head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class RotaryAngles(NamedTuple):
    """Cosine and sine of every token's position, each (T, 1, D), ready to broadcast over heads."""

    cos: torch.Tensor
    sin: torch.Tensor
    is_interleaved: bool = False


class Rotary:
    """Turns positions into angles.

    `inverse_frequencies` is (D/2,) float32; `magnitude` multiplies cosine and sine (YaRN; 1.0 elsewhere).
    `is_interleaved` pairs neighbours, for weights whose rows of q and k are in that order.
    """

    def __init__(
        self, inverse_frequencies: torch.Tensor, magnitude: float = 1.0, *, is_interleaved: bool = False
    ) -> None:
        self.inverse_frequencies = inverse_frequencies
        self.magnitude = magnitude
        self.is_interleaved = is_interleaved

    def angles(self, positions_T: torch.Tensor, dtype: torch.dtype) -> RotaryAngles:
        """Return the angles of positions, computed in float32, in `dtype`."""
        half = positions_T[:, None].float() * self.inverse_frequencies
        full = half.repeat_interleave(2, dim=-1) if self.is_interleaved else torch.cat((half, half), dim=-1)
        full = full[:, None, :]
        return RotaryAngles(
            (full.cos() * self.magnitude).to(dtype),
            (full.sin() * self.magnitude).to(dtype),
            self.is_interleaved,
        )


def rotate(x_THD: torch.Tensor, angles: RotaryAngles) -> torch.Tensor:
    """Turn every head of every token by its position's angles."""
    if angles.is_interleaved:
        turned = torch.stack((-x_THD[..., 1::2], x_THD[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = x_THD.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return x_THD * angles.cos + turned * angles.sin
