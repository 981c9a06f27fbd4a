"""A request's own deadline, kept from Serve: the ingress alone ends a request that is late, in words of its protocol.

Serve would cut the request off by the same header, in plain text, a moment earlier. The header therefore passes Serve
under another name: `HideDeadline` stands before what Serve reads, `ShowDeadline` within the ingress. A websocket has no
deadline: it lasts as long as its client, and Serve is told so.
"""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

_DEADLINE: Final = b"x-request-timeout-seconds"
_HIDDEN: Final = b"x-atelier-timeout-seconds"
_NONE: Final = (_DEADLINE, b"0")  # to Serve, no time limit


class HideDeadline:
    """ASGI middleware that renames the header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = _renamed(scope, _DEADLINE, _HIDDEN)
        if scope["type"] == "websocket":
            scope = {**scope, "headers": [*scope["headers"], _NONE]}
        await self._app(scope, receive, send)


class ShowDeadline:
    """ASGI middleware that gives the header its name back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(_renamed(scope, _HIDDEN, _DEADLINE), receive, send)


def _renamed(scope: Scope, name: bytes, other: bytes) -> Scope:
    """Return the scope with the header under its other name; the scope itself where it has none, as most have."""
    headers = scope.get("headers", ())
    if all(each != name for each, _ in headers):
        return scope
    return {**scope, "headers": [(other if each == name else each, value) for each, value in headers]}
