"""The paths that are served as others: below the cluster's own prefix, below ComfyUI's /api, and vLLM's without /v1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from configs.http import COMFYUI_PATHS, HttpConfig

_IS_BELOW: Final = "atelier.is_below_prefix"  # of a request whose path has lost the cluster's own prefix


@dataclass(frozen=True, slots=True)
class OtherPath:
    """Paths that begin with `taken` are served with `given` in its place.

    `names` are the first ones behind `taken` that this is about; None is any, and nothing at all. `kept` stay as they
    are: a path for every method, or a method and a path.
    """

    taken: str
    given: str
    names: frozenset[str] | None = None
    kept: frozenset[str] = frozenset()

    def changed(self, scope: Scope) -> Scope | None:
        """Return the request with the path that is served, None where it stays as it is."""
        path: str = scope.get("path", "")
        behind = path.removeprefix(self.taken)
        if not path.startswith(self.taken) or behind[:1] not in ("", "/"):
            return None
        if self.names is not None and behind[1:].partition("/")[0] not in self.names:
            return None
        if path in self.kept or f"{scope.get('method')} {path}" in self.kept:
            return None
        raw: bytes | None = scope.get("raw_path")
        new = None if raw is None else self.given.encode() + raw.removeprefix(self.taken.encode()) or b"/"
        return {**scope, "path": self.given + behind or "/", "raw_path": new}


# ComfyUI's own page asks there. All others below /api are Ollama's, and of ComfyUI's embeddings only the list is asked.
BELOW_API: Final = OtherPath(
    "/api", "", frozenset(path[1:] for path in COMFYUI_PATHS), frozenset({"POST /api/embeddings"})
)
# OpenAI has no path /chat: it is a page.
UNPREFIXED: Final = OtherPath(
    "",
    "/v1",
    frozenset(
        {"chat", "classify", "completions", "embeddings", "images", "models", "pooling", "rerank", "responses", "score"}
    ),
    frozenset({"/chat"}),
)


def other_paths(config: HttpConfig) -> tuple[OtherPath, ...]:
    """Return the table of a cluster, in the order in which a request meets its lines."""
    own = (OtherPath(config.route_prefix, ""),) if config.route_prefix != "/" else ()
    return (*own, *(UNPREFIXED,) * config.compat.vllm, *(BELOW_API,) * config.compat.comfyui)


class OtherPaths:
    """ASGI middleware that serves some paths as others, by each line of a table in turn."""

    def __init__(self, app: ASGIApp, table: tuple[OtherPath, ...]) -> None:
        self._app = app
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for one in self._table:
            if (changed := one.changed(scope)) is not None:
                scope = changed if one.names is not None else {**changed, _IS_BELOW: True}
        await self._app(scope, receive, send)


class WithPrefix:
    """ASGI middleware inside `OtherPaths`: Serve gets the whole path, by which it finds its application."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get(_IS_BELOW):
            raw = scope.get("raw_path") or b""
            whole: dict[str, Any] = {"path": self._prefix + scope["path"], "raw_path": self._prefix.encode() + raw}
            scope = {**scope, **whole, _IS_BELOW: False}
        await self._app(scope, receive, send)
