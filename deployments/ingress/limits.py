"""The limit on a body, at which a request is refused before anything parses it.

`deployments/limits.py` bounds what a record may ask for, and the admission queue how many requests there are.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import RequestTooLarge
from deployments.ingress.kserve.rest.routing import error_response_at


class BodyLimit:
    """ASGI middleware that refuses a body over `max_bytes`, announced or not, before anything parses it.

    Bodies of /v1/images, which may have images in them, have a limit of their own: `max_upload_bytes`.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_upload_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_upload_bytes = max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._max_upload_bytes if scope["path"].startswith("/v1/images/") else self._max_bytes
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > most:
            await error_response_at(scope["path"], _too_large(int(announced), most))(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise _too_large(received, most)
            return message

        await self._app(scope, counted, send)


def _too_large(nbytes: int, most: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body has {nbytes} bytes or more, at most {most} are allowed")
