"""The extents of a node as values: what is here, what is coming, who has a lease, what may go. No lock, no Ray.

What is asked often is counted as it changes: a lease, a release or an eviction costs the same however much is here.
"""

from __future__ import annotations

import concurrent.futures
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cluster.keeper.eviction_order import EvictionOrder, Idle, Newcomer
from cluster.keeper.records import Source
from weights.manifest import ExtentRef
from weights.memory.pages import ByteArray
from weights.residency import EvictionPlan, Popularity

POPULARITY_HALF_LIFE_S: Final = 600.0
MAX_REMEMBERED: Final = 20_000  # extents that are not here and whose popularity is still known
MAX_USES: Final = 32  # of one extent that one report counts: more are one burst
MAX_ENDED: Final = 10_000  # holders that are known to be dead
NEVER_USED: Final = Popularity(POPULARITY_HALF_LIFE_S)

# Seconds to get a byte of that source again; None when nobody measured.
ReloadRate = Callable[[Source], float | None]


@dataclass(eq=False)
class Held:
    """An extent in memory."""

    extent: ExtentRef
    ref: Any
    view: ByteArray
    source: Source
    last_used: int = 0
    hits: int = 0
    holders: Counter[str] = field(default_factory=Counter)
    popularity: Popularity = NEVER_USED
    declined: set[str] = field(default_factory=set)  # holders that were asked for it and use it


@dataclass(eq=False)
class Coming:
    """An extent that is being loaded. Leases promised to those who wait hold from the first moment."""

    extent: ExtentRef
    popularity: Popularity
    done: concurrent.futures.Future[Held] = field(default_factory=concurrent.futures.Future)
    holders: Counter[str] = field(default_factory=Counter)
    arrived: Held | None = None


