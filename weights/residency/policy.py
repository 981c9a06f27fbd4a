"""The value of what is in memory, and the order in which it goes. Pure: the clock is the caller's.

The value of an entry is what its absence would cost for each byte that it occupies:

    reload seconds x popularity / bytes

as in GreedyDual-Size (Cao and Irani, USITS 1997) and GreedyDual-Size-Frequency (Cherkasova, HPL-98-69). Both age by
an inflation term, a state of the cache: what comes in starts at the value of the last victim. Here the popularity
ages itself, so that an entry that comes back keeps its past. It is a use count that halves with time, as in LRFU (Lee
et al., IEEE Trans. Computers 50(12), 2001), and is bounded by how long nothing happened, as in hyperbolic caching
(Blankstein et al., USENIX ATC 2017): with the count alone, what was very popular once would stay for many half-lives.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

HALF_LIFE_S: Final = 600.0
# So many usual gaps without a use are an accident; after more, the gap is what is usual now.
USUAL_GAPS: Final = 2.0
MIN_RELOAD_S: Final = 1e-6
_CLASSES_PER_OCTAVE: Final = 4
_SLACK: Final = 64  # outdated places that a heap may hold beside as many as it has live ones


@dataclass(frozen=True, slots=True)
class Popularity:
    """Uses within about a half-life, as of `at_s` on the caller's clock (any unit that all of its values share)."""

    half_life_s: float = HALF_LIFE_S
    count: float = 0.0
    at_s: float = 0.0

    def touch(self, now_s: float) -> Popularity:
        """Return the popularity with one use more."""
        return Popularity(self.half_life_s, self._decayed(now_s) + 1.0, max(now_s, self.at_s))

    def value(self, now_s: float) -> float:
        """Return the uses as of now. Never grows without a use."""
        idle_s = now_s - self.at_s
        count = self._decayed(now_s)
        # A thing used every g seconds has a count near half_life / (g ln 2).
        return min(count, USUAL_GAPS * self.half_life_s / (math.log(2) * idle_s)) if idle_s > 0 else count

    def _decayed(self, now_s: float) -> float:
        return self.count * math.exp2(-max(0.0, now_s - self.at_s) / self.half_life_s)


NEVER_USED: Final = Popularity()


def rate_class(reload_s: float, nbytes: int) -> int:
    """Return the class of what takes `reload_s` seconds to get `nbytes` again, a quarter of an octave wide.

    Entries of one class keep their order at any time, which is what lets `EvictionOrder` be a few heaps.
    """
    return round(math.log2(max(reload_s, MIN_RELOAD_S) / max(nbytes, 1)) * _CLASSES_PER_OCTAVE)


def class_rate(origin: Hashable) -> float | None:
    """Return the seconds per byte of a `rate_class`; None for None, an entry whose cost nobody knows."""
    return 2.0 ** (origin / _CLASSES_PER_OCTAVE) if isinstance(origin, int) else None


def origin_rates(
    bytes_of_origin: Mapping[Hashable, int], rate_of: Callable[[Hashable], float | None] = class_rate
) -> dict[Hashable, float]:
    """Return seconds per byte by origin; None is the mean over the given bytes, and 1 where nobody measured.

    `rate_of` returns the seconds that a byte of an origin takes to get again; None: as long as the others on average.
    """
    known = {origin: rate for origin in bytes_of_origin if (rate := rate_of(origin)) is not None}
    known_bytes = sum(bytes_of_origin[origin] for origin in known)
    weighted = sum(rate * bytes_of_origin[origin] for origin, rate in known.items())
    usual = weighted / known_bytes if known_bytes else 1.0
    return {None: usual} | dict.fromkeys(bytes_of_origin, usual) | known


@dataclass(eq=False, slots=True)
class EvictionCandidate:
    """Something in memory that may have to go.

    `origin` says what it costs to get it back: a `rate_class`, or whatever the tier's own rate function knows.
    `last_used` grows with every use and is nobody else's.
    """

    key: str
    nbytes: int
    origin: Hashable = None
    popularity: Popularity = NEVER_USED
    last_used: int = 0


CandidateT = TypeVar("CandidateT", bound=EvictionCandidate)


