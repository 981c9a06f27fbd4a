"""The holders of a node's extents: which of them live, and their leases, releases and refusals. Ray-free."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from cluster.keeper.extent_book import ExtentBook
from cluster.keeper.holder_watch import HolderEpochs, HolderWatch
from cluster.keeper.records import HeldExtent, Recall, RecallAnswer
from cluster.process.processes import ProcessMark
from weights.residency.contents import Entry

MAX_USES: Final = 32  # of one extent that one report counts: more are one burst

logger = logging.getLogger("atelier.keeper")


class Holders:
    """The holders of one book, by name. Thread-safe.

    A holder that does not answer keeps its leases as long as `watch` sees it alive: it has its memory mapped, however
    long it was not scheduled.
    """

    def __init__(self, book: ExtentBook) -> None:
        self._book = book
        self._table = book.table
        self._epochs = HolderEpochs()
        self.watch = HolderWatch(self, clock=book.table.now_s)

    def greet(self, holder: str, process: ProcessMark | None = None) -> int:
        """Count the holder as living from now on, as long as its process. Return the epoch of its leases.

        It is 0 for a holder whose process has ended: its last call came late.
        """
        with self._book.changed:
            return self._epochs.renew(holder) if self.watch.on_heartbeat(holder, process) else 0

    def epoch(self, holder: str) -> int:
        """Return the epoch of the holder's leases; 0 for one that counts as dead."""
        with self._book.changed:
            return self._epochs.number(holder)

    def end(self, holder: str) -> None:
        """Count the holder as dead: its leases end, also those being granted just now."""
        with self._book.changed:
            self._book.recalls.end_holder(holder)
            self._epochs.expire(holder)
            self._table.end_holder(holder)
            self._book.serve()

    def end_silent(self) -> None:
        """Stop waiting for holders that do not answer recalls: dead ones lose their leases, the others keep them."""
        with self._book.changed:
            for holder in self._book.recalls.silent():
                lives = self.watch.lives(holder)
                logger.warning("%s does not answer: %s", holder, "it keeps its leases" if lives else "it has died")
                (self._book.recalls.time_out if lives else self.end)(holder)
                self._book.serve()

    def has_leases(self, holder: str) -> bool:
        """Return whether the holder has leases that are not recalled."""
        with self._book.changed:
            return self._table.has_held_leases(holder)

    def lease(self, entry: Entry[HeldExtent], holder: str, count: int = 1) -> None:
        """Lease a resident entry. A dead holder gets none: it would never be given back."""
        with self._book.changed:
            if not self._epochs.number(holder):
                self._table.use(entry)
                return
            self._table.lease(entry, holder, count)
            self._book.recalls.make_recallable(entry, holder)

    def lease_same(self, id_: str, ref: Any, holder: str, num_leases: int) -> bool:
        """Lease this very copy. Return False, with nothing changed, if another copy is resident."""
        with self._book.changed:
            held = self._book.here(id_)
            if held is None or held.ref != ref:
                return False
            self.lease(self._table.entries[id_], holder, num_leases)
            self._book.serve()  # holders need not wait for resident extents
            return True

    def adopt(self, held: HeldExtent, holder: str, num_leases: int) -> bool:
        """Lease `held` to the holder that has it mapped. Return False if others use another, resident copy.

        It may exceed the budget: the bytes are in memory anyway.
        """
        with self._book.changed:
            extent = held.extent
            if is_new := extent.id not in self._table.entries:
                entry = self._table.adopt(extent.id, extent.nbytes, held, held.source)
                self._book.tell([extent.id], [])
                self.lease(entry, holder, num_leases)
            elif not self.lease_same(extent.id, held.ref, holder, num_leases):
                self.add_detached(held, holder, num_leases)
            self._book.serve()
            return is_new

    def add_detached(self, held: HeldExtent, holder: str, num_leases: int) -> None:
        """Count a copy that only `holder` has mapped, and that no other holder may get, until it is given back."""
        with self._book.changed:
            if self._epochs.number(holder):  # the dead give nothing back
                entry = self._table.add_detached(held.extent.id, held.extent.nbytes, held, holder, num_leases)
                self._book.recalls.make_recallable(entry, holder)
            self._book.serve()

    def release(self, ids: Sequence[str], holder: str, epoch: int | None = None) -> None:
        """Give back one lease per id, of that epoch or of any. Unknown ids and holders are ignored."""
        with self._book.changed:
            if epoch is None or self._epochs.is_of(epoch, holder):
                for id_ in ids:
                    self._table.release(id_, holder)
            self._book.serve()

    def next_recall(self, holder: str, answer: RecallAnswer | None, epoch: int | None, timeout_s: float) -> Recall:
        """Wait for a recall of the holder's leases. Empty after the time, or when the holder counts as dead.

        `answer` is to the last recall, `epoch` that of its leases (None: another keeper's). See `Recalls.open_poll`.
        """
        recalls = self._book.recalls
        with self._book.changed:
            woken = threading.Condition(self._book.lock)
            if answer and not (epoch is not None and self._epochs.is_of(epoch, holder)):
                answer = replace(answer, given_back=())  # the leases have ended; the holder knows no others
            number = recalls.open_poll(holder, woken.notify_all, answer)
            self._book.serve()
            woken.wait_for(lambda: not recalls.is_open(holder, number), timeout_s)
            return recalls.take_recall(holder, number)

    def note_uses(self, uses: Mapping[str, int]) -> None:
        """Count uses by extent id of kept extents, which holders used without a new lease."""
        with self._book.changed:
            for id_, count in uses.items():
                if entry := self._table.entries.get(id_):
                    for _ in range(min(count, MAX_USES)):
                        self._table.use(entry)
