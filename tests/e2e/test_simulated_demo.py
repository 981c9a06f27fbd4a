"""The demo, whole, with both services on simulated accelerators: all answers right, and images those of the host."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from integration.harness import ROOT, pixels

from configs.cluster import ClusterConfig
from configs.loading import load_cluster_config
from deployments.console.client import Client as AtelierClient
from deployments.console.running import cluster_up
from deployments.local import LocalModels
from deployments.records import ImageRequest
from infra.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.long]

IMAGE = {"model": "digits-sdxl", "prompt": "a handwritten four", "seed": 11, "num_inference_steps": 4}


@pytest.fixture
def run_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module of `make demo`, with its images in the test's folder."""
    monkeypatch.syspath_prepend(ROOT / "infra/demo")
    module = importlib.import_module("run_demo")
    monkeypatch.setattr(module, "OUT", tmp_path)
    return module


def test_the_demo_on_simulated_devices_answers_as_without(run_demo: Any, tmp_path: Path) -> None:
    demo = load_cluster_config(run_demo.CONFIG)
    own = {"name": "simulated", "http": {"port": free_port()}, "grpc": None, "store": {"path": str(tmp_path / "store")}}
    config = ClusterConfig.model_validate(demo.model_dump() | own)
    with (
        cluster_up(run_demo.on_device(config, "sim"), str(run_demo.CONFIG)) as url,
        httpx.Client(timeout=120) as client,
    ):
        image = pixels(client.post(f"{url}/v1/images/generations", json=IMAGE))
        requests = run_demo.Demo(AtelierClient(url))
        assert requests.run(), [row for row in requests.rows if not row.right]
        shown = client.get(f"{url}/admin/cluster").json()
    expected = LocalModels(config).generate(ImageRequest(width=32, height=32, **IMAGE))
    assert np.array_equal(image, expected.images[0].astype(int))
    assert {replica["device"] for replica in _replicas(shown).values()} == {"sim:0", "sim:1"}


def _replicas(shown: object) -> dict[str, dict[str, object]]:
    """Return every replica's own account, wherever it stands in the answer."""
    found: dict[str, dict[str, object]] = {}

    def look(value: object, path: str) -> None:
        if isinstance(value, dict):
            if "arena" in value and "device" in value:
                found[path] = value
            for key, inner in value.items():
                look(inner, f"{path}/{key}")
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                look(inner, f"{path}/{number}")

    look(shown, "")
    return found
