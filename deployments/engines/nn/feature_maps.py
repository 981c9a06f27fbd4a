"""The maps of features of some adapters: turn a layer's outputs or inputs, weigh them, or mix in others.

None needs the layer's weights, or a copy of them: W' = R W turns W's outputs, and W' = W A its inputs.
Each map returns its addition to features (..., N), linear in them. Rows do not depend on each other, bit for bit.

Sources: LyCORIS 4.1, `lycoris/functional/diag_oft.py`, `boft.py`, `lycoris/modules/ia3.py`, `glora.py`; peft 0.21,
`tuners/oft/layer.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from deployments.engines.nn.batch_invariant import linear
from deployments.engines.records.protocol import EngineError
from weights.operations.adapters import LoraPair

Change = Callable[[torch.Tensor], torch.Tensor]  # of a tensor of a map


@dataclass(frozen=True, slots=True, eq=False)
class Gains:
    """Each feature has a weight of its own, by `weights` (N,). An IA3."""

    weights: torch.Tensor
    of_inputs: bool = False

    @property
    def size(self) -> int:
        return len(self.weights)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.weights,)

    def delta(self, features: torch.Tensor, strength: float) -> torch.Tensor:
        """Return the addition to the features."""
        return features * (self.weights * strength)

    def rows(self, start: int, stop: int) -> Self:
        """Return the map of some of the outputs. Raises EngineError where they do not stand alone."""
        return replace(self, weights=self.weights[start:stop])

    def changed(self, change: Change) -> Self:
        """Return the same map with its tensors changed."""
        return replace(self, weights=change(self.weights))


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Blocks of features are turned, in stages: `stages` (S, n, b, b) are what a block is multiplied with, from the
    right, and `lengths` (N,) what all is multiplied with in the end. An OFT has one stage, a butterfly several, each
    over features that lie twice as far apart as those of the stage before.
    """

    stages: torch.Tensor
    lengths: torch.Tensor | None = None
    is_butterfly: bool = False
    of_inputs: bool = False

    @property
    def size(self) -> int:
        return self.stages.shape[1] * self.stages.shape[2]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.stages,) if self.lengths is None else (self.stages, self.lengths)

    def delta(self, features: torch.Tensor, strength: float) -> torch.Tensor:
        """Return the addition to the features. A lower strength brings each stage nearer to the identity."""
        wide = features.float()
        if not self.is_butterfly:
            added = _of_blocks(wide, self.stages[0], strength)
            if self.lengths is not None:
                added = added * self.lengths + wide * (self.lengths - 1)
            return added.to(features.dtype)
        turned, rows = wide, wide.shape[:-1]
        for number, blocks in enumerate(self.stages):
            apart = 2**number * (blocks.shape[-1] // 2)
            near = turned.reshape(*rows, -1, 2, apart).transpose(-2, -1).flatten(-3)
            near = near + _of_blocks(near, blocks, strength)
            turned = near.reshape(*rows, -1, apart, 2).transpose(-2, -1).flatten(-3)
        if self.lengths is not None:
            turned = turned * self.lengths
        return (turned - wide).to(features.dtype)

    def rows(self, start: int, stop: int) -> Self:
        """Return the map of some of the outputs. Raises EngineError where they do not stand alone."""
        block = self.stages.shape[-1]
        if self.is_butterfly or start % block or stop % block:
            raise EngineError(f"blocks of {block} outputs lie across the layers of {start} to {stop}")
        lengths = None if self.lengths is None else self.lengths[start:stop]
        return replace(self, stages=self.stages[:, start // block : stop // block], lengths=lengths)

    def changed(self, change: Change) -> Self:
        """Return the same map with its tensors changed."""
        return replace(self, stages=change(self.stages), lengths=None if self.lengths is None else change(self.lengths))


@dataclass(frozen=True, slots=True, eq=False)
class Mixed:
    """Few mixtures of the inputs are added to them: `up` (N, r) @ `down` (r, N). The first half of a GLoRA."""

    down: torch.Tensor
    up: torch.Tensor
    of_inputs: bool = True

    @property
    def size(self) -> int:
        return len(self.up)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.down, self.up

    def delta(self, features: torch.Tensor, strength: float) -> torch.Tensor:
        """Return the addition to the features."""
        return linear(linear(features, self.down.to(features.dtype)) * strength, self.up.to(features.dtype))

    def rows(self, start: int, stop: int) -> Self:
        """Return the map of some of the outputs: it is of the inputs of each."""
        return self

    def changed(self, change: Change) -> Self:
        """Return the same map with its tensors changed."""
        return replace(self, down=change(self.down), up=change(self.up))


FeatureMap = Gains | Turns | Mixed


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class MappedPair(LoraPair):
    """A pair beside a map of the layer's features. Its matrices may have no rank, and then add nothing."""

    features: FeatureMap | None = None

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> MappedPair:
        """Return the pair with its tensors elsewhere. The map's are in float32, as little as it is."""
        assert self.features is not None
        up, down = self.up.to(device, dtype), self.down.to(device, dtype)
        return replace(
            self, down=down, up=up, features=self.features.changed(lambda one: one.to(device, torch.float32))
        )


def _of_blocks(features: torch.Tensor, blocks: torch.Tensor, strength: float) -> torch.Tensor:
    """Return the change of the features when each of their blocks is turned by (n, b, b).

    The sums are of elements or of whole products of the kernel for few rows: none depends on how many rows there are.
    """
    count, size, _ = blocks.shape
    turns = (blocks - torch.eye(size, dtype=blocks.dtype, device=blocks.device)) * strength
    if count <= size:
        parts = torch.split(features, size, dim=-1)
        return torch.cat([linear(part, turn.T) for part, turn in zip(parts, turns, strict=True)], dim=-1)
    split = features.reshape(*features.shape[:-1], count, size)
    found: Any = 0
    for place in range(size):
        found = found + split[..., place : place + 1] * turns[:, place]
    whole: torch.Tensor = found.flatten(-2)
    return whole
