"""Admission to a memory tier: requests for entries that are here or fit get their leases, the others wait FIFO.

A request gets all of its leases or none: two that each hold half of what they need would wait for ever. It may
overtake the first in the queue when it needs no room and nothing that is being called back, until the first has
waited `PATIENCE_S`; from then on only what fits beside the first and everything else that has passed since, so that
there is room once the older leases have ended. A holder that has held leases always passes: the first may be waiting
for just those. Not so with leases that were called back for the first and that it uses still.

Not thread-safe, and it does not wait: the adapter does, on a lock or an event loop, and calls `serve` when room became
free. HAZARD: refusals are text. An exception knows the frames that it came through; one that such a frame keeps makes
a circle, and what the frames hold stays until Python looks for circles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic

from weights.records.errors import listed
from weights.residency.contents import Entry, Thing
from weights.residency.entry_table import EntryTable
from weights.residency.room_plan import fits_beside_pins, plan_room, shrink
from weights.residency.sizes import DistinctBytes, Size, bytes_of, shown_bytes

PATIENCE_S: Final = 1.0
MAX_NAMED: Final = 5  # holders in a refusal


@dataclass(eq=False, slots=True)
class Ticket(Generic[Thing]):
    """A request for leases: waiting, then granted, refused or ended.

    `what` names it in a refusal ("3 extents of flux.pack"). Granted, it has a held lease on each of `entries`, in the
    order of `wanted`; its owner loads those that are `fresh`. Refused, or ended while it waited, it has a `refusal`.
    """

    what: str
    wanted: Mapping[str, Size]
    holder: str
    since_s: float
    on_settled: Callable[[Ticket[Thing]], None]
    entries: tuple[Entry[Thing], ...] | None = None
    fresh: tuple[Entry[Thing], ...] = ()
    refusal: str | None = None
    passed: dict[str, Size] = field(default_factory=dict)  # what went past it since its patience ended

    @property
    def is_waiting(self) -> bool:
        return self.entries is None and self.refusal is None


class Admission(Generic[Thing]):
    """The queue for the room of one table. `where` names its budget in a refusal ("store.node_budget_bytes")."""

    def __init__(self, table: EntryTable[Thing], where: str) -> None:
        self._table = table
        self._where = where
        self.waiting: deque[Ticket[Thing]] = deque()  # room is made for the first

    def ask(
        self,
        what: str,
        wanted: Mapping[str, Size],
        holder: str,
        on_settled: Callable[[Ticket[Thing]], None] = lambda ticket: None,
    ) -> Ticket[Thing]:
        """Return a ticket, granted if it can be at once and refused if it never can.

        `on_settled` gets the grant or the refusal, perhaps before this returns; it must not call back.
        """
        ticket = Ticket(what, wanted, holder, self._table.now_s(), on_settled)
        if self.waiting and self._may_pass(ticket):
            self._grant(ticket)
        elif (self.waiting and not self._is_hopeless(ticket)) or not self._try_first(ticket):
            self.waiting.append(ticket)
        return ticket

    def serve(self) -> None:
        """Grant what can be granted. Call it whenever room, an entry or the budget has changed."""
        shrink(self._table)
        while self.waiting and self._try_first(self.waiting[0]):
            self.waiting.popleft()
        for ticket in list(self.waiting)[1:]:
            if self._may_pass(ticket):
                self.waiting.remove(ticket)
                self._grant(ticket)

    def end_ticket(self, ticket: Ticket[Thing]) -> None:
        """Leave the queue, or give the leases back; ending twice is not an error."""
        if ticket.is_waiting:
            ticket.refusal = self._refuse(ticket, f"waited {self._table.now_s() - ticket.since_s:.1f} s")
            self.waiting.remove(ticket)
        for entry in ticket.entries or ():
            self._table.unlease(entry, ticket.holder)
        ticket.entries = None
        ticket.refusal = ticket.refusal or "ended"
        self.serve()

    def _try_first(self, ticket: Ticket[Thing]) -> bool:
        """Settle the first in line if that can be done now; else recall what may be asked back."""
        plan = plan_room(self._table, ticket.wanted)
        if not plan.missing_bytes and not plan.recall:
            self._table.evict(plan.evict)
            self._grant(ticket)
            return True
        if plan.missing_bytes and self._is_hopeless(ticket):
            ticket.refusal = self._refuse(ticket, "it can never fit beside the pinned entries")
            ticket.on_settled(ticket)
            return True
        self._table.recall(plan.recall)
        return False

    def _may_pass(self, ticket: Ticket[Thing]) -> bool:
        """It needs no room, and does not keep the first waiting for ever."""
        first, table = self.waiting[0], self._table
        if not ticket.wanted.keys() <= table.entries.keys():
            return False
        is_recalled = any(table.entries[key].recall_requested for key in ticket.wanted)
        if self._table.now_s() - first.since_s < PATIENCE_S and not is_recalled:
            return True
        if table.has_held_leases(ticket.holder):
            return True
        if not fits_beside_pins(table, first.wanted, first.passed, ticket.wanted):
            return False
        first.passed.update(ticket.wanted)
        return True

    def _is_hopeless(self, ticket: Ticket[Thing]) -> bool:
        """It needs room, and would have none if all leases ended."""
        fits = fits_beside_pins(self._table, ticket.wanted)
        return not fits and not ticket.wanted.keys() <= self._table.entries.keys()

    def _grant(self, ticket: Ticket[Thing]) -> None:
        table = self._table
        ticket.fresh = tuple(table.expect(key, size) for key, size in ticket.wanted.items() if key not in table.entries)
        ticket.entries = tuple(table.entries[key] for key in ticket.wanted)
        for entry in ticket.entries:
            table.lease(entry, ticket.holder)
        ticket.on_settled(ticket)

    def _refuse(self, ticket: Ticket[Thing], reason: str) -> str:
        lacking_bytes = plan_room(self._table, ticket.wanted).lacking_bytes
        return refusal_text(self._table, ticket.what, ticket.wanted, lacking_bytes, self._where, reason)


def refusal_text(
    table: EntryTable[Thing], what: str, wanted: Mapping[str, Size], missing_bytes: int, where: str, reason: str = ""
) -> str:
    """Describe the request, the room that is missing under the budget `where`, and the holders of the rest."""
    absent = [size for key, size in wanted.items() if key not in table.entries]
    needed, parts = shown_bytes(sum(map(bytes_of, absent))), DistinctBytes()
    for size in absent:
        parts.add(size)
    for place, nbytes in parts.elsewhere.items():
        needed += f" and {shown_bytes(nbytes)} of {place}'s {shown_bytes(table.elsewhere.get(place, 0))}"
    return (
        f"{where} is {shown_bytes(table.budget_bytes)}; {what} need {needed}, "
        f"{shown_bytes(missing_bytes)} are missing ({reason + '; ' if reason else ''}{describe_holders(table)})"
    )


def describe_holders(table: EntryTable[Thing]) -> str:
    """List the holders of the room: leases, the greatest first, pinned bytes, and bytes that come for nobody yet."""
    leased = table.bytes_by_holder()
    holders = [f"{holder} ({shown_bytes(nbytes)})" for holder, nbytes in leased.items()]
    text = f"leased by: {listed(holders, MAX_NAMED, 'nobody')}"
    pinned_bytes = sum(entry.nbytes for key in table.pinned if (entry := table.entries.get(key)) is not None)
    coming_bytes = sum(entry.nbytes for entry in table.coming if entry.is_current and not entry.is_leased)
    for label, nbytes in (("pinned", pinned_bytes), ("prefetches under way", coming_bytes)):
        if nbytes:
            text += f"; {label}: {shown_bytes(nbytes)}"
    return text
