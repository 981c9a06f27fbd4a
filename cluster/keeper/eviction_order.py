"""What may go from a node's memory, the least valuable first, without looking at all of it. Pure: the clock is given.

The value is that of `weights.residency`: seconds to get a byte again x popularity. Popularity is the lesser of two
figures, a count that halves with time and a bound by how long nothing happened. Each of the two orders extents in a way
that does not change with time, so each has a heap, and the least of both tops is the least of all. The seconds per byte
change while a node runs, but only with where an extent comes from, so there is a pair of heaps per origin.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from weights.residency import EvictionPlan, Popularity, PrefetchPlan, spare_the_valuable

# Heaps keep what went until they are that much longer than what is left.
MIN_STALE: Final = 64

ReloadRates = Mapping[str, float]  # seconds that a byte takes to get again, by origin


@dataclass(frozen=True, slots=True)
class Idle:
    """Something that nobody leases or pins. `last_used` grows with use and is nobody else's."""

    key: str
    nbytes: int
    origin: str
    popularity: Popularity
    last_used: int


class Newcomer(NamedTuple):
    """Something that would come in; `popularity` as of now."""

    key: str
    nbytes: int
    popularity: float


class _Entry(NamedTuple):
    rank: float
    last_used: int
    serial: int
    key: str


class EvictionOrder:
    """Each operation costs the logarithm of what is here, or less; a plan, that much per victim. Not thread-safe."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._idle: dict[str, Idle] = {}
        self._serial_of: dict[str, int] = {}
        self._serials = itertools.count()
        self._heaps: dict[str, tuple[list[_Entry], list[_Entry]]] = {}
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, key: object) -> bool:
        return key in self._idle

    def put(self, idle: Idle) -> None:
        """In place of what had its key."""
        self.discard(idle.key)
        self._idle[idle.key] = idle
        self._serial_of[idle.key] = serial = next(self._serials)
        self.nbytes += idle.nbytes
        by_count, by_age = self._heaps.setdefault(idle.origin, ([], []))
        heapq.heappush(by_count, _Entry(_count_rank(idle.popularity), idle.last_used, serial, idle.key))
        heapq.heappush(by_age, _Entry(idle.popularity.at_s, idle.last_used, serial, idle.key))

    def discard(self, key: str) -> None:
        """Unknown keys are ignored."""
        if (idle := self._idle.pop(key, None)) is None:
            return
        del self._serial_of[key]
        self.nbytes -= idle.nbytes
        self._num_stale += 1
        if self._num_stale > len(self._idle) + MIN_STALE:
            self._sweep()

    def plan_eviction(
        self, lacking_bytes: int, rates: ReloadRates, now_s: float, spare: Collection[str] = ()
    ) -> EvictionPlan:
        """As `weights.residency.plan_eviction`, of what is here and not in `spare`; `held` stays empty."""
        may_go_bytes = self.nbytes - sum(self._idle[key].nbytes for key in spare if key in self._idle)
        if lacking_bytes > may_go_bytes:
            return EvictionPlan((), lacking_bytes - may_go_bytes)
        popped: list[Idle] = []
        victims: list[Idle] = []
        while lacking_bytes > 0 and (least := self._least(rates, now_s)):
            popped.append(least)
            self.discard(least.key)
            if least.key not in spare:
                victims.append(least)
                lacking_bytes -= least.nbytes
        for idle in popped:
            self.put(idle)
        return EvictionPlan(spare_the_valuable(victims, -lacking_bytes))

    def plan_prefetch(
        self, newcomers: Sequence[Newcomer], free_bytes: int, rates: ReloadRates, usual_rate: float, now_s: float
    ) -> PrefetchPlan:
        """As `weights.residency.plan_prefetch`; `usual_rate` is that of the newcomers."""
        take: list[str] = []
        ascending: list[Idle] = []  # what was looked at; the first `num_victims` go
        num_victims = 0
        for newcomer in newcomers:
            room_bytes, end = free_bytes, num_victims
            while room_bytes < newcomer.nbytes:
                if end == len(ascending):
                    if (least := self._least(rates, now_s)) is None:
                        break
                    ascending.append(least)
                    self.discard(least.key)
                if _value(ascending[end], rates, now_s) >= newcomer.popularity * usual_rate:
                    break
                room_bytes += ascending[end].nbytes
                end += 1
            if room_bytes >= newcomer.nbytes:
                take.append(newcomer.key)
                num_victims = end
                free_bytes = room_bytes - newcomer.nbytes
        for idle in ascending:
            self.put(idle)
        return PrefetchPlan(tuple(take), spare_the_valuable(ascending[:num_victims], free_bytes) if take else ())

    def _least(self, rates: ReloadRates, now_s: float) -> Idle | None:
        tops = [top for heaps in self._heaps.values() for heap in heaps if (top := self._top(heap))]
        return min(tops, key=lambda idle: (_value(idle, rates, now_s), idle.last_used), default=None)

    def _top(self, heap: list[_Entry]) -> Idle | None:
        while heap and self._serial_of.get(heap[0].key) != heap[0].serial:
            heapq.heappop(heap)
        return self._idle[heap[0].key] if heap else None

    def _sweep(self) -> None:
        """Costs as much as was put since the last time."""
        self._heaps.clear()
        self._num_stale = 0
        for idle in list(self._idle.values()):
            by_count, by_age = self._heaps.setdefault(idle.origin, ([], []))
            serial = self._serial_of[idle.key]
            by_count.append(_Entry(_count_rank(idle.popularity), idle.last_used, serial, idle.key))
            by_age.append(_Entry(idle.popularity.at_s, idle.last_used, serial, idle.key))
        for heaps in self._heaps.values():
            for heap in heaps:
                heapq.heapify(heap)


def _count_rank(popularity: Popularity) -> float:
    """Orders by the halving count at any later time: all counts halve at the same pace."""
    if not popularity.count:
        return -math.inf
    return math.log2(popularity.count) + popularity.at_s / popularity.half_life_s


def _value(idle: Idle, rates: ReloadRates, now_s: float) -> float:
    return idle.popularity.value(now_s) * rates[idle.origin]
