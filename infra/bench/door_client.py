"""The HTTP client of the load generator: no more than a load needs, for it takes its time from the server's cores.

A general client spends a millisecond on a request that opens a connection, five seconds of a core on five thousand.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httptools

TIMEOUT_S: Final = 300.0
_MAX_TEXT: Final = 1024  # bytes of an answer that are kept


@dataclass(slots=True)
class Answer:
    """The end of a request. Times are those of `time.perf_counter`; one in `pieces_s` for each read of the body."""

    sent_s: float = 0.0
    done_s: float = 0.0
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)  # names in lower case
    pieces_s: list[float] = field(default_factory=list)
    text: bytes = b""  # the beginning of the body


class Client:
    """Requests to one server. A connection serves one request at a time, and the next one when `keeps_open`."""

    def __init__(self, url: str, *, keeps_open: bool = True) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._keeps_open = keeps_open
        self._head = f"host: {parts.netloc}\r\n" + ("" if keeps_open else "connection: close\r\n")
        self._idle: list[_Connection] = []

    async def ask(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """Send a request, with a body as JSON where there is one, and return its answer.

        Whoever is cancelled closes the connection. Raises OSError when there is no connection or it breaks,
        TimeoutError after `TIMEOUT_S`.
        """
        head = self._head + "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        message = f"GET {path} HTTP/1.1\r\n{head}\r\n".encode()
        if body is not None:
            data = json.dumps(body).encode()
            head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n"
            message = f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data
        connection = self._idle.pop() if self._idle else await self._connect()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await connection.exchange(message)
        except BaseException:
            connection.close()
            raise
        if self._keeps_open and connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def close(self) -> None:
        """Close the connections that nobody uses."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self._idle), self._host, self._port)
        return connection


class _Connection(asyncio.Protocol):
    """One connection. Methods named `on_...` are those that the parser calls."""

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._waiter: asyncio.Future[Answer] | None = None
        self._answer = Answer()
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def exchange(self, message: bytes) -> asyncio.Future[Answer]:
        """Send a request; its answer is the future's."""
        self._waiter = asyncio.get_running_loop().create_future()
        if self._transport is None:
            self._fail("the connection is closed")
            return self._waiter
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(message)
        self._answer = Answer(time.perf_counter())
        return self._waiter

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (AttributeError, httptools.HttpParserError) as error:  # before a request, or no HTTP
            self._fail(f"{type(error).__name__}: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self in self._idle:
            self._idle.remove(self)
        self._fail("the server disconnected" if error is None else str(error))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._answer.pieces_s.append(time.perf_counter())
        if len(self._answer.text) < _MAX_TEXT:
            self._answer.text = (self._answer.text + body)[:_MAX_TEXT]

    def on_message_complete(self) -> None:
        self._answer.status, self._answer.done_s = self._parser.get_status_code(), time.perf_counter()
        if not self._parser.should_keep_alive():
            self.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(self._answer)

    def _fail(self, problem: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionError(problem))
