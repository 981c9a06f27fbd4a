"""Ids of requests: the client's own, or one that is made at the door; in answers, log lines and calls of replicas.

HAProxy checks and makes them (`cluster/door/haproxy_rules.py`). `RequestIds` does the same where no HAProxy is.
"""

from __future__ import annotations

import re
import uuid
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.door.haproxy_rules import REQUEST_ID, REQUEST_ID_FORM
from cluster.ray_seam.request_context import current_request_id, set_request_id

_FORM: Final = re.compile(REQUEST_ID_FORM)
_NAME: Final = REQUEST_ID.encode()
_DONE: Final = "atelier.request_id"  # in the ASGI scope: a layer further out does it


def accepted(asked: str | None) -> str:
    """Return the id that a client gives its request, or one of our own where it has none that fits a line of log."""
    return asked if asked is not None and _FORM.fullmatch(asked) else str(uuid.uuid4())


def part_id() -> str:
    """Return an id for a part of the current request, which no other part of it has, nor of another of the same id."""
    return f"{current_request_id()}/{uuid.uuid4().hex}".removeprefix("/")


class RequestIds:
    """ASGI middleware: what is within sees each request with an id, and its answer has that id, once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _DONE in scope:
            await self._app(scope, receive, send)
            return
        asked = [value.decode("latin-1") for name, value in scope["headers"] if name == _NAME]
        id_ = accepted(asked[0] if len(asked) == 1 else None)
        own = _NAME, id_.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                others = [pair for pair in message.get("headers", ()) if pair[0].lower() != _NAME]
                message = {**message, "headers": [*others, own]}
            await send(message)

        set_request_id(id_)
        headers = [*(pair for pair in scope["headers"] if pair[0] != _NAME), own]
        await self._app({**scope, "headers": headers, _DONE: True}, receive, send_with_id)
