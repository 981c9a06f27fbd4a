"""Which encodings stay under a byte budget. Pure: the time is given, and nothing is held but figures.

The value of an entry is what its absence would cost for each byte that it occupies, as in `weights/residency.py`:

    recompute seconds x uses / bytes

The uses are a count that halves with time, as in LRFU (Lee et al., IEEE Trans. Computers 50(12), 2001). All counts
halve alike, so the order of two entries changes only by a use, and then in favour of what is used: an entry's place
is a number that never falls (the logarithm of its value, dated back to time zero). That is why a heap that is put
right only at its top is exact, and why neither a use nor an insertion looks at all entries.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from weights.residency import Popularity

KEEP_SHARE: Final = 0.25  # of the budget, for entries that are to be kept
HALF_LIFE_S: Final = 600.0
MIN_COST_S: Final = 1e-6
# What went keeps its count for a while: a text that has only now become popular could never get in otherwise.
MAX_REMEMBERED: Final = 4096
_SLACK: Final = 64  # places of removed entries that a heap may hold beside as many as it has live ones

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class _Entry:
    nbytes: int
    cost_s: float
    popularity: Popularity
    kept: bool

    @property
    def rank(self) -> float:
        """Grows with every use, and orders entries as their values do at any one time."""
        at = self.popularity.at_s / self.popularity.half_life_s
        return math.log2(self.cost_s / max(self.nbytes, 1)) + math.log2(self.popularity.count) + at


class CostAwareEviction(Generic[Key]):
    """Sizes, costs and uses of entries, and which of them have to go. Not thread-safe.

    What is `keep` goes only when all that is kept exceeds `keep_share` of the budget: then the least valuable of it
    counts as any other from then on.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        keep_share: float = KEEP_SHARE,
        half_life_s: float = HALF_LIFE_S,
        max_remembered: int = MAX_REMEMBERED,
    ) -> None:
        self.max_bytes = max_bytes
        self.max_kept_bytes = int(max_bytes * keep_share)
        self.nbytes = self.kept_bytes = self.num_evicted = 0
        self._fresh = Popularity(half_life_s)
        self._max_remembered = max_remembered
        self._entries: dict[Key, _Entry] = {}
        self._kept: _Ranking[Key] = _Ranking()
        self._others: _Ranking[Key] = _Ranking()
        self._past: OrderedDict[int, Popularity] = OrderedDict()  # by hash: who has another's count does no harm

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def add(self, key: Key, nbytes: int, cost_s: float, now_s: float, *, keep: bool = False) -> list[Key]:
        """What has to go for it; `key` itself when all others are worth more, or it is larger than the budget.

        An entry of that key is replaced.
        """
        if key in self._entries:
            self.remove(key)
        popularity = self._past.pop(hash(key), self._fresh).touch(now_s)
        if nbytes > self.max_bytes:
            return [key]
        self._entries[key] = entry = _Entry(nbytes, max(cost_s, MIN_COST_S), popularity, kept=False)
        self._others.add(key, entry.rank)
        self.nbytes += nbytes
        if keep:
            self._keep(key, entry)
        return self._make_room(key)

    def touch(self, key: Key, now_s: float, *, keep: bool = False) -> None:
        """One use more. Raises KeyError."""
        entry = self._entries[key]
        entry.popularity = entry.popularity.touch(now_s)
        (self._kept if entry.kept else self._others).lift(key, entry.rank)
        if keep and not entry.kept:
            self._keep(key, entry)

    def remove(self, key: Key) -> None:
        """Raises KeyError."""
        entry = self._entries.pop(key)
        (self._kept if entry.kept else self._others).discard(key)
        self.nbytes -= entry.nbytes
        self.kept_bytes -= entry.nbytes if entry.kept else 0
        self._past[hash(key)] = entry.popularity
        if len(self._past) > self._max_remembered:
            self._past.popitem(last=False)

    def _make_room(self, newcomer: Key) -> list[Key]:
        victims = []
        while self.nbytes > self.max_bytes:
            victim = self._others.least()  # there is one: what is kept is less than the budget
            self.remove(victim)
            victims.append(victim)
            self.num_evicted += victim != newcomer
        return victims

    def _keep(self, key: Key, entry: _Entry) -> None:
        if entry.nbytes > self.max_kept_bytes:
            return
        self._move(key, entry, kept=True)
        while self.kept_bytes > self.max_kept_bytes:
            least = self._kept.least()
            self._move(least, self._entries[least], kept=False)

    def _move(self, key: Key, entry: _Entry, *, kept: bool) -> None:
        source, target = (self._others, self._kept) if kept else (self._kept, self._others)
        source.discard(key)
        target.add(key, entry.rank)
        entry.kept = kept
        self.kept_bytes += entry.nbytes if kept else -entry.nbytes


class _Ranking(Generic[Key]):
    """The least of many whose ranks only grow: a heap with one place per key, out of date until it is at the top."""

    def __init__(self) -> None:
        self._ranks: dict[Key, tuple[float, int]] = {}  # the present rank, and which place in the heap is its own
        self._heap: list[tuple[float, int, Key]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, key: Key, rank: float) -> None:
        self._serial += 1
        self._ranks[key] = rank, self._serial
        heapq.heappush(self._heap, (rank, self._serial, key))

    def lift(self, key: Key, rank: float) -> None:
        self._ranks[key] = rank, self._ranks[key][1]

    def discard(self, key: Key) -> None:
        del self._ranks[key]
        if len(self._heap) > 2 * len(self._ranks) + _SLACK:
            self._heap = [(rank, serial, key) for key, (rank, serial) in self._ranks.items()]
            heapq.heapify(self._heap)

    def least(self) -> Key:
        """Of those of equal rank the one that came first. Raises IndexError when there is none."""
        while True:
            rank, serial, key = self._heap[0]
            now_rank, now_serial = self._ranks.get(key, (rank, 0))
            if serial != now_serial:
                heapq.heappop(self._heap)
            elif now_rank > rank:
                heapq.heapreplace(self._heap, (now_rank, serial, key))
            else:
                return key
