"""ComfyUI's paths below /api, where its own page asks: each is the one without it."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from configs.http import COMFYUI_PATHS

_PREFIX: Final = "/api"
_NAMES: Final = frozenset(path[1:] for path in COMFYUI_PATHS)
_OF_OLLAMA: Final = ("POST", "/api/embeddings")  # ComfyUI only gets its embeddings


class PathsBelowApi:
    """ASGI middleware that serves `/api/prompt` as `/prompt`, and so on. All others there are Ollama's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        is_ollamas = (scope.get("method"), path) == _OF_OLLAMA
        if path.startswith(f"{_PREFIX}/") and path.split("/", 3)[2] in _NAMES and not is_ollamas:
            raw: bytes = scope.get("raw_path") or b""
            scope = {**scope, "path": path.removeprefix(_PREFIX), "raw_path": raw.removeprefix(_PREFIX.encode())}
        await self._app(scope, receive, send)
