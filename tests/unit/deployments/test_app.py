"""The composition root binds every deployment, and starts the control plane where Ray is there already."""

from __future__ import annotations

from typing import Any

import pytest

from deployments import app as root
from deployments.app import AppArgs, build_app

pytestmark = pytest.mark.slow  # imports the services

CONFIG = {"name": "one", "models": [{"id": "m", "path": "/m"}]}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the actor kinds that were started."""
    names: list[str] = []
    monkeypatch.setattr(root, "connect_registry", lambda config: "registry")
    monkeypatch.setattr(root, "call_actor", lambda actor, method: names.append(f"{actor} {method.__name__}"))
    monkeypatch.setattr(root, "connect_controller", lambda config: names.append("controller"))
    monkeypatch.setattr(root, "connect_shared_encodings", lambda key, max_bytes: names.append(f"encodings {max_bytes}"))
    return names


def config_with(shared_cache_bytes: int | None) -> dict[str, Any]:
    return CONFIG | {"text_encoder": {"shared_cache_bytes": shared_cache_bytes}}


@pytest.mark.parametrize(
    ("is_connected", "shared_cache_bytes", "expected"),
    [
        (True, 2**20, ["registry expect_replicas", f"encodings {2**20}", "controller"]),
        (True, None, ["registry expect_replicas", "controller"]),
        (False, 2**20, []),
    ],
)
def test_the_control_plane_is_started_where_ray_is_there(
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
    is_connected: bool,
    shared_cache_bytes: int | None,
    expected: list[str],
) -> None:
    monkeypatch.setattr(root.ray, "is_initialized", lambda: is_connected)
    application = build_app(AppArgs(config=config_with(shared_cache_bytes)))
    assert started == expected
    ingress = application._bound_deployment
    config, encoder, worker = ingress.init_args
    bound = [ingress, encoder._bound_deployment, worker._bound_deployment]
    assert [deployment.name for deployment in bound] == ["ingress", "text_encoder", "worker"]
    assert config.name == "one"
