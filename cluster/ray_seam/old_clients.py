"""Answers to clients of HTTP/1.0, which know no chunks: what has no length ends with its connection.

uvicorn writes chunks to them, and HAProxy passes on what it is given.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class PlainConnection(HttpToolsProtocol):
    """uvicorn's connection, without chunks for those who asked in HTTP/1.0."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            _end_by_closing(self.cycle)


def _end_by_closing(cycle: Any) -> None:
    """Let an answer that says no length be as long as its pieces are, and its connection close behind it.

    The answer has not begun: uvicorn makes a task for it, which runs later.
    """
    send, has_no_length = cycle.send, False

    async def send_plain(message: Message) -> None:
        nonlocal has_no_length
        if message["type"] == "http.response.start":
            has_no_length = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if has_no_length:
                cycle.chunked_encoding, cycle.keep_alive = False, False
        elif has_no_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain
