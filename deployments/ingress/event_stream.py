"""Server-sent events whose source ends with the connection."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class EventStream(StreamingResponse):
    """Closes `source`, which `events` are made of, when the client is gone, also while a part is being sent.

    Starlette leaves that to the garbage collector, and until then a replica would go on writing for nobody.
    """

    def __init__(self, events: AsyncIterator[str], source: AsyncGenerator[Any], **options: Any) -> None:
        super().__init__(events, media_type="text/event-stream", **options)
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()
