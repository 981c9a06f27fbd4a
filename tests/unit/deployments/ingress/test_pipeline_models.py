"""Pipelines asked as models of the OpenAI protocol, and what they are made of by the directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from unit.deployments.ingress.http_fakes import client_over

from cluster.process.ray_calls import NamedActor
from cluster.records.text_routes import is_route
from cluster.registry.directory import DirectoryChange, ModelRecord
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig, LimitsConfig
from configs.model import ModelConfig
from configs.pipeline import PipelineConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.service.catalog import PipelineModels
from deployments.ingress.service.service import Service
from deployments.pipelines.pipelines import Pipelines
from deployments.pipelines.plans import SegmentCall, SegmentResult
from deployments.records import (
    CacheUse,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ImageRequest,
    ImageResult,
    Message,
    TextResult,
)
from deployments.records.errors import GenerationFailed, InvalidRequest, ModelUnavailable
from weights.operations.feature_sizes import FeatureSizes

IMAGES = {
    "id": "images",
    "inputs": {"caption": "text", "seed": "optional int"},
    "stages": [{"name": "digit_image", "model": "flux", "inputs": {"prompt": "$caption", "seed": "$seed"}}],
    "outputs": {"image": "$digit_image"},
}
WORDS = {
    "id": "words",
    "inputs": {"text": "text"},
    "stages": [{"name": "answer", "model": "adder", "inputs": {"message": "$text"}}],
    "outputs": {"answer": "$answer"},
}
VECTORS: dict[str, Any] = {
    "id": "vectors",
    "inputs": {"text": "text"},
    "stages": [{"name": "vector", "model": "bert", "inputs": {"text": "$text"}}],
    "outputs": {"vector": "$vector"},
}
PAIRS = {
    **VECTORS,
    "id": "pairs",
    "inputs": {"text": "text", "other": "text"},
    "stages": [*VECTORS["stages"], {"name": "second", "model": "bert", "inputs": {"text": "$other"}}],
    "outputs": {"vector": "$vector", "second": "$second"},
}
CONFIG = ClusterConfig.model_validate({"models": [{"id": "bert", "path": "/bert"}], "pipelines": [VECTORS, PAIRS]})
LOCAL = "http://localhost"
KNOWN = {
    "flux": ModelRecord("flux", "ready", "diffusion"),
    "adder": ModelRecord("adder", "ready", "llm"),
    "bert": ModelRecord("bert", "ready", "embedding", features=FeatureSizes(out_features=2)),
}


class Reply:
    def __init__(self, result: SegmentResult) -> None:
        self.response = result

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        return self.response

    def cancel(self) -> None:
        """It is here."""


class Models:
    """Images as bright as their seed; texts in brackets; vectors of a text's length. All have something to tell."""

    def __init__(self) -> None:
        self.calls: list[SegmentCall] = []
        self.vector_value = 1.0

    async def generate(self, request: ImageRequest) -> ImageResult:
        image = np.full((2, 2, 3), request.seed or 0, np.uint8)
        return ImageResult(request.model, [image], 0, 1, {}, None, CacheUse(0, 0), ("cut",))

    async def chat(self, request: ChatRequest) -> TextResult:
        return TextResult(request.model, f"<{request.messages[-1].content}>", "stop", 1, 1, {}, warnings=("cut",))

    async def complete(self, request: CompletionRequest) -> TextResult:
        raise AssertionError

    def run_segment(self, call: SegmentCall, upstream: tuple[Any, ...]) -> Reply:
        self.calls.append(call)
        (texts,) = call.inputs.values()
        vectors = np.array([[len(text), self.vector_value] for text in texts], np.float32)
        return Reply(SegmentResult({call.plan.results[0]: vectors}, {}, ("stage 'vector': cut",)))


@pytest.fixture
def ask() -> Models:
    return Models()


@pytest.fixture
def models(ask: Models) -> PipelineModels:
    configs = [PipelineConfig.model_validate(config) for config in (IMAGES, WORDS, VECTORS)]
    pipelines = Pipelines(configs, ask, SimpleNamespace(records=KNOWN))
    return PipelineModels(pipelines, pipelines)


