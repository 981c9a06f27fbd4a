"""The extents in a node's shared memory: what is held, how it is written there, and whether it is still sound."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, TypeVar

from cluster.keeper.adoption import Adoption
from cluster.keeper.audit import Audit, DamageLog
from cluster.keeper.extent_loading import Writing
from cluster.keeper.held_extents import HeldExtents
from cluster.keeper.object_store import MAX_SHARE, NewObject, StoreFull, max_budget_bytes
from cluster.keeper.records import HeldExtent
from weights.errors import BudgetExceeded
from weights.manifest import ExtentRef
from weights.memory.pages import ByteArray

_Result = TypeVar("_Result")


class Store(Protocol):
    """A store that shares extents with other processes."""

    capacity_bytes: int

    def create_object(self, nbytes: int, used_bytes: int) -> NewObject: ...

    def populate(self) -> None: ...


class _StoreWriter:
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


LOWEST_PRIORITY: Final = 19


class NodeMemory:
    """The object store of a node and the extents in it. `start` begins what looks after them: holders, and bytes.

    `adoption_s`: so long replicas are waited for, to offer what they have mapped. `audit_bytes_per_s` 0: no audit.
    """

    def __init__(
        self,
        store: Store,
        held: HeldExtents,
        node_id: str,
        *,
        verify: bool,
        adoption_s: float,
        audit_bytes_per_s: float,
    ) -> None:
        self.store = store
        self.held = held
        self._node_id = node_id
        self._is_audited = bool(audit_bytes_per_s)
        self.writer = _StoreWriter(store, held)
        self.damage = DamageLog()
        self.adoption = Adoption(held, self.damage, verify=verify, wait_s=adoption_s)
        self.audit = Audit(held.ids, held.held, self._note_damage, audit_bytes_per_s or float("inf"))

    def start(self, *, populate: bool) -> None:
        """Watch the holders, audit what is held and, with `populate`, make the store's pages, all in threads."""
        self.held.watch.start()
        if self._is_audited:
            self.audit.start()
        if populate:
            threading.Thread(target=self._populate_store, name="populate", daemon=True).start()

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget. Raises BudgetExceeded when the store is too small for it."""
        capacity_bytes = self.store.capacity_bytes
        largest_bytes = max_budget_bytes(capacity_bytes)
        if not 0 <= budget_bytes <= largest_bytes:
            raise BudgetExceeded(
                f"a budget of {budget_bytes} bytes: node {self._node_id} allows 0 to {largest_bytes}, "
                f"{MAX_SHARE:.0%} of its object store of {capacity_bytes}"
            )
        self.held.set_budget(budget_bytes)

    def close(self) -> None:
        """End its threads."""
        self.held.watch.close()
        self.audit.close()

    def _populate_store(self) -> None:
        """Make the store's pages in the time that others leave: every process of the node starts now."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)  # on Linux, of this thread alone
        self.store.populate()

    def _note_damage(self, held: HeldExtent) -> None:
        holders = [holder for found in self.held.residents([held.extent.id]) for holder in found.holders]
        if self.held.invalidate(held.extent.id, held.view):
            where = f"in shared memory, leased by {', '.join(holders) or 'nobody'}"
            self.damage.note_damage(held.extent.id, held.ref, where)
