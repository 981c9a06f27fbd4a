"""Images as prompts, in the form for a denoiser's layers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class PromptedLayer(NamedTuple):
    """A cross-attention, or a block of Flux, and the keys and values (1, heads, T, D) that it reads beside its text."""

    module: Any
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt:
    """An IP-Adapter at work in a request: the layers of each branch, in the order of `DenoiseState.branches`."""

    name: str
    branches: tuple[tuple[PromptedLayer, ...], ...]
    scale: float


class PromptedSpan(NamedTuple):
    """Additions of images to the rows `start` to `stop` of a batch: layers, each list with its strength."""

    uses: Sequence[tuple[Sequence[PromptedLayer], float]]
    start: int = 0
    stop: int = sys.maxsize

    def part(self, start: int, stop: int) -> PromptedSpan | None:
        """Return the span's part within the rows `start` to `stop`, counted from there; None if it lies outside."""
        first, last = max(self.start, start), min(self.stop, stop)
        return PromptedSpan(self.uses, first - start, last - start) if first < last else None
