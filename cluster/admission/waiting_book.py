"""The waiting requests by model: how many there are, and the first deadline. Pure.

With n requests waiting a change costs O(log n); a look costs the number of models, whatever n is.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

from cluster.admission.records import Waiting

_MOST_STALE: Final = 64  # stale entries of a heap, beside one for each waiting request


class _Earliest:
    """Times of requests, and the earliest. Entries of requests that left are dropped when they come up."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}  # by ticket
        self._heap: list[tuple[float, int]] = []

    def add(self, ticket: int, at_s: float) -> None:
        """Count a request."""
        self._times[ticket] = at_s
        heapq.heappush(self._heap, (at_s, ticket))
        if len(self._heap) > 2 * len(self._times) + _MOST_STALE:
            self._heap = [(each_s, each) for each, each_s in self._times.items()]
            heapq.heapify(self._heap)

    def discard(self, ticket: int) -> None:
        """Count a request no more."""
        self._times.pop(ticket, None)

    def first(self) -> float | None:
        """Return the earliest time; None without one."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


class WaitingBook:
    """The waiting requests of a pool."""

    def __init__(self) -> None:
        self.num_by_model: Counter[str] = Counter()
        self._deadlines: dict[str, _Earliest] = {}  # by model, of those that have one

    def add(self, waiting: Waiting) -> None:
        """Count a waiting request."""
        model, deadline_s = waiting.demand.model, waiting.demand.deadline_s
        self.num_by_model[model] += 1
        if deadline_s < math.inf:
            self._deadlines.setdefault(model, _Earliest()).add(waiting.ticket, deadline_s)

    def remove(self, waiting: Waiting) -> None:
        """Count a request no more."""
        model = waiting.demand.model
        self.num_by_model[model] -= 1
        if not self.num_by_model[model]:
            del self.num_by_model[model]
            self._deadlines.pop(model, None)
        elif model in self._deadlines:
            self._deadlines[model].discard(waiting.ticket)

    def deadlines(self) -> Iterator[tuple[str, float]]:
        """Yield the earliest deadline of each model."""
        for model, line in self._deadlines.items():
            if (first_s := line.first()) is not None:
                yield model, first_s
