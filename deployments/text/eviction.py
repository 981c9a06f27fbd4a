"""Eviction of encodings under a byte budget: by the residency core's value, with a share for `keep` entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from weights.residency.contents import Contents, Entry, MemoryTier
from weights.residency.policy import class_rate, rate_class
from weights.residency.room_plan import plan_shrink

KEEP_SHARE: Final = 0.25  # of the budget, for entries that are to be kept


class CostAwareEviction(MemoryTier):
    """Sizes, costs and uses of encodings by key, evicted by value. Not thread-safe.

    `keep` entries leave only if together they exceed `KEEP_SHARE` of the budget: then the least valuable becomes an
    ordinary entry.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.max_kept_bytes = int(max_bytes * KEEP_SHARE)
        self.num_evicted = 0
        self._now_s = 0.0
        self._gone: list[str] = []
        self._table: Contents[None] = Contents(max_bytes, lambda: self._now_s, self)

    def __len__(self) -> int:
        return len(self._table.entries)

    def __contains__(self, key: object) -> bool:
        return key in self._table.entries

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self._table.used_bytes

    @property
    def num_kept(self) -> int:
        """Entries that are kept."""
        return len(self._table.pinned)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the entries that are kept."""
        return self._table.here.pinned

    def add(self, key: str, nbytes: int, cost_s: float, now_s: float, *, keep: bool = False) -> list[str]:
        """Return the evicted keys; `key` itself if all others are worth more, or it exceeds the budget.

        An entry of that key is replaced.
        """
        if key in self:
            self.remove(key)
        if nbytes > self.max_bytes:
            return [key]
        self._now_s = now_s
        entry = self._table.adopt(key, nbytes, None, rate_class(cost_s, nbytes))
        self._use(entry, keep)
        self._gone = []
        self._table.evict(plan_shrink(self._table, self.max_bytes).evict)
        self.num_evicted += len(self._gone) - (key in self._gone)
        return self._gone

    def touch(self, key: str, now_s: float, *, keep: bool = False) -> None:
        """Count one use more. Raises KeyError."""
        self._now_s = now_s
        self._use(self._table.entries[key], keep)

    def remove(self, key: str) -> None:
        """Forget an entry, but not its popularity. Raises KeyError."""
        entry = self._table.entries[key]
        self._table.unpin([key])
        self._table.evict([entry])

    def entries_gone(self, entries: Sequence[Entry[Any]]) -> None:
        """Note what was evicted."""
        self._gone += [entry.key for entry in entries]

    def _use(self, entry: Entry[None], keep: bool) -> None:
        self._table.use(entry)
        if not keep or entry.key in self._table.pinned or entry.nbytes > self.max_kept_bytes:
            return
        self._table.pin([entry.key])
        while self.kept_bytes > self.max_kept_bytes:
            self._table.unpin([min(self._table.pinned, key=self._value)])

    def _value(self, key: str) -> float:
        entry = self._table.entries[key]
        return entry.popularity.value(self._now_s) * (class_rate(entry.origin) or 0.0)
