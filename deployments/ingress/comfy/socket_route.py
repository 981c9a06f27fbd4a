"""/ws: what a client is told of its prompts, over a websocket that lasts as long as the client."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any, Final

from fastapi import APIRouter, WebSocket
from pydantic_core import from_json
from starlette.websockets import WebSocketDisconnect

from deployments.ingress.access.callers import CALLER
from deployments.ingress.comfy.sockets import Socket, event_text
from deployments.ingress.comfy.watching import Watches
from deployments.records.errors import RateLimited

_MAX_CLIENT: Final = 128  # characters of a client's id
_MAX_CHARS: Final = 2**16  # of its first message
_TRY_LATER: Final = 1013  # codes of the end of a websocket, in IANA's list
_TOO_SLOW: Final = 1008


def create_socket_router(watches: Watches, features: dict[str, Any]) -> APIRouter:
    """Return the route. `features` are those of this server, for clients that tell theirs."""
    router = APIRouter()

    @router.websocket("/ws")
    async def serve(websocket: WebSocket) -> None:
        client = websocket.query_params.get("clientId", "")[:_MAX_CLIENT] or uuid.uuid4().hex
        try:
            with watches.opened(websocket.scope.get(CALLER), client) as socket:
                await websocket.accept()
                await _talk(websocket, socket, features)
        except RateLimited:
            await websocket.close(_TRY_LATER)

    return router


async def _talk(websocket: WebSocket, socket: Socket, features: dict[str, Any]) -> None:
    """Send messages until the client goes, or does not read them."""
    sending = asyncio.ensure_future(_send_all(websocket, socket))
    reading = asyncio.ensure_future(_read_all(websocket, socket, features))
    try:
        await asyncio.wait((sending, reading), return_when=asyncio.FIRST_COMPLETED)
    finally:
        has_client = not reading.done()
        for task in (sending, reading):
            task.cancel()
        await asyncio.wait((sending, reading))
    if has_client:
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await websocket.close(_TOO_SLOW)


async def _send_all(websocket: WebSocket, socket: Socket) -> None:
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # it has just gone
        while (message := await socket.next()) is not None:
            if isinstance(message, str):
                await websocket.send_text(message)
            else:
                await websocket.send_bytes(message)


async def _read_all(websocket: WebSocket, socket: Socket, features: dict[str, Any]) -> None:
    """Read the client's messages until it goes. Its first message may tell its features; others have no meaning."""
    is_first = True
    while (message := await websocket.receive())["type"] == "websocket.receive":
        told = _features_in(message.get("text") or "") if is_first else None
        is_first = False
        if told is not None:
            socket.takes_facts = told.get("supports_preview_metadata") is True
            socket.put(event_text("feature_flags", features))


def _features_in(text: str) -> dict[str, Any] | None:
    """Return the features that a message tells, None where it tells none."""
    if len(text) > _MAX_CHARS:
        return None
    with contextlib.suppress(ValueError):
        found = from_json(text)
        if isinstance(found, dict) and found.get("type") == "feature_flags" and isinstance(found.get("data"), dict):
            data: dict[str, Any] = found["data"]
            return data
    return None
