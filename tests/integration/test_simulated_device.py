"""The demo cluster with both services on simulated accelerators: the same answers as without."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest
from integration.harness import ROOT, free_port, pixels

from configs.cluster import ClusterConfig
from configs.loading import load_cluster_config
from deployments.cli.running import cluster_up
from deployments.local import LocalModels
from deployments.records import ImageRequest

pytestmark = pytest.mark.ray

IMAGE = {"model": "digits-sdxl", "prompt": "a handwritten four", "seed": 11, "num_inference_steps": 4}


def _config(folder: Path, worker: str, encoder: str) -> ClusterConfig:
    demo = load_cluster_config(ROOT / "configs/clusters/demo.yaml").model_dump(mode="json")
    demo |= {"name": "simulated", "http": {"port": free_port()}, "grpc": None, "store": {"path": str(folder / "store")}}
    demo["simulated"] = {"num_devices": 2, "memory_bytes": "512 MiB"}
    demo["worker"] |= {"device": worker}
    demo["text_encoder"] |= {"device": encoder}
    return ClusterConfig.model_validate(demo)


def test_a_cluster_on_simulated_devices_answers_as_one_without(tmp_path: Path) -> None:
    config = _config(tmp_path, "sim", "sim:1")
    with cluster_up(config, str(ROOT / "configs/clusters/demo.yaml")) as url, httpx.Client(timeout=120) as client:
        image = pixels(client.post(f"{url}/v1/images/generations", json=IMAGE))
        chat = {"model": "adder", "messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0}
        text = client.post(f"{url}/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
        drawn = client.post(
            f"{url}/v1/images/generations", json={"model": "sum-to-digit", "prompt": "3 + 4", "seed": 1}
        )
        tweet = "so tired of this rain, who else wants to be at the beach right now :)"
        tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [tweet]}
        classified = client.post(f"{url}/v2/models/text-classifier/infer", json={"inputs": [tensor]}).json()
        texts = {"model": "digits-clip", "input": ["a handwritten four", "nine"]}
        vectors = [item["embedding"] for item in client.post(f"{url}/v1/embeddings", json=texts).json()["data"]]
        shown = client.get(f"{url}/admin/cluster").json()
    expected = LocalModels(_config(tmp_path, "cpu", "cpu")).generate(ImageRequest(width=32, height=32, **IMAGE))
    assert np.array_equal(image, expected.images[0].astype(int))
    assert text == "19."
    assert pixels(drawn).shape == (32, 32, 3)
    assert ["tweet"] in [output["data"] for output in classified["outputs"]], classified
    assert np.isfinite(vectors).all()
    devices = {key: value["device"] for key, value in _replicas(shown).items()}
    assert set(devices.values()) == {"sim", "sim:1"}


def _replicas(shown: object) -> dict[str, dict[str, object]]:
    """What every replica tells of itself, wherever it stands in the answer."""
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
