"""The extents that a node wants back from replicas, and the replicas that do not answer. Pure: the clock is given.

A replica keeps what it has mapped under a lease that the node may call back. It asks for recalls by a long poll in a
thread of its own, and answers one with the next poll: nothing is sent while nobody needs room, and no request of the
replica stands before the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from cluster.keeper.records import Held, Recall, RecallAnswer
from weights.residency.admission import Admission, Ticket
from weights.residency.entries import Book
from weights.residency.leases import Entry

# An answer takes a few milliseconds. A replica that is just collecting garbage, or importing, stops for 300.
ANSWER_WITHIN_S: Final = 0.5
CHECK_S: Final = 0.05
URGE_AFTER_S: Final = 0.3  # so long new requests may use what is in use already, once somebody waits for its room


@dataclass(eq=False)
class _Line:
    """The questions to one holder, not delivered yet or not answered, and how long it has been silent."""

    wake: Callable[[], None]
    number: int = 0
    wanted: dict[str, bool] = field(default_factory=dict)  # by id: overdue
    asked: set[str] = field(default_factory=set)
    silent_s: float = 0.0

    @property
    def is_due(self) -> bool:
        return bool(self.wanted or self.asked)


class Recalls:
    """The leases of a book that may be called back for its queue, and the lines to their holders. Not thread-safe."""

    def __init__(self, book: Book[Held], queue: Admission[Held], clock: Callable[[], float]) -> None:
        self.num_recalled = 0
        self._book = book
        self._queue = queue
        self._first: Ticket[Held] | None = None  # for whom holders were asked
        self._clock = clock
        self._lines: dict[str, _Line] = {}
        self._declined: set[tuple[Entry[Held], str]] = set()  # what a holder was asked for while it used it
        self._checked_s = self._urged_s = clock()

    def __contains__(self, holder: object) -> bool:
        """Return whether the holder answers recalls."""
        return holder in self._lines

    @property
    def is_waiting(self) -> bool:
        """Return whether an answer is due."""
        return any(line.is_due for line in self._lines.values())

    def serve_queue(self) -> None:
        """Let those go on who can. What holders declined to give to the first, they are asked for again by the next."""
        self._queue.serve()
        while self._queue.first is not self._first:
            self._first = self._queue.first
            self.forget_declined()
            self._queue.serve()

    def is_pending_for(self, ticket: Ticket[Held]) -> bool:
        """Return whether room is called back for it, so that it is to look again soon. Asks again for what is overdue.

        What a holder declined to give is overdue when nothing else can make the room.
        """
        if self._queue.first is not ticket:
            return False
        plan = self._book.plan_room(ticket.wanted)
        if plan.missing_bytes:
            self._urge(ticket)
        return bool(plan.recall or self._declined) or self.is_waiting

    def open_poll(self, holder: str, wake: Callable[[], None], answer: RecallAnswer | None) -> int:
        """Return the number of this poll, which ends the one before. `wake` is called when there is something to hear.

        `answer` is to the recall before. From the first poll on, the holder's leases may be called back.
        """
        if holder not in self._lines:
            self._lines[holder] = _Line(wake)
            for entry in (*self._book.entries.values(), *self._book.apart):
                self._make_callable(entry, holder)
        line = self._lines[holder]
        self._take_answer(holder, line.asked, answer)
        line.asked, line.silent_s = set(), 0.0
        line.number += 1
        line.wake()
        line.wake = wake
        return line.number

    def is_open(self, holder: str, number: int) -> bool:
        """Return whether the poll has nothing to tell yet and no newer one has taken its place."""
        line = self._lines.get(holder)
        return line is not None and line.number == number and not line.wanted

    def take_recall(self, holder: str, number: int) -> Recall:
        """Return what that poll has to tell, which has to be answered from now on."""
        line = self._lines.get(holder)
        if line is None or line.number != number or not line.wanted:
            return Recall()
        recall = Recall(tuple(line.wanted), any(line.wanted.values()))
        line.asked, line.wanted = set(line.wanted), {}
        return recall

    def lend(self, entry: Entry[Held], holder: str) -> None:
        """Let the holder's leases on the entry be called back, if it answers and has not said that it uses it."""
        if holder in self._lines and (entry, holder) not in self._declined:
            self._make_callable(entry, holder)

    def call(self, holder: str, ids: Iterable[str], *, is_overdue: bool = False) -> None:
        """Ask the holder for extents, each once until it has answered."""
        if (line := self._lines.get(holder)) is None:
            return
        if not self.is_waiting:
            self._checked_s = self._clock()
        for id_ in ids:
            if id_ not in line.asked:
                line.wanted[id_] = is_overdue or line.wanted.get(id_, False)
        if line.wanted:
            line.wake()

    def forget_declined(self) -> None:
        """Forget who declined: somebody else asks from now on, and perhaps it is not used any more."""
        declined, self._declined = self._declined, set()
        for entry, holder in declined:
            if holder in self._lines and not entry.is_gone:
                self._make_callable(entry, holder)

    def end_holder(self, holder: str) -> None:
        """Forget a holder that has died; its poll ends."""
        if line := self._lines.pop(holder, None):
            line.wake()

    def silent(self) -> list[str]:
        """Return who has not answered for too long. Call it every `CHECK_S` while somebody waits for answers.

        Time in which nobody called, because this process stood still, is nobody's silence.
        """
        now_s = self._clock()
        passed_s, self._checked_s = min(now_s - self._checked_s, 2 * CHECK_S), now_s
        for line in self._lines.values():
            line.silent_s = line.silent_s + passed_s if line.is_due else 0.0
        return [holder for holder, line in self._lines.items() if line.silent_s > ANSWER_WITHIN_S]

    def _urge(self, first: Ticket[Held]) -> None:
        """Ask again, now and then, for all that was declined and that the first does not want itself."""
        now_s = self._clock()
        if min(now_s - first.since_s, now_s - self._urged_s) < URGE_AFTER_S:
            return
        self._urged_s = now_s
        for entry, holder in self._declined:
            if entry.is_current and entry.firm[holder] and entry.key not in first.wanted:
                self.call(holder, [entry.key], is_overdue=True)

    def _take_answer(self, holder: str, asked: set[str], answer: RecallAnswer | None) -> None:
        kept = asked.intersection(answer.kept) if answer else ()
        for id_ in answer.given_back if answer else ():
            self._book.release(id_, holder)
        for entry in filter(None, map(self._book.entries.get, asked)):
            if entry.key in kept and entry.callable[holder]:
                self._book.make_firm(entry, holder)  # until its lease ends, or somebody else asks
                self._declined.add((entry, holder))
            elif (entry, holder) not in self._declined:
                entry.called.discard(holder)  # whatever became of the answer: it may be asked again
        if answer:
            self.num_recalled += len(asked.difference(answer.kept))

    def _make_callable(self, entry: Entry[Held], holder: str) -> None:
        for _ in range(entry.firm[holder]):
            self._book.make_callable(entry, holder)
