"""Turns: few requests are read at once, so that the event loop has time for probes and answers while thousands come.

A request has its turn from its whole body to its place in the admission queue, where `admitted` ends it, or to its
answer. It has none while its client sends: slow clients hold up nobody. Large bodies, which are read in threads, come
piece by piece and need none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.door.haproxy_rules import RECEIVED
from deployments.errors import QueueFull
from deployments.ingress.kserve.rest.routing import error_response_at

MAX_TURNS: Final = 8
WAITED: Final = "atelier.waited_s"  # in the ASGI scope: how long the request waited to be read
_RECEIVED: Final = RECEIVED.encode()
_MAX_AGE_S: Final = 3600.0
_MAX_BYTES: Final = 2**16  # of a body that is kept while it waits for its turn
_LEAST_S: Final = 0.02  # shorter waits are none: what an answer says of the client's time stays what it said


class _Turn:
    """The turn of one request."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns: asyncio.Semaphore | None = turns

    def end(self) -> None:
        """Let the next one begin. A second time does nothing."""
        if self._turns is not None:
            self._turns.release()
            self._turns = None


_current_turn: ContextVar[_Turn | None] = ContextVar("_current_turn", default=None)


def end_turn() -> None:
    """End the turn of the current request, if it has one: it waits for its place from now on."""
    if (turn := _current_turn.get()) is not None:
        turn.end()


def takes_turns(scope: Scope) -> bool:
    """Return whether it is a request for inference. Probes, lists and the admin API never wait behind those."""
    path: str = scope.get("path", "")
    return scope["type"] == "http" and scope["method"] == "POST" and path.startswith(("/v1/", "/v2/models/"))


class Turns:
    """ASGI middleware. No more than `max_waiting()` requests wait for their turns."""

    def __init__(self, app: ASGIApp, max_waiting: Callable[[], int]) -> None:
        self._app = app
        self._max_waiting = max_waiting
        self._turns = asyncio.Semaphore(MAX_TURNS)
        self._num_waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not takes_turns(scope):
            await self._app(scope, receive, send)
            return
        arrived_s = _arrived_s(scope)
        announced: Any = dict(scope["headers"]).get(b"content-length", b"")
        if not announced.isdigit() or len(announced) > 10 or int(announced) > _MAX_BYTES:
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        if self._num_waiting >= self._max_waiting():
            error = QueueFull(f"{self._num_waiting} requests wait to be read, as many as may; try again in a moment")
            await error_response_at(scope["path"], error)(scope, receive, send)
            return
        self._num_waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._num_waiting -= 1
        turn = _Turn(self._turns)
        waited_s = time.monotonic() - arrived_s
        scope[WAITED] = waited_s if waited_s > _LEAST_S else 0.0
        _current_turn.set(turn)
        try:
            await self._app(scope, _beginning_with(messages, receive), send)
        finally:
            turn.end()


def _arrived_s(scope: Scope) -> float:
    """Return when the request came to HAProxy, which notes it, on this process's monotonic clock; else now.

    HAProxy is on the same node. Somebody else who sends the header makes the own request older, at most.
    """
    now_s = time.monotonic()
    noted: Any = dict(scope["headers"]).get(_RECEIVED, b"")
    if not noted.isdigit() or len(noted) > 20:
        return now_s
    return now_s - min(max(0.0, time.time() - int(noted) / 1e6), _MAX_AGE_S)


def _beginning_with(messages: list[Message], receive: Receive) -> Receive:
    rest = iter(messages)

    async def received() -> Message:
        return next(rest, None) or await receive()

    return received