class EvictionOrder(Generic[CandidateT]):
    """The candidates that may go, the least valuable first, without looking at all of them. Not thread-safe.

    Popularity is the lesser of two figures, a count that halves with time and a bound by how long nothing happened.
    Each of the two orders the candidates of one origin in a way that does not change with time, so each has a heap,
    and the least of all tops is the least of all. Ties go by least recent use.

    An operation costs the logarithm of what is here; taking the least, also the number of origins.
    """

    def __init__(self) -> None:
        self._members: dict[CandidateT, None] = {}
        self._heaps: dict[Hashable, tuple[_Heap[CandidateT], _Heap[CandidateT]]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def add(self, candidate: CandidateT) -> None:
        """Make it evictable. `origin` must not change from now on, and uses only add to popularity."""
        self._members[candidate] = None
        heaps = self._heaps.get(candidate.origin)
        if heaps is None:
            heaps = self._heaps[candidate.origin] = (_ByCount(self._members), _ByAge(self._members))
        for heap in heaps:
            if candidate not in heap.placed:
                heap.add(candidate)

    def discard(self, candidate: CandidateT) -> None:
        """Make it unevictable. What is not here is ignored. Its heap places stay until they come to the top."""
        self._members.pop(candidate, None)

    @contextlib.contextmanager
    def ascending(self, rates: Mapping[Hashable, float], now_s: float) -> Iterator[Iterator[CandidateT]]:
        """Iterate over the candidates, the least valuable first. Meanwhile nothing may be added or discarded."""
        taken: list[CandidateT] = []
        try:
            yield self._take_ascending(rates, now_s, taken)
        finally:
            for candidate in taken:
                self.add(candidate)

    def _take_ascending(
        self, rates: Mapping[Hashable, float], now_s: float, taken: list[CandidateT]
    ) -> Iterator[CandidateT]:
        while tops := [top for pair in self._heaps.values() for heap in pair if (top := heap.least()) is not None]:
            least = min(tops, key=lambda top: (value_of(top, rates, now_s), top.last_used))
            self.discard(least)
            taken.append(least)
            yield least


def value_of(candidate: EvictionCandidate, rates: Mapping[Hashable, float], now_s: float) -> float:
    """Return the seconds that a byte of it saves, weighted by its popularity."""
    # An origin of no bytes, whose only candidates are empty, has no rate.
    return candidate.popularity.value(now_s) * rates.get(candidate.origin, rates[None])


class _Heap(Generic[CandidateT]):
    """Candidates by a rank that only grows; each has one place, which is put right when it comes to the top."""

    def __init__(self, members: Mapping[CandidateT, None]) -> None:
        self._members = members
        self._places: list[tuple[float, int, CandidateT]] = []
        self.placed: set[CandidateT] = set()

    def rank(self, candidate: CandidateT) -> float:
        """Return the place of a candidate in the order."""
        raise NotImplementedError

    def add(self, candidate: CandidateT) -> None:
        if len(self._places) > 2 * len(self._members) + _SLACK:
            self._sweep()
        self.placed.add(candidate)
        heapq.heappush(self._places, (self.rank(candidate), candidate.last_used, candidate))

    def least(self) -> CandidateT | None:
        while self._places:
            _, last_used, candidate = self._places[0]
            if candidate not in self._members:
                heapq.heappop(self._places)
                self.placed.discard(candidate)
            elif last_used != candidate.last_used:
                heapq.heapreplace(self._places, (self.rank(candidate), candidate.last_used, candidate))
            else:
                return candidate
        return None

    def _sweep(self) -> None:
        """Drop the entries that may not go. The cost is proportional to the additions since the last sweep."""
        self.placed = {candidate for candidate in self.placed if candidate in self._members}
        self._places = [(self.rank(candidate), candidate.last_used, candidate) for candidate in self.placed]
        heapq.heapify(self._places)


class _ByCount(_Heap[CandidateT]):
    """Ordered by the halving count at any later time: all counts halve at the same pace."""

    def rank(self, candidate: CandidateT) -> float:
        popularity = candidate.popularity
        if not popularity.count:
            return -math.inf
        return math.log2(popularity.count) + popularity.at_s / popularity.half_life_s


class _ByAge(_Heap[CandidateT]):
    """Ordered by the time of the last use."""

    def rank(self, candidate: CandidateT) -> float:
        return candidate.popularity.at_s
