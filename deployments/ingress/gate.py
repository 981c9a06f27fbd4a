"""The gate: the one ASGI layer around all routes. It refuses a request before anything parses its body.

It stands at two places of one way. Where HAProxy leads requests to this replica, `OuterGate` stands before Serve: what
Serve does for each of them takes a part of a millisecond and does not pause, so that a probe would wait while it does
that for thousands. There a request waits for its turn to be read (`turns.py`). Within Serve, `Gate` gives a turn to
what has none yet, and lets in what may ask: `access/` says who that is, `terms.py` what the request wants of the queue,
and the body is bounded here. `deployments/limits.py` bounds what a record may ask for, and the admission queue how many
requests there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.door.haproxy_rules import RECEIVED
from configs.cluster import LimitsConfig
from deployments.errors import RequestTooLarge, ServiceError
from deployments.ingress.access.callers import acting_for
from deployments.ingress.access.http import HttpAccess
from deployments.ingress.kserve.rest.routing import error_response_at
from deployments.ingress.terms import current_terms, read_terms
from deployments.ingress.turns import Turns, takes_turns

WAITED: Final = "atelier.waited_s"  # in the ASGI scope: how long the request waited to be read
_REFUSAL: Final = "atelier.refusal"  # in the ASGI scope: the error of a request that gets no turn
_TIMEOUT: Final = b"x-request-timeout-seconds"
_RECEIVED: Final = RECEIVED.encode()
_MAX_AGE_S: Final = 3600.0
_MAX_DIGITS: Final = 10  # of an announced size
_MAX_BYTES: Final = 2**16  # of a body that is kept while it waits for its turn
# Connections accepted at one look of the event loop at its sockets; more cost every single connection something.
_MOST_ACCEPTED: Final = 16
_LEAST_S: Final = 0.02  # shorter waits are none: what an answer says of the client's time stays what it said


class OuterGate:
    """ASGI middleware. Requests for inference go on when it is their turn.

    Large bodies, which are read in threads, come piece by piece and need none. With `refuses` off, a gate further in
    answers those that this one refuses: what stands between them has a part in every answer.
    """

    def __init__(self, app: ASGIApp, turns: Turns, *, refuses: bool = True) -> None:
        self._app = app
        self._turns = turns
        self._refuses = refuses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _REFUSAL in scope:
            await error_response_at(scope["path"], scope[_REFUSAL])(scope, receive, send)
        elif takes_turns(scope) and WAITED not in scope and _announced_bytes(scope) <= _MAX_BYTES:
            await self._take_turn(scope, receive, send)
        else:
            await self._let_in(scope, receive, send)

    async def _take_turn(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in when it is its turn. It has none while its client sends: slow ones hold up nobody."""
        turns, timeout_s = self._turns, _timeout_s(scope)
        arrived_s = _arrived_s(scope, turns.clock())
        error: ServiceError | None
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        if (error := turns.why_not_wait(timeout_s - turns.clock() + arrived_s)) is not None:
            await self._refuse(error, scope, _beginning_with(messages, receive), send)
            return
        # The whole body is here: there is one more message, which says that the client has gone or has its answer.
        leaving = asyncio.ensure_future(receive())
        is_crowded = turns.are_taken
        try:
            with turns.waiting() as free:
                await free.acquire()
            with turns.begin_turn() as turn:
                if _has_left(leaving):
                    return
                waited_s = turns.note_begin(is_crowded) - arrived_s
                rest = _beginning_with(messages, lambda: asyncio.shield(leaving))
                if (error := turns.why_late(waited_s, timeout_s)) is not None:
                    await self._refuse(error, scope, rest, send)
                    return
                if is_crowded:
                    send = self._noting_status(send)
                    body = b"".join(message.get("body", b"") for message in messages)
                    if (error := turns.ask_unread(turn, scope, body, waited_s)) is not None:
                        await self._refuse(error, scope, rest, send)
                        return
                scope[WAITED] = waited_s if waited_s > _LEAST_S else 0.0
                await self._let_in(scope, rest, send)
        finally:
            leaving.cancel()

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _refuse(self, error: ServiceError, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_REFUSAL] = error
        await (self if self._refuses else self._app)(scope, receive, send)

    def _noting_status(self, send: Send) -> Send:
        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._turns.note_status(message["status"])
            await send(message)

        return noted


