"""The shared admission queue as one ingress replica sees it: in place of a Dispatcher of its own.

One task keeps a session with the actor. What changes while a batch is under way goes with the next one, so that
requests cost one round trip, and ends of requests none. While the actor is away requests wait for its restart.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from ray.exceptions import RayActorError

from cluster.control.admission_records import AdmissionSnapshot, Refused
from cluster.control.dispatcher import settle_place
from cluster.control.ended_requests import EndedRequests
from cluster.control.lanes import Ask
from cluster.control.shared_queue import (
    SILENT_S,
    Entered,
    Held,
    Left,
    Listed,
    Message,
    News,
    Returned,
    SharedQueue,
)
from cluster.errors import ClusterError
from cluster.processes import ProcessMark
from cluster.ray_calls import call_actor
from configs.admission import AdmissionConfig

LISTEN_S: Final = SILENT_S / 5
CALL_S: Final = 5.0  # an actor that takes longer to answer is out of reach
PAUSE_S: Final = 0.1
_TICKET_BITS: Final = 64

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("atelier.admission")


class QueueAway(ClusterError):
    """The shared queue is restarting or out of reach."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request of this ingress. Times are of the client's clock."""

    ask: Ask
    arrived_s: float
    place: asyncio.Future[str]
    replica: str | None = None
    is_let_in: bool = False
    is_refused: bool = False
    is_measured: bool = True  # no session ended while it ran


