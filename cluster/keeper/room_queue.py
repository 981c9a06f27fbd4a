"""The queue for room on a node: who goes on, what is called back for the first, why one is refused. Pure.

Room is given in the order in which it was asked for. A request for what is already here overtakes those that wait, for
`OVERTAKE_S`; then it queues as well, or two models that do not fit together would never change places. A holder of
leases always overtakes: the first may be waiting for just those leases. Not so a holder that answers recalls: it has no
firm lease while it waits. What is called back for the first, nobody takes before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.keeper.recalls import Recalls
from cluster.keeper.records import Held
from weights.manifest import ExtentRef
from weights.residency.entries import Book, RoomPlan

OVERTAKE_S: Final = 2.0
# So long a request for what is being used may join, once somebody waits for its room.
PATIENCE_S: Final = 0.3
MAX_NAMED: Final = 5


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """One request in the queue: the extents that it wants, and when it came."""

    since_s: float
    wanted: Mapping[str, ExtentRef]
    sizes: Mapping[str, int]


class RoomQueue:
    """The requests for room in a book, in the order in which they came. Not thread-safe."""

    def __init__(self, book: Book[Held], recalls: Recalls, clock: Callable[[], float]) -> None:
        self._book = book
        self._recalls = recalls
        self._clock = clock
        self._tickets: deque[Ticket] = deque()
        self._called: set[str] = set()  # for the first
        self._urged_s = clock()

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def wanted_bytes(self) -> int:
        """Bytes that the first lacks; without one, bytes over the budget."""
        if self._tickets:
            return _lacking_bytes(self._book.plan_room(self._tickets[0].sizes))
        return max(0, self._book.used_bytes - self._book.budget_bytes)

    def join(self, extents: Sequence[ExtentRef]) -> Ticket:
        """Queue a request for all of the extents."""
        wanted = {extent.id: extent for extent in extents}
        ticket = Ticket(self._clock(), wanted, {id_: extent.nbytes for id_, extent in wanted.items()})
        self._tickets.append(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Take the request out of the queue. What holders declined to give to the first, they are asked for again."""
        if self._tickets[0] is ticket:
            self._called.clear()
            self._recalls.forget_declined()
        self._tickets.remove(ticket)

    def may_go(self, ticket: Ticket, holder: str) -> bool:
        """Return whether the request of `holder` is to be served now."""
        first = self._tickets[0]
        if not self.missing(ticket):
            overtakes = self._clock() - first.since_s < OVERTAKE_S and self._called.isdisjoint(ticket.wanted)
            is_never_called = self._book.has_leases(holder) and holder not in self._recalls
            return first is ticket or overtakes or is_never_called
        return first is ticket and _is_room(self._book.plan_room(ticket.sizes))

    def missing(self, ticket: Ticket) -> list[ExtentRef]:
        """Return the wanted extents that are neither here nor coming."""
        return [extent for id_, extent in ticket.wanted.items() if id_ not in self._book.entries]

    def never_fits(self, ticket: Ticket) -> bool:
        """Return whether the request exceeds the budget beside what is pinned, whatever is given back."""
        return self._book.bytes_beside_pins(ticket.sizes) > self._book.budget_bytes

    def call_back(self, ticket: Ticket) -> bool:
        """Call back the room that the request lacks, if it is the first. Return whether to look again soon."""
        if self._tickets[0] is not ticket:
            return False
        plan = self._book.plan_room(ticket.sizes)
        self._book.recall(plan.recall)
        self._called.update(entry.key for entry in plan.recall)
        now_s = self._clock()
        if plan.missing_bytes and min(now_s - ticket.since_s, now_s - self._urged_s) >= PATIENCE_S:
            self._urged_s = now_s
            self._called.update(self._recalls.urge(ticket.wanted))
        return bool(plan.recall) or self._recalls.is_pending

    def refusal(self, ticket: Ticket) -> str:
        """Return why the request is refused: how much is missing, and who holds it."""
        missing = self.missing(ticket)
        needed_bytes = sum(extent.nbytes for extent in missing)
        if self.never_fits(ticket):
            lacking_bytes = self._book.bytes_beside_pins(ticket.sizes) - self._book.budget_bytes
            reason = f"{sum(ticket.sizes.values())} bytes at once can never fit"
        else:
            lacking_bytes = _lacking_bytes(self._book.plan_room(ticket.sizes))
            reason = f"waited {self._clock() - ticket.since_s:.1f} s"
        packs = _named(sorted({extent.pack for extent in missing}))
        return (
            f"{len(missing)} extents of {packs} need {needed_bytes} bytes; {lacking_bytes} bytes are missing under the "
            f"node's budget of {self._book.budget_bytes} ({reason}; {self.holders_text()})"
        )

    def holders_text(self) -> str:
        """Return who has leases on how much, the greatest first, and how much is pinned."""
        holders = [f"{holder} ({nbytes} bytes)" for holder, nbytes in self._book.bytes_by_holder().items()]
        pinned = f"; pinned: {self._book.pinned_bytes} bytes" if self._book.pinned_bytes else ""
        return f"leased by: {_named(holders) or 'nobody'}{pinned}"


def _lacking_bytes(plan: RoomPlan[Held]) -> int:
    """Return the bytes that nobody can give, or else those that holders have to give back."""
    return plan.missing_bytes or sum(entry.nbytes for entry in plan.recall)


def _is_room(plan: RoomPlan[Held]) -> bool:
    return not plan.missing_bytes and not plan.recall


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
