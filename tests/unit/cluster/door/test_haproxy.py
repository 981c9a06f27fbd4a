"""HAProxy before replicas that die, itself killed, and what it listens on: the real one, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
import ray
from aiohttp import web
from kit.waiting import until
from ray.serve._private import haproxy as serve_haproxy
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from unit.cluster.door import doors
from unit.cluster.door.doors import Replica, dies, door, says_yes

from cluster.door.haproxy_rules import CROWDED, MAX_RETRIES, RECEIVED, machine_clock, rewrite_config
from cluster.door.places import HTTP_ADDRESS, MAX_REQUESTS, METRICS_PORT, STATS_PORT
from cluster.ray_seam import haproxy
from cluster.records.errors import RayIncompatible
from infra.ports import free_port

pytestmark = pytest.mark.slow


@pytest.mark.drawn(2)
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
        ("POST", "/split/v1/embeddings", True),
        ("POST", "/split/v2/repository/models/m/load", False),
        ("POST", "/split/prompt", False),
    ],
)
async def test_what_changes_nothing_goes_to_another_replica_when_its_own_died(
    client: aiohttp.ClientSession, method: str, path: str, repeated: bool
) -> None:
    prefix = "/split" if path.startswith("/split/") else "/"  # of a second cluster, say
    async with Replica(dies) as first, Replica(says_yes) as second, door(first, second, prefix=prefix) as (url, _):
        for _ in range(2):  # one of the two begins at the replica that dies
            body = None if method == "GET" else b"x" * 5000
            async with client.request(method, url + path, data=body) as answer:
                text = await answer.text()
                if answer.status == 200:
                    assert text == f"yes {len(body or b'')}"
                    continue
                assert (repeated, answer.status) == (False, 502), text
                message = json.loads(text)["error"]
                assert "replica" in (message if "/v2/" in path else message["message"])
                assert answer.headers["Retry-After"] == "1"
        assert len(first.seen) >= 1
        assert len(second.seen) == (2 if repeated else 1)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("path", "body", "headers", "repeated"),
    [
        ("/v1/jobs", {"endpoint": "/v1/embeddings", "body": {}}, {}, False),
        ("/v1/jobs", {"endpoint": "/v1/embeddings", "body": {}, "idempotency_key": "k"}, {}, True),
        ("/v1/batches", {}, {"Idempotency-Key": "k"}, True),
        ("/v1/batches", {}, {}, False),
        ("/prompt", {"prompt": {}}, {}, False),
        ("/prompt", {"prompt": {}, "prompt_id": "p"}, {}, True),
        ("/v1/responses", {"input": "x", "background": True}, {}, False),
        ("/v1/responses", {"input": "x", "background": False}, {}, True),
        ("/v1/images/generations", {"prompt": "x", "background": True}, {"Idempotency-Key": "k"}, True),
    ],
)
async def test_a_request_that_begins_a_job_is_sent_again_with_an_idempotency_key_alone(
    client: aiohttp.ClientSession, path: str, body: dict[str, Any], headers: dict[str, str], repeated: bool
) -> None:
    async with Replica(dies) as first, Replica(says_yes) as second, door(first, second) as (url, _):
        statuses = []
        for _ in range(2):  # one of the two begins at the replica that dies
            async with client.post(url + path, json=body, headers=headers) as answer:
                statuses.append(answer.status)
        assert sorted(statuses) == ([200, 200] if repeated else [200, 502])
        assert len(second.seen) == (2 if repeated else 1)


async def test_a_node_that_falls_silent_is_noticed_while_a_request_is_there(client: aiohttp.ClientSession) -> None:
    """HAProxy lets the kernel ask the replica's: `tests/nodes` cuts the link."""
    release = asyncio.Event()

    async def hold(request: web.Request) -> web.Response:
        await release.wait()
        return web.Response()

    async with Replica(hold) as replica, door(replica) as (url, _):
        asking = asyncio.create_task(client.post(f"{url}/v1/embeddings", data=b"x"))
        await until(lambda: replica.seen)
        await until(lambda: _is_asked_after(replica.port))
        release.set()
        assert (await asking).status == 200


def _is_asked_after(port: int) -> bool:
    """Return whether the kernel has a keepalive timer for a connection to the port (proc(5), `tr`)."""
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any(row[2].endswith(f":{port:04X}") and row[5].startswith("02:") for row in rows)


