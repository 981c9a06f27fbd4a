"""HAProxy as clients see it, and what they may do to it: streams, leaving, slowness, headers of Serve's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import uuid
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import uvicorn
from aiohttp import web
from kit.waiting import until
from unit.cluster.door.doors import Replica, door, says_yes

from cluster.door import haproxy_rules
from cluster.ray_seam.old_clients import PlainConnection
from infra.ports import free_port

pytestmark = pytest.mark.slow


async def test_a_stream_arrives_piece_by_piece(client: aiohttp.ClientSession) -> None:
    heard = asyncio.Event()

    async def waits_to_be_heard(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(b"data: 1\n\n")
        await heard.wait()
        await stream.write(b"data: 2\n\n")
        return stream

    async with Replica(waits_to_be_heard) as replica, door(replica) as (url, _):
        answer = await client.post(url + "/v1/chat/completions", data=b"x")
        assert await answer.content.readline() == b"data: 1\n"
        heard.set()
        assert await answer.content.read() == b"\ndata: 2\n\n"


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_is_noticed(client: aiohttp.ClientSession, begun: bool) -> None:
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def works_for_long(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        if begun:
            await stream.prepare(request)
            await stream.write(b"data: 1\n\n")
        arrived.set()
        try:
            await asyncio.sleep(3600)
        finally:
            gone.set()
        return stream

    async with Replica(works_for_long) as replica, door(replica) as (url, _):
        asking = asyncio.create_task(client.post(url + "/v1/chat/completions", data=b"x"))
        await asyncio.wait_for(arrived.wait(), 10)
        if begun:
            (await asking).close()
        else:
            asking.cancel()
        await asyncio.wait_for(gone.wait(), 10)


@pytest.mark.drawn
@pytest.mark.parametrize("headers", [{}, {haproxy_rules.UNREAD: "1"}])
async def test_a_refusal_arrives_while_the_body_is_still_being_sent(
    client: aiohttp.ClientSession, headers: dict[str, str]
) -> None:
    text = json.dumps({"error": 'too "large": é %[src] %'}, ensure_ascii=False)

    async def refuses(request: web.Request) -> web.Response:
        answer = web.Response(status=413, text=text, headers=headers)
        answer.force_close()
        return answer

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(2**10):
            yield b"x" * 2**14

    async with Replica(refuses) as replica, door(replica) as (url, _):
        for make in (lambda: b"x" * 2**24, pieces):
            for is_last in (False, False, True):
                try:
                    async with client.post(url + "/v1/embeddings", data=make()) as answer:
                        assert (answer.status, await answer.text()) == (413, text)
                        assert haproxy_rules.UNREAD not in answer.headers
                    break
                except aiohttp.ClientOSError:  # aiohttp may tell of a write that failed although the answer is here
                    if is_last:
                        raise


async def shows_headers(request: web.Request) -> web.Response:
    return web.json_response(dict(request.headers))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "value", "arrives"),
    [
        ("x-request-disconnect-disabled", "?1", None),
        ("serve_multiplexed_model_id", "m", None),
        ("X-Session-Id", "s", None),
        ("x-request-id", "abc-1", "abc-1"),
        ("x-request-timeout-seconds", "2.5", "2.5"),
        ("x-request-timeout-seconds", "2\xff", "not-text"),
        ("x-tenant", "caf\xe9", "caf\xe9"),
    ],
)
async def test_headers_that_serve_itself_obeys_are_not_for_clients(name: str, value: str, arrives: str | None) -> None:
    async with Replica(shows_headers) as replica, door(replica) as (url, _):
        where = urlsplit(url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        head = f"GET /v1/models HTTP/1.1\r\nhost: door\r\n{name}: {value}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode("latin-1"))
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    status, _, body = answer.partition(b"\r\n\r\n")
    assert b" 200 " in status.splitlines()[0], status
    seen = {key.lower(): text for key, text in json.loads(body).items()}
    if arrives is None:
        assert name.lower() not in seen
    else:
        assert seen[name].encode("utf-8", "surrogateescape") == arrives.encode("latin-1")


ID = "job:7/a_b.c+d=e@f-0"


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("asked", "is_kept"),
    [
        ([ID], True),
        (["x" * 128], True),
        (["x" * 129], False),
        (["a b"], False),
        (["%[src]"], False),
        (["\xff"], False),
        ([""], False),
        ([], False),
        ([ID, "other"], False),
    ],
)
async def test_every_answer_has_the_id_of_its_request(asked: list[str], is_kept: bool) -> None:
    """Answers of a replica, and those that HAProxy gives itself: nobody there, too many."""
    gate = asyncio.Event()

    async def shows(request: web.Request) -> web.Response:
        if request.path == "/v1/hold":
            await gate.wait()
        return web.json_response(request.headers.getall("x-request-id"), headers={"x-request-id": "of the replica"})

    async def ids(url: str, path: str, method: str = "GET") -> tuple[int, list[str], bytes]:
        where = urlsplit(url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        lines = [f"{method} {path} HTTP/1.1", "host: door", "connection: close", "content-length: 0"]
        lines += [f"x-request-id: {id_}" for id_ in asked]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
        writer.close()
        pairs = [line.partition(": ") for line in head.decode("latin-1").split("\r\n")[1:]]
        return int(head.split()[1]), [value for name, _, value in pairs if name.lower() == "x-request-id"], body

    async with Replica(shows) as replica, door(replica, max_requests=1) as (url, _), door(free_port()) as (empty, _):
        status, (told,), body = await ids(url, "/v1/models")
        assert (status, json.loads(body)) == (200, [told])
        holding = asyncio.create_task(ids(url, "/v1/hold", "POST"))
        await until(lambda: "POST /v1/hold" in replica.seen)
        refused, (of_refusal,), _ = await ids(url, "/v1/embeddings", "POST")
        gate.set()
        await holding
        absent, (of_absence,), _ = await ids(empty, "/v1/models")
    assert (refused, absent) == (429, 503)
    for found in (told, of_refusal, of_absence):
        assert (found in asked) == is_kept
        assert is_kept or uuid.UUID(found).version == 4


@pytest.mark.parametrize(
    "begun",
    [b"POST /v1/chat HTTP/1.1\r\nhost: do", b"POST /v1/chat HTTP/1.1\r\nhost: door\r\ncontent-length: 900\r\n\r\n{"],
)
async def test_a_client_that_is_slow_with_its_request_is_cut_off(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    """Slowloris: a byte now and then. The replica does not hear of it."""
    monkeypatch.setattr(haproxy_rules, "_DEFAULT_RULES", haproxy_rules._DEFAULT_RULES.replace("30s", "1s"))
    monkeypatch.setattr(haproxy_rules, "_PATH_RULES", haproxy_rules._PATH_RULES.replace("10s", "1s"))
    async with Replica(says_yes) as replica, door(replica) as (url, _):
        where = urlsplit(url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(begun)
        answer = asyncio.create_task(reader.read())
        async with asyncio.timeout(10):
            while not answer.done():
                writer.write(b"x")
                await asyncio.sleep(0.1)
        writer.close()
    assert b" 408 " in answer.result().splitlines()[0]
    assert replica.seen == []


async def test_a_client_that_stops_reading_is_cut_off_and_its_replica_told() -> None:
    """Waiting clients are bounded meanwhile."""
    ended, written = asyncio.Event(), 0

    async def streams(request: web.Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 2**16)
                written += 2**16
        finally:
            ended.set()

    async with Replica(streams) as replica, door(replica, timeout_client_s=1) as (url, _):
        where = urlsplit(url)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((where.hostname, where.port))
            client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: door\r\n\r\n")
            await asyncio.wait_for(ended.wait(), 10)
    assert 0 < written < 32 * 2**20


async def test_an_address_has_its_share_of_connections_and_others_have_theirs(client: aiohttp.ClientSession) -> None:
    """Half-sent heads, which cost their sender a packet each."""
    async with Replica(says_yes) as replica, door(replica, maxconn=40) as (url, _):
        where = urlsplit(url)
        begun = []
        for _ in range(60):
            with contextlib.suppress(ConnectionResetError):  # the later ones
                begun.append(await asyncio.open_connection(where.hostname, where.port))
                begun[-1][1].write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: do")
        connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=5)) as other,
            other.post(url + "/v1/embeddings", data=b"x") as answer,
        ):
            assert await answer.text() == "yes 1"
        for _, writer in begun:
            writer.close()
        async with asyncio.timeout(10):
            status = 0
            while status != 200:  # as soon as HAProxy has seen that they are closed
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with client.post(url + "/v1/embeddings", data=b"x") as answer:
                        status = answer.status


@pytest.mark.parametrize(("path", "is_nested"), [("/v1/chat/completions", True), ("/v2/models/m/infer", False)])
async def test_a_body_that_is_no_http_is_refused_in_the_words_of_the_protocol(path: str, is_nested: bool) -> None:
    async with Replica(says_yes) as replica, door(replica) as (url, _):
        where = urlsplit(url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(f"POST {path} HTTP/1.1\r\nhost: door\r\nx-request-id: {ID}\r\n".encode())
        writer.write(b"transfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)  # HAProxy has read the head
        writer.write(b"no length\r\n")
        head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
        writer.close()
    assert b" 400 " in head.splitlines()[0]
    assert f"x-request-id: {ID}".encode() in head
    error = json.loads(body)["error"]
    assert (error["message"] if is_nested else error) == "the body is not written as HTTP has it"
    assert replica.seen == []


@pytest.mark.drawn(over="kept")
@pytest.mark.parametrize("through_door", [True, False])
@pytest.mark.parametrize("kept", ["", "connection: keep-alive\r\n"])
async def test_a_stream_for_an_old_client_has_no_chunks_and_ends_with_its_connection(
    through_door: bool, kept: str
) -> None:
    async def streams(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream")]
        if scope["path"] == "/v1/models":
            headers.append((b"content-length", b"2"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for body in (b"a", b"b"):
            await send({"type": "http.response.body", "body": body, "more_body": body == b"a"})

    async def ask(port: int | None, line: str) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{line}\r\nhost: door\r\n{kept}content-length: 0\r\n\r\n".encode())
        found = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        is_whole = b"content-length" in found.lower()
        body = await asyncio.wait_for(reader.readexactly(2) if is_whole else reader.read(), 20)
        writer.close()
        return found.lower(), body

    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(streams, http=PlainConnection, lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listening]))
        await until(lambda: server.started)
        own = listening.getsockname()[1]
        async with door(own) as (url, _):
            port = urlsplit(url).port if through_door else own
            head, body = await ask(port, "POST /v1/chat/completions HTTP/1.0")
            assert b"chunked" not in head
            assert body == b"ab"
            head, body = await ask(port, "GET /v1/models HTTP/1.0")
            assert (b"content-length: 2" in head, body) == (True, b"ab")
        server.should_exit = True
        await serving
