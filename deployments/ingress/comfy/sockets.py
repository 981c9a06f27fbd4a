"""The open websockets of one ingress, by API key and client, and what is sent over them.

A client that reads more slowly than events come loses previews first, then its connection.
"""

from __future__ import annotations

import asyncio
import io
import json
import struct
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from deployments.records.errors import RateLimited
from deployments.records.tasks import Tasks

MAX_SOCKETS: Final = 512  # of one ingress
MAX_OF_KEY: Final = 64
_MAX_WAITING: Final = 4096  # messages of a client that does not read
_MAX_PREVIEWS: Final = 2  # among them
_PREVIEW_SIDE: Final = 512
_PREVIEW, _PREVIEW_WITH_FACTS = 1, 4  # kinds of binary messages
_JPEG = 1

Message = str | bytes


class Socket:
    """One websocket's messages, in the order in which they go out."""

    def __init__(self, key: str, client: str) -> None:
        self.key = key
        self.client = client
        self.takes_facts = False  # with previews: it has said so
        self._waiting: deque[Message] = deque()
        self._num_previews = 0
        self._has_more = asyncio.Event()
        self._is_greeted = False
        self._is_over = False

    def greet(self, message: Message) -> None:
        """Send a message before all others, which wait for it."""
        self._waiting.appendleft(message)
        self._is_greeted = True
        self._has_more.set()

    def put(self, message: Message) -> None:
        """Send a message when its turn comes."""
        if len(self._waiting) >= _MAX_WAITING:
            self.end()
        is_preview = isinstance(message, bytes)
        if self._is_over or (is_preview and self._num_previews >= _MAX_PREVIEWS):
            return
        self._num_previews += is_preview
        self._waiting.append(message)
        self._has_more.set()

    def end(self) -> None:
        """Send nothing more."""
        self._is_over = True
        self._waiting.clear()
        self._has_more.set()

    async def next(self) -> Message | None:
        """Return the next message; None when there will be none: the client has not read for too long."""
        while not (self._waiting and self._is_greeted) and not self._is_over:
            self._has_more.clear()
            await self._has_more.wait()
        if self._is_over:
            return None
        message = self._waiting.popleft()
        self._num_previews -= isinstance(message, bytes)
        return message


class Sockets:
    """All of one ingress. Lives on one event loop."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], list[Socket]] = {}
        self._num_of_key: Counter[str] = Counter()
        self._previews = Tasks()

    @contextmanager
    def opened(self, key: str, client: str) -> Iterator[Socket]:
        """Yield a client's new socket, which gets messages until the context ends. Raises RateLimited."""
        if self._num_of_key[key] >= MAX_OF_KEY or self._num_of_key.total() >= MAX_SOCKETS:
            raise RateLimited(f"{self._num_of_key[key]} websockets of this key are open, as many as may be")
        socket = Socket(key, client)
        self._num_of_key[key] += 1
        self._open.setdefault((key, client), []).append(socket)
        try:
            yield socket
        finally:
            self._num_of_key[key] -= 1
            self._num_of_key += Counter()  # without keys that have none
            self._open[key, client].remove(socket)
            if not self._open[key, client]:
                del self._open[key, client]

    @property
    def is_showing(self) -> bool:
        """Return whether a preview is being made."""
        return len(self._previews) > 0

    def of(self, key: str, client: str | None) -> list[Socket]:
        """Return the sockets of a client, none without one."""
        return self._open.get((key, client), []) if client is not None else []

    def send(self, key: str, client: str | None, type_: str, data: Mapping[str, Any]) -> None:
        """Send an event to a client."""
        if found := self.of(key, client):
            text = event_text(type_, data)
            for socket in found:
                socket.put(text)

    def show(
        self,
        key: str,
        client: str | None,
        image: npt.NDArray[np.uint8],
        facts: Mapping[str, Any],
        *,
        to_all: bool,
    ) -> None:
        """Send a preview, unless the one before is still being made.

        HAZARD: some clients take any binary message for a result, so that without `to_all` only those get it that take
        its facts.
        """
        if not self.is_showing:
            self._previews.run(self._send_preview(key, client, image, facts, to_all=to_all))

    async def _send_preview(
        self,
        key: str,
        client: str | None,
        image: npt.NDArray[np.uint8],
        facts: Mapping[str, Any],
        *,
        to_all: bool,
    ) -> None:
        file = await asyncio.to_thread(_jpeg_of, image)
        plain = struct.pack(">II", _PREVIEW, _JPEG) + file
        described = json.dumps({**facts, "image_type": "image/jpeg"}).encode()
        whole = struct.pack(">II", _PREVIEW_WITH_FACTS, len(described)) + described + file
        for socket in self.of(key, client):
            if socket.takes_facts:
                socket.put(whole)
            elif to_all:
                socket.put(plain)


def event_text(type_: str, data: Mapping[str, Any]) -> str:
    """Return an event as it is sent. HAZARD: some clients take only texts that begin with `{"type":`."""
    return json.dumps({"type": type_, "data": data})


def _jpeg_of(image: npt.NDArray[np.uint8]) -> bytes:
    found = Image.fromarray(image)
    found.thumbnail((_PREVIEW_SIDE, _PREVIEW_SIDE), Image.Resampling.BILINEAR)
    file = io.BytesIO()
    found.save(file, "JPEG", quality=95)
    return file.getvalue()
