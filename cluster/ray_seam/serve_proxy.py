"""Serve's own HTTP proxy, made to treat slow requests, half-open connections and deadlines as HAProxy does.

Serve calls `install` in the proxy's process, where `ENVIRONMENT` of its controller leads it. Replicas that HAProxy asks
would call it, too, so that only a Serve without HAProxy gets it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import uvicorn.config
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.door.deadlines import HideDeadline
from cluster.process.logs import bound_access_log
from cluster.ray_seam import shims
from cluster.ray_seam.old_clients import PlainConnection
from cluster.ray_seam.request_ids import RequestIds

ENVIRONMENT: Final[Mapping[str, str]] = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.ray_seam.serve_proxy.install"
}
_START_BYTES: Final = 32 * 2**10
_START_TIMEOUT_S: Final = 30.0
_HEAD_TIMEOUT_S: Final = 10.0
_MAX_HEAD_BYTES: Final = 64 * 2**10
_MAX_PER_ADDRESS: Final = 2048  # connections of one client's address at once
_LATE: Final = {
    "message": f"the body did not begin within {_START_TIMEOUT_S:g} s",
    "type": "invalid_request_error",
    "param": None,
    "code": "request_timeout",
}


def install() -> list[Middleware]:
    """Return the middlewares before Serve, the outermost last: `_BufferedStart`, one that leaves deadlines alone, ids.

    Servers that this process makes without a choice of their own bound their connections (`_BoundedConnection`).
    """
    shims.require(shims.PROXY_HTTP)
    bound_access_log()
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{_BoundedConnection.__name__}"
    return [Middleware(_BufferedStart), Middleware(HideDeadline), Middleware(RequestIds)]


class _BoundedConnection(PlainConnection):
    """uvicorn's connection with bounds: the time and the size of each request's head, and how many an address has.

    uvicorn itself waits for a head as long as its client likes.
    """

    num_of: ClassVar[Counter[str]] = Counter()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._num_head_bytes = 0
        self._late: asyncio.TimerHandle | None = None
        self._address = self.client[0] if self.client else ""
        self.num_of[self._address] += 1
        if self.num_of[self._address] > _MAX_PER_ADDRESS:
            transport.abort()
        else:
            self._late = self.loop.call_later(_HEAD_TIMEOUT_S, self._refuse_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        self.num_of[self._address] -= 1
        if not self.num_of[self._address]:
            del self.num_of[self._address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._late is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._late is None:  # the first request's time began with its connection
            self._late = self.loop.call_later(_HEAD_TIMEOUT_S, self._refuse_head)

    def on_headers_complete(self) -> None:
        self._head_is_here()
        super().on_headers_complete()

    def _head_is_here(self) -> None:
        self._num_head_bytes = 0
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse_head(self) -> None:
        self._head_is_here()
        if not self.transport.is_closing():
            self.send_400_response("The request's headers are too large, or came too slowly.")


class _BufferedStart:
    """ASGI middleware that lets a request in when its whole body is here, or the first 32 KiB of it.

    Until then a slow client holds a connection only, and no place in a replica.
    """

    def __init__(self, app: ASGIApp, timeout_s: float = _START_TIMEOUT_S) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                messages = await _receive_start(receive)
        except TimeoutError:
            await _refuse(send)
            return
        messages.reverse()

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)


async def _receive_start(receive: Receive) -> list[Message]:
    messages, num_bytes = list[Message](), 0
    while num_bytes < _START_BYTES:
        messages.append(await receive())
        num_bytes += len(messages[-1].get("body", b""))
        if not messages[-1].get("more_body", False):  # its end, or that of the connection
            break
    return messages


async def _refuse(send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 408, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": _LATE}).encode()})
