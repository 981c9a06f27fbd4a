"""A few slots shared fairly: the waiters of one tenant are served FIFO, and the tenants in turn.

Read slots are such: few requests are read at once, so that the event loop has time for probes and answers under
overload. A request has its slot from its whole body until it is in the admission queue, or until its answer. A request
that would spend most of its time on waiting for a slot is refused: what is read should still be done in time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Final

from cluster.admission.dispatcher import Dispatcher, NotAdmitted
from cluster.admission.records import Refusal
from cluster.admission.shares import Crowd, given_until
from cluster.records.errors import ClusterError
from configs.admission import AdmissionConfig

# The holder of a slot hardly pauses: all holders go on between two looks of the event loop at its sockets.
NUM_READ_SLOTS: Final = 3
_MOST_SHARE: Final = 0.5  # of a request's time that it may wait to be read
_SHORT_S: Final = 0.25  # a wait that a request with more time than that is never refused for
_NEW: Final = 0.05  # weight of a new interval in the mean of those between two slots


class SlotsFull(ClusterError):
    """Raised when the most waiters, `num_waiting`, wait for a slot already."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__(num_waiting)
        self.num_waiting = num_waiting


class FairSlots:
    """A number of slots on one event loop, and at most `max_waiting` waiters.

    Beyond that, the newest waiter of the tenant that has the most makes room for a tenant that has fewer.
    """

    def __init__(self, number: int, max_waiting: int) -> None:
        self._num_free = number
        self.max_waiting = max_waiting
        self._lines: OrderedDict[str, dict[asyncio.Future[None], None]] = OrderedDict()  # the next tenant first
        self._crowd = Crowd(AdmissionConfig())  # all of one weight: nobody knows yet what a request costs

    @property
    def num_waiting(self) -> int:
        """Number of waiters."""
        return len(self._crowd)

    @property
    def are_taken(self) -> bool:
        """Return whether a new request has to wait."""
        return self._num_free == 0

    def num_ahead(self, tenant: str) -> int:
        """Return how many slots are given out before one of the tenant who comes now has one."""
        num_own = len(self._lines.get(tenant, ()))
        others = [(1.0, len(line)) for other, line in self._lines.items() if other != tenant]
        return num_own + int(given_until(num_own + 1, others))

    async def acquire(self, tenant: str) -> None:
        """Wait for a slot, which the caller has to release. Raises SlotsFull, at once or to make room for another."""
        if self._num_free:
            self._num_free -= 1
            return
        if self.num_waiting >= self.max_waiting:
            self._make_room(tenant)
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, {})[slot] = None
        self._crowd.add(tenant)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled() and slot.exception() is None:
                self.release()  # it had the slot already
            else:
                self._remove(tenant, slot)
            raise

    def release(self) -> None:
        """Give the slot to the first waiter of the tenant whose turn it is."""
        while self._lines:
            tenant = next(iter(self._lines))
            slot = next(iter(self._lines[tenant]))
            self._remove(tenant, slot)
            if tenant in self._lines:
                self._lines.move_to_end(tenant)
            if not slot.done():
                slot.set_result(None)
                return
        self._num_free += 1

    def _make_room(self, tenant: str) -> None:
        if (richer := self._crowd.richer_than(tenant)) is None:
            raise SlotsFull(self.num_waiting)
        newest = next(reversed(self._lines[richer[1]]))
        if not newest.done():
            newest.set_exception(SlotsFull(self.num_waiting))
        self._remove(richer[1], newest)

    def _remove(self, tenant: str, slot: asyncio.Future[None]) -> None:
        """Remove a waiter; a second time does nothing."""
        line = self._lines.get(tenant, {})
        if slot in line:
            del line[slot]
            self._crowd.remove(tenant)
            if not line:
                del self._lines[tenant]


_current_slot: ContextVar[contextlib.ExitStack | None] = ContextVar("_current_slot", default=None)


def release_read_slot() -> None:
    """Let another request be read, if the current one has a slot: from now on it waits for something else."""
    if (slot := _current_slot.get()) is not None:
        slot.close()


class ReadLimiter:
    """The read slots before an admission queue. At most as many requests wait for one as may wait in the queue."""

    def __init__(self, queue: Dispatcher) -> None:
        self.now_s = queue.now_s
        self._queue = queue
        self._slots = FairSlots(NUM_READ_SLOTS, queue.config.max_waiting)
        self._interval_s = 0.0  # between two slots that requests waited for
        self._given_s = 0.0  # when the last one was given out

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for a slot."""
        return self._slots.num_waiting

    @contextlib.asynccontextmanager
    async def slot(self, tenant: str, ends_s: float) -> AsyncIterator[None]:
        """Wait for a slot and hold it at most as long as the context. The request's time ends at `ends_s`, by `now_s`.

        Raises NotAdmitted.
        """
        began_s = self.now_s()
        left_s, has_to_wait = ends_s - began_s, self._slots.are_taken
        longest_s = min(left_s, max(_SHORT_S, _MOST_SHARE * left_s))
        self._check(tenant, self._wait_s(tenant) if has_to_wait else 0.0, longest_s, left_s)
        self._slots.max_waiting = self._queue.config.max_waiting
        try:
            await self._slots.acquire(tenant)
        except SlotsFull as full:
            raise NotAdmitted(Refusal("queue_full", self._wait_s(tenant), limit=full.num_waiting)) from None
        with contextlib.ExitStack() as slot:
            slot.callback(self._slots.release)
            _current_slot.set(slot)
            now_s = self.now_s()
            if has_to_wait:
                self._interval_s += _NEW * (now_s - self._given_s - self._interval_s)
            self._given_s = now_s
            self._check(tenant, now_s - began_s, longest_s, ends_s - now_s)
            yield

    def _check(self, tenant: str, wait_s: float, longest_s: float, left_s: float) -> None:
        """Raise NotAdmitted where no time is left, or for a wait that is too long.

        A refusal tells the time until the present requests are read: then a new one would be read at once.
        """
        if left_s <= 0:
            raise NotAdmitted(Refusal("expired"))
        if wait_s > longest_s:
            raise NotAdmitted(Refusal("unread", max(0.0, self._wait_s(tenant) - longest_s)))

    def _wait_s(self, tenant: str) -> float:
        """Return the seconds that a new request of the tenant would wait, at the recent pace."""
        return self._slots.num_ahead(tenant) * self._interval_s
