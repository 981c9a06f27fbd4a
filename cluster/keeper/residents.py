"""The extents in a node's memory at one moment, and their figures. Thread-safe; changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.keeper.extent_book import ExtentBook
from cluster.keeper.records import HeldExtent, ResidentExtent, Totals
from weights.memory.host_pool import ByteArray
from weights.records.manifest import DeltaRef
from weights.residency.admission import describe_holders
from weights.residency.contents import Entry
from weights.residency.room_plan import plan_room


class Residents:
    """The resident extents by id, and their holders."""

    def __init__(self, book: ExtentBook) -> None:
        self._book = book
        self._table = book.table

    def held(self, id_: str) -> HeldExtent | None:
        """Return a resident extent; None for another."""
        with self._book.changed:
            return self._book.here(id_)

    def view(self, id_: str) -> ByteArray | None:
        """Return the bytes of a resident extent; None for another."""
        held = self.held(id_)
        return held.view if held else None

    def delta(self, key: str) -> DeltaRef | None:
        """Return the delta of that `key` that a resident extent was stored as; None without one."""
        with self._book.changed:
            here = [entry.thing.extent.delta for entry in self._table.entries.values() if entry.is_here and entry.thing]
        return next((delta for delta in here if delta and delta.key == key), None)

    def ids(self) -> list[str]:
        """Return the ids of all resident extents."""
        with self._book.changed:
            return [entry.key for entry in self._table.entries.values() if entry.is_here]

    def described(self, ids: Iterable[str] | None = None) -> list[ResidentExtent]:
        """Return the resident extents among `ids`, each once; without `ids` all of them, which takes longer."""
        with self._book.changed:
            entries = self._table.entries
            chosen = entries.values() if ids is None else map(entries.get, dict.fromkeys(ids))
            return [self._described(found, found.thing) for found in chosen if found and found.is_here and found.thing]

    def totals(self) -> Totals:
        """Return the counts and bytes of resident extents, at one moment."""
        with self._book.changed:
            table = self._table
            num_here = len(table.entries) - len(self._book.coming)
            return Totals(num_here, table.here.total, table.here.leased, table.here.pinned)

    def bytes_by_holder(self) -> dict[str, int]:
        with self._book.changed:
            return self._table.bytes_by_holder()

    def holders_text(self) -> str:
        """List the holders of the room: see `describe_holders`."""
        with self._book.changed:
            return describe_holders(self._table)

    @property
    def is_in_use(self) -> bool:
        """Return whether any holder has leases, or extents are being loaded."""
        with self._book.changed:
            return bool(self._book.coming or self._table.bytes_by_holder())

    @property
    def budget_bytes(self) -> int:
        return self._table.budget_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all resident and arriving extents."""
        with self._book.changed:
            return self._table.used_bytes

    @property
    def callable_bytes(self) -> int:
        """Bytes of extents that all their holders may give back on a recall. Looks at all extents."""
        with self._book.changed:
            entries = self._table.entries.values()
            return sum(entry.nbytes for entry in entries if entry.recallable and not entry.held)

    @property
    def wanted_bytes(self) -> int:
        """Bytes that the first waiting request lacks; without one, bytes over the budget."""
        with self._book.changed:
            if waiting := self._book.queue.waiting:
                return plan_room(self._table, waiting[0].wanted).lacking_bytes
            return max(0, self._table.used_bytes - self._table.budget_bytes)

    @property
    def num_waiting(self) -> int:
        return len(self._book.queue.waiting)

    @property
    def num_evicted(self) -> int:
        return self._table.num_evicted

    @property
    def num_recalled(self) -> int:
        return self._book.recalls.num_recalled

    def _described(self, entry: Entry[HeldExtent], held: HeldExtent) -> ResidentExtent:
        holders, is_pinned = dict(entry.held + entry.recallable), entry.key in self._table.pinned
        return ResidentExtent(entry.key, entry.nbytes, holders, is_pinned, held.source, entry.num_uses)
