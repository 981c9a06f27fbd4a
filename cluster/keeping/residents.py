"""The extents of a node as values: what is here, what is coming, who has a lease, what may go. No lock, no Ray."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cluster.keeper_records import Source
from weights.manifest import ExtentRef
from weights.memory.pages import ByteArray
from weights.residency import EvictionPlan, Popularity, Resident, plan_eviction, plan_prefetch

POPULARITY_HALF_LIFE_S: Final = 600.0
MAX_REMEMBERED: Final = 20_000  # extents whose popularity is known, here or not

# Seconds to get an extent of that source again; None when nobody measured.
ReloadTime = Callable[[ExtentRef, Source], float | None]


@dataclass
class Held:
    """An extent in memory."""

    extent: ExtentRef
    ref: Any
    view: ByteArray
    source: Source
    last_used: int = 0
    hits: int = 0
    holders: Counter[str] = field(default_factory=Counter)


@dataclass
class Coming:
    """An extent that is being loaded. Leases promised to those who wait hold from the first moment."""

    extent: ExtentRef
    done: concurrent.futures.Future[Held] = field(default_factory=concurrent.futures.Future)
    holders: Counter[str] = field(default_factory=Counter)


class Residents:
    """Not thread-safe. `clock` is in seconds and only ages popularity."""

    def __init__(self, clock: Callable[[], float], reload_s: ReloadTime) -> None:
        self.held: dict[str, Held] = {}
        self.coming: dict[str, Coming] = {}
        self.pinned: set[str] = set()
        self.num_evicted = 0
        # Out of the directory, but in memory as long as somebody has a lease.
        self._damaged: list[Held] = []
        self._ended: set[str] = set()
        self._clock = clock
        self._reload_s = reload_s
        self._ticks = itertools.count(1)
        self._popularity: dict[str, Popularity] = {}

    def entries(self) -> Iterator[Held | Coming]:
        yield from self.held.values()
        yield from self.coming.values()
        yield from self._damaged

    def entry(self, id_: str) -> Held | Coming | None:
        return self.held.get(id_) or self.coming.get(id_)

    def missing(self, wanted: Mapping[str, ExtentRef]) -> list[ExtentRef]:
        return [extent for id_, extent in wanted.items() if self.entry(id_) is None]

    def expect(self, extent: ExtentRef) -> None:
        self.coming[extent.id] = Coming(extent)

    def lease(self, id_: str, holder: str, count: int = 1) -> Held | Coming:
        """Of what is here or coming. A holder that has died gets none: nobody would give it back."""
        entry = self.held.get(id_) or self.coming[id_]
        if holder not in self._ended:
            entry.holders[holder] += count
        before = self._popularity.get(id_) or Popularity(POPULARITY_HALF_LIFE_S)
        self._popularity[id_] = before.touch(self._clock())
        self._forget_oldest()
        if isinstance(entry, Held):
            entry.hits += 1
            entry.last_used = next(self._ticks)
        return entry

    def unlease(self, entry: Held | Coming, holder: str) -> None:
        entry.holders -= Counter([holder])
        self._damaged = [held for held in self._damaged if held.holders]

    def release(self, id_: str, holder: str) -> None:
        """One lease; of a damaged copy before its fresh one. Unknown ids and holders are ignored."""
        for entry in (*self._damaged, self.entry(id_)):
            if entry and entry.extent.id == id_ and entry.holders[holder] > 0:
                self.unlease(entry, holder)
                return

    def end_holder(self, holder: str) -> None:
        """It is dead: all its leases go, and none comes later."""
        self._ended.add(holder)
        for entry in self.entries():
            entry.holders.pop(holder, None)
        self._damaged = [held for held in self._damaged if held.holders]

    def arrive(self, id_: str, ref: Any, view: ByteArray, source: Source) -> Coming:
        coming = self.coming.pop(id_)
        held = Held(coming.extent, ref, view, source, next(self._ticks), 0, coming.holders)
        held.hits = held.holders.total()
        self.held[id_] = held
        return coming

    def condemn(self, id_: str) -> None:
        held = self.held.pop(id_, None)
        if held and held.holders:
            self._damaged.append(held)

    def evict(self, ids: Iterable[str]) -> None:
        for id_ in ids:
            del self.held[id_]
            self.num_evicted += 1

    def plan_room(self, extents: Sequence[ExtentRef], budget_bytes: int, spare: Collection[str] = ()) -> EvictionPlan:
        """Room for the extents; `spare` stays, as if it were leased."""
        needed_bytes = sum(extent.nbytes for extent in extents)
        return plan_eviction(self._residents(spare), needed_bytes + self.unmovable_bytes(), budget_bytes)

    def plan_shrink(self, budget_bytes: int) -> tuple[str, ...]:
        """What should go so that no more than the budget is used, as far as it may."""
        fixed_bytes = self.unmovable_bytes() + sum(
            held.extent.nbytes for id_, held in self.held.items() if held.holders or id_ in self.pinned
        )
        return self.plan_room((), max(budget_bytes, fixed_bytes)).evict

    def plan_prefetch(self, extents: Sequence[ExtentRef], budget_bytes: int) -> tuple[list[ExtentRef], tuple[str, ...]]:
        """Which of the extents come in, and what goes for them."""
        # Announced work counts as a use.
        newcomers = [
            Resident(extent.id, extent.nbytes, next(self._ticks), popularity=max(1.0, self._popularity_of(extent.id)))
            for extent in extents
        ]
        plan = plan_prefetch(self._residents(), newcomers, budget_bytes - self.unmovable_bytes())
        return [extent for extent in extents if extent.id in plan.take], plan.evict

    def unmovable_bytes(self) -> int:
        """In memory or on the way there, and in no plan."""
        return sum(entry.extent.nbytes for entry in self.coming.values()) + sum(
            held.extent.nbytes for held in self._damaged
        )

    def bytes_by_holder(self) -> Counter[str]:
        """The bytes that each has a lease on, the most first."""
        sizes: Counter[str] = Counter()
        for entry in self.entries():
            for holder in entry.holders:
                sizes[holder] += entry.extent.nbytes
        return Counter(dict(sizes.most_common()))

    def _residents(self, spare: Collection[str] = ()) -> list[Resident]:
        return [
            Resident(
                id_,
                held.extent.nbytes,
                held.last_used,
                held.holders.total() + (id_ in spare),
                self._reload_s(held.extent, held.source),
                self._popularity_of(id_),
                id_ in self.pinned,
            )
            for id_, held in self.held.items()
        ]

    def _popularity_of(self, id_: str) -> float:
        found = self._popularity.get(id_)
        return found.value(self._clock()) if found else 0.0

    def _forget_oldest(self) -> None:
        if len(self._popularity) > MAX_REMEMBERED:
            recent = sorted(self._popularity.items(), key=lambda found: found[1].at_s)[MAX_REMEMBERED // 2 :]
            self._popularity = dict(recent)
