"""The cluster as comfy-api-simplified sees it, a client of ComfyUI, which sends a prompt before it listens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from integration.harness import Cluster
from integration.judging import Observed, judge
from integration.test_comfy import workflow
from PIL import Image

pytestmark = [pytest.mark.ray, pytest.mark.long]
TITLES = {"3": "sampler", "4": "loader", "9": "saved"}


@pytest.fixture(scope="module")
def client(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    asked = workflow("a handwritten seven", 1)
    asked["9"]["inputs"]["filename_prefix"] = "judged"
    for node, found in asked.items():
        found["_meta"] = {"title": TITLES.get(node, node)}
    questions = {"workflow": asked, "title": "saved", "sampler": "sampler", "loader": "loader"}
    folder: Path = tmp_path_factory.mktemp("comfyui")
    return judge("comfyui_client", "comfyui", cluster.url, cluster.grpc, folder, questions)


def test_the_client_gets_the_image_of_its_seed(client: Observed) -> None:
    (first,), (second,) = client["images"], client["again"]
    assert first != second
    one, again = (np.asarray(Image.open(client.folder / name)) for name in (first, second))
    assert one.shape == (32, 32, 3)
    assert np.array_equal(one, again)


def test_the_client_is_refused_and_described_to(client: Observed) -> None:
    assert "400" in client["unknown_model"]
    assert client["uploaded"]["subfolder"] == "sent"
    assert client["queue"] == {"queue_running": [], "queue_pending": []}
    assert client["stats"]["system"]["comfyui_version"]
    (names, _) = client["loader"]["CheckpointLoaderSimple"]["input"]["required"]["ckpt_name"]
    assert "digits-flux.safetensors" in names
