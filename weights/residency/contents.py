"""The contents of one memory tier under a byte budget: entries that are here, coming or pinned, and their popularity.

Totals are counted as they change, so that an arrival or an eviction costs the same however much is here. Not
thread-safe.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

from weights.residency.policy import NEVER_USED, EvictionCandidate, EvictionOrder, Popularity, class_rate, origin_rates
from weights.residency.recent import Recent
from weights.residency.sizes import DistinctBytes, Size, bytes_of, unshared

MAX_REMEMBERED: Final = 50_000  # entries that are not here and whose popularity is still known

Thing = TypeVar("Thing")


class MemoryTier:
    """The tier of a table: it moves the bytes, and hears what leaves its memory. Quick; it must not call the table."""

    def entries_gone(self, entries: Sequence[Entry[Any]]) -> None:
        """Take in what leaves memory, before its things are dropped; not what failed to come."""

    def recall(self, holder: str, keys: Sequence[str]) -> None:
        """Ask a holder for its recallable leases.

        It answers with `release` or `make_held`; one that does not in time is ended with `end_holder`.
        """

    def reload_rate(self, origin: Hashable) -> float | None:
        """Return the seconds that a byte of an origin takes to get again; None: as long as the others on average."""
        return class_rate(origin)


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


@dataclass(slots=True)
class HereBytes:
    """The bytes of what is here and current, each entry whole; `by_origin` by what it costs to get it again."""

    total: int = 0
    leased: int = 0
    pinned: int = 0
    by_origin: Counter[Hashable] = field(default_factory=Counter)

    def count(self, entry: Entry[Any], sign: int, *, is_pinned: bool) -> None:
        """Count an entry that came, or with -1 one that went."""
        nbytes = sign * entry.nbytes
        self.total += nbytes
        self.leased += nbytes if entry.is_leased else 0
        self.pinned += nbytes if is_pinned else 0
        self.by_origin[entry.origin] += nbytes
        if not self.by_origin[entry.origin]:
            del self.by_origin[entry.origin]


class PastUses:
    """The popularity of entries that are not here, as far as it is remembered."""

    def __init__(self, never_used: Popularity) -> None:
        self._never_used = never_used
        self._known: Recent[str, Popularity] = Recent(MAX_REMEMBERED)

    def of(self, key: str) -> Popularity:
        """Return the popularity of a key."""
        return self._known.get(key, self._never_used)

    def take(self, key: str) -> Popularity:
        """Return the popularity of a key that comes in: it is the entry's now."""
        return self._known.pop(key, self._never_used)

    def note(self, entry: EvictionCandidate) -> None:
        """Remember an entry that goes."""
        self._known.note(entry.key, entry.popularity)


class Contents(Generic[Thing]):
    """Entries under a byte budget. What has a held lease, is pinned or is coming is never evicted.

    `room_plan` plans over `used`, `order` and `movable_bytes`; nobody else changes them.
    """

    def __init__(
        self,
        budget_bytes: int,
        clock: Callable[[], float],
        tier: MemoryTier | None = None,
        *,
        never_used: Popularity = NEVER_USED,
        elsewhere: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`elsewhere` are the budgets of other places, of which entries may have parts."""
        self.budget_bytes = budget_bytes
        self.elsewhere = elsewhere
        self.entries: dict[str, Entry[Thing]] = {}  # the current ones
        self.coming: set[Entry[Thing]] = set()
        self.used = DistinctBytes()
        self.here = HereBytes()
        self.past = PastUses(never_used)
        self.num_evicted = 0
        self.movable_bytes = 0
        self.now_s = clock
        self._tier = MemoryTier() if tier is None else tier
        self.order: EvictionOrder[Entry[Thing]] = EvictionOrder()
        self._pinned: set[str] = set()
        self._detached: dict[str, list[Entry[Thing]]] = {}  # in memory until their leases end
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
        """Return seconds per byte by origin, as `origin_rates` of what is here."""
        return origin_rates(self.here.by_origin, self._tier.reload_rate)

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
            self.here.count(entry, 1, is_pinned=entry.key in self._pinned)
            self._sort(entry)
        elif not entry.is_leased:
            self._let_go([entry])

    def fail(self, entry: Entry[Thing]) -> None:
        """Note that it does not come."""
        self._take_out(entry)
        entry.thing = None

    def adopt(self, key: str, size: Size, thing: Thing, origin: Hashable = None) -> Entry[Thing]:
        """Enter one that is here already, over the budget if need be: the bytes are in memory whatever is decided."""
        entry = self._enter(key, size)
        self.arrive(entry, thing, origin)
        return entry

    def invalidate(self, entry: Entry[Thing]) -> None:
        """Give it to nobody new. It goes with its last lease; one that is coming, once it has come."""
        if not entry.is_current:
            return
        if entry.is_here:
            self.here.count(entry, -1, is_pinned=entry.key in self._pinned)
        del self.entries[entry.key]
        entry.is_current = False
        self._sort(entry)
        self.past.note(entry)
        # Its parts are its own now, beside the fresh ones that others share.
        self.used.remove(entry.size)
        entry.size = unshared(entry.size, f"{entry.key} before {next(self._ticks)}")
        self.used.add(entry.size)
        self._detached.setdefault(entry.key, []).append(entry)
        if entry.is_here and not entry.is_leased:
            self._let_go([entry])

    def evict(self, entries: Sequence[Entry[Thing]]) -> None:
        """Let go of entries that nobody leases, whatever is pinned: a plan's, or what an operator drops."""
        if not entries:
            return
        for entry in entries:
            assert entry.is_here
            assert not entry.is_leased
        self.num_evicted += len(entries)
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

    def _enter(self, key: str, size: Size) -> Entry[Thing]:
        assert key not in self.entries
        entry: Entry[Thing] = Entry(key, bytes_of(size), size=size)
        entry.popularity = self.past.take(key)
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
                self.here.count(entry, -1, is_pinned=entry.key in self._pinned)
            del self.entries[entry.key]
            self.past.note(entry)
        else:
            copies = self._detached[entry.key]
            copies.remove(entry)
            if not copies:
                del self._detached[entry.key]
        self.coming.discard(entry)
        self.used.remove(entry.size)

    def _let_go(self, entries: Sequence[Entry[Thing]]) -> None:
        for entry in entries:
            self._take_out(entry)
        self._tier.entries_gone(entries)
        for entry in entries:
            entry.thing = None  # the order may know the entry for a while

    def _pin_changed(self, key: str, sign: int) -> None:
        if (entry := self.entries.get(key)) is not None:
            self.here.pinned += sign * entry.nbytes if entry.is_here else 0
            self._sort(entry)

    def _sort(self, entry: Entry[Thing]) -> None:
        """Put it into the order, or take it out, as it may go now or not."""
        is_free = not entry.held and entry.key not in self._pinned
        is_movable = is_free and entry.is_here and entry.is_current and not entry.is_gone
        if is_movable != entry.is_movable:
            entry.is_movable = is_movable
            (self.order.add if is_movable else self.order.discard)(entry)
            self.movable_bytes += entry.nbytes if is_movable else -entry.nbytes
