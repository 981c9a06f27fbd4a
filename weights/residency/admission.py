"""Admission to a memory tier: requests for entries that are here or fit get their leases, the others wait FIFO.

A request gets all of its leases or none: two that each hold half of what they need would wait for ever. It may
overtake the first in the queue when it needs no room and nothing that is being called back, until the first has
waited `patience_s`; from then on only what fits beside the first and everything else that has passed since, so that
there is room once the older leases have ended. A holder that has firm leases always passes: the first may be waiting
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

from weights.residency.entries import Book, Size, bytes_of
from weights.residency.leases import Entry, Thing

PATIENCE_S: Final = 1.0


@dataclass(eq=False, slots=True)
class Ticket(Generic[Thing]):
    """A request for leases: waiting, then granted, refused or ended.

    `what` names it in a refusal ("3 extents of flux.pack"). Granted, it has a firm lease on each of `entries`, in the
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
    """The queue for the room of one book. `where` names its budget in a refusal ("the node")."""

    def __init__(
        self, book: Book[Thing], clock: Callable[[], float], where: str, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._book = book
        self._clock = clock
        self._where = where
        self._patience_s = patience_s
        self._waiting: deque[Ticket[Thing]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first(self) -> Ticket[Thing] | None:
        """The ticket that room is made for; None when nobody waits."""
        return self._waiting[0] if self._waiting else None

    def ask(
        self,
        what: str,
        wanted: Mapping[str, Size],
        holder: str,
        on_settled: Callable[[Ticket[Thing]], None] = lambda ticket: None,
    ) -> Ticket[Thing]:
        """Return a ticket, granted if it can be at once and refused if it never can.

        `on_settled` hears of the grant or the refusal, perhaps before this returns; it must not call back.
        """
        ticket = Ticket(what, wanted, holder, self._clock(), on_settled)
        if self._waiting and self._may_pass(ticket):
            self._grant(ticket)
        elif (self._waiting and not self._is_hopeless(ticket)) or not self._try_first(ticket):
            self._waiting.append(ticket)
        return ticket

    def serve(self) -> None:
        """Grant what can be granted. Call it whenever room, an entry or the budget has changed."""
        self._book.shrink()
        while self._waiting and self._try_first(self._waiting[0]):
            self._waiting.popleft()
        for ticket in list(self._waiting)[1:]:
            if self._may_pass(ticket):
                self._waiting.remove(ticket)
                self._grant(ticket)

    def end_ticket(self, ticket: Ticket[Thing]) -> None:
        """Leave the queue, or give the leases back; ending twice is not an error."""
        if ticket.is_waiting:
            ticket.refusal = self._refuse(ticket, f"waited {self._clock() - ticket.since_s:.1f} s")
            self._waiting.remove(ticket)
        for entry in ticket.entries or ():
            self._book.unlease(entry, ticket.holder)
        ticket.entries = None
        ticket.refusal = ticket.refusal or "ended"
        self.serve()

    def _try_first(self, ticket: Ticket[Thing]) -> bool:
        """Settle the first in line if that can be done now; else ask for what was lent."""
        plan = self._book.plan_room(ticket.wanted)
        if not plan.missing_bytes and not plan.recall:
            self._book.evict(plan.evict)
            self._grant(ticket)
            return True
        if plan.missing_bytes and self._is_hopeless(ticket):
            ticket.refusal = self._refuse(ticket, "it can never fit beside what is pinned")
            ticket.on_settled(ticket)
            return True
        self._book.recall(plan.recall)
        return False

    def _may_pass(self, ticket: Ticket[Thing]) -> bool:
        """It needs no room, and does not keep the first waiting for ever."""
        first, book = self._waiting[0], self._book
        if not ticket.wanted.keys() <= book.entries.keys():
            return False
        is_called = any(book.entries[key].called for key in ticket.wanted)
        if self._clock() - first.since_s < self._patience_s and not is_called:
            return True
        if book.has_firm_leases(ticket.holder):
            return True
        if book.bytes_beside_pins(first.wanted, first.passed, ticket.wanted) > book.budget_bytes:
            return False
        first.passed.update(ticket.wanted)
        return True

    def _is_hopeless(self, ticket: Ticket[Thing]) -> bool:
        """It needs room, and would have none if all leases ended."""
        fits = self._book.bytes_beside_pins(ticket.wanted) <= self._book.budget_bytes
        return not fits and not ticket.wanted.keys() <= self._book.entries.keys()

    def _grant(self, ticket: Ticket[Thing]) -> None:
        book = self._book
        ticket.fresh = tuple(book.expect(key, size) for key, size in ticket.wanted.items() if key not in book.entries)
        ticket.entries = tuple(book.entries[key] for key in ticket.wanted)
        for entry in ticket.entries:
            book.lease(entry, ticket.holder)
        ticket.on_settled(ticket)

    def _refuse(self, ticket: Ticket[Thing], reason: str) -> str:
        lacking_bytes = self._book.plan_room(ticket.wanted).lacking_bytes
        return refusal_text(self._book, ticket.what, ticket.wanted, lacking_bytes, self._where, reason)


def refusal_text(
    book: Book[Thing], what: str, wanted: Mapping[str, Size], missing_bytes: int, where: str, reason: str = ""
) -> str:
    """Say what was wanted, how much room is missing, and who has it."""
    needed_bytes = sum(bytes_of(size) for key, size in wanted.items() if key not in book.entries)
    return (
        f"{what} need {needed_bytes} bytes; {missing_bytes} bytes are missing under the budget of {where}, "
        f"{book.budget_bytes} bytes ({reason + '; ' if reason else ''}{book.describe_holders()})"
    )
