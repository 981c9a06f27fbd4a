"""A request reaches the application when the start of its body is here, and then as it was sent."""

from __future__ import annotations

import asyncio
import json
import random
from importlib import import_module
from typing import Any

import pytest
from ray.serve._private import proxy
from starlette.types import Message, Receive, Scope, Send

from cluster.door import serve_proxy
from cluster.door.serve_proxy import ENVIRONMENT, _BufferedStart

HTTP = {"type": "http"}


class Echo:
    """Notes what was there when the request came, and reads the body."""

    def __init__(self) -> None:
        self.body = b""
        self.num_calls = 0
        self.last: Message = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_calls += 1
        self.last = {"more_body": True}
        while self.last.get("more_body"):
            self.last = await receive()
            self.body += self.last.get("body", b"")


def pieces_of(body: bytes, *sizes: int) -> list[Message]:
    found, start = [], 0
    for size in sizes:
        found.append({"type": "http.request", "body": body[start : start + size], "more_body": True})
        start += size
    return [*found, {"type": "http.request", "body": body[start:], "more_body": False}]


async def run(app: Any, messages: list[Message], timeout_s: float = 10.0) -> list[Message]:
    """Send the messages; after the last one the client is silent."""
    sent: list[Message] = []

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    await _BufferedStart(app, timeout_s)(HTTP, receive, send)
    return sent


@pytest.mark.parametrize("sizes", [(), (1,), (100, 31 * 2**10), (32 * 2**10, 7), (40 * 2**10,)])
async def test_a_body_arrives_as_it_was_sent(sizes: tuple[int, ...]) -> None:
    body, app = random.randbytes(80 * 2**10), Echo()
    assert await run(app, pieces_of(body, *sizes)) == []
    assert app.body == body


async def test_who_sends_no_body_in_time_takes_no_place() -> None:
    app = Echo()
    start, body = await run(app, pieces_of(b"x" * 9, 4)[:1], timeout_s=0.01)
    assert start["status"] == 408
    assert json.loads(body["body"])["error"]["code"] == "request_timeout"
    assert app.num_calls == 0


async def test_a_client_that_leaves_is_told_on() -> None:
    app = Echo()
    await run(app, [*pieces_of(b"x" * 9, 4)[:1], {"type": "http.disconnect"}])
    assert app.last["type"] == "http.disconnect"


async def test_other_protocols_pass() -> None:
    app = Echo()

    async def receive() -> Message:
        return {"type": "lifespan.startup"}

    await _BufferedStart(app)({"type": "lifespan"}, receive, None)  # type: ignore[arg-type]
    assert app.last["type"] == "lifespan.startup"


def test_serve_finds_what_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = ENVIRONMENT.values()
    module, _, name = path.rpartition(".")
    install = getattr(import_module(module), name)
    assert install is serve_proxy.install
    monkeypatch.setattr(proxy, "parse_request_timeout_header", None)
    assert [middleware.cls for middleware in install()] == [_BufferedStart]
    assert proxy.parse_request_timeout_header({b"x-request-timeout-seconds": b"0.1"}, 300.0) == 300.0
