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


@dataclass(frozen=True, slots=True)
class TurnBounds:
    """What all requests of one turn may have together; one request takes its turn whatever it has."""

    max_rows: int = 64
    max_pixels: int = 16 * 2**20


DEFAULT_BOUNDS: Final = TurnBounds()


@dataclass(frozen=True, slots=True)
class Runner:
    """A request as turns see it: rows and pixels of a step, steps to do, and the turn of its last step, or arrival."""

    num_rows: int
    num_pixels: int
    num_steps_left: int
    last_turn: int

    @property
    def work_left(self) -> int:
        return self.num_steps_left * self.num_pixels


def choose(runners: Sequence[Runner], bounds: TurnBounds, turn: int) -> list[int]:
    """Places in `runners`, which are in the order of arrival, of those that step in turn number `turn`; ascending."""
    if sum(r.num_rows for r in runners) <= bounds.max_rows and sum(r.num_pixels for r in runners) <= bounds.max_pixels:
        return list(range(len(runners)))
    order = sorted(range(len(runners)), key=lambda place: runners[place].work_left)
    if turn % ROTATION == 0:
        longest = min(order, key=lambda place: (runners[place].last_turn, place))
        order.remove(longest)
        order.insert(0, longest)
    chosen: list[int] = []
    rows = pixels = 0
    for place in order:
        runner = runners[place]
        fits = rows + runner.num_rows <= bounds.max_rows and pixels + runner.num_pixels <= bounds.max_pixels
        if fits or not chosen:
            chosen.append(place)
            rows, pixels = rows + runner.num_rows, pixels + runner.num_pixels
        if rows >= bounds.max_rows:
            break
    return sorted(chosen)