class Gate(OuterGate):
    """ASGI middleware. What runs within has the key's tenant in `callers.current_tenant`, and `current_terms`.

    A body over `limits.max_body_bytes` is refused, announced or not. Bodies of /v1/images, which may have images in
    them, have a limit of their own: `max_upload_bytes`.
    """

    def __init__(self, app: ASGIApp, turns: Turns, access: HttpAccess, limits: LimitsConfig) -> None:
        super().__init__(app, turns)
        self._access = access
        self._limits = limits

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        with contextlib.ExitStack() as request:
            try:
                tenant = ""
                if caller := self._access.caller_of(scope["path"], scope["method"], headers):
                    request.enter_context(caller.begin_request())
                    request.enter_context(acting_for(caller))
                    tenant = caller.tenant
                if takes_turns(scope):
                    current_terms.set(replace(read_terms(headers, tenant), waited_s=scope.get(WAITED, 0.0)))
                receive = self._bounded(scope, receive)
            except ServiceError as error:
                await error_response_at(scope["path"], error)(scope, receive, send)
                return
            await self._app(scope, receive, send)

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """Return a `receive` that raises RequestTooLarge behind the limit; raises it now for a size that is known."""
        is_upload = scope["path"].startswith("/v1/images/")
        most = self._limits.max_upload_bytes if is_upload else self._limits.max_body_bytes
        if most < (announced := _announced_bytes(scope)) < math.inf:
            raise _too_large(announced, most)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise _too_large(received, most)
            return message

        return counted


def put_gate_before_serve(turns: Turns, *, refuses: bool) -> None:
    """Let an OuterGate stand before the HTTP server that Serve starts in this replica: for its direct ingress."""
    from ray.serve._private import replica

    start_server: Callable[..., Awaitable[Any]] = replica.start_asgi_http_server

    async def start(app: ASGIApp, *arguments: Any, **options: Any) -> Any:
        running, server = await start_server(OuterGate(app, turns, refuses=refuses), *arguments, **options)
        _accept_many(server)  # it begins when this coroutine ends
        return running, server

    replica.start_asgi_http_server = start


def _accept_many(server: uvicorn.Server) -> None:
    """Let a server that has not started yet accept several connections at each look of the event loop at its sockets.

    libuv, below uvloop, takes one from a listening socket (since 1.45). Where requests are read between two looks, ten
    milliseconds and more under load, the last of a thousand that HAProxy opens at once would wait for seconds, and
    every probe behind them. Each further descriptor of the same socket is good for one more.
    """
    startup = server.startup

    async def start(sockets: Sequence[socket.socket] | None = None) -> None:
        further = [one.dup() for one in sockets or () for _ in range(_MOST_ACCEPTED - 1)]
        await startup([*sockets, *further] if sockets else None)

    server.startup = start  # type: ignore[method-assign]


def _too_large(nbytes: float, most: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body has {nbytes} bytes or more, at most {most} are allowed")


def _announced_bytes(scope: Scope) -> float:
    """Return the size of the body as its client says it; infinity where it says none, or none that makes sense."""
    announced: Any = dict(scope["headers"]).get(b"content-length", b"")
    return int(announced) if announced.isdigit() and len(announced) <= _MAX_DIGITS else math.inf


def _arrived_s(scope: Scope, now_s: float) -> float:
    """Return when the request came to HAProxy, which notes it, on the clock that says `now_s`; else now.

    HAProxy is on the same node. Somebody else who sends the header makes the own request older, at most.
    """
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


def _has_left(leaving: asyncio.Future[Message]) -> bool:
    """Return whether nobody waits for an answer any more."""
    is_told = leaving.done() and not leaving.cancelled() and leaving.exception() is None
    return is_told and leaving.result()["type"] == "http.disconnect"


def _beginning_with(messages: list[Message], receive: Receive) -> Receive:
    rest = iter(messages)

    async def received() -> Message:
        return next(rest, None) or await receive()

    return received
