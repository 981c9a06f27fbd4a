"""HEAD on every GET route: the same status and headers, without the body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadRequests:
    """ASGI middleware. What runs within sees a GET, whose body is left out. Its end is that of the headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        has_ended = False

        async def send_head(message: Message) -> None:
            nonlocal has_ended
            if message["type"] == "http.response.start":
                await send(message)
            elif not has_ended:
                has_ended = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app({**scope, "method": "GET"}, receive, send_head)
