"""The cluster as ComfyUI's clients see it: a prompt is sent, followed over a websocket, and its image fetched."""

from __future__ import annotations

import asyncio
import io
import json
import uuid
from typing import Any

import httpx
import numpy as np
import pytest
import websockets
from integration.harness import Cluster
from PIL import Image

pytestmark = pytest.mark.ray
STEPS = 4


def workflow(prompt: str, seed: int) -> dict[str, Any]:
    """The workflow that ComfyUI's page begins with."""
    sampling = {"seed": seed, "steps": STEPS, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}
    links = {"model": ["4", 0], "positive": ["6", 0], "negative": ["7", 0], "latent_image": ["5", 0]}
    return {
        "3": {"class_type": "KSampler", "inputs": {**sampling, **links, "denoise": 1.0}},
        "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "digits-flux.safetensors"}},
        "5": {"class_type": "EmptySD3LatentImage", "inputs": {"width": 32, "height": 32, "batch_size": 1}},
        "6": {"class_type": "CLIPTextEncode", "inputs": {"text": prompt, "clip": ["4", 1]}},
        "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "", "clip": ["4", 1]}},
        "8": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["4", 2]}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["8", 0], "filename_prefix": "digits/seven"}},
    }


async def followed(url: str, prompt: dict[str, Any], **more: Any) -> tuple[str, list[dict[str, Any]], list[bytes]]:
    """Send a prompt, and return its id, the events until it is over, and its previews."""
    client, address = uuid.uuid4().hex, url.replace("http://", "ws://")
    events, previews = list[dict[str, Any]](), list[bytes]()
    async with (
        httpx.AsyncClient(base_url=url, timeout=120) as http,
        websockets.connect(f"{address}/ws?clientId={client}") as socket,
        asyncio.timeout(120),
    ):
        answer = await http.post("/prompt", json={"prompt": prompt, "client_id": client, **more})
        assert answer.status_code == 200, answer.text
        id_ = answer.json()["prompt_id"]
        async for message in socket:
            if isinstance(message, bytes):
                previews.append(message[8:])
                continue
            events.append(json.loads(message))
            if events[-1]["type"] == "executing" and events[-1]["data"]["node"] is None:
                return id_, events, previews
    raise AssertionError("the websocket ended before the prompt")


def image_of(http: httpx.Client, file: dict[str, str]) -> Image.Image:
    answer = http.get("/view", params=file)
    assert answer.status_code == 200, answer.text
    return Image.open(io.BytesIO(answer.content))


def test_a_workflow_makes_the_image_of_its_seed(cluster: Cluster) -> None:
    prompts = [workflow("a handwritten seven", seed) for seed in (3, 3, 4)]
    with httpx.Client(base_url=cluster.url, timeout=120) as http:
        images = []
        for prompt in prompts:
            id_, events, previews = asyncio.run(followed(cluster.url, prompt))
            assert previews == []
            names = [event["type"] for event in events]
            assert names.count("execution_success") == 1
            steps = [event["data"]["value"] for event in events if event["type"] == "progress"]
            assert steps[-1] == STEPS
            entry = http.get(f"/history/{id_}").json()[id_]
            assert entry["status"]["completed"]
            (file,) = entry["outputs"]["9"]["images"]
            assert (file["subfolder"], file["type"]) == ("digits", "output")
            image = image_of(http, file)
            assert json.loads(image.text["prompt"]) == prompt
            images.append(np.asarray(image).astype(int))
    one, again, other = images
    assert one.shape == (32, 32, 3)
    assert np.array_equal(one, again)
    assert np.abs(one - other).max() > 50
    assert one.std() > 20  # there is a digit


def test_previews_come_for_who_asks(cluster: Cluster) -> None:
    asked = followed(cluster.url, workflow("a handwritten five", 6), extra_data={"preview_method": "auto"})
    _, _, previews = asyncio.run(asked)
    assert previews
    for preview in previews:
        image = Image.open(io.BytesIO(preview))
        assert (image.format, image.size) == ("JPEG", (32, 32))


def test_a_workflow_is_refused_before_it_runs(cluster: Cluster) -> None:
    prompt = workflow("x", 1)
    prompt["4"]["inputs"]["ckpt_name"] = "dreams.safetensors"
    with httpx.Client(base_url=cluster.url, timeout=60) as http:
        answer = http.post("/prompt", json={"prompt": prompt})
    assert answer.status_code == 400
    assert "digits-flux.safetensors" in answer.json()["node_errors"]["4"]["errors"][0]["details"]
