"""SharedQueue: the one admission queue of several ingress replicas. A named, detached actor.

Each ingress joins with all that it has, then sends what changes in batches, and listens: that is its heartbeat, too.
One that is silent for `SILENT_S` counts as dead, and its requests leave; one whose process is seen to run may be busy
for `_STALLED_S`: what it has runs on meanwhile. A message that may be lost ends a session: the ingress joins anew and
what it says then counts. So the actor needs no memory: after a restart it hands out nothing for
as long as an ingress that lives may need to join, and then knows all that runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from cluster.actor_names import admission_name
from cluster.control.admission_records import AdmissionSnapshot, Refused, Started
from cluster.control.dispatcher import Dispatcher
from cluster.control.ended_requests import EndedRequests
from cluster.control.lanes import Ask
from cluster.controller.actor import connect_controller
from cluster.controller.link import ControllerLink, link_queue
from cluster.processes import ProcessMark, is_alive
from cluster.ray_calls import call_actor, connect_actor
from cluster.registry.actor import WeightRegistry, connect_registry
from configs.admission import AdmissionConfig
from configs.cluster import ClusterConfig

__all__ = ["SharedQueue", "connect_shared_queue"]

SILENT_S: Final = 1.5
TICK_S: Final = 0.125
_STALLED_S: Final = 10.0
_NUM_TICKS: Final = round(SILENT_S / TICK_S)
_NUM_STALLED_TICKS: Final = round(_STALLED_S / TICK_S)
_SETTINGS_S: Final = 10.0
MAX_CALLS: Final = 10_000

logger = logging.getLogger("atelier.admission")


@dataclass(frozen=True, slots=True)
class Entered:
    """A request came. `ask.deadline_s` is from now."""

    ticket: int
    ask: Ask


@dataclass(frozen=True, slots=True)
class Returned:
    """A request lost its replica and waits again."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Left:
    """A request ended; see `AdmissionQueue.leave`."""

    ticket: int
    is_answered: bool
    switch_s: float


@dataclass(frozen=True, slots=True)
class Listed:
    """The replicas that the ingress knows."""

    pool: str
    names: frozenset[str]


Message = Entered | Returned | Left | Listed
Held = tuple[int, Ask, float, str | None]  # of a request that was let in: as `Dispatcher.restore` takes it


@dataclass(frozen=True, slots=True)
class News:
    """The events of one ingress's requests, and the settings: `config` is None while the ingress knows `revision`."""

    events: tuple[Started | Refused, ...]
    revision: str
    config: AdmissionConfig | None


@dataclass(slots=True, eq=False)
class _Session:
    number: int
    lists: dict[str, frozenset[str]]
    tickets: set[int]
    process: ProcessMark
    num_ticks: int = 0  # since the last heartbeat
    events: list[Started | Refused] = field(default_factory=list)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)


async def _no_settings() -> AdmissionConfig | None:
    return None


