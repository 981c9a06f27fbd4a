"""The extents of a node, shared by many threads: leases, pins, and the byte budget. Ray-free.

The lock is held for as long as it takes to look at what is asked for, not at all that is here. The residency core says
whose turn it is when room is short, and what goes for it.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

from cluster.keeper.holder_watch import HolderEpochs, HolderWatch
from cluster.keeper.recalls import CHECK_S, Recalls
from cluster.keeper.records import Claim, HeldExtent, Recall, RecallAnswer, ResidentExtent, Source, Totals
from cluster.process.processes import ProcessMark
from weights.memory.host_pool import ByteArray
from weights.records.errors import BudgetExceeded, listed
from weights.records.manifest import DeltaRef, ExtentRef
from weights.residency.admission import MAX_NAMED, Admission, Ticket, describe_holders
from weights.residency.entry_table import Entry, EntryTable
from weights.residency.room_plan import plan_prefetch, plan_room, shrink

MAX_WAIT_S: Final = 60.0
MAX_USES: Final = 32  # of one extent that one report counts: more are one burst

logger = logging.getLogger("atelier.keeper")


class HeldExtents:
    """The extents of a node, by id. Thread-safe.

    A request for room that others have leased waits at most `max_wait_s` for it. `on_change` gets extents that came
    and that went, with the lock held: it must be quick and must not call back. A holder that does not answer keeps its
    leases as long as it lives for `watch`: it has its memory mapped, however long it was not scheduled.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        max_wait_s: float = MAX_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[Sequence[str], Sequence[str]], None] = lambda added, removed: None,
        reload_rate: Callable[[Source], float | None] = lambda source: None,
    ) -> None:
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._on_change = on_change
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._table: EntryTable[HeldExtent] = EntryTable(
            budget_bytes,
            clock,
            on_gone=self._on_gone,
            on_recall=lambda holder, ids: self._recalls.call(holder, ids),
            rate_of=lambda source: reload_rate(cast("Source", source)),
        )
        # By extent id, of what is being loaded.
        self._coming: dict[str, tuple[ExtentRef, concurrent.futures.Future[HeldExtent]]] = {}
        self.watch = HolderWatch(self.end_holder, clock=clock)
        self._epochs = HolderEpochs()
        self._queue = Admission(self._table, clock, "store.node_budget_bytes")
        self._recalls = Recalls(self._table, self._queue, clock)

    @property
    def budget_bytes(self) -> int:
        return self._table.budget_bytes

    @property
    def num_evicted(self) -> int:
        return self._table.num_evicted

    @property
    def num_recalled(self) -> int:
        return self._recalls.num_recalled

    @property
    def num_waiting(self) -> int:
        return len(self._queue.waiting)

    @property
    def used_bytes(self) -> int:
        """Bytes of all that is in memory or on the way there."""
        with self._changed:
            return self._table.used_bytes

    def lease_resident(self, extents: Sequence[ExtentRef], holder: str) -> tuple[dict[str, Any], int] | None:
        """Lease what is all here while nobody waits. Return references by id, and the epoch of the leases.

        None, with nothing done, when they must be claimed.
        """
        with self._changed:
            entries = [self._table.entries.get(extent.id) for extent in extents]
            if self._queue.waiting or not all(entry and entry.is_here for entry in entries):
                return None
            for entry in filter(None, entries):
                self._lease(entry, holder)
            refs = {entry.key: entry.thing.ref for entry in entries if entry and entry.thing}
            self.watch.on_heartbeat(holder)
            return refs, self._epochs.number(holder)

    def claim(self, extents: Sequence[ExtentRef], holder: str) -> Claim:
        """Lease each of the extents to the holder, as often as it is named: all of them or none.

        Raises BudgetExceeded at once when they cannot fit beside what is pinned, and after the wait when others
        still have the room.
        """
        claims: list[Claim] = []
        sizes = {extent.id: extent.nbytes for extent in extents}
        with self._changed:
            ticket = self._queue.ask(_named(extents), sizes, holder, partial(self._on_settled, extents, claims))
            try:
                self._serve()
                while ticket.is_waiting and (left_s := ticket.since_s + self._max_wait_s - self._clock()) > 0:
                    self._changed.wait(min(left_s, CHECK_S) if self._recalls.is_pending_for(ticket) else left_s)
                    self._end_silent()
            finally:
                if ticket.is_waiting:
                    self._queue.end_ticket(ticket)
                    self._serve()
            if ticket.refusal:
                raise BudgetExceeded(ticket.refusal)
            return claims[0]

    def settle(self, claim: Claim, holder: str) -> dict[str, Any]:
        """Return references by id, once all of the claim is here. Raises what loading raised; the leases end then."""
        try:
            refs = {held.extent.id: held.ref for held in (arrival.result() for arrival in claim.arrivals)}
        except BaseException:
            self._give_back(claim, holder)
            raise
        with self._changed:
            for entry in claim.entries:
                self._recalls.settle_lease(entry, holder)
            self._serve()
            self.watch.on_heartbeat(holder)  # it may have died while it waited, and its leases have ended before these
        return refs

    def prefetch(self, extents: Sequence[ExtentRef]) -> list[ExtentRef]:
        """Return what the caller is to load: without a lease, and in no room that anything more valuable has."""
        with self._changed:
            if self._queue.waiting:
                return []  # who waits for room comes first
            wanted = {extent.id: extent for extent in extents}
            take, evict = plan_prefetch(self._table, {id_: extent.nbytes for id_, extent in wanted.items()})
            self._table.evict(evict)
            for id_ in take:
                self._table.expect(id_, wanted[id_].nbytes, prefetched=True)
                self._coming[id_] = wanted[id_], concurrent.futures.Future()
            return [wanted[id_] for id_ in take]

    def has_room_for(self, extents: Sequence[ExtentRef]) -> bool:
        """Return whether they fit, now, without calling anything back."""
        with self._changed:
            plan = plan_room(self._table, {extent.id: extent.nbytes for extent in extents})
            return not (self._queue.waiting or plan.missing_bytes or plan.recall)

    def loaded(self, id_: str, ref: Any, view: ByteArray, source: Source) -> None:
        """Take in an extent that was loaded, and wake who waits for it."""
        with self._changed:
            extent, arrival = self._coming.pop(id_)
            held = HeldExtent(extent, ref, view, source)
            try:
                self._table.arrive(self._table.entries[id_], held, source)
                self._on_change([id_], [])
                self._serve()
            finally:
                arrival.set_result(held)

    def failed(self, id_: str, error: Exception) -> None:
        with self._changed:
            _, arrival = self._coming.pop(id_)
            try:
                self._table.fail(self._table.entries[id_])
                self._on_change([], [id_])  # who waits for this node to have it need not
                self._serve()
            finally:
                arrival.set_exception(error)

    def lease_same(self, id_: str, ref: Any, holder: str, num_leases: int) -> bool:
        """Lease that very copy. Return False, with nothing done, when it is not the one that is here."""
        with self._changed:
            held = self.held(id_)
            if held is None or held.ref != ref:
                return False
            self._lease(self._table.entries[id_], holder, num_leases)
            self._serve()  # who has leases need not wait for what is here
            return True

    def adopt(self, held: HeldExtent, holder: str, num_leases: int) -> bool:
        """Lease `held` to the holder that has it mapped. Return False when others get another copy, which is here.

        Over the budget, too, if need be: the bytes are in memory whatever is decided here.
        """
        with self._changed:
            extent = held.extent
            if is_new := extent.id not in self._table.entries:
                entry = self._table.adopt(extent.id, extent.nbytes, held, held.source)
                self._on_change([extent.id], [])
                self._lease(entry, holder, num_leases)
            elif not self.lease_same(extent.id, held.ref, holder, num_leases):
                self.add_detached(held, holder, num_leases)
            self._serve()
            return is_new

    def add_detached(self, held: HeldExtent, holder: str, num_leases: int) -> None:
        """Count a copy that `holder` has mapped, and that nobody else may get, until the holder gives it back."""
        with self._changed:
            if self._epochs.number(holder):  # the dead give nothing back
                entry = self._table.add_detached(held.extent.id, held.extent.nbytes, held, holder, num_leases)
                self._recalls.make_recallable(entry, holder)
            self._serve()

    def wait_until_known(self, ids: Sequence[str], timeout_s: float) -> bool:
        """Wait until all of them are here or coming. Return False when some are not after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: all(id_ in self._table.entries for id_ in ids), max(timeout_s, 0.0))

    def release(self, ids: Sequence[str], holder: str, epoch: int | None = None) -> None:
        """Give back one lease per id, of that epoch or of any. Unknown ids and holders are ignored."""
        with self._changed:
            if epoch is None or self._epochs.is_of(epoch, holder):
                for id_ in ids:
                    self._table.release(id_, holder)
            self._serve()

    def next_recall(self, holder: str, answer: RecallAnswer | None, epoch: int | None, timeout_s: float) -> Recall:
        """Wait until something is wanted back from the holder. Empty after the time, or when it counts as dead.

        `answer` is to the recall before, `epoch` that of its leases (None: another keeper's). See `Recalls.open_poll`.
        """
        with self._changed:
            woken = threading.Condition(self._lock)
            if answer and not (epoch is not None and self._epochs.is_of(epoch, holder)):
                answer = replace(answer, given_back=())  # leases that have ended; it does not know of others
            number = self._recalls.open_poll(holder, woken.notify_all, answer)
            self._serve()
            woken.wait_for(lambda: not self._recalls.is_open(holder, number), timeout_s)
            return self._recalls.take_recall(holder, number)

    def note_uses(self, uses: Mapping[str, int]) -> None:
        """Count uses, by extent id, of what holders keep and have used without a new lease."""
        with self._changed:
            for id_, count in uses.items():
                if entry := self._table.entries.get(id_):
                    for _ in range(min(count, MAX_USES)):
                        self._table.use(entry)

    def greet(self, holder: str, process: ProcessMark | None = None) -> int:
        """Count the holder as living from now on, as long as its process. Return the epoch of its leases."""
        with self._changed:
            self.watch.on_heartbeat(holder, process)
            return self._epochs.renew(holder)

    def epoch(self, holder: str) -> int:
        """Return the epoch of the holder's leases; 0 for one that counts as dead."""
        with self._changed:
            return self._epochs.number(holder)

    def end_holder(self, holder: str) -> None:
        """Count the holder as dead: its leases end, also those that are being given just now."""
        with self._changed:
            self._recalls.end_holder(holder)
            self._epochs.expire(holder)
            self._table.end_holder(holder)
            self._serve()

    def set_pins(self, ids: Iterable[str]) -> None:
        """Pin these extents and no others, here or not yet: what is pinned is not evicted."""
        with self._changed:
            pinned = set(ids)
            self._table.unpin(set(self._table.pinned) - pinned)
            self._table.pin(pinned)
            self._serve()

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget. What is over it goes at once if it may, else when it is given back."""
        with self._changed:
            self._table.budget_bytes = budget_bytes
            self._serve()

    def drop(self, ids: Sequence[str]) -> list[str]:
        """Evict extents; return those that went. What is leased or pinned stays, what is only kept is called back."""
        with self._changed:
            if not self._queue.waiting:
                self._recalls.forget_declined()
            asked = [entry for id_ in dict.fromkeys(ids) if (entry := self._table.entries.get(id_)) and entry.is_here]
            free = [entry for entry in asked if entry.key not in self._table.pinned]
            self._table.recall(entry for entry in free if not entry.held)
            gone = [entry for entry in free if not entry.is_leased]
            self._table.evict(gone)
            self._serve()
            return [entry.key for entry in gone]

    def shed(self, nbytes: int) -> bool:
        """Evict so many bytes of what may go, whatever the budget says. Return False when nothing may go."""
        with self._changed:
            while True:
                before = self._table.num_evicted
                shrink(self._table, max(0, min(self._table.budget_bytes, self._table.used_bytes - nbytes)))
                self._end_silent()
                if self._table.num_evicted > before:
                    self._serve()
                    return True
                if not self._recalls.is_waiting:
                    return False
                self._changed.wait(CHECK_S)

    def invalidate(self, id_: str, view: ByteArray) -> bool:
        """Let the next request load a fresh copy: the bytes of `view` are damaged. Return False if they are gone."""
        with self._changed:
            held = self.held(id_)
            if held is None or held.view is not view:
                return False
            self._on_change([], [id_])
            self._table.invalidate(self._table.entries[id_])
            self._serve()
            return True

    def held(self, id_: str) -> HeldExtent | None:
        """Return the extent that is here; None when it is not."""
        with self._changed:
            entry = self._table.entries.get(id_)
            return entry.thing if entry and entry.is_here else None

    def view(self, id_: str) -> ByteArray | None:
        """Return the bytes of an extent that is here; None when it is not."""
        held = self.held(id_)
        return held.view if held else None

    def delta(self, key: str) -> DeltaRef | None:
        """Return the delta of that `key` that an extent which is here was stored as; None without one."""
        with self._changed:
            here = [entry.thing.extent.delta for entry in self._table.entries.values() if entry.is_here and entry.thing]
        return next((delta for delta in here if delta and delta.key == key), None)

    def ids(self) -> list[str]:
        """Return the ids of all that is here."""
        with self._changed:
            return [entry.key for entry in self._table.entries.values() if entry.is_here]

    def residents(self, ids: Iterable[str] | None = None) -> list[ResidentExtent]:
        """Return those of `ids` that are here, each once; without them, all: that takes as long as there are many."""
        with self._changed:
            entries = self._table.entries
            chosen = entries.values() if ids is None else map(entries.get, dict.fromkeys(ids))
            return [self._resident(found, found.thing) for found in chosen if found and found.is_here and found.thing]

    def totals(self) -> Totals:
        """Return the counts and bytes of what is here, at one moment."""
        with self._changed:
            table = self._table
            num_here = len(table.entries) - len(self._coming)
            return Totals(num_here, table.here_bytes, table.leased_bytes, table.pinned_bytes)

    @property
    def callable_bytes(self) -> int:
        """Bytes of extents that every holder may give back when asked: that looks at all."""
        with self._changed:
            entries = self._table.entries.values()
            return sum(entry.nbytes for entry in entries if entry.recallable and not entry.held)

    def bytes_by_holder(self) -> dict[str, int]:
        with self._changed:
            return self._table.bytes_by_holder()

    @property
    def wanted_bytes(self) -> int:
        """Bytes that the first waiter lacks; without one, bytes over the budget."""
        with self._changed:
            if self._queue.waiting:
                return plan_room(self._table, self._queue.waiting[0].wanted).lacking_bytes
            return max(0, self._table.used_bytes - self._table.budget_bytes)

    def holders_text(self) -> str:
        """Return who has the room: see `describe_holders`."""
        with self._changed:
            return describe_holders(self._table)

    def _resident(self, entry: Entry[HeldExtent], held: HeldExtent) -> ResidentExtent:
        holders, is_pinned = dict(entry.held + entry.recallable), entry.key in self._table.pinned
        return ResidentExtent(entry.key, entry.nbytes, holders, is_pinned, held.source, entry.num_uses)

    def _give_back(self, claim: Claim, holder: str) -> None:
        """Give back the leases of a claim that came to nothing. Of its own entries: some may be loading anew by now."""
        with self._changed:
            for entry in claim.entries:
                self._table.unlease(entry, holder)
                self._recalls.settle_lease(entry, holder)
            self._serve()

    def _on_gone(self, entries: Sequence[Entry[HeldExtent]]) -> None:
        """Tell of extents that went. What was invalidated has been told before."""
        if gone := [entry.key for entry in entries if entry.is_current]:
            self._on_change([], gone)

    def _on_settled(self, extents: Sequence[ExtentRef], claims: list[Claim], ticket: Ticket[HeldExtent]) -> None:
        """Add the claim of a request that was granted its leases. A holder that has died keeps none."""
        if ticket.entries is None:
            return
        by_id = {extent.id: extent for extent in extents}
        to_load = tuple(by_id[entry.key] for entry in ticket.fresh)
        self._coming |= {extent.id: (extent, concurrent.futures.Future()) for extent in to_load}
        for id_, count in Counter(extent.id for extent in extents).items():
            if count > 1:
                self._table.lease(self._table.entries[id_], ticket.holder, count - 1)
        if not (epoch := self._epochs.number(ticket.holder)):
            self._table.end_holder(ticket.holder)
        entries = tuple(self._table.entries[extent.id] for extent in extents)
        for entry in entries:
            self._recalls.expect_lease(entry, ticket.holder)
        claims.append(Claim(entries, tuple(map(self._arrival, entries)), to_load, epoch))

    def _arrival(self, entry: Entry[HeldExtent]) -> concurrent.futures.Future[HeldExtent]:
        if not entry.is_here:
            return self._coming[entry.key][1]
        here: concurrent.futures.Future[HeldExtent] = concurrent.futures.Future()
        here.set_result(entry.thing)  # type: ignore[arg-type]  # it is here
        return here

    def _lease(self, entry: Entry[HeldExtent], holder: str, count: int = 1) -> None:
        """A holder that has died gets none: nobody would give it back."""
        if not self._epochs.number(holder):
            self._table.use(entry)
            return
        self._table.lease(entry, holder, count)
        self._recalls.make_recallable(entry, holder)

    def _end_silent(self) -> None:
        for holder in self._recalls.silent():
            lives = self.watch.lives(holder)
            logger.warning("%s does not answer: %s", holder, "it keeps its leases" if lives else "it has died")
            (self._recalls.time_out if lives else self.end_holder)(holder)
            self._serve()

    def _serve(self) -> None:
        """Let those go on who can."""
        self._recalls.serve_queue()
        self._changed.notify_all()


def _named(extents: Sequence[ExtentRef]) -> str:
    """Return what a refusal calls these extents."""
    packs = sorted({extent.pack for extent in extents})
    return f"{len(extents)} extents of {listed(packs, MAX_NAMED)}"
