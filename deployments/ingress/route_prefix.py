"""The path below which a cluster answers, taken off before anything of ours looks at a request's path."""

from __future__ import annotations

from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

_WITHOUT: Final = "atelier.without_prefix"


class WithoutPrefix:
    """ASGI middleware: a request below the prefix is one below the root."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._prefix or path.startswith(f"{self._prefix}/"):
            raw, prefix = scope.get("raw_path") or b"", self._prefix.encode()
            own: dict[str, Any] = {"path": path[len(prefix) :] or "/", "raw_path": raw.removeprefix(prefix) or b"/"}
            scope = {**scope, **own, _WITHOUT: True}
        await self._app(scope, receive, send)


class WithPrefix:
    """ASGI middleware inside a `WithoutPrefix`: Serve gets the whole path, by which it finds its application."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get(_WITHOUT):
            raw = scope.get("raw_path") or b""
            whole: dict[str, Any] = {"path": self._prefix + scope["path"], "raw_path": self._prefix.encode() + raw}
            scope = {**scope, **whole, _WITHOUT: False}
        await self._app(scope, receive, send)
