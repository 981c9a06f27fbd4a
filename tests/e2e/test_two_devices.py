"""A cluster whose worker has two simulated devices: a language model that neither holds alone answers from both."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from integration.harness import ROOT

from configs.cluster import ClusterConfig
from deployments.console.running import cluster_up
from infra.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.long]


def test_a_model_larger_than_the_first_device_answers_from_two(tmp_path: Path) -> None:
    config = ClusterConfig.model_validate(
        {
            "name": "two",
            "http": {"port": free_port()},
            "store": {"path": str(tmp_path / "store")},
            "worker": {
                "devices": ["sim:0", "sim:1"],
                "device_budget_bytes": "1800 KiB",
                "kv_cache_bytes": "512 KiB",
            },
            "simulated": {"num_devices": 2},
            "models": [{"id": "adder", "path": str(ROOT / "infra/demo/models/adder"), "dtype": "float32"}],
        }
    )
    question = {"model": "adder", "messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0}
    with cluster_up(config, "two.yaml") as url, httpx.Client(timeout=120) as client:
        answer = client.post(f"{url}/v1/chat/completions", json=question).json()
        (worker,) = client.get(f"{url}/admin/cluster").json()["workers"]
    assert "19" in answer["choices"][0]["message"]["content"]
    arenas = [worker["arena"], *worker["other_arenas"]]
    assert [arena["device"] for arena in arenas] == ["sim:0", "sim:1"]
    assert all(0 < arena["resident_bytes"] <= arena["budget_bytes"] for arena in arenas)
    assert worker["elsewhere"]["sim:1"]["charged_bytes"] == arenas[1]["resident_bytes"]
