"""The HTTP door: HAProxy before the ingress replicas. Its own rules are tested without Ray in unit/cluster/door.

What every client sees is tested by all other integration tests, which come through the same door.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from integration.harness import SCENARIO_S, Cluster, run_scenario
from kit.waiting import wait_until
from ray import serve

pytestmark = [pytest.mark.ray, pytest.mark.timeout(SCENARIO_S)]

CHAT = {"model": "adder", "messages": [{"role": "user", "content": "What is 12 + 7?"}], "max_tokens": 8}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenario(Path(__file__).with_name("proxy_scenario.py"), tmp_path_factory.mktemp("store"))


@pytest.mark.long
@pytest.mark.parametrize("disturbance", ["kill", "drain", "only one"])
def test_no_request_is_lost_with_a_replica(observed: dict[str, Any], disturbance: str) -> None:
    """Also not with the only one: Serve's own proxy keeps what comes until there is another."""
    assert observed[disturbance].keys() == {"200"}, observed[disturbance]


@pytest.mark.long
def test_nothing_of_haproxy_stays(observed: dict[str, Any]) -> None:
    assert observed["left"] == []


def session_processes() -> list[psutil.Process]:
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def haproxies() -> list[psutil.Process]:
    return [process for process in session_processes() if process.name() == "haproxy"]


def test_nothing_listens_where_nobody_asked_for_it(cluster: Cluster) -> None:
    """Neither HAProxy, nor the replicas, nor Ray."""
    listening = {}
    for process in session_processes():
        try:
            found = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        except psutil.NoSuchProcess:
            continue
        listening |= {(address.ip.removeprefix("::ffff:"), address.port): process.name() for address in found}
    assert {name for (ip, _), name in listening.items() if ip != "127.0.0.1"} == set()
    assert listening["127.0.0.1", cluster.config.http.port] == "haproxy"
    assert "ray::ServeReplica:integration:ingress" in {
        name for (_, port), name in listening.items() if 30000 <= port < 32768
    }


def test_haproxy_that_was_killed_is_back_before_clients_give_up(cluster: Cluster) -> None:
    (before,) = haproxies()
    before.send_signal(signal.SIGKILL)
    client = cluster.openai.with_options(max_retries=2)  # as OpenAI's client does unless told otherwise
    for _ in range(5):
        assert "19" in client.chat.completions.create(**CHAT).choices[0].message.content
    wait_until(lambda: [process.pid for process in haproxies()] not in ([], [before.pid]), "another HAProxy")


def test_connections_are_kept(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.url) as http:
        ports = set()
        for _ in range(5):
            answer = http.get("/v1/models")
            assert answer.status_code == 200
            ports.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
    assert len(ports) == 1


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_refused_by_its_size(cluster: Cluster, announced: bool) -> None:
    """Ten times over, and more than sockets hold: the answer comes while the body is still being sent."""
    size = 10 * cluster.config.ingress.limits.max_body_bytes

    def pieces() -> Any:
        yield from (b"x" * 2**16 for _ in range(size // 2**16))

    headers = {"content-type": "application/json"} | ({"content-length": str(size)} if announced else {})
    answer = httpx.post(f"{cluster.url}/v1/embeddings", content=pieces(), headers=headers, timeout=60)
    assert answer.status_code == 413, answer.text
    assert answer.json()["error"]["code"] == "request_too_large"


def test_handles_work_outside_an_event_loop_in_the_driver_and_in_tasks(cluster: Cluster) -> None:
    """The switches of Serve's actors reach no other process."""
    assert len(cluster.handle.embed.remote({"model": "digits-clip", "input": ["x"]}).result().embeddings) == 1

    name = cluster.config.name

    @ray.remote(num_cpus=0)
    def ask() -> tuple[int, list[str]]:
        handle = serve.get_app_handle(name)
        result = handle.embed.remote({"model": "digits-clip", "input": ["x"]}).result(timeout_s=60)
        return len(result.embeddings), [name for name in os.environ if name.startswith("RAY_SERVE_")]

    assert ray.get(ask.remote(), timeout=120) == (1, [])
