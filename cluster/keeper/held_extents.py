"""The extents of a node, shared by many threads: leases, pins, and the byte budget. Ray-free.

The lock is held to look at the requested extents only, not at all resident ones. The residency core decides
whose turn it is when room is short, and which extents are evicted for it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from cluster.keeper.extent_book import ExtentBook
from cluster.keeper.holders import Holders
from cluster.keeper.recalls import CHECK_S
from cluster.keeper.records import Claim, HeldExtent, Source, StoreFull
from cluster.keeper.residents import Residents
from weights.memory.host_pool import ByteArray
from weights.records.errors import BudgetExceeded, listed
from weights.records.manifest import ExtentRef
from weights.residency.admission import MAX_NAMED, Ticket
from weights.residency.room_plan import plan_prefetch, plan_room, shrink

_Loading = TypeVar("_Loading")
MAX_WAIT_S: Final = 60.0
RETRY_S: Final = 0.2  # Ray does not signal when it has freed an object
FREED_WITHIN_S: Final = 5.0  # an object without leases


class HeldExtents:
    """The extents of a node, by id: room for them, and their loads. Thread-safe.

    A request for room that others have leased waits at most `max_wait_s` for it. `holders` has the leases, `residents`
    shows what is here.
    """

    def __init__(self, book: ExtentBook, *, max_wait_s: float = MAX_WAIT_S) -> None:
        self._max_wait_s = max_wait_s
        self._book = book
        self._changed, self._table = book.changed, book.table
        self._trying_again = threading.Lock()  # held by the one that tries again after the store was full
        self.residents = Residents(self._book)
        self.holders = Holders(self._book)

    def lease_resident(self, extents: Sequence[ExtentRef], holder: str) -> tuple[dict[str, Any], int] | None:
        """Lease extents that are all resident, while no request waits. Return references by id, and the leases' epoch.

        None, with nothing changed, when they must be claimed.
        """
        with self._changed:
            entries = [self._table.entries.get(extent.id) for extent in extents]
            if self._book.queue.waiting or not all(entry and entry.is_here for entry in entries):
                return None
            for entry in filter(None, entries):
                self.holders.lease(entry, holder)
            refs = {entry.key: entry.thing.ref for entry in entries if entry and entry.thing}
            self.holders.watch.on_heartbeat(holder)
            return refs, self.holders.epoch(holder)

    def claim(self, extents: Sequence[ExtentRef], holder: str) -> Claim:
        """Lease each of the extents to the holder, as often as it is named: all of them or none.

        Raises BudgetExceeded at once when they cannot fit beside what is pinned, and after the wait when others
        still have the room.
        """
        claims: list[Claim] = []
        sizes = {extent.id: extent.nbytes for extent in extents}
        with self._changed:
            ticket = self._book.queue.ask(
                _listed_extents(extents), sizes, holder, partial(self._on_settled, extents, claims)
            )
            try:
                self._book.serve()
                while ticket.is_waiting and (left_s := ticket.since_s + self._max_wait_s - self._table.now_s()) > 0:
                    self._changed.wait(min(left_s, CHECK_S) if self._book.recalls.is_pending_for(ticket) else left_s)
                    self.holders.end_silent()
            finally:
                if ticket.is_waiting:
                    self._book.queue.end_ticket(ticket)
                    self._book.serve()
            if ticket.refusal:
                raise BudgetExceeded(ticket.refusal)
            return claims[0]

    def settle(self, claim: Claim, holder: str) -> dict[str, Any]:
        """Return references by id once the whole claim is resident. Raises the error of a load; then the leases end."""
        try:
            refs = {held.extent.id: held.ref for held in (arrival.result() for arrival in claim.arrivals)}
        except BaseException:
            self._give_back(claim, holder)
            raise
        with self._changed:
            for entry in claim.entries:
                self._book.recalls.settle_lease(entry, holder)
            self._book.serve()
            # It may have died while it waited, and its leases have ended before these.
            self.holders.watch.on_heartbeat(holder)
        return refs

    def lease_loaded(
        self, extents: Sequence[ExtentRef], holder: str, load: Callable[[Sequence[ExtentRef]], _Loading]
    ) -> tuple[Claim, dict[str, Any], _Loading]:
        """Claim the extents, `load` the missing ones, and return the references once all are resident.

        Within the budget the store may still be full: of holes, and of released objects that Ray has not freed. A call
        that finds it full gives all back and tries again, as long as it would wait for room. Meanwhile others that have
        something to load come after it, but for holders with leases: it may be waiting for just those.
        Raises as `claim` and `settle` do.
        """
        is_in_turn = self._trying_again.locked() and not self.holders.has_leases(holder) and self._take_turn()
        since_s = used_s = self._table.now_s()  # when some request last had room
        try:
            while True:
                claim = self.claim(extents, holder)
                loading = load(claim.to_load)
                try:
                    return claim, self.settle(claim, holder), loading
                except StoreFull as error:
                    # HAZARD: the loaded extents make room as well, but the claim and the error's frames refer to them.
                    error.__traceback__ = None
                    del claim, loading
                    used_s = self._table.now_s() if self.residents.is_in_use else used_s
                    if not self._wait_until(min(since_s + self._max_wait_s, used_s + FREED_WITHIN_S)):
                        raise
                    # Two calls that each have a part of their extents would take turns in failing.
                    is_in_turn = is_in_turn or self._take_turn()
        finally:
            if is_in_turn:
                self._trying_again.release()

    def _take_turn(self) -> bool:
        return self._trying_again.acquire(timeout=self._max_wait_s)

    def _wait_until(self, until_s: float) -> bool:
        """Wait a moment for something to change. Return False when that time has come."""
        with self._changed:
            if (left_s := until_s - self._table.now_s()) > 0:
                self._changed.wait(min(left_s, RETRY_S))
                self.holders.end_silent()
            return left_s > 0

    def prefetch(self, extents: Sequence[ExtentRef]) -> list[ExtentRef]:
        """Return the extents that the caller should load: without a lease, and without evicting more valuable ones."""
        with self._changed:
            if self._book.queue.waiting:
                return []  # waiting requests come first
            wanted = {extent.id: extent for extent in extents}
            take, evict = plan_prefetch(self._table, {id_: extent.nbytes for id_, extent in wanted.items()})
            self._table.evict(evict)
            for id_ in take:
                self._table.expect(id_, wanted[id_].nbytes, prefetched=True)
                self._book.expect(wanted[id_])
            return [wanted[id_] for id_ in take]

    def has_room_for(self, extents: Sequence[ExtentRef]) -> bool:
        """Return whether the extents fit now, without a recall."""
        with self._changed:
            plan = plan_room(self._table, {extent.id: extent.nbytes for extent in extents})
            return not (self._book.queue.waiting or plan.missing_bytes or plan.recall)

    def loaded(self, id_: str, ref: Any, view: ByteArray, source: Source) -> None:
        """Take in a loaded extent, and wake the requests that wait for it."""
        with self._changed:
            extent, arrival = self._book.coming.pop(id_)
            held = HeldExtent(extent, ref, view, source)
            try:
                self._table.arrive(self._table.entries[id_], held, source)
                self._book.tell([id_], [])
                self._book.serve()
            finally:
                arrival.set_result(held)

    def failed(self, id_: str, error: Exception) -> None:
        with self._changed:
            _, arrival = self._book.coming.pop(id_)
            try:
                self._table.fail(self._table.entries[id_])
                self._book.tell([], [id_])  # other nodes need not wait for this one
                self._book.serve()
            finally:
                arrival.set_exception(error)

    def wait_until_known(self, ids: Sequence[str], timeout_s: float) -> bool:
        """Wait until all of them are here or coming. Return False when some are not after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: all(id_ in self._table.entries for id_ in ids), max(timeout_s, 0.0))

    def set_pins(self, ids: Iterable[str]) -> None:
        """Pin these extents and no others, here or not yet: pinned extents are not evicted."""
        with self._changed:
            pinned = set(ids)
            self._table.unpin(set(self._table.pinned) - pinned)
            self._table.pin(pinned)
            self._book.serve()

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget. Surplus extents go at once if they may, else when they are released."""
        with self._changed:
            self._table.budget_bytes = budget_bytes
            self._book.serve()

    def drop(self, ids: Sequence[str]) -> list[str]:
        """Evict extents; return those that went. Leased and pinned ones stay; leases without a use are recalled."""
        with self._changed:
            if not self._book.queue.waiting:
                self._book.recalls.forget_declined()
            asked = [entry for id_ in dict.fromkeys(ids) if (entry := self._table.entries.get(id_)) and entry.is_here]
            free = [entry for entry in asked if entry.key not in self._table.pinned]
            self._table.recall(entry for entry in free if not entry.held)
            gone = [entry for entry in free if not entry.is_leased]
            self._table.evict(gone)
            self._book.serve()
            return [entry.key for entry in gone]

    def shed(self, nbytes: int) -> bool:
        """Evict at least so many bytes, whatever the budget. Return False when no extent may go."""
        with self._changed:
            if not self._book.queue.waiting:
                self._book.recalls.forget_declined()  # an extent in use at the last recall may be idle by now
            while True:
                before = self._table.num_evicted
                shrink(self._table, max(0, min(self._table.budget_bytes, self._table.used_bytes - nbytes)))
                self.holders.end_silent()
                if self._table.num_evicted > before:
                    self._book.serve()
                    return True
                if not self._book.recalls.is_waiting:
                    return False
                self._changed.wait(CHECK_S)

    def invalidate(self, id_: str, view: ByteArray) -> bool:
        """Make the next request load a fresh copy: the bytes of `view` are damaged. Return False if they are gone."""
        with self._changed:
            held = self._book.here(id_)
            if held is None or held.view is not view:
                return False
            self._book.tell([], [id_])
            self._table.invalidate(self._table.entries[id_])
            self._book.serve()
            return True

    def _give_back(self, claim: Claim, holder: str) -> None:
        """Give back the leases of a failed claim, by its own entries: some extents may be loading anew by now."""
        with self._changed:
            for entry in claim.entries:
                self._table.unlease(entry, holder)
                self._book.recalls.settle_lease(entry, holder)
            self._book.serve()

    def _on_settled(self, extents: Sequence[ExtentRef], claims: list[Claim], ticket: Ticket[HeldExtent]) -> None:
        """Add the claim of a request that was granted its leases. A dead holder keeps none."""
        if ticket.entries is None:
            return
        by_id = {extent.id: extent for extent in extents}
        to_load = tuple(by_id[entry.key] for entry in ticket.fresh)
        for extent in to_load:
            self._book.expect(extent)
        for id_, count in Counter(extent.id for extent in extents).items():
            if count > 1:
                self._table.lease(self._table.entries[id_], ticket.holder, count - 1)
        if not (epoch := self.holders.epoch(ticket.holder)):
            self._table.end_holder(ticket.holder)
        entries = tuple(self._table.entries[extent.id] for extent in extents)
        for entry in entries:
            self._book.recalls.expect_lease(entry, ticket.holder)
        claims.append(Claim(entries, tuple(map(self._book.arrival, entries)), to_load, epoch))


def _listed_extents(extents: Sequence[ExtentRef]) -> str:
    """Return the name of these extents in a refusal."""
    packs = sorted({extent.pack for extent in extents})
    return f"{len(extents)} extents of {listed(packs, MAX_NAMED)}"
