"""Turns: few requests are read at once, so that the event loop has time for probes and answers while thousands come.

A request has its turn from its whole body to its place in the admission queue, where `admitted` ends it, or to its
answer. It has none while its client sends: slow clients hold up nobody. Large bodies, which are read in threads, come
piece by piece and need none.

A turn begins before Serve's replica sees the request where HAProxy leads requests to it. What Serve does for each of
them takes a part of a millisecond and does not pause, so that a probe would wait while it does that for thousands.
Where others wait for their turns, the queue is asked there about requests of a known form (`known_forms.py`): most of
an overload is refused so, without Serve, validation and records.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.control.lanes import Ask
from cluster.door.haproxy_rules import RECEIVED
from deployments.errors import DeadlineExceeded, QueueFull, ServiceError
from deployments.ingress.known_forms import Form, KnownForms
from deployments.ingress.kserve.rest.routing import error_response_at
from deployments.ingress.listening import accept_many

# Who has a turn hardly pauses, and all of them take theirs between two looks of the event loop at its sockets.
MAX_TURNS: Final = 3
WAITED: Final = "atelier.waited_s"  # in the ASGI scope: how long the request waited to be read
_REFUSED: Final = 429
_REFUSAL: Final = "atelier.refusal"  # in the ASGI scope: the error of a request that gets no turn
_TIMEOUT: Final = b"x-request-timeout-seconds"
_RECEIVED: Final = RECEIVED.encode()
_MAX_AGE_S: Final = 3600.0
_MAX_BYTES: Final = 2**16  # of a body that is kept while it waits for its turn
_NEW: Final = 0.05  # weight of a new turn in the time that turns take
# Who has spent more of its time on waiting to be read is refused unread, while most of those that are read are refused.
# Not sooner: the queue has room again when something ends, and those that wait here fill it.
_MOST_SHARE: Final = 0.5
_MOSTLY: Final = 0.5
_SHORT_S: Final = 0.25  # a wait for which nobody is refused who has more time than that
_LEAST_S: Final = 0.02  # shorter waits are none: what an answer says of the client's time stays what it said


class _Turn:
    """The turn of one request. `on_ask` is told what it needs, once that is known."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns: asyncio.Semaphore | None = turns
        self.on_ask: Callable[[Ask], None] | None = None

    def end(self, ask: Ask | None = None) -> None:
        """Let the next one begin. A second time does nothing."""
        if self._turns is not None:
            self._turns.release()
            self._turns = None
            if ask is not None and self.on_ask is not None:
                self.on_ask(ask)


_current_turn: ContextVar[_Turn | None] = ContextVar("_current_turn", default=None)


def end_turn(ask: Ask | None = None) -> None:
    """End the turn of the current request, if it has one: it waits from now on, for the place that it asks for."""
    if (turn := _current_turn.get()) is not None:
        turn.end(ask)


def takes_turns(scope: Scope) -> bool:
    """Return whether it is a request for inference. Probes, lists and the admin API never wait behind those."""
    path: str = scope.get("path", "")
    return scope["type"] == "http" and scope["method"] == "POST" and path.startswith(("/v1/", "/v2/models/"))


