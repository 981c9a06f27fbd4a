"""The admission queue on an event loop: requests await their places, and leave however they end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Final

from cluster.control.admission import AdmissionQueue
from cluster.control.admission_records import AdmissionSnapshot, Placement, Refusal, Refused, Started
from cluster.control.ended_requests import EndedRequests
from cluster.control.lanes import Ask
from cluster.errors import ClusterError
from configs.admission import AdmissionConfig

__all__ = ["AVOID_S", "Dispatcher", "NotAdmitted"]

AVOID_S: Final = 1.0  # a replica on which a request was lost


class NotAdmitted(ClusterError):
    """The request leaves the queue unserved: `refusal` says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal)
        self.refusal = refusal


class Dispatcher:
    """The queue of one event loop: a place is a future. Times that callers give are seconds from now; `clock` is the
    queue's.

    `on_event` is told what happens, in place of those who await it: who has requests of others needs that.
    """

    def __init__(
        self,
        config: AdmissionConfig,
        clock: Callable[[], float] = time.monotonic,
        on_event: Callable[[Started | Refused], None] | None = None,
    ) -> None:
        self._queue = AdmissionQueue(config)
        self._clock = clock
        self._on_event = on_event or self._tell_who_waits
        self._numbers = itertools.count(1)
        self._places: dict[int, asyncio.Future[str]] = {}  # by ticket, until it leaves
        self._timer: asyncio.TimerHandle | None = None
        self._replicas: dict[str, frozenset[str]] = {}
        self._avoided: dict[str, set[str]] = {}
        self.news = asyncio.Event()  # set when a controller should look at once; it clears it

    @property
    def config(self) -> AdmissionConfig:
        """Bounds and weights in force."""
        return self._queue.config

    def submit(self, ask: Ask) -> int:
        """Let a request in and return its ticket. `ask.deadline_s` is from now. Who has a ticket calls `leave` once."""
        ticket = next(self._numbers)
        self._places[ticket] = asyncio.get_running_loop().create_future()
        self.enter(ticket, ask)
        return ticket

    def enter(self, ticket: int, ask: Ask) -> None:
        """Let a request in that has a ticket already."""
        now_s = self._clock()
        self._queue.submit(ticket, replace(ask, deadline_s=now_s + ask.deadline_s), now_s)
        self._pump()
        if self._queue.is_unplaced(ask, now_s):
            self.news.set()

    def refuse_unread(self, ask: Ask) -> Refusal | None:
        """Return why a request is refused that is like `ask`; None if it may come. `ask.deadline_s` is from now."""
        now_s = self._clock()
        return self._queue.refuse_unread(replace(ask, deadline_s=now_s + ask.deadline_s), now_s)

    def restore(self, ended: Iterable[int], held: Iterable[tuple[int, Ask, float, str | None]]) -> None:
        """End requests and take over others, all at once: nothing starts in between.

        Those that are taken over have their tickets, ages in seconds, and replicas, None for those that wait.
        """
        now_s = self._clock()
        for ticket in ended:
            self._queue.leave(ticket, now_s)
        for ticket, ask, age_s, replica in held:
            ask = replace(ask, deadline_s=now_s + ask.deadline_s)
            self._queue.restore(ticket, ask, now_s - age_s, now_s, replica)
        self._pump()

    def place(self, ticket: int) -> asyncio.Future[str]:
        """Return the future replica: it comes when the request may start. Raises, awaited: NotAdmitted."""
        return self._places[ticket]

    def place_again(self, ticket: int) -> asyncio.Future[str]:
        """Return another place to wait for, before all others: the replica died. Raises, awaited: NotAdmitted."""
        self._places[ticket] = asyncio.get_running_loop().create_future()
        self.give_back(ticket)
        return self._places[ticket]

    def give_back(self, ticket: int) -> None:
        """Let a request wait again, before all others: its replica died.

        Nothing starts there for a moment, in which the list of replicas follows.
        """
        pool, replica = self._queue.give_back(ticket, self._clock())
        if replica:  # one without a name is whichever Serve chooses
            self._avoided.setdefault(pool, set()).add(replica)
            asyncio.get_running_loop().call_later(AVOID_S, self._trust, pool, replica)
            self._list_replicas(pool)
        self._pump()

    def leave(self, ticket: int, *, is_answered: bool = False, switch_s: float = 0.0) -> None:
        """End a request, wherever it is."""
        self._places.pop(ticket, None)
        self._queue.leave(ticket, self._clock(), is_answered=is_answered, switch_s=switch_s)
        self._pump()

    def set_replicas(self, pool: str, names: Collection[str]) -> None:
        """Say which replicas there are."""
        self._replicas[pool] = frozenset(names)
        self._list_replicas(pool)
        self._pump()

    def num_replicas(self, pool: str) -> int:
        """Return the number of replicas that can be given work."""
        return self._queue.num_replicas(pool)

    def set_placement(self, placement: Placement) -> None:
        """Start requests where `placement` lets them. Its `until_s` is from now."""
        self._queue.set_placement(replace(placement, until_s=self._clock() + placement.until_s))
        self._pump()

    async def retune(self, config: AdmissionConfig) -> None:
        """Use other bounds and weights from now on."""
        self._queue.retune(config)
        self._pump()

    async def snapshot(self) -> AdmissionSnapshot:
        """Return the state of the queue."""
        return self._queue.snapshot(self._clock())

    async def ended_requests(self, number: int | None) -> EndedRequests:
        """Return the requests that have ended, from a number on."""
        return self._queue.ended.after(number, self._clock())

    def _list_replicas(self, pool: str) -> None:
        names = self._replicas.get(pool, frozenset()) - self._avoided.get(pool, set())
        self._queue.set_replicas(pool, names, self._clock())
        self.news.set()

    def _trust(self, pool: str, replica: str) -> None:
        self._avoided[pool].discard(replica)  # a second time does nothing
        self._list_replicas(pool)
        self._pump()

    def _pump(self) -> None:
        for event in self._queue.pump(self._clock()):
            self._on_event(event)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queue.num_waiting:
            delay_s = max(0.0, self._queue.look_again_s() - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._pump)

    def _tell_who_waits(self, event: Started | Refused) -> None:
        if (place := self._places.get(event.ticket)) is not None:
            settle_place(place, event)


def settle_place(place: asyncio.Future[str], event: Started | Refused) -> None:
    """Tell who awaits a place what became of it, unless they are about to leave."""
    if place.done():
        return
    if isinstance(event, Refused):
        place.set_exception(NotAdmitted(event.refusal))
        place.exception()  # seen: its caller may leave without asking
    else:
        place.set_result(event.replica)
