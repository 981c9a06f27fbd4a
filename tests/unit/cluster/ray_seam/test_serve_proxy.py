"""A request reaches the application when the start of its body is here, and then as it was sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from importlib import import_module
from typing import Any

import pytest
import uvicorn
from kit.serving import served
from kit.waiting import until
from ray.serve._private import proxy
from ray.serve.config import HTTPOptions
from starlette.types import Message, Receive, Scope, Send

from cluster.door.deadlines import HideDeadline
from cluster.ray_seam import serve_proxy
from cluster.ray_seam.request_ids import RequestIds
from cluster.ray_seam.serve_proxy import ENVIRONMENT, _BufferedStart

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


async def says_yes(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
    await send({"type": "http.response.body", "body": b"yes"})


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nhost: x\r\nx-one: 1\r\n"])
async def test_a_head_that_does_not_end_in_time_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(serve_proxy, "_HEAD_TIMEOUT_S", 0.3)
    async with served(says_yes, http=serve_proxy._BoundedConnection) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = asyncio.create_task(reader.readuntil(b"\r\n"))
        writer.write(begun)
        async with asyncio.timeout(10):
            while not answer.done():
                if begun:
                    writer.write(b"x-two: 2\r\n")
                await asyncio.sleep(0.02)
        assert b" 400 " in answer.result()
        with contextlib.suppress(ConnectionResetError):  # of what was sent when the connection had ended
            await asyncio.wait_for(reader.read(), 10)
        writer.close()


async def test_a_head_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(says_yes, http=serve_proxy._BoundedConnection) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx-one: " + b"x" * (serve_proxy._MAX_HEAD_BYTES + 1))
        assert b" 400 " in await asyncio.wait_for(reader.read(), 10)
        writer.close()


async def test_an_address_has_its_connections_and_others_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_proxy, "_MAX_PER_ADDRESS", 3)
    async with served(says_yes, http=serve_proxy._BoundedConnection) as port:
        for _ in range(2):  # what has ended counts no longer
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
            other, its_writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            for each, asking in ((other, its_writer), opened[0]):
                for _ in range(2):
                    asking.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                    assert (await asyncio.wait_for(each.readuntil(b"yes"), 10)).startswith(b"HTTP/1.1 200")
            for one in (writer, its_writer, *(its for _, its in opened)):
                one.close()
            await until(lambda: not serve_proxy._BoundedConnection.num_of)


async def test_serve_finds_what_the_environment_names_and_its_server_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", uvicorn.config.HTTP_PROTOCOLS["auto"])
    (path,) = ENVIRONMENT.values()
    module, _, name = path.rpartition(".")
    assert [middleware.cls for middleware in getattr(import_module(module), name)()] == [
        _BufferedStart,
        HideDeadline,
        RequestIds,
    ]
    options = HTTPOptions(host="127.0.0.1", port=0)
    running, server = await proxy.start_asgi_http_server(says_yes, options, event_loop=asyncio.get_running_loop())
    await until(lambda: server.started)
    assert server.config.http_protocol_class is serve_proxy._BoundedConnection
    server.should_exit = True
    await running
