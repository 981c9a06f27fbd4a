"""Recalls: a node asks replicas for extents back, and some replicas do not answer. Pure: the clock is a parameter.

A replica keeps mapped extents under leases that the node may recall. It asks for recalls by a long poll in a
thread of its own, and answers one with the next poll: nothing is sent while no room is needed, and no request of the
replica delays the answer. Extents that it does not give back stay with it, and are not recalled again at
once, or the two would go on asking and answering for as long as an extent is on its way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from cluster.keeper.records import HeldExtent, Recall, RecallAnswer
from weights.residency.admission import Admission, Ticket
from weights.residency.contents import Entry
from weights.residency.entry_table import EntryTable
from weights.residency.room_plan import plan_room

# An answer takes a few milliseconds. A replica that is just collecting garbage, or importing, stops for 300.
ANSWER_WITHIN_S: Final = 0.5
CHECK_S: Final = 0.05
URGE_AFTER_S: Final = 0.3  # the time that new requests may use a recalled extent that is in use already


@dataclass(eq=False)
class _PendingRecalls:
    """The recalls to one holder that are not delivered or not answered yet, and the length of its silence.

    Once it `is_timed_out`, no request waits for its answer, which may still come.
    """

    wake: Callable[[], None]
    number: int = 0
    wanted: dict[str, bool] = field(default_factory=dict)  # by id: overdue
    asked: set[str] = field(default_factory=set)
    silent_s: float = 0.0
    is_timed_out: bool = False

    @property
    def is_due(self) -> bool:
        return bool(self.wanted or self.asked) and not self.is_timed_out


class Recalls:
    """The leases of a table that may be recalled for its queue, and the polls of their holders. Not thread-safe."""

    def __init__(self, table: EntryTable[HeldExtent], queue: Admission[HeldExtent]) -> None:
        self.num_recalled = 0
        self._table = table
        self._queue = queue
        self._first: Ticket[HeldExtent] | None = None  # the request that the recalls are for
        self._lines: dict[str, _PendingRecalls] = {}
        self._declined: set[tuple[Entry[HeldExtent], str]] = set()  # recalled extents that a holder has kept
        self._coming: Counter[tuple[Entry[HeldExtent], str]] = Counter()  # leases that the holder does not know of yet
        self._checked_s = self._urged_s = table.now_s()

    def __contains__(self, holder: object) -> bool:
        """Return whether the holder answers recalls."""
        return holder in self._lines

    @property
    def is_waiting(self) -> bool:
        """Return whether an answer is due."""
        return any(line.is_due for line in self._lines.values())

    def serve_queue(self) -> None:
        """Grant the requests that can go on. Extents refused to the first are recalled again for the next."""
        self._queue.serve()
        while (first := self._queue.waiting[0] if self._queue.waiting else None) is not self._first:
            self._first = first
            self.forget_declined()
            self._queue.serve()

    def is_pending_for(self, ticket: Ticket[HeldExtent]) -> bool:
        """Return whether room is being recalled for the request, which should look again soon. Repeats overdue recalls.

        A refused extent is overdue when nothing else can make the room.
        """
        if self._queue.waiting[0] is not ticket:
            return False
        plan = plan_room(self._table, ticket.wanted)
        if plan.missing_bytes:
            self._urge(ticket)
        return bool(plan.recall or self._declined) or self.is_waiting

    def open_poll(self, holder: str, wake: Callable[[], None], answer: RecallAnswer | None) -> int:
        """Return the number of this poll, which ends the last one. `wake` is called when there is a recall.

        `answer` is to the last recall. From the first poll on, the holder's leases may be recalled.
        """
        if holder not in self._lines:
            self._lines[holder] = _PendingRecalls(wake)
            for entry in (*self._table.entries.values(), *self._table.detached):
                self._mark_recallable(entry, holder)
        line = self._lines[holder]
        if line.is_timed_out:
            line.is_timed_out = False
            self.forget_declined(holder)
        self._take_answer(holder, line.asked, answer)
        line.asked, line.silent_s = set(), 0.0
        line.number += 1
        line.wake()
        line.wake = wake
        return line.number

    def is_open(self, holder: str, number: int) -> bool:
        """Return whether the poll has no recall yet and no newer poll has taken its place."""
        line = self._lines.get(holder)
        return line is not None and line.number == number and not line.wanted

    def take_recall(self, holder: str, number: int) -> Recall:
        """Return the recall of that poll, which has to be answered from now on."""
        line = self._lines.get(holder)
        if line is None or line.number != number or not line.wanted:
            return Recall()
        recall = Recall(tuple(line.wanted), any(line.wanted.values()))
        line.asked, line.wanted = set(line.wanted), {}
        return recall

    def expect_lease(self, entry: Entry[HeldExtent], holder: str) -> None:
        """Hold recalls of a lease until it is settled: before, the holder could not give it back."""
        self._coming[entry, holder] += 1

    def settle_lease(self, entry: Entry[HeldExtent], holder: str) -> None:
        """Allow recalls of an expected lease."""
        self._coming[entry, holder] -= 1
        if not self._coming[entry, holder]:
            del self._coming[entry, holder]
        self.make_recallable(entry, holder)

    def make_recallable(self, entry: Entry[HeldExtent], holder: str) -> None:
        """Allow recalls of the holder's leases on the entry, if it answers polls and has not refused."""
        line = self._lines.get(holder)
        if line and line.is_timed_out:
            self._declined.add((entry, holder))
        elif line and (entry, holder) not in self._declined:
            self._mark_recallable(entry, holder)

    def call(self, holder: str, ids: Iterable[str], *, is_overdue: bool = False) -> None:
        """Ask the holder for extents, each once until it has answered."""
        if (line := self._lines.get(holder)) is None:
            return
        if not self.is_waiting:
            self._checked_s = self._table.now_s()
        for id_ in ids:
            if id_ not in line.asked:
                line.wanted[id_] = is_overdue or line.wanted.get(id_, False)
        if line.wanted:
            line.wake()

    def forget_declined(self, of: str | None = None) -> None:
        """Forget all refusals, or those of one holder: another recall asks from now on, and uses may have ended."""
        forgotten = {(entry, holder) for entry, holder in self._declined if of in (None, holder)}
        self._declined -= forgotten
        for entry, holder in forgotten:
            if not entry.is_gone:
                self.make_recallable(entry, holder)

    def end_holder(self, holder: str) -> None:
        """Forget a holder that has died; its poll ends."""
        if line := self._lines.pop(holder, None):
            line.wake()

    def silent(self) -> list[str]:
        """Return the holders that have not answered for too long. Call it every `CHECK_S` while a request waits.

        Time without calls, because this process stood still, does not count as silence.
        """
        now_s = self._table.now_s()
        passed_s, self._checked_s = min(now_s - self._checked_s, 2 * CHECK_S), now_s
        for line in self._lines.values():
            line.silent_s = line.silent_s + passed_s if line.is_due else 0.0
        return [holder for holder, line in self._lines.items() if line.silent_s > ANSWER_WITHIN_S]

    def time_out(self, holder: str) -> None:
        """Stop waiting for this answer: until it comes the holder keeps all its extents."""
        self._lines[holder].is_timed_out = True
        for entry in self._table.entries.values():
            self._decline(entry, holder)

    def _urge(self, first: Ticket[HeldExtent]) -> None:
        """Recall again, now and then, all refused extents that the first request does not want itself."""
        now_s = self._table.now_s()
        if min(now_s - first.since_s, now_s - self._urged_s) < URGE_AFTER_S:
            return
        self._urged_s = now_s
        for entry, holder in self._declined:
            if entry.is_current and entry.held[holder] and entry.key not in first.wanted:
                self.call(holder, [entry.key], is_overdue=True)

    def _take_answer(self, holder: str, asked: set[str], answer: RecallAnswer | None) -> None:
        for id_ in answer.given_back if answer else ():
            self._table.release(id_, holder)
        for id_ in asked:
            entry = self._table.entries.get(id_)
            is_kept = entry is not None and (holder in entry.held or holder in entry.recallable)
            if answer and not is_kept:
                self.num_recalled += 1
            elif answer and entry:
                self._decline(entry, holder)
            elif entry and (entry, holder) not in self._declined:
                entry.recall_requested.discard(holder)  # the answer was lost: it may be asked again

    def _decline(self, entry: Entry[HeldExtent], holder: str) -> None:
        """Leave an extent to the holder until its lease ends, or another request recalls it."""
        if holder in entry.recallable:
            self._table.make_held(entry, holder)
            self._declined.add((entry, holder))

    def _mark_recallable(self, entry: Entry[HeldExtent], holder: str) -> None:
        for _ in range(entry.held[holder] - self._coming[entry, holder]):
            self._table.mark_recallable(entry, holder)
