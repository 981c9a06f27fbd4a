"""A cluster beside others on one Ray: what it may share with them, and what ends with it."""

from __future__ import annotations

from typing import Any

import pytest
from ray import serve

from cluster.ray_seam.serve_control import RunningServe
from cluster.records.errors import SessionError
from configs.cluster import ClusterConfig
from deployments.console import applications
from deployments.console.applications import check_beside_others, end_cluster

pytestmark = pytest.mark.slow  # imports Serve


def config(name: str = "two", **http: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"name": name, "http": http, "models": [{"id": "m", "path": "/m"}]})


@pytest.mark.parametrize(
    ("running", "asked", "expected"),
    [
        (None, config(), False),
        (RunningServe(8000, {}), config(), True),
        (RunningServe(8000, {"one": "/"}), config(route_prefix="/two"), True),
        (RunningServe(8000, {"two": "/"}), config(), True),  # its own, which is deployed again
        (RunningServe(8000, {"one": "/"}), config(), "the path / of this Ray's Serve belongs to 'one': give 'two'"),
        (RunningServe(8000, {"one": "/two"}), config(route_prefix="/two"), "the path /two of this Ray's Serve belongs"),
        (RunningServe(8000, {"one": "/"}), config(port=8005), r"listens on port 8000 .*\(one\), and not on 8005: set"),
        (RunningServe(8000, {}), config(port=8005), r"\(none now\)"),
    ],
)
def test_a_path_of_another_one_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, running: RunningServe | None, asked: ClusterConfig, expected: bool | str
) -> None:
    monkeypatch.setattr(applications, "running_serve", lambda: running)
    if isinstance(expected, bool):
        assert check_beside_others(asked) is expected
    else:
        with pytest.raises(SessionError, match=expected):
            check_beside_others(asked)


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        (["one", "two"], ["delete one", "end registry:one:a"]),
        (["one"], ["delete one", "shutdown", "end registry:one:a"]),
        (["two"], ["end registry:one:a"]),
        ([], ["shutdown", "end registry:one:a"]),
        (None, ["end registry:one:a"]),
    ],
)
def test_its_application_ends_before_its_actors_and_serve_only_with_the_last_one(
    monkeypatch: pytest.MonkeyPatch, served: list[str] | None, expected: list[str]
) -> None:
    done: list[str] = []

    running = None if served is None else RunningServe(8000, dict.fromkeys(served, "/"))
    monkeypatch.setattr(applications, "running_serve", lambda: running)
    monkeypatch.setattr(serve, "delete", lambda name: done.append(f"delete {name}"))
    monkeypatch.setattr(serve, "shutdown", lambda: done.append("shutdown"))
    names = ["registry:two:a", "registry:one:a", "SERVE_REPLICA::one#worker#x"]
    monkeypatch.setattr(applications, "end_actors", lambda find: done.extend(f"end {name}" for name in find(names)))
    end_cluster("one")
    assert done == expected
