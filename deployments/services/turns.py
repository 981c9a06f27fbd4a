"""Which requests of a pipeline take the next step, when not all of them fit into one turn. Pure.

Those with the least work left go first: of equal requests some run to their end while the others wait, which answers
them sooner on average than if all advanced at the same pace and ended last together. Now and then the first place goes
to whoever has waited the longest since its last step, so that a long request moves on however many short ones come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ROTATION: Final = 4  # every so many turns the first place goes to who has waited the longest
WHOLE: Final = 1 + 1e-9  # ten tenths are a little more or less than one


@dataclass(frozen=True, slots=True)
class Runner:
    """A request as turns see it. `share`: of what one turn has room for, that a step of it takes; more than 1 is a turn
    by itself. `last_turn`: number of the turn of its last step, or of its arrival.
    """

    share: float
    num_steps_left: int
    last_turn: int

    @property
    def work_left(self) -> float:
        return self.num_steps_left * self.share


def choose(runners: Sequence[Runner], turn: int) -> list[int]:
    """Places in `runners`, which are in the order of arrival, of those that step in turn number `turn`; ascending."""
    if sum(runner.share for runner in runners) <= WHOLE:
        return list(range(len(runners)))
    order = sorted(range(len(runners)), key=lambda place: runners[place].work_left)
    if turn % ROTATION == 0:
        longest = min(order, key=lambda place: (runners[place].last_turn, place))
        order.remove(longest)
        order.insert(0, longest)
    chosen: list[int] = []
    taken = 0.0
    for place in order:
        if not chosen or taken + runners[place].share <= WHOLE:
            chosen.append(place)
            taken += runners[place].share
    return sorted(chosen)
