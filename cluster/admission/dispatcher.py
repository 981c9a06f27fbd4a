"""The admission queue on an event loop: requests await their slots, and leave however they end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from cluster.admission.outcomes import EndedRequests
from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import (
    AdmissionSnapshot,
    Demand,
    Placement,
    Refusal,
    Refused,
    Started,
)
from cluster.records.errors import ClusterError
from configs.admission import AdmissionConfig

__all__ = ["AVOID_S", "Dispatcher", "NotAdmitted"]

AVOID_S: Final = 1.0  # a replica on which a request was lost


class NotAdmitted(ClusterError):
    """The request leaves the queue unserved: `refusal` says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal)
        self.refusal = refusal


class Dispatcher:
    """The queue of one event loop: a slot is a future replica. Times that callers give are seconds from now; `clock` is
    the queue's.

    One of several, `num_sharing`, starts requests within the slots that its `parts` own.
    """

    def __init__(
        self, config: AdmissionConfig, clock: Callable[[], float] = time.monotonic, num_sharing: int = 1
    ) -> None:
        self._queue = AdmissionQueue(config, num_sharing)
        self.now_s = clock
        self._numbers = itertools.count(1)
        self._slots: dict[int, asyncio.Future[str]] = {}  # by ticket, until it leaves
        self._timer: asyncio.TimerHandle | None = None
        self._replicas: dict[str, frozenset[str]] = {}
        self._avoided: dict[str, set[str]] = {}
        self.met_pools: set[str] = set()  # the pools that have ever had a replica
        self.changed = asyncio.Event()  # set when a controller should look at once; the controller clears it
        self.parts, self.arrivals = self._queue.parts, self._queue.arrivals
        self.parts_changed = asyncio.Event()  # set when the slots of all should be split anew

    @property
    def config(self) -> AdmissionConfig:
        """Bounds and weights in force."""
        return self._queue.config

    def submit(self, demand: Demand) -> int:
        """Let a request in and return its ticket, for which `leave` is called once. `demand.deadline_s` is from now."""
        ticket = next(self._numbers)
        self._slots[ticket] = asyncio.get_running_loop().create_future()
        now_s = self.now_s()
        try:
            self._queue.submit(ticket, replace(demand, deadline_s=now_s + demand.deadline_s), now_s)
            self.pump()
            if self._queue.places.is_unplaced(demand):
                self.changed.set()
        except BaseException:  # nobody will call `leave`
            del self._slots[ticket]
            self._queue.leave(ticket, self.now_s())
            raise
        return ticket

    def slot(self, ticket: int) -> asyncio.Future[str]:
        """Return a future of the replica, set when the request may start. Awaiting it raises NotAdmitted."""
        return self._slots[ticket]

    def reassign(self, ticket: int, *, is_lost: bool = True) -> asyncio.Future[str]:
        """Let a request wait again, before all others; return a future of its next replica.

        If its replica `is_lost`, nothing starts there for a moment, until the list of replicas is up to date. Awaiting
        the future raises NotAdmitted.
        """
        slot = self._slots[ticket] = asyncio.get_running_loop().create_future()
        pool, replica = self._queue.give_back(ticket, self.now_s())
        if is_lost and replica:  # without a name, Serve chooses the replica
            self._avoided.setdefault(pool, set()).add(replica)
            asyncio.get_running_loop().call_later(AVOID_S, self._trust, pool, replica)
            self._list_replicas(pool)
        self.pump()
        return slot

    def note_unable(self, ticket: int) -> bool:
        """Note that a running request's replica could not load its model: other requests of that model go elsewhere.

        Return whether there is another replica for this one.
        """
        return self._queue.note_unable(ticket, self.now_s())

    def leave(self, ticket: int, *, is_answered: bool = False, switch_s: float = 0.0) -> None:
        """End a request, wherever it is."""
        self._slots.pop(ticket, None)
        self._queue.leave(ticket, self.now_s(), is_answered=is_answered, switch_s=switch_s)
        self.pump()

    def set_replicas(self, pool: str, names: Collection[str]) -> None:
        """Set the list of replicas."""
        self._replicas[pool] = frozenset(names)
        if names:
            self.met_pools.add(pool)
        self._list_replicas(pool)
        self.pump()

    def num_replicas(self, pool: str) -> int:
        """Return the number of replicas that can be given work."""
        return len(self._trusted(pool))

    def set_placement(self, placement: Placement) -> None:
        """Start requests where `placement` lets them. Its `until_s` is from now."""
        self._queue.set_placement(replace(placement, until_s=self.now_s() + placement.until_s))
        self.pump()

    async def retune(self, config: AdmissionConfig) -> None:
        """Use other bounds and weights from now on."""
        self._queue.retune(config)
        self.pump()

    async def snapshot(self) -> AdmissionSnapshot:
        """Return the state of the queue."""
        return self._queue.snapshot(self.now_s())

    async def ended_requests(self, number: int | None) -> EndedRequests:
        """Return the requests that have ended, from a number on."""
        return self._queue.ended.after(number, self.now_s())

    def pump(self) -> None:
        """Start and refuse the requests whose time it is, and look again when that of others has come."""
        now_s = self.now_s()
        try:
            for event in self._queue.pump(now_s):
                if (slot := self._slots.get(event.ticket)) is not None:
                    _settle(slot, event)
        finally:
            self._set_timer()
            if self.parts.take_news():
                self.parts_changed.set()

    def _list_replicas(self, pool: str) -> None:
        self._queue.set_replicas(pool, self._trusted(pool), self.now_s())
        self.changed.set()

    def _trusted(self, pool: str) -> frozenset[str]:
        return self._replicas.get(pool, frozenset()) - self._avoided.get(pool, set())

    def _trust(self, pool: str, replica: str) -> None:
        self._avoided[pool].discard(replica)  # a second time does nothing
        self._list_replicas(pool)
        self.pump()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queue.num_waiting:
            delay_s = max(0.0, self._queue.look_again_s() - self.now_s())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.pump)


def _settle(slot: asyncio.Future[str], event: Started | Refused) -> None:
    """Set the result of a slot, unless its caller is about to leave."""
    if slot.done():
        return
    if isinstance(event, Refused):
        slot.set_exception(NotAdmitted(event.refusal))
        slot.exception()  # seen: its caller may leave without asking
    else:
        slot.set_result(event.replica)
