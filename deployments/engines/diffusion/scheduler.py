"""The scheduler of denoise steps: which requests of a pipeline share the next batch, when not all fit. Pure.

Those with the least work left go first: of equal requests some run to their end while the others wait, which answers
them sooner on average than if all advanced at the same pace and ended last together. Now and then the first place goes
to the request that has waited the longest since its last step, so that a long one moves on under many short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ROTATION: Final = 4  # every so many batches the first place goes to the request that has waited the longest
WHOLE: Final = 1 + 1e-9  # ten tenths are a little more or less than one


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that could step. `share`: the part of a batch that a step of it takes; more than 1 is one by itself.

    `last_batch` is the number of the batch of its last step, or that of its arrival.
    """

    share: float
    num_steps_left: int
    last_batch: int

    @property
    def work_left(self) -> float:
        return self.num_steps_left * self.share


def choose_batch(candidates: Sequence[Candidate], number: int) -> list[int]:
    """Return the ascending places in `candidates`, which are in the order of arrival, that form batch `number`."""
    if sum(candidate.share for candidate in candidates) <= WHOLE:
        return list(range(len(candidates)))
    order = sorted(range(len(candidates)), key=lambda place: candidates[place].work_left)
    if number % ROTATION == 0:
        longest = min(order, key=lambda place: (candidates[place].last_batch, place))
        order.remove(longest)
        order.insert(0, longest)
    chosen: list[int] = []
    taken = 0.0
    for place in order:
        if not chosen or taken + candidates[place].share <= WHOLE:
            chosen.append(place)
            taken += candidates[place].share
    return sorted(chosen)
