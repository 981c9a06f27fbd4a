"""How large the body of a request may be. What its record may ask for is bounded in `deployments/limits.py`."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import RequestTooLarge
from deployments.ingress.errors import error_response
from deployments.ingress.kserve.rest.errors import is_protocol_path, protocol_error


class BodyLimit:
    """ASGI middleware: refuses a body over `max_bytes`, announced or not, before anything parses it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await self._refuse(int(announced), scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise RequestTooLarge(self._text(received))
            return message

        await self._app(scope, counted, send)

    async def _refuse(self, nbytes: int, scope: Any, receive: Any, send: Any) -> None:
        respond = protocol_error if is_protocol_path(scope["path"]) else error_response
        await respond(RequestTooLarge(self._text(nbytes)))(scope, receive, send)

    def _text(self, nbytes: int) -> str:
        return f"the body has {nbytes} bytes or more, at most {self._max_bytes} are allowed"
