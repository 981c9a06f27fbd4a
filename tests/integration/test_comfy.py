"""The cluster as ComfyUI's clients see it: a prompt is sent, followed over a websocket, and its image fetched."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import uuid
from typing import Any

import httpx
import numpy as np
import pytest
import ray
import websockets
from integration.harness import Cluster
from kit.waiting import wait_until
from PIL import Image

from cluster.records.actor_names import NAMESPACE, registry_name
from deployments.records import ImageRequest

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


def test_a_registered_workflow_is_a_pipeline(cluster: Cluster) -> None:
    """Its image is that of the prompt with the same values, and it is there again when the registry is."""
    nodes = workflow("a handwritten seven", 3)
    nodes["6"]["_meta"], nodes["3"]["_meta"] = {"title": "prompt"}, {"title": "sampler"}
    given = {"prompt": "a handwritten two", "sampler_seed": 5}
    with httpx.Client(base_url=cluster.url, timeout=120) as http:
        answer = http.post("/admin/workflows", json={"id": "posters", "workflow": nodes})
        assert answer.status_code == 201, answer.text
        nodes["6"]["inputs"]["text"], nodes["3"]["inputs"]["seed"] = given.values()
        id_, _, _ = asyncio.run(followed(cluster.url, nodes))
        (saved,) = http.get(f"/history/{id_}").json()[id_]["outputs"]["9"]["images"]
        expected = np.asarray(image_of(http, saved))

        registry = ray.get_actor(registry_name(cluster.config), namespace=NAMESPACE)
        os.kill(ray.get(registry.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)

        def is_back() -> bool:
            shown = http.get("/admin/cluster").json()
            return "registry" not in shown and shown["nodes"][0].get("num_extents", 0) > 0

        wait_until(is_back, "the restarted registry")
        wait_until(lambda: ray.get(registry.find_model.remote("posters")).workflow is not None, "its workflow")
        tensors = [
            {"name": "prompt", "datatype": "BYTES", "shape": [1], "data": [given["prompt"]]},
            {"name": "sampler_seed", "datatype": "INT64", "shape": [1], "data": [given["sampler_seed"]]},
        ]
        (output,) = http.post("/v2/models/posters/infer", json={"inputs": tensors}).json()["outputs"]
        assert np.array_equal(np.array(output["data"]).reshape(output["shape"]), expected[None])
        by_handle = cluster.handle.run_pipeline.remote({"pipeline": "posters", "inputs": given}).result(timeout_s=120)
        assert np.array_equal(by_handle.outputs[output["name"]].data, expected[None])
        asked = ImageRequest(model="posters", prompt=given["prompt"])
        made = cluster.handle.generate.remote(asked).result(timeout_s=120)
        assert made.images[0].shape == (32, 32, 3)
        assert http.delete("/admin/models/posters").json()["deleted"]