async def test_images_have_seeds_in_a_row(models: PipelineModels) -> None:
    result = await models.generate(ImageRequest(model="images", prompt="x", n=3, seed=7))
    assert [int(image[0, 0, 0]) for image in result.images] == [7, 8, 9]
    assert (result.seed, result.model, result.switch) == (7, "images", None)
    assert result.warnings == tuple(f"stage 'digit_image': item {number}: cut" for number in range(3))
    unseeded = await models.generate(ImageRequest(model="images", prompt="x"))
    assert (unseeded.seed, len(unseeded.images), unseeded.warnings) == (None, 1, ("stage 'digit_image': cut",))


async def test_the_last_turn_of_a_chat_is_asked(models: PipelineModels) -> None:
    turns = (Message(role="user", content="first"), Message(role="user", content="naïve"))
    result = await models.write(ChatRequest(model="words", messages=turns))
    assert (result.text, result.finish_reason, result.warnings) == ("<naïve>", "stop", ("stage 'answer': cut",))
    assert (await models.write(CompletionRequest(model="words", prompt="x"))).text == "<x>"


async def test_texts_are_embedded_with_the_requests_terms(models: PipelineModels, ask: Models) -> None:
    request = EmbeddingRequest(model="vectors", input=("a", "bcd"), priority=2, timeout_s=9.0)
    result = await models.embed(request)
    assert [vector.tolist() for vector in result.embeddings] == [[1, 1], [3, 1]]
    assert result.warnings == ("stage 'vector': cut",)
    (call,) = ask.calls
    assert call.priority == 2
    assert call.timeout_s is not None
    assert 8 < call.timeout_s <= 9


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_vectors_that_are_not_finite_are_no_embeddings(models: PipelineModels, ask: Models, value: float) -> None:
    ask.vector_value = value
    with pytest.raises(GenerationFailed, match="pipeline 'vectors': vector has numbers that are not finite"):
        await models.embed(EmbeddingRequest(model="vectors", input=("a", "b")))


@pytest.mark.parametrize(
    ("request_", "param", "message"),
    [
        (ImageRequest(model="images", prompt="x", width=32), "width", r"does not take it \(options: seed\)"),
        (ImageRequest(model="words", prompt="x"), "model", "does not make images: it is one of text"),
        (ChatRequest(model="images", messages=(Message(role="user", content="x"),)), "model", "does not make text"),
        (CompletionRequest(model="words", prompt="x", top_k=3), "top_k", r"does not take it \(options: none\)"),
        (EmbeddingRequest(model="words", input=("x",)), "model", "does not make embeddings"),
        (EmbeddingRequest(model="vectors", input=((1, 2),)), "input", "takes text, not token ids"),
        (ImageRequest(model="images", prompt="x", n=2, seed=2**63 - 1), "seed", "not a INT64|too large|too big"),
    ],
)
async def test_what_a_pipeline_does_not_do_is_refused(
    models: PipelineModels, request_: Any, param: str, message: str
) -> None:
    kind = {ImageRequest: models.generate, EmbeddingRequest: models.embed}.get(type(request_), models.write)
    with pytest.raises(InvalidRequest, match=message) as raised:
        await kind(request_)
    assert raised.value.param == param


async def test_options_that_say_what_holds_anyway_are_none(models: PipelineModels) -> None:
    await models.generate(ImageRequest(model="images", prompt="x", true_cfg_scale=1.0, negative_prompt=None, lora=()))
    await models.write(CompletionRequest(model="words", prompt="x", n=1, frequency_penalty=0.0, stop=()))


BERT = ModelRecord(
    "bert",
    "ready",
    "embedding",
    fingerprint="f1",
    entry=ModelConfig(id="bert", path=Path("/bert"), long_text="error"),
    features=FeatureSizes(out_features=2),
)
HEAD = ModelRecord("head", "ready", "head", features=FeatureSizes(2, 3, ("a", "b", "c")))
TORN = ModelRecord("torn", "unavailable", error="it is torn")


class Registry:
    """Its handle: the first copy of the directory comes when `records` are set."""

    def __init__(self) -> None:
        self.records: tuple[ModelRecord, ...] = ()
        self.is_open = asyncio.Event()
        self.watch = SimpleNamespace(remote=self._watch)

    async def _watch(self, revision: int, epoch: str, timeout_s: float, replica: str | None) -> DirectoryChange:
        if revision:
            await asyncio.Event().wait()
        await self.is_open.wait()
        return DirectoryChange(1, "e", self.records, full=True)

    def open(self, *records: ModelRecord) -> None:
        self.records = records
        self.is_open.set()


