"""The book of a node's extents, under one lock: resident and arriving extents, requests for room, and recalls.

Ray-free. `Holders`, `Residents` and `HeldExtents` share it; every reader and writer holds `changed`.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, cast

from cluster.keeper.recalls import Recalls
from cluster.keeper.records import HeldExtent, Source
from weights.records.manifest import ExtentRef
from weights.residency.admission import Admission
from weights.residency.contents import Entry, MemoryTier
from weights.residency.entry_table import EntryTable

Arrival = concurrent.futures.Future[HeldExtent]


class Neighbours(Protocol):
    """Other nodes' knowledge of the extents that this node has."""

    def changed(self, added: Sequence[str], removed: Sequence[str]) -> None:
        """Take in the extents that came and went. Called with the lock held: it must be quick and not call back."""
        ...


class ReloadRates(Protocol):
    """Measured seconds to load bytes again, by source."""

    def reload_rate(self, source: Source) -> float | None:
        """Return the seconds of one byte from that source; None before a measurement."""
        ...


class ExtentBook(MemoryTier):
    """The table of extents, those that are being loaded, the queue of requests, and the recalls for it.

    `neighbours` get to know what came and went.
    """

    def __init__(
        self,
        budget_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        neighbours: Neighbours | None = None,
        rates: ReloadRates | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.table: EntryTable[HeldExtent] = EntryTable(budget_bytes, clock, self)
        self.coming: dict[str, tuple[ExtentRef, Arrival]] = {}  # by id: the extents being loaded
        self.queue = Admission(self.table, "store.node_budget_bytes")
        self.recalls = Recalls(self.table, self.queue)
        self._neighbours = neighbours
        self._rates = rates

    def serve(self) -> None:
        """Grant the requests that can go on."""
        self.recalls.serve_queue()
        self.changed.notify_all()

    def tell(self, added: Sequence[str], removed: Sequence[str]) -> None:
        """Tell the neighbours of extents that came and that went."""
        if self._neighbours:
            self._neighbours.changed(added, removed)

    def here(self, id_: str) -> HeldExtent | None:
        """Return a resident extent; None for another."""
        entry = self.table.entries.get(id_)
        return entry.thing if entry and entry.is_here else None

    def expect(self, extent: ExtentRef) -> None:
        """Note that the extent is being loaded."""
        self.coming[extent.id] = extent, Arrival()

    def arrival(self, entry: Entry[HeldExtent]) -> Arrival:
        """Return the arrival of an entry, which ends with the extent or its error."""
        if not entry.is_here:
            return self.coming[entry.key][1]
        here = Arrival()
        here.set_result(entry.thing)  # type: ignore[arg-type]  # it is here
        return here

    def entries_gone(self, entries: Sequence[Entry[Any]]) -> None:
        """Publish the removal of extents. That of invalidated ones was published before."""
        if gone := [entry.key for entry in entries if entry.is_current]:
            self.tell([], gone)

    def recall(self, holder: str, keys: Sequence[str]) -> None:
        """Recall a holder's leases on extents."""
        self.recalls.call(holder, keys)

    def reload_rate(self, origin: Hashable) -> float | None:
        """Return the seconds of one byte from a source; None when nothing is measured."""
        return self._rates.reload_rate(cast("Source", origin)) if self._rates else None
