"""The demo's models on a device: what is served equals the host's, bit for bit on a simulated one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

from configs.cluster import ClusterConfig
from deployments.local import LocalModels
from deployments.records import ImageRequest, LoraUse

pytestmark = pytest.mark.usefixtures("learned_once")
DEMO = Path(__file__).parents[2] / "infra/demo/models"
NAMES = ("digits-flux", "digits-flux-inverted", "digits-sdxl", "adder", "texts-bert", "texts-head")


def cluster_config(store: Path, device: str, encoder_device: str | None = None, **worker: Any) -> ClusterConfig:
    kind = device.partition(":")[0]
    simulated = torch.sim.config if kind == "sim" else None  # type: ignore[attr-defined]
    return ClusterConfig.model_validate(
        {
            "store": {"path": str(store)},
            "worker": {"device": device, **worker},
            "text_encoder": {"device": encoder_device or device},
            "models": [{"id": name, "path": str(DEMO / name), "dtype": "float32"} for name in NAMES],
            "adapters": [{"id": "bold", "path": str(DEMO / "bold"), "base": ["digits-flux"], "dtype": "float32"}],
        }
        | ({"simulated": simulated} if simulated else {})
    )


def assert_same(found: np.ndarray, expected: np.ndarray, device: torch.device) -> None:
    if device.type == "sim":
        assert np.array_equal(found, expected)
    else:  # other kernels, other rounding
        assert np.abs(found.astype(int) - expected.astype(int)).max() <= 2


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("device") / "store"


@pytest.mark.drawn
@pytest.mark.parametrize(("model", "lora"), [("digits-flux", False), ("digits-flux", True), ("digits-sdxl", False)])
def test_images_are_those_of_the_host(store: Path, model: str, lora: bool, device: torch.device, module: Any) -> None:
    request = ImageRequest(
        model=model,
        prompt=f"a handwritten {random.choice(['two', 'five', 'nine'])}",
        seed=random.getrandbits(40),
        width=32,
        height=32,
        num_inference_steps=2,
        guidance_scale=3.0,
        max_sequence_length=16 if model == "digits-flux" else None,
        lora=(LoraUse(name="bold"),) if lora else (),
    )
    expected, found = (LocalModels(cluster_config(store, name)).generate(request) for name in ("cpu", str(device)))
    assert_same(found.images, expected.images, device)
    assert found.switch.device_bytes == found.switch.attached_bytes > 0


def test_text_encoder_and_worker_on_different_devices_make_the_same_image(
    store: Path, device: torch.device, second_device: torch.device, module: Any
) -> None:
    request = ImageRequest(
        model="digits-sdxl", prompt="a handwritten six", seed=7, width=32, height=32, num_inference_steps=2
    )
    configs = cluster_config(store, "cpu"), cluster_config(store, str(device), str(second_device))
    expected, found = (LocalModels(config).generate(request) for config in configs)
    assert_same(found.images, expected.images, device)
