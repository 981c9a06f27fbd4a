"""Rotary position embedding in the half-split layout (dimension i is paired with i + D/2).

Suffixes: T tokens, H heads, D head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class RotaryAngles(NamedTuple):
    """Cosine and sine of every token's position, each (T, 1, D), ready to broadcast over heads."""

    cos: torch.Tensor
    sin: torch.Tensor


class Rotary:
    """Turns positions into angles.

    `inverse_frequencies` is (D/2,) float32; `magnitude` multiplies cosine and sine (YaRN; 1.0 elsewhere).
    """

    def __init__(self, inverse_frequencies: torch.Tensor, magnitude: float = 1.0) -> None:
        self.inverse_frequencies = inverse_frequencies
        self.magnitude = magnitude

    def angles(self, positions_T: torch.Tensor, dtype: torch.dtype) -> RotaryAngles:
        """Return the angles of positions, computed in float32, in `dtype`."""
        half = positions_T[:, None].float() * self.inverse_frequencies
        full = torch.cat((half, half), dim=-1)[:, None, :]
        return RotaryAngles(
            (full.cos() * self.magnitude).to(dtype),
            (full.sin() * self.magnitude).to(dtype),
        )


def rotate(x_THD: torch.Tensor, angles: RotaryAngles) -> torch.Tensor:
    """Turn every head of every token by its position's angles."""
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * angles.cos + torch.cat((-second, first), dim=-1) * angles.sin