async def test_a_replica_learns_when_a_request_came_and_on_whose_clock(client: aiohttp.ClientSession) -> None:
    async def says_received(request: web.Request) -> web.Response:
        return web.Response(text=request.headers[RECEIVED])

    async with Replica(says_received) as replica, door(replica) as (url, _):
        answer = await client.get(url + "/v1/models", headers={RECEIVED: "somebody:1"})
        clock, _, received_us = (await answer.text()).rpartition(":")
    assert clock == machine_clock()
    assert abs(time.time() - int(received_us) / 1e6) < 60


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


async def test_an_application_without_any_server_is_one_that_nobody_answers_for_and_comes_back(
    client: aiohttp.ClientSession,
) -> None:
    """As Serve writes it between the last replica and the next where no proxy of its own stands by."""
    async with Replica(says_yes) as replica, door(replica) as (url, process):
        (backend,) = process.backend_configs.values()
        servers, backend.servers = backend.servers, []
        await process.reload()
        for method, path in (("POST", "/v1/embeddings"), ("POST", "/v2/models/m/infer"), ("GET", "/v1/models")):
            async with client.request(method, url + path, data=b"x" if method == "POST" else None) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                assert "no replica of the ingress is available now" in await answer.text()
        backend.servers = servers
        await process.reload()
        await until(lambda: _answers(client, f"{url}/v1/embeddings"))
    assert replica.seen


async def _answers(client: aiohttp.ClientSession, url: str) -> bool:
    async with client.post(url, data=b"x") as answer:
        return answer.status == 200


@pytest.mark.parametrize("names", [["app"], ["app", "other"]])
def test_haproxy_takes_backends_without_servers_beside_those_that_have_some(names: list[str], tmp_path: Path) -> None:
    server = ServerConfig(name="r", host="127.0.0.1", port=1)
    backends = {
        name: BackendConfig(name, f"/{name}", servers=[server] if number else []) for number, name in enumerate(names)
    }
    text = rewrite_config(_rendered(backends), "127.0.0.1", free_port(), 8, 8)
    assert [name for name in names if f"\nbackend {name}-quick\n" not in text] == []
    assert text.count("maxconn 8 ") == len(names) - 1
    file = tmp_path / "haproxy.cfg"
    file.write_text(text)
    checked = subprocess.run(
        [haproxy._find_haproxy(), "-c", "-f", str(file)], capture_output=True, text=True, check=False, timeout=60
    )
    assert checked.returncode == 0, checked.stderr


class Held(Replica):
    """Holds every inference until its gate is open."""

    def __init__(self) -> None:
        super().__init__(self._hold)
        self.gate = asyncio.Event()

    async def _hold(self, request: web.Request) -> web.Response:
        if request.method == "POST" and not request.path.startswith("/admin"):
            await self.gate.wait()
        return await says_yes(request)

    async def wait_for(self, number: int) -> None:
        await until(lambda: len(self.seen) >= number)


async def ask(client: aiohttp.ClientSession, url: str, **given: Any) -> tuple[int, str | None, str]:
    async with client.post(url, data=b"x" * 3000, **given) as answer:
        return answer.status, answer.headers.get("Retry-After"), await answer.text()


async def test_who_asks_before_haproxy_knows_of_an_application_may_ask_again(client: aiohttp.ClientSession) -> None:
    async with door(free_port()) as (url, process):
        process.backend_configs.clear()
        await process.reload()
        async with client.post(f"{url}/v1/embeddings", data=b"x") as answer:
            assert "try again in a moment" in await answer.text()
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")


async def test_more_than_the_replicas_may_have_in_hand_is_refused_and_nothing_else(
    client: aiohttp.ClientSession,
) -> None:
    async with Held() as one, Held() as other, door(one, other, max_requests=3) as (url, _):
        asked = [asyncio.create_task(ask(client, url + "/v1/embeddings")) for _ in range(20)]
        await one.wait_for(3)
        await other.wait_for(3)
        await until(lambda: sum(task.done() for task in asked) >= 14)
        status, retry_after, text = await ask(client, url + "/v1/embeddings")
        assert (status, retry_after, json.loads(text)["error"]["code"]) == (429, "1", "queue_full")
        status, retry_after, text = await ask(client, url + "/v2/models/m/infer")
        assert (status, retry_after) == (429, "1")
        assert "try again in 1 s" in json.loads(text)["error"]
        for path in ("/healthz", "/v1/models", "/metrics"):
            async with client.get(url + path) as answer:
                assert answer.status == 200
        assert (await ask(client, url + "/admin/models"))[0] == 200
        one.gate.set()
        other.gate.set()
        statuses = [status for status, _, _ in await asyncio.gather(*asked)]
        assert (statuses.count(200), statuses.count(429)) == (6, 14)
        assert (await ask(client, url + "/v1/embeddings"))[0] == 200


