"""Seconds of forwards and decodes by kind and rows, as measured, for the choice of batch sizes. Free of torch.

A kind is anything that takes the same time for the same rows: an image size and a text length, say. For rows that were
not measured the seconds lie on the line between the nearest ones that were. Beyond the largest the cost is believed to
rise half as fast as the rows, which is friendly enough for a larger batch to be tried, and found out.
"""

from __future__ import annotations

import bisect
import statistics
from collections import OrderedDict, deque
from typing import Any, Final

MAX_KINDS: Final = 512
MAX_ROWS_KEPT: Final = 64  # sizes of one kind
NUM_KEPT: Final = 5  # seconds of one size; their median counts, so that one slow turn says nothing
GROWTH: Final = 2  # a batch is at most so many times the largest that was measured


class StepCosts:
    """Measured seconds, newest last."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[str, dict[int, deque[float]]] = OrderedDict()
        self._medians: dict[str, tuple[list[int], list[float]]] = {}  # of `_kinds`, by ascending rows

    def note(self, kind: str, rows: int, seconds: float) -> None:
        """Take in that a call of `rows` rows took `seconds`."""
        sizes = self._kinds.setdefault(kind, {})
        self._kinds.move_to_end(kind)
        if rows not in sizes and len(sizes) >= MAX_ROWS_KEPT:
            del sizes[next(iter(sizes))]
        sizes.setdefault(rows, deque(maxlen=NUM_KEPT)).append(seconds)
        self._medians.pop(kind, None)
        if len(self._kinds) > MAX_KINDS:
            forgotten, _ = self._kinds.popitem(last=False)
            self._medians.pop(forgotten, None)

    def seconds(self, kind: str, rows: int) -> float:
        """Return what a call would take; 0 for a kind of which nothing is known."""
        sizes, medians = self._curve(kind)
        if not sizes:
            return 0.0
        place = bisect.bisect_left(sizes, rows)
        if place < len(sizes) and sizes[place] == rows:
            return medians[place]
        if place == len(sizes):
            return medians[-1] * (1 + (rows / sizes[-1] - 1) / 2)
        if place == 0:  # fewer rows than were ever measured: at most as long, and hardly in proportion
            return medians[0] * (1 + rows / sizes[0]) / 2
        low, high = sizes[place - 1], sizes[place]
        share = (rows - low) / (high - low)
        return medians[place - 1] * (1 - share) + medians[place] * share

    def seconds_per_row(self, kind: str) -> float:
        """Return the least seconds that a row was seen to take; 0 for a kind of which nothing is known."""
        sizes, medians = self._curve(kind)
        return min((median / size for size, median in zip(sizes, medians, strict=True)), default=0.0)

    def max_rows_to_try(self, kind: str) -> int:
        """Return the rows up to which the estimate is good enough to act on."""
        sizes, _ = self._curve(kind)
        return GROWTH * sizes[-1] if sizes else 1

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the medians as JSON can say them, for `begin_with`."""
        return {
            kind: {str(size): median for size, median in zip(*self._curve(kind), strict=True)} for kind in self._kinds
        }

    def begin_with(self, figures: Any) -> None:
        """Take in the `figures` of an earlier run; what does not look like such is left out."""
        for kind, sizes in figures.items() if isinstance(figures, dict) else ():
            for size, seconds in sizes.items() if isinstance(sizes, dict) else ():
                is_usable = isinstance(seconds, int | float) and 0 < seconds < float("inf")
                if is_usable and str(size).isdecimal() and int(size) > 0:
                    self.note(str(kind), int(size), float(seconds))

    def _curve(self, kind: str) -> tuple[list[int], list[float]]:
        if kind not in self._medians:
            measured = sorted(self._kinds.get(kind, {}).items())
            self._medians[kind] = [size for size, _ in measured], [statistics.median(kept) for _, kept in measured]
        return self._medians[kind]
