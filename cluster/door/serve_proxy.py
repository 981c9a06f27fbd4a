"""Serve's own HTTP proxy, made to treat slow requests and deadlines as HAProxy does.

Serve calls `install` in the proxy's process, where `ENVIRONMENT` of its controller leads it: it needs Serve's private
modules. Replicas that HAProxy asks would call it, too, so that only a Serve without HAProxy gets it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Final

from ray.serve._private import proxy
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ENVIRONMENT: Final[Mapping[str, str]] = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.door.serve_proxy.install"
}
_START_BYTES: Final = 32 * 2**10
_START_TIMEOUT_S: Final = 30.0
_LATE: Final = {
    "message": f"the body did not begin within {_START_TIMEOUT_S:g} s",
    "type": "invalid_request_error",
    "param": None,
    "code": "request_timeout",
}


def install() -> list[Middleware]:
    """Leave deadlines to the ingress, which answers in the form of its protocols, and return `_BufferedStart`."""
    proxy.parse_request_timeout_header = lambda _, default_timeout_s: default_timeout_s
    return [Middleware(_BufferedStart)]


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
