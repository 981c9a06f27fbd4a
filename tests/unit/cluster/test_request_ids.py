"""Ids of requests: kept or replaced, once in each answer, and known to what works on the request."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import httpx
import pytest
import uvicorn
from kit.waiting import until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from cluster.ray_seam.replica_http import put_before_serve
from cluster.ray_seam.request_context import current_request_id, set_request_id
from cluster.ray_seam.request_ids import RequestIds, accepted, part_id
from cluster.records.errors import RayIncompatible
from infra.ports import free_port


async def shows(request: Request) -> PlainTextResponse:
    seen = await asyncio.create_task(asyncio.sleep(0, current_request_id()))
    return PlainTextResponse(f"{request.headers['x-request-id']} {seen}", headers={"X-Request-ID": "of Serve"})


async def streams(_: Request) -> StreamingResponse:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"a"
        yield b"b"

    return StreamingResponse(pieces())


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("asked", "is_kept"), [("a-1", True), ("é", False), ("a b", False), ("x" * 129, False)])
async def test_an_answer_has_the_id_that_the_request_is_known_by(layers: int, asked: str, is_kept: bool) -> None:
    app = Starlette(routes=[Route("/", shows)])
    for _ in range(layers):
        app = RequestIds(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        answer = await http.get("/", headers={"x-request-id": asked.encode()})
    (told,) = answer.headers.get_list("x-request-id")
    assert answer.text == f"{told} {told}"
    assert (told == asked) == is_kept


async def test_two_ids_of_one_request_are_none() -> None:
    app = RequestIds(Starlette(routes=[Route("/", shows)]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        answer = await http.get("/", headers=[("x-request-id", "a"), ("x-request-id", "b")])
    assert answer.headers["x-request-id"] not in ("a", "b", "a, b")


async def test_a_replicas_server_repeats_no_id_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's own server, which by itself repeats whatever it gets."""
    from ray.serve._private import replica
    from ray.serve.config import HTTPOptions

    monkeypatch.setattr(replica, "start_asgi_http_server", replica.start_asgi_http_server)
    prepared: list[uvicorn.Server] = []
    put_before_serve(lambda app: app, prepared.append)
    options, loop = HTTPOptions(host="127.0.0.1", port=free_port()), asyncio.get_running_loop()
    running, server = await replica.start_asgi_http_server(
        Starlette(routes=[Route("/", shows), Route("/stream", streams)]), options, event_loop=loop
    )
    assert prepared == [server]
    await until(lambda: server.started or running.done())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{options.port}") as http:
        for asked in ("a-1", "a b", "x" * 129):
            answer = await http.get("/", headers={"x-request-id": asked})
            (told,) = answer.headers.get_list("x-request-id")
            assert answer.text == f"{told} {told}"
            assert (told == asked) == (asked == "a-1")
    reader, writer = await asyncio.open_connection("127.0.0.1", options.port)
    writer.write(b"GET /stream HTTP/1.0\r\n\r\n")
    head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
    writer.close()
    assert (b"chunked" in head, body) == (False, b"ab")  # a client that knows no chunks
    server.should_exit = True
    await running


async def test_a_server_that_runs_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change after the start has no effect."""
    from ray.serve._private import replica

    server = uvicorn.Server(uvicorn.Config(shows))
    server.config.load()

    async def start_server(app: ASGIApp) -> tuple[None, uvicorn.Server]:
        return None, server

    monkeypatch.setattr(replica, "start_asgi_http_server", start_server)
    put_before_serve(lambda app: app, lambda server: None)
    with pytest.raises(RayIncompatible, match="runs before"):
        await replica.start_asgi_http_server(shows)


def test_an_id_that_would_not_fit_a_line_of_log_is_replaced() -> None:
    for bad in (None, "", "a\n", "a\nb", "\x1b[31m", "{}", '"', "x" * 129):
        assert uuid.UUID(accepted(bad)).version == 4
    assert accepted("x" * 128) == "x" * 128


async def test_parts_of_a_request_have_ids_of_their_own() -> None:
    assert "/" not in part_id()
    set_request_id("a")
    parts = {part_id() for _ in range(9)}
    assert len(parts) == 9
    assert all(part.startswith("a/") for part in parts)