class Turns:
    """ASGI middleware. No more than `max_waiting()` requests wait for their turns, and only those that can be in time.

    It may stand at two places of one way: a request has the turn that the outer one gave it. With `refuses` off, the
    inner one answers those that the outer one refuses: what stands between them has a part in every answer. `forms`
    tell whether the queue refuses a request that has not been read.
    """

    def __init__(
        self, app: ASGIApp, max_waiting: Callable[[], int], *, refuses: bool = True, forms: KnownForms | None = None
    ) -> None:
        self._app = app
        self._max_waiting = max_waiting
        self._refuses = refuses
        self._forms = forms
        self._turns = asyncio.Semaphore(MAX_TURNS)
        self._num_waiting = 0
        self._turn_s = 0.0  # from one turn to the next, while requests wait for theirs
        self._begun_s = 0.0  # when the last one began
        self._refused_share = 0.0  # of those that were read of late while others waited

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not takes_turns(scope) or WAITED in scope:
            await self._app(scope, receive, send)
            return
        if _REFUSAL in scope:
            await error_response_at(scope["path"], scope[_REFUSAL])(scope, receive, send)
            return
        arrived_s = _arrived_s(scope)
        announced: Any = dict(scope["headers"]).get(b"content-length", b"")
        if not announced.isdigit() or len(announced) > 10 or int(announced) > _MAX_BYTES:
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        timeout_s = _timeout_s(scope)
        if (refusal := self._refusal(timeout_s - time.monotonic() + arrived_s)) is not None:
            await self._refuse(refusal, scope, _beginning_with(messages, receive), send)
            return
        # The whole body is here: there is one more message, which says that the client has gone or has its answer.
        leaving = asyncio.ensure_future(receive())
        self._num_waiting += 1
        is_crowded = self._turns.locked()
        try:
            await self._turns.acquire()
        except BaseException:
            leaving.cancel()
            raise
        finally:
            self._num_waiting -= 1
        turn = _Turn(self._turns)
        try:
            if _has_left(leaving):
                return
            waited_s = self._note_begin(is_crowded) - arrived_s
            receive_rest = _beginning_with(messages, lambda: asyncio.shield(leaving))
            if waited_s >= timeout_s:
                late = DeadlineExceeded("the request's timeout was over before the request could be read", "timeout")
                await self._refuse(late, scope, receive_rest, send)
                return
            if self._refused_share > _MOSTLY and waited_s > _longest_s(timeout_s):
                await self._refuse(self._too_many(), scope, receive_rest, send)
                return
            if is_crowded and self._forms is not None:
                body = b"".join(message.get("body", b"") for message in messages)
                if form := Form.of(scope["path"], dict(scope["headers"]), body):
                    if (error := self._forms.why_refused(form, waited_s)) is not None:
                        await self._refuse(error, scope, receive_rest, self._noting_refusals(send))
                        return
                    turn.on_ask = partial(self._forms.note_ask, form, waited_s=waited_s)
            scope[WAITED] = waited_s if waited_s > _LEAST_S else 0.0
            _current_turn.set(turn)
            await self._app(scope, receive_rest, self._noting_refusals(send) if is_crowded else send)
        finally:
            turn.end()
            leaving.cancel()

    def _noting_refusals(self, send: Send) -> Send:
        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._refused_share += _NEW * ((message["status"] == _REFUSED) - self._refused_share)
            await send(message)

        return noted

    def _note_begin(self, is_crowded: bool) -> float:
        """Take in that a turn begins now, and return the time."""
        now_s = time.monotonic()
        if is_crowded:
            self._turn_s += _NEW * (now_s - self._begun_s - self._turn_s)
        self._begun_s = now_s
        return now_s

    def _refusal(self, left_s: float) -> QueueFull | None:
        """Return why a request that has so much time left cannot wait for its turn; None if it can."""
        if self._num_waiting >= self._max_waiting():
            return QueueFull(f"{self._num_waiting} requests wait to be read, as many as may; try again in a moment")
        wait_s = self._num_waiting * self._turn_s
        longest_s = _longest_s(left_s) if self._refused_share > _MOSTLY else left_s
        return self._too_many() if wait_s > longest_s > 0 else None

    def _too_many(self) -> QueueFull:
        """Return the refusal of a request that would spend too much of its time on waiting to be read."""
        wait_s = self._num_waiting * self._turn_s
        text = "so many requests wait to be read that little time of this one would be left"
        return QueueFull(f"{text}; try again in {wait_s:.3g} s", retry_after_s=wait_s)

    async def _refuse(self, error: ServiceError, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_REFUSAL] = error
        await (self if self._refuses else self._app)(scope, receive, send)


def begin_turns_before_serve(max_waiting: Callable[[], int], *, refuses: bool, forms: KnownForms | None) -> None:
    """Let turns begin at the HTTP server that Serve starts in this replica: for direct ingress, in Serve's words."""
    from ray.serve._private import replica

    start_server = replica.start_asgi_http_server

    async def start(app: ASGIApp, *arguments: Any, **options: Any) -> Any:
        running, server = await start_server(
            Turns(app, max_waiting, refuses=refuses, forms=forms), *arguments, **options
        )
        accept_many(server)  # it begins when this coroutine ends
        return running, server

    replica.start_asgi_http_server = start


def _arrived_s(scope: Scope) -> float:
    """Return when the request came to HAProxy, which notes it, on this process's monotonic clock; else now.

    HAProxy is on the same node. Somebody else who sends the header makes the own request older, at most.
    """
    now_s = time.monotonic()
    noted: Any = dict(scope["headers"]).get(_RECEIVED, b"")
    if not noted.isdigit() or len(noted) > 20:
        return now_s
    return now_s - min(max(0.0, time.time() - int(noted) / 1e6), _MAX_AGE_S)


def _timeout_s(scope: Scope) -> float:
    """Return the time that the request gives itself; infinity where it says none, or none that makes sense."""
    try:
        timeout_s = float(dict(scope["headers"]).get(_TIMEOUT, b"inf"))
    except ValueError:
        return math.inf
    return timeout_s if timeout_s > 0 else math.inf  # it is refused for that later


def _longest_s(timeout_s: float) -> float:
    """Return how long a request with so much time may wait to be read."""
    return min(timeout_s, max(_SHORT_S, _MOST_SHARE * timeout_s))


def _has_left(leaving: asyncio.Future[Message]) -> bool:
    """Return whether nobody waits for an answer any more."""
    is_told = leaving.done() and not leaving.cancelled() and leaving.exception() is None
    return is_told and leaving.result()["type"] == "http.disconnect"


def _beginning_with(messages: list[Message], receive: Receive) -> Receive:
    rest = iter(messages)

    async def received() -> Message:
        return next(rest, None) or await receive()

    return received