async def test_the_bound_holds_for_serves_own_proxy_too(client: aiohttp.ClientSession) -> None:
    async with Held() as stand_by, door(free_port(), fallback=stand_by, max_requests=2) as (url, _):
        asked = [asyncio.create_task(ask(client, url + "/v1/embeddings")) for _ in range(6)]
        await stand_by.wait_for(2)
        await until(lambda: sum(task.done() for task in asked) >= 4)
        stand_by.gate.set()
        assert sorted(status for status, _, _ in await asyncio.gather(*asked)) == [200] * 2 + [429] * 4


async def test_who_sends_slowly_keeps_nobody_out(client: aiohttp.ClientSession) -> None:
    async with Replica(says_yes) as replica, door(replica, max_requests=2) as (url, _):
        where = urlsplit(url)
        slow = [await asyncio.open_connection(where.hostname, where.port) for _ in range(8)]
        for _, writer in slow:
            writer.write(b"POST /v1/embeddings HTTP/1.1\r\nhost: door\r\ncontent-length: 900\r\n\r\n{")
            await writer.drain()
        for _ in range(5):
            assert (await ask(client, url + "/v1/embeddings"))[0] == 200
        for _, writer in slow:
            writer.close()


async def test_refusals_repeat_when_a_replica_told_others_to_come_back_by_model(client: aiohttp.ClientSession) -> None:
    gate = asyncio.Event()

    async def refuses(request: web.Request) -> web.Response:
        await request.read()
        if "hold" in request.query:
            await gate.wait()
        told = {"Retry-After": request.query.get("told", "1")}
        return web.Response(status=429, headers=told | ({CROWDED: "1"} if "crowded" in request.query else {}))

    async def told(path: str, data: bytes) -> int:
        async with client.post(path, data=data) as answer:
            assert answer.status == 429
            assert CROWDED not in answer.headers
            return int(answer.headers["Retry-After"])

    def body(model: str) -> bytes:
        return json.dumps({"messages": [{"role": "user", "content": '"model": "b" ' * 100}], "model": model}).encode()

    async with Replica(refuses) as replica, door(replica, max_requests=1) as (url, _):
        path = url + "/v1/chat/completions"
        assert await told(path + "?crowded&told=30", body("a")) == 30
        assert await told(path + "?told=900", body("a")) == 900  # for this key alone
        assert await told(path + "?crowded&told=60", body("org/b")) == 60
        assert await told(url + "/v2/models/c/infer?crowded&told=90", b"x") == 90
        holding = asyncio.create_task(told(path + "?hold", body("a")))
        while len(replica.seen) < 5:
            await asyncio.sleep(0.005)
        for asked, data, least_s, most_s in [
            (path, body("a"), 20, 30),
            (path, body("org/b"), 50, 60),
            (url + "/v2/models/org%2Fb/infer", b"x", 50, 60),
            (url + "/v2/models/c/versions/1/infer", b"x", 80, 90),
            # Nothing is known of those: as the last one was told.
            (path, body("d"), 80, 90),
            (path, b"no JSON", 80, 90),
            (path, b'{"model": 7}', 80, 90),
        ]:
            assert least_s <= await told(asked, data) <= most_s
        assert len(replica.seen) == 5  # HAProxy said it
        gate.set()
        await holding


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


async def test_haproxy_that_dies_after_a_reload_is_back_while_the_one_before_still_has_a_request(
    client: aiohttp.ClientSession,
) -> None:
    gate = asyncio.Event()

    async def waits(_: web.Request) -> web.Response:
        await gate.wait()
        return web.Response()

    async with Replica(waits) as busy, Replica(says_yes) as other, door(busy) as (url, process):
        held = asyncio.ensure_future(client.post(url + "/v1/embeddings", data=b"x"))
        async with asyncio.timeout(10):
            while not busy.seen:
                await asyncio.sleep(0.01)
        process.backend_configs["app"].servers = [ServerConfig("r9", "127.0.0.1", other.port)]
        await process.reload()
        os.kill(await process._get_running_pid(), signal.SIGKILL)
        async with asyncio.timeout(10):
            while not other.seen:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with client.post(url + "/v1/embeddings", headers={"Connection": "close"}, data=b"x"):
                        pass
                await asyncio.sleep(0.01)
        assert not held.done()
        gate.set()
        assert (await held).status == 200


