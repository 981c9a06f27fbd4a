"""The next forward, and the requests that share it. Pure, over values.

**Order.** Requests go in the order in which they would end if all shared the device evenly (`FairOrder`). Short
requests overtake long ones, no request is overtaken for ever, and none ends later than under deficit round robin,
which gives even shares and so lets equal requests end all together, at the end. (Source: E. Friedman, S. Henderson,
"Fairness and efficiency in web server protocols", SIGMETRICS 2003.) A request that would miss its deadline in this
order, but not as the first one, goes before the others.

**Size.** The first request determines the forward, and as many of those that can share it join as make the mean
latency least. While R rows wait, a batch of r rows of t(r) seconds delays all of them: the best first batch of many
minimizes t(r) / r * (2 R + r). (For t(r) = a + b r that is r = sqrt(2 a R / b).) R includes the rows expected before
the device is idle again. No batch is chosen whose rows take longer than a row alone: one row is always a choice.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from deployments.engines.costs.step_costs import StepCosts

RECENT: Final = (4, 16)  # recent arrivals that predict the coming ones
MAX_SHARING: Final = 1024
MAX_LOAD: Final = 0.75  # the largest load that counts, also when work arrives faster than it is done


class FairOrder:
    """The virtual time of requests that share one device evenly, in seconds of work done for each."""

    def __init__(self) -> None:
        self._time = 0.0
        self._ends: list[float] = []  # of requests unfinished under even shares, ascending

    def arrive(self, work_s: float) -> float:
        """Return the virtual time at which a request of `work_s` seconds, alone, would end."""
        end = self._time + work_s
        if len(self._ends) >= MAX_SHARING:  # overestimated work is never done
            self._time = max(self._time, self._ends.pop(0))
        bisect.insort(self._ends, end)
        return end

    def leave(self, end: float) -> None:
        """Remove an unfinished request."""
        place = bisect.bisect_left(self._ends, end)
        if place < len(self._ends) and self._ends[place] == end:
            del self._ends[place]

    def work(self, work_s: float) -> None:
        """Move on by done work of any request."""
        while self._ends and work_s > 0:
            until_next = (self._ends[0] - self._time) * len(self._ends)
            if until_next > work_s:
                self._time += work_s / len(self._ends)
                return
            work_s -= max(0.0, until_next)
            self._time = max(self._time, self._ends.pop(0))


class ArrivingLoad:
    """The arriving work, as a share of the time. A burst does not predict load: its end is noticed soon."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, float]] = deque(maxlen=max(RECENT))

    def arrive(self, now_s: float, work_s: float) -> None:
        """Note a request of `work_s` seconds."""
        self._arrivals.append((now_s, work_s))

    def share(self, now_s: float) -> float:
        """Return the lower load of the last few and of the last more arrivals; 0 before there were enough."""
        shares = []
        for count in RECENT:
            if len(self._arrivals) < count:
                return 0.0
            latest = list(self._arrivals)[-count:]
            elapsed_s = now_s - latest[0][0]
            shares.append(sum(work_s for _, work_s in latest) / elapsed_s if elapsed_s > 0 else float("inf"))
        return min(shares)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that could have a turn.

    A step takes one forward for each of `keys`; requests share one when they have its key. `kind` is the cost's, and
    `rows` how many of it the step takes. `max_rows` bounds a forward. `end` is the fair order's, `work_s` the work
    and `deadline_s` the time when it should be done, on the clock of `now_s`.
    """

    keys: frozenset[Hashable]
    kind: str
    rows: int
    max_rows: float
    end: float
    work_s: float = 0.0
    deadline_s: float | None = None


def select_batch(candidates: Sequence[Candidate], costs: StepCosts, now_s: float = 0.0, load: float = 0.0) -> list[int]:
    """Return the ascending places of the next batch in `candidates`, which are in the order of arrival."""
    if not candidates:
        return []
    order = _in_order(candidates, now_s)
    first = candidates[order[0]]
    mates = [place for place in order if candidates[place].keys <= first.keys]
    waiting_rows = sum(candidate.rows for candidate in candidates) / (1 - min(load, MAX_LOAD))
    bound = min(first.max_rows, max(first.rows, costs.max_rows_to_try(first.kind)))
    best, least, rows = 1, float("inf"), 0
    for count, place in enumerate(mates, 1):
        rows += candidates[place].rows
        if count > 1 and rows > bound:
            break
        score = costs.seconds(first.kind, rows) / rows * (2 * waiting_rows + rows)
        if score < least:
            best, least = count, score
    return sorted(mates[:best])


def _in_order(candidates: Sequence[Candidate], now_s: float) -> list[int]:
    order = sorted(range(len(candidates)), key=lambda place: (candidates[place].end, place))
    if all(candidate.deadline_s is None for candidate in candidates):
        return order
    urgent, ahead_s = [], 0.0
    for place in order:
        candidate = candidates[place]
        ahead_s += candidate.work_s
        deadline_s = candidate.deadline_s
        if deadline_s is not None and now_s + ahead_s > deadline_s >= now_s + candidate.work_s:
            urgent.append(place)
    urgent.sort(key=lambda place: candidates[place].deadline_s or 0.0)
    return urgent + [place for place in order if place not in set(urgent)]
