"""Workflows that are registered: checked when they come, and asked as any pipeline."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from kit.seeding import seeded_rng
from PIL import Image
from ray.exceptions import RayTaskError
from unit.deployments.ingress.comfy.comfy_fakes import Samplers, png, text_to_image
from unit.deployments.ingress.http_fakes import CONFIG, problem, served

from cluster.registry.directory import DirectoryChange, ModelRecord
from cluster.registry.watched_directory import WatchedDirectory
from configs.cluster import ClusterConfig
from configs.workflow import WorkflowConfig
from deployments.records.errors import QueueFull

PATH = "/admin/workflows"


class Registering(Samplers):
    """Replicas that take in workflows, and tell of them."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = WatchedDirectory("first")
        for found in self.states.values():
            self.directory.apply(found)

    async def on_watch(self, revision: int, epoch: str, timeout_s: float, replica: str | None) -> DirectoryChange:
        return await self.directory.watch(revision, epoch, timeout_s)

    async def on_register_workflow(self, workflow: WorkflowConfig) -> ModelRecord:
        return self.directory.apply(ModelRecord(workflow.id, "ready", workflow=workflow))

    async def on_unregister(self, id_: str, purge: bool) -> tuple[str, ...]:
        self.directory.remove(id_)
        return ()

    async def on_find_model(self, model: str) -> ModelRecord:
        if (found := self.directory.get(model)) is None:
            raise RayTaskError("find_model", "Traceback of the actor", self.directory.unknown(model))
        return found


@pytest.fixture
def registering() -> Registering:
    return Registering()


@pytest.fixture
async def http(registering: Registering) -> AsyncIterator[httpx.AsyncClient]:
    async with served(registering) as found:
        yield found.http


def named_workflow() -> dict[str, Any]:
    """The first workflow of every page, with names: a prompt, the sampler's values, and the image."""
    nodes = text_to_image()
    for id_, title in {"3": "sampler", "6": "prompt", "9": "poster"}.items():
        nodes[id_]["_meta"] = {"title": title}
    return nodes


async def registered(http: httpx.AsyncClient, nodes: Any, id_: str = "posters", **more: Any) -> httpx.Response:
    return await http.post(PATH, json={"id": id_, "workflow": nodes, **more})


async def completed(http: httpx.AsyncClient, **inputs: Any) -> dict[str, Any]:
    """Return the last event of a run."""
    answer = await http.post("/v1/pipelines/posters/runs", json={"inputs": inputs})
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["type"] == "pipeline.completed", events[-1]
    return dict(events[-1])


def pixels_of(b64: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64))))


