"""The exchanges of ranks around the forwards of a model of transformers that a plan divides (`planned_share.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deployments.engines.llm.models.planned_share import PlannedShare
from deployments.engines.llm.models.rank_share import gather_columns
from deployments.engines.ranks.group import RankGroup


@dataclass(slots=True, eq=False)
class PlannedForwards:
    """The exchanges of rank `rank` of `size`. Without `ranks` a forward has the right shapes, and hears of no other."""

    rank: int
    size: int
    ranks: RankGroup | None = None
    share: PlannedShare | None = None

    def divide(self, module: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Make a whole module one of the rank's sizes, and return its parts of the tensors. Raises EngineError."""
        share = self.share = PlannedShare(module, self.rank, self.size)
        for path, part in module.named_modules():
            style = share.style_of(path)
            if style.inputs == "own tokens":
                part.forward = _of_own_tokens(part.forward, *share.ranges(path)[self.rank])
            elif style.inputs == "cut":
                part.register_forward_pre_hook(_cutting(*share.ranges(path)[self.rank]))
            # The LoRAs of a layer come before these.
            if style.outputs == "summed":
                part.register_forward_hook(lambda _, args, own: self._sum(own))
            elif style.outputs == "gathered":
                part.register_forward_hook(self._gathering(share.ranges(path)))
        return share.divide(tensors)

    def _sum(self, own: torch.Tensor) -> torch.Tensor:
        return own if self.ranks is None else self.ranks.all_reduce(own, "tensor")

    def _gathering(self, ranges: Sequence[tuple[int, int]]) -> Callable[..., torch.Tensor]:
        sizes = [stop - start for start, stop in ranges]

        def gather(_: Any, args: Any, own: torch.Tensor) -> torch.Tensor:
            if self.ranks is None:
                return own.new_zeros(*own.shape[:-1], sum(sizes))
            return gather_columns(self.ranks, own, sizes)

        return gather


def _cutting(start: int, stop: int) -> Callable[..., Any]:
    return lambda _, args: (args[0][..., start:stop], *args[1:])


def _of_own_tokens(
    forward: Callable[[torch.Tensor], torch.Tensor], start: int, stop: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an embedding's forward, over the rows `start` to `stop`, that gives zeros for all other tokens."""

    def forward_own(ids: torch.Tensor) -> torch.Tensor:
        is_own = (ids >= start) & (ids < stop)
        return forward(torch.where(is_own, ids - start, 0)).masked_fill(~is_own[..., None], 0)

    return forward_own
