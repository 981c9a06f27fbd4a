"""Pipelines described, and run with their stages told: over models that are made up."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image
from unit.deployments.ingress.test_pipeline_models import IMAGES, KNOWN, VECTORS, WORDS, Models

from configs.cluster import LimitsConfig
from configs.jobs import JobsConfig
from configs.pipeline import PipelineConfig
from deployments.ingress.error_forms import install_error_handlers
from deployments.ingress.jobs.desk import JobDesk
from deployments.ingress.openai.image_decoders import ImageReaders
from deployments.ingress.openai.pipeline_runs import create_pipelines_router
from deployments.pipelines.pipelines import Pipelines
from deployments.records import ChatRequest, ImageRequest, TextResult
from deployments.records.errors import GenerationFailed

TWO_WAYS = {
    "id": "two-ways",
    "description": "<b>both</b>",
    "inputs": {"text": "text", "image": "optional image"},
    "stages": [
        {"name": "answer", "model": "adder", "inputs": {"message": "$text", "temperature": 0}},
        {"name": "picture", "model": "flux", "inputs": {"prompt": "$answer", "init_image": "$image"}},
        {"name": "shout", "function": "fill_template", "inputs": {"template": "{text}!", "text": "$answer"}},
    ],
    "outputs": {"image": "$picture", "text": "$shout"},
}


class Asked(Models):
    """Notes the requests for images; `error` is what chats raise."""

    def __init__(self) -> None:
        super().__init__()
        self.images: list[ImageRequest] = []
        self.error: Exception | None = None

    async def generate(self, request: ImageRequest) -> Any:
        self.images.append(request)
        return await super().generate(request)

    async def chat(self, request: ChatRequest) -> TextResult:
        if self.error:
            raise self.error
        return await super().chat(request)


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
async def http(asked: Asked) -> AsyncIterator[httpx.AsyncClient]:
    configs = [PipelineConfig.model_validate(config) for config in (IMAGES, WORDS, VECTORS, TWO_WAYS)]
    pipelines = Pipelines(configs, asked, SimpleNamespace(records=KNOWN))
    service: Any = SimpleNamespace(pipelines=pipelines, run_pipeline=pipelines.run_pipeline)
    app = FastAPI()
    install_error_handlers(app)
    app.include_router(create_pipelines_router(service, ImageReaders(), LimitsConfig(), JobDesk(service, JobsConfig())))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def run(http: httpx.AsyncClient, pipeline: str, **inputs: Any) -> list[tuple[str, dict[str, Any]]]:
    answer = await http.post(f"/v1/pipelines/{pipeline}/runs", json={"inputs": inputs})
    assert answer.status_code == 200, answer.text
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


async def test_a_pipeline_is_described_as_its_config_has_it(http: httpx.AsyncClient) -> None:
    found = (await http.get("/v1/pipelines")).json()["pipelines"]
    assert [one["id"] for one in found] == ["images", "words", "vectors", "two-ways"]
    two_ways = found[-1]
    assert (two_ways["description"], two_ways["problem"]) == ("<b>both</b>", None)
    assert two_ways["inputs"][1] == {"name": "image", "type": "image", "optional": True}
    assert [(one["name"], one["kind"], one["target"], one["needs"]) for one in two_ways["stages"]] == [
        ("answer", "model", "adder", ["text"]),
        ("picture", "model", "flux", ["answer", "image"]),
        ("shout", "function", "fill_template", ["answer"]),
    ]


async def test_stages_are_told_as_they_begin_and_end(http: httpx.AsyncClient) -> None:
    events = await run(http, "two-ways", text="hello")
    stages = [(data["stage"], data["state"]) for name, data in events if name == "pipeline.stage"]
    assert stages[:2] == [("answer", "running"), ("answer", "done")]
    for name in ("picture", "shout"):
        assert stages.index((name, "running")) < stages.index((name, "done"))
    assert len(stages) == 6
    name, completed = events[-1]
    assert name == "pipeline.completed"
    assert completed["outputs"]["text"] == "<hello>!"
    picture = Image.open(io.BytesIO(base64.b64decode(completed["outputs"]["image"]["b64_json"])))
    assert picture.size == (2, 2)
    assert completed["timings_ms"].keys() == {"answer", "picture", "shout", "total"}
    assert any("cut" in warning for warning in completed["warnings"])


async def test_images_and_numbers_are_inputs(http: httpx.AsyncClient, asked: Asked) -> None:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 6, 3), 77, np.uint8)).save(file, "PNG")
    await run(http, "two-ways", text="x", image=base64.b64encode(file.getvalue()).decode())
    assert asked.images[0].init_image.shape == (4, 6, 3)  # type: ignore[union-attr]
    assert np.unique(asked.images[0].init_image).tolist() == [77]  # type: ignore[arg-type]
    await run(http, "images", caption="x", seed=9)
    assert asked.images[1].seed == 9


async def test_a_stage_in_a_segment_is_told_and_vectors_are_numbers(http: httpx.AsyncClient) -> None:
    events = await run(http, "vectors", text="four")
    assert events[0][1] == {"type": "pipeline.stage", "stage": "vector", "state": "running", "ms": None}
    assert events[-1][1]["outputs"] == {"vector": [4.0, 1.0]}


async def test_numbers_that_json_has_no_name_for_are_texts(http: httpx.AsyncClient, asked: Asked) -> None:
    asked.vector_value = float("nan")
    events = await run(http, "vectors", text="four")
    assert events[-1][1]["outputs"] == {"vector": ["4.0", "nan"]}


@pytest.mark.parametrize(
    ("pipeline", "inputs", "status", "says"),
    [
        ("nothing", {}, 404, "known: images"),
        ("words", {}, 400, "needs input text"),
        ("words", {"text": "x", "other": 1}, 400, "no input 'other'"),
        ("images", {"caption": "x", "seed": "many"}, 400, "seed: not a INT64"),
        ("two-ways", {"text": "x", "image": 5}, 400, "image: expected a PNG"),
        ("two-ways", {"text": "x", "image": "AAAA"}, 400, "image"),
        ("words", [], 400, "inputs"),
    ],
)
async def test_bad_inputs_are_refused_before_anything_runs(
    http: httpx.AsyncClient, pipeline: str, inputs: Any, status: int, says: str
) -> None:
    answer = await http.post(f"/v1/pipelines/{pipeline}/runs", json={"inputs": inputs})
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


async def test_a_stage_that_fails_is_an_event(http: httpx.AsyncClient, asked: Asked) -> None:
    asked.error = GenerationFailed("no words")
    events = await run(http, "words", text="x")
    assert events[0][1]["state"] == "running"
    assert events[-1][0] == "error"
    assert "answer" in events[-1][1]["error"]["message"]
