"""Answers of Serve and Ray about replicas and nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.ray_seam import serve_control
from cluster.ray_seam.serve_control import (
    DeployedApp,
    ReplicaCount,
    deployed_app,
    draining_nodes,
    proxy_host,
    running_serve,
    serving_nodes,
)
from cluster.records.errors import RayIncompatible


@pytest.mark.parametrize("error", [RayIncompatible("no sdk"), ray.exceptions.RpcError("no answer"), TimeoutError()])
def test_where_ray_does_not_say_no_node_drains(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry asks at each look at its nodes, and what comes after that ends the control plane."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(serve_control, "_cluster_status", fail)
    assert draining_nodes() == set()


def test_nodes_that_drain_are_those_that_ray_shows_so(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [SimpleNamespace(node_id=name, node_status=status) for name, status in (("a", "IDLE"), ("b", "DRAINING"))]
    monkeypatch.setattr(serve_control, "_cluster_status", lambda: SimpleNamespace(active_nodes=nodes))
    assert draining_nodes() == {"b"}


def controller_of(monkeypatch: pytest.MonkeyPatch, details: dict[str, Any]) -> None:
    """Have Serve's controller say these details."""
    method = SimpleNamespace(remote=lambda: details)
    monkeypatch.setattr(serve_control, "_serve_controller", lambda: SimpleNamespace(get_serve_instance_details=method))
    monkeypatch.setattr(ray, "get", lambda found, timeout: found)


@pytest.mark.parametrize(
    ("status", "failure", "is_settled"),
    [("RUNNING", "", True), ("DEPLOYING", "", False), ("DEPLOY_FAILED", "no room", False)],
)
def test_an_application_is_as_serves_controller_says(
    status: str, failure: str, is_settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [
        ("RUNNING", "n"),
        ("RUNNING", None),
        ("STARTING", None),
        ("STARTING", "n"),
        ("STARTING", "n"),
        ("STOPPING", None),
    ]
    options: list[Any] = [{"runtime_env": {"env_vars": {"A": "1"}}}, {"runtime_env": None}, {}, None]
    deployments = {
        f"d{place}": {
            "deployment_config": {"ray_actor_options": option},
            "replicas": [{"state": state, "node_id": node} for state, node in states],
            "target_num_replicas": 4,
        }
        for place, option in enumerate(options)
    }
    app = {"status": status, "message": "no room", "deployments": deployments}
    controller_of(monkeypatch, {"applications": {"app": app}})
    found = deployed_app("app")
    assert (found.failure, found.is_settled) == (failure, is_settled)
    assert set(found.replicas.values()) == {ReplicaCount(num_running=2, num_unplaced=1, num_wanted=4)}
    assert found.environments == {"d0": {"A": "1"}, "d1": {}, "d2": {}, "d3": {}}
    assert deployed_app("another") == DeployedApp({})


def test_nodes_serve_whose_proxies_are_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    controller_of(monkeypatch, {"proxies": {"a": {"status": "HEALTHY"}, "b": {"status": "STARTING"}}})
    assert serving_nodes() == {"a"}
    assert proxy_host() is None
    controller_of(monkeypatch, {"http_options": {"host": "127.0.0.9"}})
    assert proxy_host() == "127.0.0.9"


def test_without_a_serve_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("no actor of that name")

    monkeypatch.setattr(serve_control, "_serve_controller", fail)
    assert (serving_nodes(), running_serve()) == (set(), None)
