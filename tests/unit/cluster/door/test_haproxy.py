"""HAProxy before replicas that die, itself killed, and what it listens on: the real one, without Ray."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web
from ray.serve._private import haproxy as serve_haproxy
from ray.serve._private.haproxy import HAProxyConfig, ServerConfig
from unit.cluster.door import doors
from unit.cluster.door.doors import Replica, dies, door, free_port, says_yes

from cluster.door.haproxy import HTTP_ADDRESS
from cluster.door.haproxy_rules import MAX_RETRIES, rewrite_config

pytestmark = pytest.mark.slow


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
            sys.executable, doors.__file__, folder, str(port), env=environment, stdout=subprocess.PIPE
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
