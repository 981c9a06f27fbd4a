"""Slots that few have at a time: waiters of one tenant are served FIFO, and the tenants in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from cluster.errors import ClusterError


class SlotsFull(ClusterError):
    """Raised when as many wait for a slot as may: `num_waiting`."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__(num_waiting)
        self.num_waiting = num_waiting


class FairSlots:
    """A number of slots on one event loop, and at most `max_waiting()` waiters.

    Beyond that, the newest waiter of the tenant that has the most makes room for a tenant that has fewer.
    """

    def __init__(self, number: int, max_waiting: Callable[[], int]) -> None:
        self._num_free = number
        self._max_waiting = max_waiting
        self._lines: OrderedDict[str, dict[asyncio.Future[None], None]] = OrderedDict()  # the next tenant first
        self.num_waiting = 0

    @property
    def are_taken(self) -> bool:
        """Return whether a request that comes now has to wait."""
        return self._num_free == 0

    def num_ahead(self, tenant: str) -> int:
        """Return how many slots are given out before one of the tenant who comes now has one."""
        num_own, num_tenants = len(self._lines.get(tenant, ())), len(self._lines.keys() | {tenant})
        return min(self.num_waiting, (num_own + 1) * num_tenants)

    async def acquire(self, tenant: str) -> None:
        """Wait for a slot, which the caller has to release. Raises SlotsFull, at once or when it has to make room."""
        if self._num_free:
            self._num_free -= 1
            return
        if self.num_waiting >= self._max_waiting():
            self._make_room(tenant)
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, {})[slot] = None
        self.num_waiting += 1
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
        if not self._lines:  # nobody may wait at all
            raise SlotsFull(self.num_waiting)
        most = max(self._lines, key=lambda name: len(self._lines[name]))
        if len(self._lines[most]) <= len(self._lines.get(tenant, ())) + 1:
            raise SlotsFull(self.num_waiting)
        newest = next(reversed(self._lines[most]))
        if not newest.done():
            newest.set_exception(SlotsFull(self.num_waiting))
        self._remove(most, newest)

    def _remove(self, tenant: str, slot: asyncio.Future[None]) -> None:
        """Remove a waiter; a second time does nothing."""
        line = self._lines.get(tenant, {})
        if slot in line:
            del line[slot]
            self.num_waiting -= 1
            if not line:
                del self._lines[tenant]
