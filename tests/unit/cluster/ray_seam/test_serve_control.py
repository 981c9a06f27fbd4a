"""Answers of Serve and Ray about replicas and nodes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from cluster.ray_seam import serve_control
from cluster.ray_seam.serve_control import draining_nodes
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
