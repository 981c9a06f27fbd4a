"""Images as prompts, in the form for a denoiser's layers."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class PromptedLayer(NamedTuple):
    """A cross-attention, or a block of Flux, and the keys and values (1, heads, T, D) that it reads beside its text.

    An attention of Stable Diffusion 3 also has `norms`: the weights for its image's queries and keys.
    """

    module: Any
    key: torch.Tensor
    value: torch.Tensor
    norms: tuple[torch.Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all of its tensors."""
        return self.key, self.value, *self.norms

    @property
    def form(self) -> Hashable:
        """Return all but the values of key and value, for as long as the module lives."""
        return id(self.module), tuple(tuple(one.shape) for one in self.tensors)

    def with_tensors(self, tensors: Iterator[torch.Tensor]) -> PromptedLayer:
        """Return the layer with others in the place of its `tensors`, taken in that order."""
        return PromptedLayer(self.module, next(tensors), next(tensors), tuple(next(tensors) for _ in self.norms))


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt:
    """An IP-Adapter at work in a request: the layers of each branch, in the order of `DenoiseState.branches`."""

    name: str
    branches: tuple[tuple[PromptedLayer, ...], ...]
    scale: float

    def layers_at(self, branch: int, timestep: torch.Tensor) -> tuple[PromptedLayer, ...]:
        """Return the layers of a branch at a step: the same at each, unless the adapter reads the time."""
        return self.branches[branch]


class PromptedSpan(NamedTuple):
    """Additions of images to the rows `start` to `stop` of a batch: layers, each list with its strength."""

    uses: Sequence[tuple[Sequence[PromptedLayer], float]]
    start: int = 0
    stop: int = sys.maxsize

    def part(self, start: int, stop: int) -> PromptedSpan | None:
        """Return the span's part within the rows `start` to `stop`, counted from there; None if it lies outside."""
        first, last = max(self.start, start), min(self.stop, stop)
        return PromptedSpan(self.uses, first - start, last - start) if first < last else None

    @property
    def form(self) -> Hashable:
        """Return all but the values of `tensors`."""
        return self.start, self.stop, tuple((tuple(one.form for one in layers), scale) for layers, scale in self.uses)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of its layers."""
        return (one for layers, _ in self.uses for layer in layers for one in layer.tensors)

    def with_tensors(self, tensors: Iterator[torch.Tensor]) -> PromptedSpan:
        """Return the span with others in the place of its `tensors`, taken in that order."""
        return self._replace(
            uses=[([one.with_tensors(tensors) for one in layers], scale) for layers, scale in self.uses]
        )
