"""The table of one memory tier: what is here or coming, who leases it, what is pinned, how popular it is.

A tier is an adapter: it moves the bytes and keeps what it made of them in `Entry.thing`. What is asked often is counted
as it changes, so that a lease, a release or an eviction costs the same however much is here. Not thread-safe;
callbacks must be quick and must not call the table.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from weights.residency.policy import NEVER_USED, EvictionCandidate, EvictionOrder, Popularity, class_rate
from weights.residency.recent import Recent
from weights.residency.sizes import DistinctBytes, Size, bytes_of, unshared

MAX_REMEMBERED: Final = 50_000  # entries that are not here and whose popularity is still known

Thing = TypeVar("Thing")


@dataclass(eq=False, slots=True)
class Entry(EvictionCandidate, Generic[Thing]):
    """An entry of the table, by identity: after a failure or an invalidation another one may have its key.

    `thing` is the tier's, set when the entry arrives or before, and None once it is gone. `held` counts leases by
    holder, `recallable` those that the table may ask back; `recall_requested` names the holders that were asked and
    have it still. `is_current`: whoever asks for the key gets this one. `is_expected`: prefetched, and not used since.
    `is_movable`: may be evicted, or asked back and then evicted.
    """

    size: Size = 0
    thing: Thing | None = None
    held: Counter[str] = field(default_factory=Counter)
    recallable: Counter[str] = field(default_factory=Counter)
    recall_requested: set[str] = field(default_factory=set)
    num_uses: int = 0
    is_here: bool = False
    is_current: bool = True
    is_gone: bool = False
    is_expected: bool = False
    is_movable: bool = False

    @property
    def is_leased(self) -> bool:
        """Return whether anybody has a lease on it, held or recallable."""
        return bool(self.held or self.recallable)


class EntryTable(Generic[Thing]):
    """Entries under a byte budget. What has a held lease, is pinned or is coming is never evicted.

    `on_gone` gets entries that leave memory, before their things are dropped; not of those that failed to come.
    `on_recall(holder, keys)` asks a holder for its recallable leases: it answers with `release` or
    `make_held`, and one that does not answer in time is ended with `end_holder`. `rate_of` is that of `EvictionOrder`.

    `room_plan` plans over `used`, `order` and `movable_bytes`; nobody else changes them. An entry counts whole in
    `here_bytes`, `leased_bytes` and `pinned_bytes`, which are of what is here and current.
    """

    def __init__(
        self,
        budget_bytes: int,
        clock: Callable[[], float],
        *,
        on_gone: Callable[[Sequence[Entry[Thing]]], None] = lambda entries: None,
        on_recall: Callable[[str, Sequence[str]], None] = lambda holder, keys: None,
        rate_of: Callable[[Hashable], float | None] = class_rate,
        never_used: Popularity = NEVER_USED,
        elsewhere: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`elsewhere` are the budgets of other places, of which entries may have parts."""
        self.budget_bytes = budget_bytes
        self.elsewhere = elsewhere
        self.entries: dict[str, Entry[Thing]] = {}  # the current ones
        self.coming: set[Entry[Thing]] = set()
        self.used = DistinctBytes()
        self.order: EvictionOrder[Entry[Thing]] = EvictionOrder(rate_of)
        self.num_evicted = 0
        self.here_bytes = 0
        self.leased_bytes = 0
        self.pinned_bytes = 0
        self.movable_bytes = 0
        self.now_s = clock
        self._on_gone = on_gone
        self._on_recall = on_recall
        self._never_used = never_used
        self._pinned: set[str] = set()
        self._detached: dict[str, list[Entry[Thing]]] = {}  # in memory until their leases end
        self._bytes_of_origin: Counter[Hashable] = Counter()
        self._leases: dict[str, dict[Entry[Thing], None]] = {}
        self._leased_by: Counter[str] = Counter()
        self._past: Recent[str, Popularity] = Recent(MAX_REMEMBERED)
        self._ticks = itertools.count(1)

    @property
    def used_bytes(self) -> int:
        """Bytes of all that is in memory or on the way there; shared parts count once."""
        return self.used.total

    @property
    def pinned(self) -> Collection[str]:
        """Keys that are pinned, here or not."""
        return self._pinned

    @property
    def detached(self) -> list[Entry[Thing]]:
        """Entries that nobody new gets: leased still, or coming still."""
        return [entry for entries in self._detached.values() for entry in entries]

    def rates(self) -> dict[Hashable, float]:
        """Return seconds per byte by origin, as `EvictionOrder.rates` of what is here."""
        return self.order.rates(self._bytes_of_origin)

    def popularity_of(self, key: str) -> Popularity:
        """Return the popularity of one that is not here, as far as it is remembered."""
        return self._past.get(key, self._never_used)

    # entries

    def expect(self, key: str, size: Size, *, prefetched: bool = False) -> Entry[Thing]:
        """Enter one that is coming, for which there should be room; whoever calls loads it: `arrive` or `fail`.

        A prefetch counts as the use that it announces.
        """
        entry = self._enter(key, size)
        if prefetched:
            self.announce(entry)
        return entry

    def arrive(self, entry: Entry[Thing], thing: Thing, origin: Hashable = None) -> None:
        """Note that it is here; `origin` says what it costs to get it again. An invalidated one may go at once."""
        entry.thing, entry.origin, entry.is_here = thing, origin, True
        self.coming.discard(entry)
        if entry.is_current:
            self._count_here(entry, 1)
            self._sort(entry)
        elif not entry.is_leased:
            self._remove(entry)

    def fail(self, entry: Entry[Thing]) -> None:
        """Note that it does not come. Leases on it end."""
        for holder in {**entry.held, **entry.recallable}:
            self._end_leases(entry, holder)
        self._take_out(entry)
        entry.thing = None

    def adopt(self, key: str, size: Size, thing: Thing, origin: Hashable = None) -> Entry[Thing]:
        """Enter one that is here already, over the budget if need be: the bytes are in memory whatever is decided."""
        entry = self._enter(key, size)
        self.arrive(entry, thing, origin)
        return entry

    def add_detached(self, key: str, size: Size, thing: Thing, holder: str, count: int = 1) -> Entry[Thing]:
        """Enter a copy that `holder` has and nobody else gets; its bytes count until its leases end."""
        entry: Entry[Thing] = Entry(key, bytes_of(size), size=bytes_of(size), thing=thing, is_here=True)
        entry.is_current = False
        self.used.add(entry.size)
        self._detached.setdefault(key, []).append(entry)
        self.lease(entry, holder, count)
        return entry

    def invalidate(self, entry: Entry[Thing]) -> None:
        """Give it to nobody new. It goes with its last lease; one that is coming, once it has come."""
        if not entry.is_current:
            return
        if entry.is_here:
            self._count_here(entry, -1)
        del self.entries[entry.key]
        entry.is_current = False
        self._sort(entry)
        self._past.note(entry.key, entry.popularity)
        # Its parts are its own now, beside the fresh ones that others share.
        self.used.remove(entry.size)
        entry.size = unshared(entry.size, f"{entry.key} before {next(self._ticks)}")
        self.used.add(entry.size)
        self._detached.setdefault(entry.key, []).append(entry)
        if entry.is_here and not entry.is_leased:
            self._remove(entry)

    def evict(self, entries: Sequence[Entry[Thing]]) -> None:
        """Let go of entries that nobody leases, whatever is pinned: a plan's, or what an operator drops."""
        if not entries:
            return
        for entry in entries:
            assert entry.is_here
            assert not entry.is_leased
            self._take_out(entry)
            self.num_evicted += 1
        self._let_go(entries)

    def pin(self, keys: Iterable[str]) -> None:
        """Never evict these, nor when they come only later."""
        for key in set(keys) - self._pinned:
            self._pinned.add(key)
            self._pin_changed(key, 1)

    def unpin(self, keys: Iterable[str]) -> None:
        """Let these be evicted again."""
        for key in self._pinned.intersection(keys):
            self._pinned.discard(key)
            self._pin_changed(key, -1)

    # leases and uses

    def lease(self, entry: Entry[Thing], holder: str, count: int = 1) -> None:
        """Count a use, and add so many held leases."""
        if holder not in entry.held:
            if holder not in entry.recallable:
                self._leases.setdefault(holder, {})[entry] = None
                self._leased_by[holder] += entry.nbytes
            if entry.is_here and entry.is_current and not entry.is_leased:
                self.leased_bytes += entry.nbytes
        entry.held[holder] = entry.held.get(holder, 0) + count
        self._sort(entry)
        self.use(entry)

    def use(self, entry: Entry[Thing]) -> None:
        """Count a use, of a copy elsewhere too. The use that a prefetch announced counted then."""
        if not entry.is_expected:
            entry.popularity = entry.popularity.touch(self.now_s())
        entry.is_expected = False
        entry.num_uses += 1
        entry.last_used = next(self._ticks)

    def announce(self, entry: Entry[Thing]) -> None:
        """Count the use that is to come, once."""
        if not entry.is_expected:
            self.use(entry)
            entry.num_uses -= 1
            entry.is_expected = True

    def release(self, key: str, holder: str, count: int = 1) -> None:
        """Give back leases on a key, of a detached copy before the current one. Ignores unknown keys and holders."""
        for entry in self._detached.get(key, ()):
            if holder in entry.held or holder in entry.recallable:
                self.unlease(entry, holder, count)
                return
        if (current := self.entries.get(key)) is not None:
            self.unlease(current, holder, count)

    def unlease(self, entry: Entry[Thing], holder: str, count: int = 1) -> None:
        """Give back so many leases, or as many as there are, the held ones first."""
        left = _subtract(entry.held, holder, count)
        if left and entry.recallable:
            _subtract(entry.recallable, holder, left)
        if holder not in entry.held:
            self._lease_ended(entry, holder)

    def mark_recallable(self, entry: Entry[Thing], holder: str) -> None:
        """Let the table ask for one of the holder's held leases: it keeps the entry and does not need it."""
        if not _subtract(entry.held, holder, 1):
            if holder not in entry.recallable:
                entry.recall_requested.discard(holder)  # it used it when it was asked: it may be asked again
            entry.recallable[holder] = entry.recallable.get(holder, 0) + 1
            self._sort(entry)

    def make_held(self, entry: Entry[Thing], holder: str) -> None:
        """Let the holder keep it because it needs it: one answer to a recall, which is not asked for twice."""
        if holder in entry.recallable:
            entry.held[holder] = entry.held.get(holder, 0) + entry.recallable.pop(holder)
            self._sort(entry)

    def recall(self, entries: Iterable[Entry[Thing]]) -> None:
        """Ask for the recallable leases on these, each holder once until it answers."""
        asked: dict[str, list[str]] = {}
        for entry in entries:
            for holder in entry.recallable.keys() - entry.recall_requested:
                entry.recall_requested.add(holder)
                asked.setdefault(holder, []).append(entry.key)
        for holder, keys in asked.items():
            self._on_recall(holder, keys)

    def end_holder(self, holder: str) -> None:
        """End all leases of a holder: it is done, or it died."""
        for entry in list(self._leases.get(holder, ())):
            self._end_leases(entry, holder)

    def has_held_leases(self, holder: str) -> bool:
        """Return whether the holder has held leases that it was not asked to give back. Looks at all that it has."""
        found = self._leases.get(holder, ())
        return any(holder in entry.held and holder not in entry.recall_requested for entry in found)

    def bytes_by_holder(self) -> dict[str, int]:
        """Return the bytes that each has a lease on, the most first; what two of them share counts for both."""
        return dict(self._leased_by.most_common())

    # inside

    def _enter(self, key: str, size: Size) -> Entry[Thing]:
        assert key not in self.entries
        entry: Entry[Thing] = Entry(key, bytes_of(size), size=size)
        entry.popularity = self._past.pop(key, self._never_used)
        entry.last_used = next(self._ticks)
        self.entries[key] = entry
        self.coming.add(entry)
        self.used.add(size)
        return entry

    def _take_out(self, entry: Entry[Thing]) -> None:
        """Take it out of the table, current or detached."""
        if entry.is_gone:
            return
        entry.is_gone = True
        self._sort(entry)
        if entry.is_current:
            if entry.is_here:
                self._count_here(entry, -1)
            del self.entries[entry.key]
            self._past.note(entry.key, entry.popularity)
        else:
            copies = self._detached[entry.key]
            copies.remove(entry)
            if not copies:
                del self._detached[entry.key]
        self.coming.discard(entry)
        self.used.remove(entry.size)

    def _remove(self, entry: Entry[Thing]) -> None:
        self._take_out(entry)
        self._let_go([entry])

    def _let_go(self, entries: Sequence[Entry[Thing]]) -> None:
        self._on_gone(entries)
        for entry in entries:
            entry.thing = None  # the order may know the entry for a while

    def _end_leases(self, entry: Entry[Thing], holder: str) -> None:
        entry.held.pop(holder, None)
        entry.recallable.pop(holder, None)
        self._lease_ended(entry, holder)

    def _lease_ended(self, entry: Entry[Thing], holder: str) -> None:
        """Some or all of the holder's leases on it have ended."""
        if holder not in entry.recallable:
            entry.recall_requested.discard(holder)
            mine = self._leases.get(holder)
            if mine and entry in mine and holder not in entry.held:
                del mine[entry]
                self._leased_by[holder] -= entry.nbytes
                if not mine:
                    del self._leases[holder], self._leased_by[holder]
                if entry.is_here and not entry.is_leased:
                    if not entry.is_current:
                        self._remove(entry)
                        return
                    self.leased_bytes -= entry.nbytes
        self._sort(entry)

    def _pin_changed(self, key: str, sign: int) -> None:
        if (entry := self.entries.get(key)) is not None:
            self.pinned_bytes += sign * entry.nbytes if entry.is_here else 0
            self._sort(entry)

    def _count_here(self, entry: Entry[Thing], sign: int) -> None:
        nbytes = sign * entry.nbytes
        self.here_bytes += nbytes
        self.leased_bytes += nbytes if entry.is_leased else 0
        self.pinned_bytes += nbytes if entry.key in self._pinned else 0
        self._bytes_of_origin[entry.origin] += nbytes
        if not self._bytes_of_origin[entry.origin]:
            del self._bytes_of_origin[entry.origin]

    def _sort(self, entry: Entry[Thing]) -> None:
        """Put it into the order, or take it out, as it may go now or not."""
        is_free = not entry.held and entry.key not in self._pinned
        is_movable = is_free and entry.is_here and entry.is_current and not entry.is_gone
        if is_movable != entry.is_movable:
            entry.is_movable = is_movable
            (self.order.add if is_movable else self.order.discard)(entry)
            self.movable_bytes += entry.nbytes if is_movable else -entry.nbytes


def _subtract(leases: dict[str, int], holder: str, count: int) -> int:
    """Take so many leases, or as many as there are; returns how many were lacking."""
    found = leases.get(holder, 0)
    if found > count:
        leases[holder] = found - count
    elif found:
        del leases[holder]
    return max(0, count - found)
