"""Writing extents into a node's object store: room is made when there are bytes for it, by eviction if need be."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from cluster.keeper.extent_loading import Writing
from cluster.keeper.held_extents import HeldExtents
from cluster.keeper.object_store import NewObject, StoreFull
from weights.errors import BudgetExceeded
from weights.manifest import ExtentRef
from weights.memory.pages import ByteArray

_Result = TypeVar("_Result")


class Store(Protocol):
    """A store that shares extents with other processes."""

    capacity_bytes: int

    def create_object(self, nbytes: int, used_bytes: int) -> NewObject: ...

    def populate(self) -> None: ...


class StoreWriter:
    """The extents that are being written into the store, beside those that are held there. Thread-safe."""

    def __init__(self, store: Store, held: HeldExtents) -> None:
        self._store = store
        self._held = held
        self._counting = threading.Lock()
        self._writing_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes used of the store, with what is being written."""
        return self._held.totals().resident_bytes + self._writing_bytes

    @contextlib.contextmanager
    def begin_writing(self, extent: ExtentRef) -> Iterator[Writing]:
        """Give a place in the store, which is made when it is asked for; it goes with the block unless it was sealed.

        Making it raises BudgetExceeded when the store is full and nothing may be evicted.
        """

        @functools.cache
        def created() -> NewObject:
            found = self._with_room(extent, lambda: self._store.create_object(extent.nbytes, self.used_bytes))
            self._count_writing(found.reserved_bytes)
            return found

        def seal() -> tuple[Any, ByteArray]:
            return self._with_room(extent, lambda: created().seal(self.used_bytes))

        try:
            yield Writing(lambda: created().out, seal)
        finally:
            if created.cache_info().currsize:
                self._count_writing(-created().reserved_bytes)

    def _with_room(self, extent: ExtentRef, put: Callable[[], _Result]) -> _Result:
        while True:
            try:
                return put()
            except StoreFull as error:
                # Within the budget, but not in one piece, or something that is not weights is in the way.
                if not self._held.shed(extent.nbytes):
                    raise BudgetExceeded(f"{error} ({self._held.holders_text()})") from None

    def _count_writing(self, nbytes: int) -> None:
        with self._counting:
            self._writing_bytes += nbytes
