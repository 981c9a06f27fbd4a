"""A stream of events ends its source when the client goes, wherever it is at that moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from deployments.ingress.messages.responses import EventStream


class Source:
    """Yields numbers; the one at `stuck_at` never comes."""

    def __init__(self, stuck_at: int) -> None:
        self._stuck_at = stuck_at
        self.is_closed = False

    async def numbers(self) -> AsyncGenerator[int]:
        try:
            for number in range(9):
                if number == self._stuck_at:
                    await asyncio.Event().wait()
                yield number
        finally:
            self.is_closed = True


async def events(numbers: AsyncIterator[int]) -> AsyncIterator[str]:
    async for number in numbers:
        yield f"data: {number}\n\n"


async def test_the_events_go_out() -> None:
    source = Source(stuck_at=99)
    sent = await run(source, lambda message: None)
    assert b"".join(sent) == b"".join(b"data: %d\n\n" % number for number in range(9))
    assert source.is_closed


@pytest.mark.parametrize("stuck_at", [3, 99])
async def test_who_leaves_closes_the_source(stuck_at: int) -> None:
    """While the next piece is made, and while one is sent to a client that does not read: then no error comes from
    the source's own side, and nothing would close it before Python looks for garbage.
    """
    source, is_there = Source(stuck_at), asyncio.Event()

    async def on_send(message: Any) -> None:
        if message.get("body") == b"data: 2\n\n":
            is_there.set()
            if stuck_at == 99:
                await asyncio.Event().wait()

    running = asyncio.create_task(run(source, on_send))
    await is_there.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert source.is_closed


async def run(source: Source, on_send: Any) -> list[bytes]:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        if (waiting := on_send(message)) is not None:
            await waiting
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    numbers = source.numbers()
    scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
    await EventStream(events(numbers), numbers)(scope, receive, send)
    return sent