async def test_a_workflow_is_asked_as_a_pipeline(http: httpx.AsyncClient, registering: Registering) -> None:
    answer = await registered(http, named_workflow(), description="Posters")
    assert (answer.status_code, answer.json()["kind"], answer.json()["state"]) == (201, "workflow", "ready")
    (listed,) = (await http.get("/v1/pipelines")).json()["pipelines"]
    assert (listed["id"], listed["description"], listed["problem"]) == ("posters", "Posters", None)
    said = {one["name"]: f"optional {one['type']}" for one in listed["inputs"]}
    assert (answer.json()["inputs"], answer.json()["outputs"]) == (said, {"poster": "image"})
    types = {one["name"]: (one["type"], one["optional"]) for one in listed["inputs"]}
    assert types == {
        "prompt": ("text", True),
        "sampler_seed": ("int", True),
        "sampler_steps": ("int", True),
        "sampler_cfg": ("float", True),
        "sampler_sampler_name": ("text", True),
        "sampler_scheduler": ("text", True),
        "sampler_denoise": ("float", True),
    }
    assert listed["outputs"] == {"poster": "$workflow.poster"}

    given = await completed(http, prompt="an eight", sampler_seed=9)
    asked = next(one for one in registering.requests if one.output == "latent")
    assert (asked.prompt, asked.num_inference_steps) == ("an eight", 4)
    assert pixels_of(given["outputs"]["poster"]["b64_json"]).shape == (16, 32, 3)
    registering.requests.clear()
    assert (await completed(http))["outputs"].keys() == {"poster"}
    assert registering.requests[0].prompt == "a seven", "the workflow's own values are the defaults"

    body = {"model": "posters", "prompt": "two", "response_format": "b64_json", "n": 2}
    images = (await http.post("/v1/images/generations", json=body)).json()["data"]
    assert [pixels_of(one["b64_json"]).shape for one in images] == [(16, 32, 3)] * 2
    infer = {"inputs": [{"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}
    (output,) = (await http.post("/v2/models/posters/infer", json=infer)).json()["outputs"]
    assert (output["name"], output["shape"]) == ("poster", [1, 16, 32, 3])
    card = next(one for one in (await http.get("/v1/models")).json()["data"] if one["id"] == "posters")
    assert (card["kind"], card["endpoints"]) == ("pipeline", ["/v1/images/generations"])
    (shown,) = [one for one in (await http.get("/admin/cluster")).json()["models"] if one["id"] == "posters"]
    assert (shown["kind"], shown["state"], shown["description"]) == ("workflow", "ready", "Posters")

    again = await registered(http, named_workflow())
    assert again.status_code == 200
    assert (await http.delete("/admin/models/posters")).json()["deleted"]
    assert (await http.get("/v1/pipelines")).json()["pipelines"] == []
    assert (await http.post("/v1/pipelines/posters/runs", json={"inputs": {}})).status_code == 404


async def test_images_come_and_go_with_the_request(http: httpx.AsyncClient) -> None:
    nodes = {
        "1": {"class_type": "LoadImage", "inputs": {"image": "old.png"}, "_meta": {"title": "photo"}},
        "2": {"class_type": "ImageInvert", "inputs": {"image": ["1", 0]}},
        "3": {"class_type": "ImageBatch", "inputs": {"image1": ["2", 0], "image2": ["1", 0]}},
        "4": {"class_type": "PreviewImage", "inputs": {"images": ["3", 0]}},
        "5": {"class_type": "PrimitiveString", "inputs": {"value": "note"}, "_meta": {"title": "about"}},
        "6": {"class_type": "PreviewAny", "inputs": {"source": ["5", 0]}},
    }
    assert (await registered(http, nodes)).status_code == 201
    missing = await http.post("/v1/pipelines/posters/runs", json={"inputs": {"about": "x"}})
    assert "needs input photo" in missing.text
    image = seeded_rng().integers(0, 256, (8, 16, 3), np.uint8)
    found = await completed(http, photo=base64.b64encode(png(image)).decode(), about="mine")
    np.testing.assert_allclose(pixels_of(found["outputs"]["image"]["b64_json"]), 255 - image.astype(int), atol=1)
    assert found["outputs"]["text"] == "mine"
    assert found["warnings"] == ["stage 'workflow': image: the first of 2 images: a pipeline gives one for each item"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda nodes: nodes["4"]["inputs"].update(ckpt_name="no.safetensors"), "node 4, CheckpointLoaderSimple"),
        (lambda nodes: nodes["3"]["inputs"].update(steps=10**9), "node 3, sampler (KSampler), input 'steps'"),
        (lambda nodes: nodes["6"].update(class_type="Unheard"), "no node 'Unheard' is known here"),
        (lambda nodes: [nodes[id_].pop("_meta", None) for id_ in nodes], "a title of one word"),
        (lambda nodes: nodes.clear(), "no nodes"),
    ],
)
async def test_what_cannot_run_is_refused_when_it_comes(http: httpx.AsyncClient, change: Any, said: str) -> None:
    nodes = named_workflow()
    change(nodes)
    answer = await registered(http, nodes)
    assert (answer.status_code, said in problem(answer)["message"]) == (400, True), answer.text
    assert (await http.get("/v1/pipelines")).json()["pipelines"] == []


async def test_the_id_is_nobody_elses(registering: Registering) -> None:
    stages = [{"name": "image", "model": "flux", "inputs": {"prompt": "$prompt"}}]
    taken = {"id": "taken", "inputs": {"prompt": "text"}, "stages": stages, "outputs": {"image": "$image"}}
    config = ClusterConfig.model_validate(CONFIG.model_dump(exclude_unset=True) | {"pipelines": [taken]})
    async with served(registering, config) as found:
        answer = await registered(found.http, named_workflow(), "taken")
        assert (answer.status_code, "of the cluster config" in problem(answer)["message"]) == (409, True)
        for id_ in ("", "../x", "a b"):
            assert (await registered(found.http, named_workflow(), id_)).status_code == 400


async def test_a_bad_value_is_the_requests_fault_and_a_missing_model_is_not(
    http: httpx.AsyncClient, registering: Registering
) -> None:
    await registered(http, named_workflow())

    async def refused(name: str, datatype: str, value: Any) -> tuple[int, str]:
        tensor = {"name": name, "datatype": datatype, "shape": [1], "data": [value]}
        answer = await http.post("/v2/models/posters/infer", json={"inputs": [tensor]})
        return answer.status_code, answer.json()["error"]

    for given, said in (
        (("sampler_steps", "INT64", 10**9), "sampler_steps: Value 1000000000 bigger than max"),
        (("sampler_scheduler", "BYTES", "none"), "sampler_scheduler: Value not in list"),
    ):
        status, message = await refused(*given)
        assert (status, said in message) == (400, True), message
    registering.error = RayTaskError("f", "Traceback", QueueFull("too many"))
    assert (await refused("prompt", "BYTES", "x"))[0] == 429
    registering.error = None
    registering.directory.remove("flux")
    status, message = await refused("prompt", "BYTES", "x")
    assert (status, "flux.safetensors" in message) == (503, True), message
