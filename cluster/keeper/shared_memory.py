"""The extents in a node's shared memory: what is held, how it is written there, and whether it is still sound."""

from __future__ import annotations

import os
import threading
from typing import Final

from cluster.keeper.adoption import Adoption
from cluster.keeper.audit import Audit, DamageLog
from cluster.keeper.held_extents import HeldExtents
from cluster.keeper.object_store import MAX_SHARE, max_budget_bytes
from cluster.keeper.records import HeldExtent
from cluster.keeper.store_writing import Store, StoreWriter
from weights.errors import BudgetExceeded

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
        self.writer = StoreWriter(store, held)
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