class SharedQueue:
    """The actor. It is async: an ingress that listens holds no thread. `fetch_settings` returns settings that were set
    while the cluster ran, None when they are those of `config`. `link` connects the queue with the controller.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        config: AdmissionConfig,
        fetch_settings: Callable[[], Awaitable[AdmissionConfig | None]] = _no_settings,
        clock: Callable[[], float] = time.monotonic,
        link: Callable[[Dispatcher], ControllerLink] | None = None,
    ) -> None:
        try:
            async with asyncio.timeout(_SETTINGS_S):
                config = await fetch_settings() or config
        except Exception as error:  # without settings there is a config; without this actor nothing is served
            logger.warning("the admission settings were not found: %s", str(error).partition("\n")[0])
        self._queue = Dispatcher(config, clock, self._tell)
        self._revision = uuid.uuid4().hex
        self._sessions: dict[str, _Session] = {}  # by ingress
        self._owners: dict[int, _Session] = {}  # by ticket
        self._num_ticks_closed = _NUM_TICKS
        self._ticking = asyncio.ensure_future(self._tick())
        self._link = link(self._queue) if link else None
        if self._link:
            self._link.start()

    async def join(
        self, ingress: str, number: int, held: Sequence[Held], lists: Mapping[str, frozenset[str]], process: ProcessMark
    ) -> News | None:
        """Begin the ingress's session of this number: it has these requests, and no others that were let in.

        `process` is the ingress's. None: there is a later session.
        """
        before = self._sessions.get(ingress)
        if before and before.number > number:
            return None
        session = _Session(number, dict(lists), {ticket for ticket, *_ in held}, process)
        self._sessions[ingress] = session
        gone = self._forget_tickets(before)
        self._owners |= dict.fromkeys(session.tickets, session)
        self._queue.restore(gone, held)
        self._list_replicas()
        return self._news(session, "")

    async def send(self, ingress: str, number: int, revision: str, messages: Sequence[Message]) -> News | None:
        """Take messages, in their order. None: this session is over."""
        session = self._session(ingress, number)
        if session is None:
            return None
        for message in messages:
            self._take(session, message)
        return self._news(session, revision)

    async def receive(self, ingress: str, number: int, revision: str, wait_s: float) -> News | None:
        """Wait for news, at most for `wait_s`. None: this session is over."""
        session = self._session(ingress, number)
        if session is None:
            return None
        if not session.events and revision == self._revision:
            session.has_news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await session.has_news.wait()
            if self._sessions.get(ingress) is not session:
                return None
        return self._news(session, revision)

    async def retune(self, config: AdmissionConfig) -> None:
        """Use other bounds and weights from now on."""
        await self._queue.retune(config)
        self._revision = uuid.uuid4().hex
        for session in self._sessions.values():
            session.has_news.set()

    async def snapshot(self) -> AdmissionSnapshot:
        """Return the state of the queue."""
        return await self._queue.snapshot()

    async def ended_requests(self, number: int | None) -> EndedRequests:
        """Return the requests of all ingresses that have ended, from a number on."""
        return await self._queue.ended_requests(number)

    def _session(self, ingress: str, number: int) -> _Session | None:
        session = self._sessions.get(ingress)
        if session is None or session.number != number:
            return None
        session.num_ticks = 0
        return session

    def _take(self, session: _Session, message: Message) -> None:
        match message:
            case Entered(ticket, ask):
                session.tickets.add(ticket)
                self._owners[ticket] = session
                self._queue.enter(ticket, ask)
            case Left(ticket, is_answered, switch_s):
                session.tickets.discard(ticket)
                self._owners.pop(ticket, None)
                self._queue.leave(ticket, is_answered=is_answered, switch_s=switch_s)
            case Returned(ticket):
                self._queue.give_back(ticket)
            case Listed(pool, names):
                session.lists[pool] = names
                self._list_replicas()

    def _tell(self, event: Started | Refused) -> None:
        session = self._owners[event.ticket]
        if isinstance(event, Refused):
            session.tickets.discard(event.ticket)
            del self._owners[event.ticket]
        session.events.append(event)
        session.has_news.set()

    def _news(self, session: _Session, revision: str) -> News:
        events, session.events = tuple(session.events), []
        return News(events, self._revision, self._queue.config if revision != self._revision else None)

    def _list_replicas(self) -> None:
        """Start requests on those replicas that every ingress knows: any of them may get the next place there."""
        if self._num_ticks_closed:
            return
        found: dict[str, frozenset[str]] = {}
        for session in self._sessions.values():
            for pool, names in session.lists.items():
                found[pool] = found.get(pool, names) & names
        for pool, names in found.items():
            self._queue.set_replicas(pool, names)

    def _forget_tickets(self, session: _Session | None) -> set[int]:
        """Return the tickets of a session that is over."""
        if session is None:
            return set()
        session.has_news.set()
        for ticket in session.tickets:
            del self._owners[ticket]
        return session.tickets

    async def _tick(self) -> None:
        """Count ticks of this loop, not time: when it stood still, messages may wait that it has not read."""
        while True:
            await asyncio.sleep(TICK_S)
            if self._num_ticks_closed:
                self._num_ticks_closed -= 1
                self._list_replicas()
            for ingress, session in list(self._sessions.items()):
                session.num_ticks += 1
                is_silent = session.num_ticks > _NUM_TICKS
                if is_silent and (session.num_ticks > _NUM_STALLED_TICKS or not _is_running(session.process)):
                    logger.warning("an ingress is gone with %d requests", len(session.tickets))
                    del self._sessions[ingress]
                    self._queue.restore(self._forget_tickets(session), ())
                    self._list_replicas()


def _is_running(mark: ProcessMark) -> bool:
    process = mark.seen()
    return process is not None and is_alive(process)


async def _settings_of_registry(config: ClusterConfig) -> AdmissionConfig | None:
    registry = await asyncio.to_thread(connect_registry, config)
    return await call_actor(registry, WeightRegistry.admission)


def _linked(config: ClusterConfig, queue: Dispatcher) -> ControllerLink:
    return link_queue(uuid.uuid4().hex, queue, partial(connect_controller, config), config.controller.tick_s)


def connect_shared_queue(config: ClusterConfig) -> Any:
    """Return the handle of the cluster's shared queue; the first caller starts it. Blocks."""
    link = partial(_linked, config) if config.controller.enabled else None
    settings = partial(_settings_of_registry, config)
    return connect_actor(SharedQueue, admission_name(config), MAX_CALLS, config.admission, settings, link=link)