async def test_haproxy_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="d") as folder:
        port = free_port()
        environment = os.environ | {HTTP_ADDRESS: f"127.0.0.1:{port}", MAX_REQUESTS: "8"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
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


@pytest.mark.drawn(2)
@pytest.mark.parametrize("asked", [[], [STATS_PORT], [METRICS_PORT, STATS_PORT]])
async def test_haproxys_own_pages_are_where_they_were_asked_for_and_not_outside(
    client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    """Nobody listens on a port that nobody chose: HAProxy would not start where it is taken."""
    ports = {STATS_PORT: free_port(), METRICS_PORT: free_port()}
    for name in asked:
        monkeypatch.setenv(name, str(ports[name]))
    pages = {"stats_port": ports[STATS_PORT], "metrics_port": ports[METRICS_PORT]}
    with contextlib.ExitStack() as others:
        for name in ports.keys() - {*asked}:
            others.enter_context(socket.create_server(("127.0.0.1", ports[name])))
        async with Replica(says_yes) as replica, door(replica, **pages) as (url, process):
            assert process._proc is not None
            listening = {
                (connection.laddr.ip, connection.laddr.port)
                for connection in psutil.Process(process._proc.pid).net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            }
            chosen = {int(url.rpartition(":")[2])} | {ports[name] for name in asked}
            assert listening == {("127.0.0.1", port) for port in chosen}
            assert Path(process.cfg.socket_path).stat().st_mode & 0o077 == 0


async def test_a_port_that_somebody_else_has_on_a_node_is_named_with_the_node_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.3")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        monkeypatch.setattr(doors, "free_port", lambda: taken)
        with pytest.raises(RuntimeError) as raised:
            async with door():
                pass
    assert str(raised.value) == (
        f"HAProxy of node 10.0.0.3 cannot listen on 127.0.0.1:{taken} (Address already in use): end the program there, "
        "or choose another `http.port`"
    )


def test_the_public_address_is_the_one_that_was_asked_for() -> None:
    text = _rendered()
    assert "\n    bind *:8123 shards by-thread\n" in rewrite_config(text, "0.0.0.0", 8123, 8, 8)
    assert "\n    bind [::1]:8123 shards by-thread\n" in rewrite_config(text, "::1", 8123, 8, 8)
    with pytest.raises(ValueError, match="0 places for metrics"):
        rewrite_config(text.replace("bind :", "bind 127.0.0.1:"), "127.0.0.1", 8000, 8, 8)


@pytest.mark.parametrize(
    ("line", "other", "named"),
    [
        ("use_backend app if is_app", "use_backend app", "chooses 0 of 1"),
        (":1 check", ":1", "another form in backend app"),
    ],
)
def test_a_configuration_of_another_form_is_refused(line: str, other: str, named: str) -> None:
    """Replicas without a bound on their requests would serve, and nobody would notice."""
    text = _rendered({"app": BackendConfig("app", "/", servers=[ServerConfig(name="r", host="127.0.0.1", port=1)])})
    assert "\nbackend app-quick\n" in rewrite_config(text, "127.0.0.1", 8000, 8, 8)
    assert line in text
    with pytest.raises(ValueError, match=named):
        rewrite_config(text.replace(line, other), "127.0.0.1", 8000, 8, 8)


def _rendered(backends: dict[str, BackendConfig] | None = None) -> str:
    with tempfile.TemporaryDirectory(prefix="d") as folder:
        config = HAProxyConfig(socket_path=f"{folder}/admin", server_state_base=folder, server_state_file=f"{folder}/s")
        plain = serve_haproxy.HAProxyApi(config, backends or {}, f"{folder}/haproxy.cfg")
        plain._generate_config_file_internal()
        return Path(f"{folder}/haproxy.cfg").read_text()


async def test_a_serve_that_does_not_start_what_it_was_given_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a Ray that has the name and does not read it: its own configuration opens the admin socket to all."""
    started: list[Any] = []
    start = HAProxyApi.start

    async def note(self: Any) -> None:
        await start(self)
        started.append(self._proc)

    monkeypatch.setattr(HAProxyApi, "start", note)
    monkeypatch.setattr(haproxy, "_prepare_start", haproxy._find_haproxy)
    with pytest.raises(RayIncompatible, match=r"admin socket .* is open to other users"):
        async with door(free_port()):
            pass
    assert await started[0].wait() != 0  # and nobody can command it