class Encoder:
    def __init__(self) -> None:
        self.calls: list[SegmentCall] = []
        self.run_segment = SimpleNamespace(remote=self._run)

    def options(self, *, stream: bool, session_id: str) -> Encoder:
        assert not stream
        assert is_route(session_id)
        return self

    def _run(self, call: SegmentCall) -> Reply:
        self.calls.append(call)
        return Models().run_segment(call, ())


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
async def watch(registry: Registry) -> AsyncIterator[RegistrySnapshot]:
    watch = RegistrySnapshot(NamedActor(lambda: registry))
    yield watch
    watch.close()


async def test_pipelines_follow_the_directory(registry: Registry, watch: RegistrySnapshot) -> None:
    service = service_of(watch)
    assert "unknown model 'bert'" in (service.pipelines.problem("vectors") or "")
    registry.open(BERT, HEAD, TORN)
    await watch.ready()
    assert watch.records == {"bert": BERT, "head": HEAD, "torn": TORN}
    assert service.pipelines.problem("vectors") is None
    assert service.pipelines.signature("vectors").outputs[0].shape == (-1, 2)


def service_of(watch: RegistrySnapshot, encoder: Any = None) -> Service:
    return Service(CONFIG, watch, encoder, None)


@pytest.mark.parametrize(
    ("records", "listed", "others"),
    [
        ((HEAD,), {"vectors": "unavailable", "pairs": "unavailable"}, {}),
        ((HEAD, BERT), {"vectors": "ready"}, {"pairs": "ready"}),  # no endpoint of OpenAI's takes two texts
    ],
)
async def test_pipelines_that_a_client_can_name_are_listed_and_those_that_are_only_away(
    registry: Registry,
    watch: RegistrySnapshot,
    records: tuple[ModelRecord, ...],
    listed: dict[str, str],
    others: dict[str, str],
) -> None:
    registry.open(*records)
    async with client_over(create_http_app(service_of(watch), CONFIG), LOCAL) as http:
        for query, expected in (("", listed), ("?all=true", listed | others)):
            models = (await http.get(f"/v1/models{query}")).json()["data"]
            found = {model["id"]: model["state"] for model in models if model["kind"] == "pipeline"}
            assert found == expected


@pytest.mark.parametrize("method", ["metadata", "ready", "configuration", "embed"])
async def test_the_first_request_of_a_replica_waits_for_the_directory(
    registry: Registry, watch: RegistrySnapshot, method: str
) -> None:
    service = service_of(watch, Encoder())
    inference = Inference(service, LimitsConfig())
    work = (
        service.embed({"model": "vectors", "input": ["a"]})
        if method == "embed"
        else getattr(inference, method)("vectors")
    )
    asking = asyncio.ensure_future(work)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not asking.done()
    registry.open(BERT)
    assert await asking


async def test_a_pipelines_tenant_is_checked_whoever_names_it(registry: Registry, watch: RegistrySnapshot) -> None:
    registry.open(BERT)
    service = service_of(watch, Encoder())
    with pytest.raises(InvalidRequest, match="no tenant 'nobody'"):
        await service.embed({"model": "vectors", "input": ["a"], "tenant": "nobody"})
    assert await service.embed({"model": "vectors", "input": ["a"], "tenant": "default"})


async def test_a_pipeline_is_ready_when_it_can_run(registry: Registry, watch: RegistrySnapshot) -> None:
    registry.open(HEAD)
    inference = Inference(service_of(watch), LimitsConfig())
    assert not await inference.ready("vectors")
    with pytest.raises(ModelUnavailable, match="bert"):
        await inference.metadata("vectors")


async def test_segments_carry_what_the_directory_says(registry: Registry, watch: RegistrySnapshot) -> None:
    registry.open(BERT)
    encoder = Encoder()
    result = await service_of(watch, encoder).embed({"model": "vectors", "input": ["abc"]})
    assert result.embeddings[0].tolist() == [3, 1]
    (call,) = encoder.calls
    assert (call.versions, call.long_texts) == ({"bert": "f1"}, {"bert": "error"})
