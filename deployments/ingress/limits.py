"""The limit on a body, at which a request is refused before anything parses it.

`deployments/limits.py` bounds what a record may ask for, and the admission queue how many requests there are.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import RequestTooLarge
from deployments.ingress.kserve.rest.routing import error_response_at


class BodyLimit:
    """ASGI middleware that refuses a body over `max_bytes`, announced or not, before anything parses it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await error_response_at(scope["path"], self._too_large(int(announced)))(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large(received)
            return message

        await self._app(scope, counted, send)

    def _too_large(self, nbytes: int) -> RequestTooLarge:
        return RequestTooLarge(f"the body has {nbytes} bytes or more, at most {self._max_bytes} are allowed")
