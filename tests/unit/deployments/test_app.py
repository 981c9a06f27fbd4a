"""The composition root binds every deployment; the control plane starts apart, for who ends it."""

from __future__ import annotations

from typing import Any

import pytest

from configs.cluster import ClusterConfig
from deployments import app as root
from deployments.app import AppArgs, build_app, start_control_plane

pytestmark = pytest.mark.slow  # imports the services

CONFIG: dict[str, Any] = {"name": "one", "models": [{"id": "m", "path": "/m"}]}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the actor kinds that were started."""
    names: list[str] = []
    for kind in ("registry", "controller"):
        monkeypatch.setattr(root, f"connect_{kind}", lambda config, kind=kind: names.append(kind))
    return names


def test_every_deployment_is_bound_and_no_actor_starts_whom_nobody_would_end(started: list[str]) -> None:
    application = build_app(AppArgs(config=CONFIG))
    assert started == []
    ingress = application._bound_deployment
    config, encoder, worker = ingress.init_args
    bound = [ingress, encoder._bound_deployment, worker._bound_deployment]
    assert [deployment.name for deployment in bound] == ["ingress", "text_encoder", "worker"]
    assert config.name == "one"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["registry", "controller"]),
        ({"controller": {"enabled": False}}, ["registry"]),
        ({"controller": {"enabled": False}, "ingress": {"num_replicas": 2}}, ["registry", "controller"]),
    ],
)
def test_the_control_plane_is_what_the_replicas_would_start(
    started: list[str], settings: dict[str, Any], expected: list[str]
) -> None:
    start_control_plane(ClusterConfig.model_validate(CONFIG | settings))
    assert started == expected