class SharedQueueClient:
    """The queue of one event loop. `connect` returns a handle of the actor, and may block; `config` holds until then.

    Times that callers give are seconds from now. `process` tells the actor that this one runs.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        config: AdmissionConfig,
        clock: Callable[[], float] = time.monotonic,
        process: ProcessMark | None = None,
    ) -> None:
        self._connect = connect
        self._config = config
        self._clock = clock
        self._process = process or ProcessMark.this()
        self._actor: Any = None
        self._name = uuid.uuid4().hex
        self._tickets = itertools.count(secrets.randbits(_TICKET_BITS) << _TICKET_BITS)  # none in two ingresses
        self._sessions = itertools.count(1)
        self._revision = ""
        self._requests: dict[int, _Request] = {}
        self._lists: dict[str, frozenset[str]] = {}
        self._outbox: list[Message] | None = None  # None while there is no session
        self._has_mail = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def config(self) -> AdmissionConfig:
        """Bounds and weights in force, as far as they are known here."""
        return self._config

    def start(self) -> None:
        """Join the queue and stay in it. Has to be called on the event loop of the requests."""
        if self._task is None or self._task.done():
            # HAZARD: the task's calls must not be of the context of a request: Ray cancels those when that is.
            self._task = asyncio.get_running_loop().create_task(self._follow(), context=contextvars.Context())

    def submit(self, ask: Ask) -> int:
        """Let a request in and return its ticket. `ask.deadline_s` is from now. Who has a ticket calls `leave` once."""
        self.start()
        ticket, now_s = next(self._tickets), self._clock()
        ask = replace(ask, deadline_s=now_s + ask.deadline_s)
        self._requests[ticket] = _Request(ask, now_s, asyncio.get_running_loop().create_future())
        self._post(Entered(ticket, ask))
        return ticket

    def place(self, ticket: int) -> asyncio.Future[str]:
        """Return the future replica: it comes when the request may start. Raises, awaited: NotAdmitted."""
        return self._requests[ticket].place

    def place_again(self, ticket: int) -> asyncio.Future[str]:
        """Return another place to wait for, before all others: the replica died. Raises, awaited: NotAdmitted."""
        request = self._requests[ticket]
        request.replica, request.place = None, asyncio.get_running_loop().create_future()
        self._post(Returned(ticket))
        return request.place

    def leave(self, ticket: int, *, is_answered: bool = False, switch_s: float = 0.0) -> None:
        """End a request, wherever it is."""
        request = self._requests.pop(ticket)
        self._post(Left(ticket, is_answered and request.is_measured, switch_s))

    def set_replicas(self, pool: str, names: Collection[str]) -> None:
        """Say which replicas there are."""
        self._lists[pool] = frozenset(names)
        self._post(Listed(pool, self._lists[pool]))

    def num_replicas(self, pool: str) -> int:
        """Return the number of replicas that this ingress knows."""
        return len(self._lists.get(pool, ()))

    async def retune(self, config: AdmissionConfig) -> None:
        """Use other bounds and weights from now on, in the whole cluster. Raises QueueAway."""
        await self._asked(SharedQueue.retune, config)
        self._config = config

    async def snapshot(self) -> AdmissionSnapshot:
        """Return the state of the queue, the requests of all ingresses. Raises QueueAway."""
        return await self._asked(SharedQueue.snapshot)

    async def ended_requests(self, number: int | None) -> EndedRequests:
        """Return the requests of all ingresses that have ended, from a number on. Raises QueueAway."""
        return await self._asked(SharedQueue.ended_requests, number)

    def close(self) -> None:
        """Leave the queue without a word."""
        if self._task:
            self._task.cancel()

    async def _asked(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        self.start()
        try:
            return await self._call(method, *args, **kwargs)
        except (RayActorError, TimeoutError):
            raise QueueAway("the admission queue is restarting; try again") from None

    async def _call(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        async with asyncio.timeout(CALL_S):
            if self._actor is None:
                self._actor = await asyncio.to_thread(self._connect)
            return await call_actor(self._actor, method, *args, **kwargs)

    def _post(self, message: Message) -> None:
        """Send it with the next batch. Without a session, `_join` says it all."""
        if self._outbox is not None:
            self._outbox.append(message)
            self._has_mail.set()

    async def _follow(self) -> None:
        while True:
            try:
                await self._session()
            except Exception as error:  # whatever it is, the requests have their deadlines and the next one may do
                logger.warning("the shared queue does not answer: %s", str(error).partition("\n")[0])
                if isinstance(error, RayActorError):
                    self._actor = None  # Ray restarts it under its name, unless it was ended for good
            self._outbox = None
            await asyncio.sleep(PAUSE_S)

    async def _session(self) -> None:
        """Have one session; return when the actor says that it is over."""
        number = next(self._sessions)
        news = await self._call(
            SharedQueue.join, self._name, number, self._begin_anew(), dict(self._lists), self._process
        )
        if news is None:
            return
        self._absorb(news)
        parts = [asyncio.ensure_future(part) for part in (self._send(number), self._listen(number))]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    def _begin_anew(self) -> list[Held]:
        """Return what the actor has to know of before all else. Requests that nobody has let in yet follow as new."""
        now_s = self._clock()
        held: list[Held] = []
        self._outbox = []
        for ticket, request in self._requests.items():
            if request.is_refused:
                continue
            if not request.is_let_in:
                self._post(Entered(ticket, request.ask))
                continue
            request.is_measured = False
            held.append((ticket, _from(request.ask, now_s), now_s - request.arrived_s, request.replica))
        return held

    async def _send(self, number: int) -> None:
        while True:
            await self._has_mail.wait()
            self._has_mail.clear()
            if not self._outbox:
                continue
            batch, self._outbox = self._outbox, []
            now_s = self._clock()
            sent = [Entered(m.ticket, _from(m.ask, now_s)) if isinstance(m, Entered) else m for m in batch]
            news = await self._call(SharedQueue.send, self._name, number, self._revision, sent)
            if news is None:
                return
            for message in batch:
                if isinstance(message, Entered) and message.ticket in self._requests:
                    self._requests[message.ticket].is_let_in = True
            self._absorb(news)

    async def _listen(self, number: int) -> None:
        while news := await self._call(SharedQueue.receive, self._name, number, self._revision, LISTEN_S):
            self._absorb(news)

    def _absorb(self, news: News) -> None:
        self._revision = news.revision
        self._config = news.config or self._config
        for event in news.events:
            request = self._requests.get(event.ticket)
            if request is None:
                continue  # its end is under way
            if isinstance(event, Refused):
                request.is_refused = True
            else:
                request.replica, request.is_let_in = event.replica, True
            settle_place(request.place, event)


def _from(ask: Ask, now_s: float) -> Ask:
    return replace(ask, deadline_s=ask.deadline_s - now_s)
