"""The table of one memory tier: what is here or coming, and who leases it.

A tier is an adapter: it moves the bytes and keeps what it made of them in `Entry.thing`. A lease or a release costs the
same however much is here. Not thread-safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from weights.residency.contents import Contents, Entry, MemoryTier, Thing
from weights.residency.policy import NEVER_USED, Popularity
from weights.residency.sizes import Size, bytes_of


class EntryTable(Contents[Thing]):
    """Contents that holders have leases on. A lease is held, or recallable: the table may ask it back."""

    def __init__(
        self,
        budget_bytes: int,
        clock: Callable[[], float],
        tier: MemoryTier | None = None,
        *,
        never_used: Popularity = NEVER_USED,
        elsewhere: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(budget_bytes, clock, tier, never_used=never_used, elsewhere=elsewhere)
        self._leases: dict[str, dict[Entry[Thing], None]] = {}
        self._leased_by: Counter[str] = Counter()

    def fail(self, entry: Entry[Thing]) -> None:
        """Note that it does not come. Leases on it end."""
        for holder in {**entry.held, **entry.recallable}:
            self._end_leases(entry, holder)
        super().fail(entry)

    def add_detached(self, key: str, size: Size, thing: Thing, holder: str, count: int = 1) -> Entry[Thing]:
        """Enter a copy that `holder` has and nobody else gets; its bytes count until its leases end."""
        entry: Entry[Thing] = Entry(key, bytes_of(size), size=bytes_of(size), thing=thing, is_here=True)
        entry.is_current = False
        self.used.add(entry.size)
        self._detached.setdefault(key, []).append(entry)
        self.lease(entry, holder, count)
        return entry

    def lease(self, entry: Entry[Thing], holder: str, count: int = 1) -> None:
        """Count a use, and add so many held leases."""
        if holder not in entry.held:
            if holder not in entry.recallable:
                self._leases.setdefault(holder, {})[entry] = None
                self._leased_by[holder] += entry.nbytes
            if entry.is_here and entry.is_current and not entry.is_leased:
                self.here.leased += entry.nbytes
        entry.held[holder] = entry.held.get(holder, 0) + count
        self._sort(entry)
        self.use(entry)

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
            self._tier.recall(holder, keys)

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
                        self._let_go([entry])
                        return
                    self.here.leased -= entry.nbytes
        self._sort(entry)


def _subtract(leases: dict[str, int], holder: str, count: int) -> int:
    """Take so many leases, or as many as there are; returns how many were lacking."""
    found = leases.get(holder, 0)
    if found > count:
        leases[holder] = found - count
    elif found:
        del leases[holder]
    return max(0, count - found)