class Residents:
    """Not thread-safe. `clock` is in seconds and only ages popularity."""

    def __init__(self, clock: Callable[[], float], reload_rate: ReloadRate) -> None:
        self.held: dict[str, Held] = {}
        self.coming: dict[str, Coming] = {}
        self.pinned: frozenset[str] = frozenset()
        self.num_evicted = 0
        self.callable: set[str] = set()  # holders that give back, when asked, what they do not use
        self.resident_bytes = self.leased_bytes = self.pinned_bytes = 0
        self._unmovable_bytes = 0
        # Out of the directory, but in memory as long as somebody has a lease.
        self._apart: dict[str, list[Held]] = {}
        self._idle = EvictionOrder()
        self._kept = EvictionOrder()  # leased, but only by holders that have not declined to give it back
        self._declined: set[Held] = set()
        self._leases: dict[str, dict[Held | Coming, None]] = {}
        self._leased_by: Counter[str] = Counter()
        self._bytes_from: Counter[Source] = Counter()
        self._lives: dict[str, int] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._clock = clock
        self._reload_rate = reload_rate
        self._ticks = itertools.count(1)
        self._past: OrderedDict[str, Popularity] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        """All that is in memory or on the way there."""
        return self.resident_bytes + self._unmovable_bytes

    def entry(self, id_: str) -> Held | Coming | None:
        return self.held.get(id_) or self.coming.get(id_)

    @property
    def callable_bytes(self) -> int:
        """Bytes of extents that every holder may give back when asked."""
        return self._kept.nbytes

    def missing(self, wanted: Mapping[str, ExtentRef]) -> list[ExtentRef]:
        return [extent for id_, extent in wanted.items() if self.entry(id_) is None]

    # what comes and goes

    def expect(self, extent: ExtentRef) -> None:
        self.coming[extent.id] = Coming(extent, self._past.pop(extent.id, NEVER_USED))
        self._unmovable_bytes += extent.nbytes

    def arrive(self, id_: str, ref: Any, view: ByteArray, source: Source) -> Coming:
        coming = self._no_longer_coming(id_)
        held = Held(coming.extent, ref, view, source, next(self._ticks), 0, coming.holders, coming.popularity)
        held.hits = held.holders.total()
        coming.arrived = held
        for holder in held.holders:
            del self._leases[holder][coming]
            self._leases[holder][held] = None
        self._place(held)
        return coming

    def fail(self, id_: str) -> Coming:
        """Whoever has a lease on it has to give that back."""
        coming = self._no_longer_coming(id_)
        self._remember(id_, coming.popularity)
        return coming

    def adopt(self, held: Held) -> None:
        """One that is here in no other form."""
        held.popularity = self._past.pop(held.extent.id, NEVER_USED)
        self._place(held)

    def set_apart(self, held: Held) -> None:
        """A copy that nobody new gets: it counts as long as it is leased, so it has to be leased at once."""
        self._apart.setdefault(held.extent.id, []).append(held)
        self._unmovable_bytes += held.extent.nbytes

    def condemn(self, id_: str) -> None:
        held = self._take_out(id_)
        if held.holders:
            self.set_apart(held)

    def evict(self, ids: Iterable[str]) -> None:
        for id_ in ids:
            self._take_out(id_)
            self.num_evicted += 1

    def pin(self, ids: Iterable[str]) -> None:
        """These and no others, whether they are here or not."""
        before, self.pinned = self.pinned, frozenset(ids)
        for id_ in before ^ self.pinned:
            if (held := self.held.get(id_)) is not None:
                self.pinned_bytes += held.extent.nbytes if id_ in self.pinned else -held.extent.nbytes
                self._sort(held)

    # leases

    def life(self, holder: str) -> int:
        """The number that its leases have; 0 for one that is dead. After it was dead it has another one."""
        if holder in self._ended:
            return 0
        if holder not in self._lives:
            self._lives[holder] = next(self._ticks)
        return self._lives[holder]

    def is_of(self, life: int, holder: str) -> bool:
        """Whether leases of that life are those that `holder` has now."""
        return self._lives.get(holder) == life

    def revive(self, holder: str) -> int:
        """It was heard of. Returns its life."""
        self._ended.pop(holder, None)
        return self.life(holder)

    def lease(self, entry: Held | Coming, holder: str, count: int = 1) -> None:
        """A holder that has died gets none: nobody would give it back."""
        if self.life(holder):
            if not entry.holders[holder]:
                self._leases.setdefault(holder, {})[entry] = None
                self._leased_by[holder] += entry.extent.nbytes
            if isinstance(entry, Held) and not entry.holders and self._is_placed(entry):
                self.leased_bytes += entry.extent.nbytes
            entry.holders[holder] += count
        self._use(entry)

    def note_uses(self, uses: Mapping[str, int]) -> None:
        """Count uses, by extent id, that took no new lease. Unknown ids are ignored."""
        for id_, count in uses.items():
            if held := self.held.get(id_):
                self._use(held, min(count, MAX_USES))

    def _use(self, entry: Held | Coming, count: int = 1) -> None:
        now_s = self._clock()
        for _ in range(count):
            entry.popularity = entry.popularity.touch(now_s)
        if isinstance(entry, Held):
            entry.hits += count
            entry.last_used = next(self._ticks)
            self._sort(entry)

    def unlease(self, entry: Held | Coming, holder: str, count: int = 1) -> None:
        """So many leases, or as many as there are."""
        entry = (isinstance(entry, Coming) and entry.arrived) or entry
        if entry.holders[holder] > count:
            entry.holders[holder] -= count
            return
        if not entry.holders.pop(holder, 0):
            return
        self._leased_by[holder] -= entry.extent.nbytes
        del self._leases[holder][entry]
        if not self._leases[holder]:
            del self._leases[holder], self._leased_by[holder]
        if not isinstance(entry, Held):
            return
        entry.declined.discard(holder)
        if not entry.declined:
            self._declined.discard(entry)
        if self._is_placed(entry):
            self.leased_bytes -= 0 if entry.holders else entry.extent.nbytes
            self._sort(entry)
        elif not entry.holders and entry in self._apart.get(entry.extent.id, ()):
            self._free_apart(entry)

    def release(self, id_: str, holder: str) -> None:
        """One lease; of a copy that is set apart before the one that is here. Unknown ones are ignored."""
        for entry in (*self._apart.get(id_, ()), self.entry(id_)):
            if entry and entry.holders[holder] > 0:
                self.unlease(entry, holder)
                return

    def end_holder(self, holder: str) -> None:
        """It is dead: all its leases go, and none comes until it is heard of again."""
        self.callable.discard(holder)
        self._lives.pop(holder, None)
        self._ended[holder] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        for entry in list(self._leases.get(holder, ())):
            self.unlease(entry, holder, entry.holders[holder])

    # what may be called back

    def make_callable(self, holder: str) -> None:
        """From now on the holder answers recalls: its leases may be called back."""
        if holder not in self.callable:
            self.callable.add(holder)
            for entry in self._leases.get(holder, ()):
                if isinstance(entry, Held):
                    self._sort(entry)

    def decline(self, id_: str, holder: str) -> None:
        """The holder uses it just now: its lease counts as firm until it ends."""
        held = self.held.get(id_)
        if held and held.holders[holder]:
            held.declined.add(holder)
            self._declined.add(held)
            self._sort(held)

    def declined(self) -> Iterator[tuple[str, str]]:
        """Extent id and holder, of what was asked for and was in use."""
        for held in self._declined:
            if self._is_placed(held):
                yield from ((held.extent.id, holder) for holder in held.declined)

    def forget_declined(self) -> None:
        """Somebody else asks: perhaps it is not used any more."""
        declined, self._declined = self._declined, set()
        for held in declined:
            held.declined.clear()
            self._sort(held)

    def plan_recall(
        self,
        extents: Sequence[ExtentRef],
        budget_bytes: int,
        spare: Collection[str] = (),
        *,
        as_far_as_possible: bool = False,
    ) -> tuple[str, ...]:
        """Return what has to be called back for room for the extents, beside what may go anyway; `spare` stays.

        Empty when that is not enough, unless `as_far_as_possible`.
        """
        idle_bytes = self._idle.nbytes - sum(self.held[id_].extent.nbytes for id_ in spare if id_ in self._idle)
        lacking_bytes = self.used_bytes + sum(extent.nbytes for extent in extents) - idle_bytes - budget_bytes
        if as_far_as_possible:
            lacking_bytes = min(lacking_bytes, self._kept.nbytes)
        if lacking_bytes <= 0:
            return ()
        return self._kept.plan_eviction(lacking_bytes, self._rates(), self._clock(), spare).evict

    def may_be_called(self, id_: str) -> bool:
        """Return whether every holder of it gives it back when asked, as far as is known."""
        return id_ in self._kept

    def has_leases(self, holder: str) -> bool:
        return holder in self._leases

    def bytes_by_holder(self) -> dict[str, int]:
        """The bytes that each has a lease on, the most first."""
        return dict(self._leased_by.most_common())

    # room

    def plan_room(self, extents: Sequence[ExtentRef], budget_bytes: int, spare: Collection[str] = ()) -> EvictionPlan:
        """Room for the extents; `spare` stays, as if it were leased."""
        lacking_bytes = self.used_bytes + sum(extent.nbytes for extent in extents) - budget_bytes
        if lacking_bytes <= 0:
            return EvictionPlan(())
        return self._idle.plan_eviction(lacking_bytes, self._rates(), self._clock(), spare)

    def missing_bytes(self, wanted: Mapping[str, ExtentRef], budget_bytes: int) -> int:
        """What cannot be made free of the room for that of `wanted` which is not here."""
        needed_bytes = sum(extent.nbytes for extent in self.missing(wanted))
        spare_bytes = sum(extent.nbytes for id_, extent in wanted.items() if id_ in self._idle)
        return max(0, self.used_bytes + needed_bytes - (self._idle.nbytes - spare_bytes) - budget_bytes)

    def plan_shrink(self, budget_bytes: int) -> tuple[str, ...]:
        """What should go so that no more than the budget is used, as far as it may."""
        return self.plan_room((), max(budget_bytes, self.used_bytes - self._idle.nbytes)).evict

    def plan_prefetch(self, extents: Sequence[ExtentRef], budget_bytes: int) -> tuple[list[ExtentRef], tuple[str, ...]]:
        """Which of the extents come in, and what goes for them."""
        now_s = self._clock()
        # Announced work counts as a use.
        newcomers = [
            Newcomer(extent.id, extent.nbytes, max(1.0, self._past.get(extent.id, NEVER_USED).value(now_s)))
            for extent in extents
        ]
        plan = self._idle.plan_prefetch(
            newcomers, budget_bytes - self.used_bytes, self._rates(), self._usual_rate(), now_s
        )
        take = set(plan.take)
        return [extent for extent in extents if extent.id in take], plan.evict

    def _rates(self) -> dict[str, float]:
        usual = self._usual_rate()
        known = {source: self._reload_rate(source) for source in self._bytes_from}
        return {source: usual if rate is None else rate for source, rate in known.items()}

    def _usual_rate(self) -> float:
        """Of the bytes that are here; 1 where nobody measured."""
        rates = {source: self._reload_rate(source) for source in self._bytes_from}
        known = [(rate, self._bytes_from[source]) for source, rate in rates.items() if rate is not None]
        known_bytes = sum(nbytes for _, nbytes in known)
        return sum(rate * nbytes for rate, nbytes in known) / known_bytes if known_bytes else 1.0

    # the counts

    def _is_placed(self, held: Held) -> bool:
        return self.held.get(held.extent.id) is held

    def _place(self, held: Held) -> None:
        id_, nbytes = held.extent.id, held.extent.nbytes
        self.held[id_] = held
        self.resident_bytes += nbytes
        self.leased_bytes += nbytes if held.holders else 0
        self.pinned_bytes += nbytes if id_ in self.pinned else 0
        self._bytes_from[held.source] += nbytes
        self._sort(held)

    def _take_out(self, id_: str) -> Held:
        held = self.held.pop(id_)
        nbytes = held.extent.nbytes
        self.resident_bytes -= nbytes
        self.leased_bytes -= nbytes if held.holders else 0
        self.pinned_bytes -= nbytes if id_ in self.pinned else 0
        self._bytes_from[held.source] -= nbytes
        self._idle.discard(id_)
        self._kept.discard(id_)
        self._declined.discard(held)
        self._remember(id_, held.popularity)
        return held

    def _sort(self, held: Held) -> None:
        """Into what may go, or may be called back, or out of both."""
        id_ = held.extent.id
        if not self._is_placed(held):
            return
        self._idle.discard(id_)
        self._kept.discard(id_)
        if id_ in self.pinned or held.declined or not self.callable.issuperset(held.holders):
            return
        order = self._kept if held.holders else self._idle
        order.put(Idle(id_, held.extent.nbytes, held.source, held.popularity, held.last_used))

    def _no_longer_coming(self, id_: str) -> Coming:
        coming = self.coming.pop(id_)
        self._unmovable_bytes -= coming.extent.nbytes
        return coming

    def _free_apart(self, held: Held) -> None:
        copies = self._apart[held.extent.id]
        copies.remove(held)
        if not copies:
            del self._apart[held.extent.id]
        self._unmovable_bytes -= held.extent.nbytes

    def _remember(self, id_: str, popularity: Popularity) -> None:
        self._past[id_] = popularity
        if len(self._past) > MAX_REMEMBERED:
            self._past.popitem(last=False)
