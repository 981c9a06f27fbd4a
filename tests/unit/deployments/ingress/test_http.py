"""The HTTP edge over fake replicas, asked by the real OpenAI client and by clients that are up to no good."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError
from unit.deployments.serve_fakes import FakeHandle

from cluster.errors import ModelUnknown
from cluster.registry.directory import Directory, DirectoryChange, ModelRecord
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig, HttpConfig
from configs.model import ModelConfig
from deployments.errors import GenerationFailed, InvalidRequest, Overloaded
from deployments.ingress.http import create_http_app
from deployments.ingress.openai import embeddings as openai_embeddings
from deployments.ingress.openai.answers import ChatChunk, CompletionChunk
from deployments.ingress.service import Service
from deployments.records import (
    CacheUse,
    EmbeddingRequest,
    EmbeddingResult,
    ImageRequest,
    ImageResult,
    SwitchReport,
    TextChunk,
    TextResult,
)

SWITCH = SwitchReport("m", 1.0, 0.5, 0.5, 10, ("vae",), ())
CONFIG = ClusterConfig.model_validate(
    {
        "ingress": {
            "limits": {
                "max_images": 4,
                "max_pixels": 64 * 64,
                "max_inference_steps": 50,
                "max_prompt_chars": 100,
                "max_embedding_chars": 4096,
            }
        },
        "models": [
            {"id": "flux", "path": "/f", "defaults": {"width": 16, "height": 8, "num_inference_steps": 3}},
            {"id": "other-flux", "path": "/o"},
            {"id": "chatty", "path": "/c", "defaults": {"temperature": 0.0}},
            {"id": "plain", "path": "/p"},
            {"id": "clip", "path": "/e"},
            {"id": "broken", "path": "/b"},
        ],
        "adapters": [
            {"id": "bold", "path": "/l", "base": ["flux"]},
            {"id": "thin", "path": "/t", "base": ["other-flux"]},
            {"id": "torn", "path": "/r", "base": ["flux"]},
        ],
    }
)
KINDS = {"flux": "diffusion", "other-flux": "diffusion", "chatty": "llm", "plain": "llm", "clip": "embedding"}
CLASSES = {"flux": "FluxPipeline", "other-flux": "FluxPipeline", "sdxl": "StableDiffusionXLPipeline"}
KINDS |= {"bold": "adapter", "thin": "adapter"}
STATUSES = {
    entry.id: ModelRecord(
        entry.id,
        "ready",
        KINDS[entry.id],
        10,
        f"version of {entry.id}",
        entry=entry,
        class_name=CLASSES.get(entry.id, ""),
    )
    if entry.id in KINDS
    else ModelRecord(entry.id, "unavailable", error="model.safetensors: tensor 'w' is torn", entry=entry)
    for entry in (*CONFIG.models, *CONFIG.adapters)
}


class Replicas:
    """Registry, encoder and worker in one; `requests` are those that arrived, `error` is what they raise."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.error: Exception | None = None
        self.error_after: int | None = None
        self.num_deaths = 0
        self.vectors: np.ndarray | None = None
        self.questions: list[str] = []
        self.error_then: Exception = RayTaskError("f", "Traceback", GenerationFailed("the model failed at token 2"))
        self.pieces = ["Hel", "lo", ""]
        self.states = dict(STATUSES)

    def options(self, *, stream: bool) -> Replicas:
        assert stream
        return self

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=getattr(type(self), f"on_{method}").__get__(self))

    async def on_watch(self, revision: int, epoch: str, timeout_s: float) -> DirectoryChange:
        if epoch:
            await asyncio.Event().wait()
        directory = Directory("first")
        for found in self.states.values():
            directory.apply(found)
        return directory.changes_since(revision, epoch)

    async def on_status(self, model: str) -> ModelRecord:
        self.questions.append(model)
        if model not in self.states:
            cause = ModelUnknown(f"no model {model!r} (known: {', '.join(self.states)})")
            raise RayTaskError("status", "Traceback of the actor", cause)
        return self.states[model]

    async def on_residency(self, *_: Any) -> dict[str, Any]:
        return {"num_nodes": 0, "nodes": [], "models": {}}

    def broadcast(self, method: str) -> Any:
        async def results_async(**_: Any) -> list[dict[str, Any]]:
            return [{"answers": method}] * 2

        return SimpleNamespace(results_async=results_async)

    async def on_generate(self, request: ImageRequest) -> ImageResult:
        self._arrived(request)
        images = [np.full((request.height or 8, request.width or 8, 3), 10 * i, np.uint8) for i in range(request.n)]
        times: Any = {"denoise": 2.0, "total": 3.0}
        return ImageResult(request.model, images, request.seed or 0, 3, times, SWITCH, CacheUse(1, 2), ("a note",))

    async def on_embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        self._arrived(request)
        small = [np.array([i, 0.1, -2.5], np.float32) for i in range(len(request.input))]
        vectors = small if self.vectors is None else list(self.vectors[: len(request.input)])
        return EmbeddingResult(request.model, vectors, 7, {"encode": 1.0, "total": 1.0}, CacheUse(0, 1))

    async def on_stream_text(self, request: Any) -> AsyncIterator[TextChunk]:
        self._arrived(request)
        for number, piece in enumerate(self.pieces):
            if number == self.error_after:
                raise self.error_then
            last = number == len(self.pieces) - 1
            yield TextChunk(
                piece, 4, number + 1, "stop" if last else None, {"total": 5.0} if last else {}, SWITCH if last else None
            )

    async def on_write_text(self, request: Any) -> TextResult:
        chunks = [chunk async for chunk in self.on_stream_text(request)]
        text, last = "".join(chunk.text for chunk in chunks), chunks[-1]
        return TextResult(request.model, text, "stop", 4, last.num_completion_tokens, last.timings_ms, SWITCH)

    def _arrived(self, request: Any) -> None:
        self.requests.append(request)
        if self.num_deaths:
            self.num_deaths -= 1
            raise ActorDiedError()
        if self.error:
            raise self.error


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.retries.PAUSE_S", 0.0)


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


@pytest.fixture
async def http(replicas: Replicas, as_described: Any) -> AsyncIterator[httpx.AsyncClient]:
    watch = RegistrySnapshot(lambda: replicas)
    handle = FakeHandle(replicas)
    app = create_http_app(Service(CONFIG, watch, handle, handle), CONFIG)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    hooks = as_described(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", event_hooks=hooks) as client:
        yield client
    watch.close()


@pytest.fixture
def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http, max_retries=0)


def problem(response: httpx.Response) -> dict[str, Any]:
    """The error, after checking that it is in OpenAI's envelope and tells nothing of the inside."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert "Traceback" not in response.text
    return body["error"]


# The OpenAI client


async def test_images(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    extra = {"seed": 5, "num_inference_steps": 2, "lora": [{"name": "bold", "scale": 0.5}]}
    found = await client.images.generate(model="flux", prompt="a seven", n=2, size="24x16", extra_body=extra)  # type: ignore[call-overload]
    pictures = [Image.open(io.BytesIO(base64.b64decode(item.b64_json))) for item in found.data]
    assert [(picture.size, picture.format, picture.getpixel((0, 0))) for picture in pictures] == [
        ((24, 16), "PNG", (0, 0, 0)),
        ((24, 16), "PNG", (10, 10, 10)),
    ]
    (request,) = replicas.requests
    assert (request.width, request.height, request.n, request.seed, request.num_inference_steps) == (24, 16, 2, 5, 2)
    assert [(use.name, use.scale) for use in request.lora] == [("bold", 0.5)]
    details = found.to_dict()
    assert (details["seed"], details["warnings"], details["switch"]["built"]) == (5, ["a note"], ["vae"])


async def test_an_image_request_gets_the_models_defaults_and_a_seed(
    client: openai.AsyncOpenAI, replicas: Replicas
) -> None:
    found = await client.images.generate(model="flux", prompt="x", output_format="jpeg")
    (request,) = replicas.requests
    assert (request.width, request.height, request.num_inference_steps) == (16, 8, 3)
    assert found.to_dict()["seed"] == request.seed
    assert found.data
    assert found.data[0].b64_json
    assert Image.open(io.BytesIO(base64.b64decode(found.data[0].b64_json))).format == "JPEG"


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_embeddings(client: openai.AsyncOpenAI, replicas: Replicas, encoding_format: Any) -> None:
    found = await client.embeddings.create(model="clip", input=["a", "b"], encoding_format=encoding_format)
    vectors = [item.embedding for item in found.data]
    if encoding_format == "base64":
        vectors = [np.frombuffer(base64.b64decode(vector), "<f4").tolist() for vector in vectors]  # type: ignore[arg-type]
    np.testing.assert_array_equal(np.float32(vectors), np.float32([[0, 0.1, -2.5], [1, 0.1, -2.5]]))
    assert found.usage.prompt_tokens == 7
    assert replicas.requests[0].input == ("a", "b")


@pytest.mark.parametrize(
    ("given", "arrived"),
    [("a", ("a",)), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
async def test_embedding_inputs(client: openai.AsyncOpenAI, replicas: Replicas, given: Any, arrived: Any) -> None:
    found = await client.embeddings.create(model="clip", input=given)
    assert replicas.requests[0].input == arrived
    assert len(found.data[0].embedding) == 3


async def test_chat(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    parts = [{"type": "text", "text": "12 "}, {"type": "text", "text": "+ 7?"}]
    found = await client.chat.completions.create(
        model="chatty",
        messages=[{"role": "system", "content": "add"}, {"role": "user", "content": parts}],
        max_tokens=9,  # type: ignore[list-item]
    )
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == ("Hello", "stop")
    assert found.usage
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (4, 3, 7)
    (request,) = replicas.requests
    assert [(message.role, message.content) for message in request.messages] == [("system", "add"), ("user", "12 + 7?")]
    assert (request.max_tokens, request.temperature) == (9, 0.0)


async def test_a_model_without_a_default_temperature_gets_openais(
    client: openai.AsyncOpenAI, replicas: Replicas
) -> None:
    for options in ({}, {"temperature": 0.3}, {"stop": "x"}, {"max_completion_tokens": 5}):
        await client.chat.completions.create(model="plain", messages=[{"role": "user", "content": "x"}], **options)  # type: ignore[call-overload]
    assert [request.temperature for request in replicas.requests] == [1.0, 0.3, 1.0, 1.0]
    assert (replicas.requests[2].stop, replicas.requests[3].max_tokens) == (("x",), 5)


async def test_completions(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    found = await client.completions.create(model="chatty", prompt="x", stop=["a", "b"], seed=3)
    assert (found.choices[0].text, found.choices[0].finish_reason, found.object) == ("Hello", "stop", "text_completion")
    assert (replicas.requests[0].stop, replicas.requests[0].seed) == (("a", "b"), 3)


async def test_chat_as_a_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="chatty", messages=[{"role": "user", "content": "x"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 7)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_completions_as_a_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="chatty", prompt="x", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"


async def test_models(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    listed = [model async for model in client.models.list()]
    assert [model.id for model in listed] == [entry.id for entry in (*CONFIG.models, *CONFIG.adapters)]
    one = (await client.models.retrieve("bold")).to_dict()
    assert (one["object"], one["kind"], one["base"], one["state"]) == ("model", "adapter", ["flux"], "ready")
    broken = (await client.models.retrieve("broken")).to_dict()
    assert (broken["state"], broken["error"]) == ("unavailable", "model.safetensors: tensor 'w' is torn")
    assert (await http.get("/admin/cluster")).json()["cluster"] == "atelier"


async def test_errors_are_the_clients_own_types(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    with pytest.raises(openai.NotFoundError, match="known: flux") as unknown:
        await client.images.generate(model="nothing", prompt="x")
    assert (unknown.value.code, unknown.value.param, unknown.value.type) == (
        "model_not_found",
        "model",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nothing")
    with pytest.raises(openai.BadRequestError, match="does not make images; models that do: flux, other-flux") as wrong:
        await client.images.generate(model="chatty", prompt="x")
    assert wrong.value.param == "model"
    with pytest.raises(openai.InternalServerError, match="torn") as unavailable:
        await client.completions.create(model="broken", prompt="x")
    assert unavailable.value.status_code == 503
    replicas.error = RayTaskError("generate", "Traceback of the replica", InvalidRequest("n: too many", "n"))
    with pytest.raises(openai.BadRequestError, match="too many"):
        await client.images.generate(model="flux", prompt="x")


# What goes wrong

IMAGE: dict[str, Any] = {"model": "flux", "prompt": "x"}
CHAT: dict[str, Any] = {"model": "chatty", "messages": [{"role": "user", "content": "x"}]}
COMPLETION: dict[str, Any] = {"model": "chatty", "prompt": "x"}
EMBEDDING: dict[str, Any] = {"model": "clip", "input": "x"}
IMAGES, CHATS, COMPLETIONS, EMBEDDINGS = "images/generations", "chat/completions", "completions", "embeddings"
NAN, INF = float("nan"), float("inf")

BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    (IMAGES, {**IMAGE, "model": "nothing"}, 404, "model"),
    (IMAGES, {**IMAGE, "model": "../etc"}, 404, "model"),
    (IMAGES, {**IMAGE, "model": "clip"}, 400, "model"),
    (IMAGES, {**IMAGE, "model": "bold"}, 400, "model"),
    (IMAGES, {**IMAGE, "model": "broken"}, 503, "model"),
    (IMAGES, {**IMAGE, "model": 3}, 400, "model"),
    (IMAGES, {"prompt": "x"}, 400, "model"),
    (IMAGES, {"model": "flux"}, 400, "prompt"),
    (IMAGES, {}, 400, "model"),
    (IMAGES, {**IMAGE, "prompt": ""}, 400, "prompt"),
    (IMAGES, {**IMAGE, "prompt": ["x"]}, 400, "prompt"),
    (IMAGES, {**IMAGE, "prompt": None}, 400, "prompt"),
    (IMAGES, {**IMAGE, "prompt": "x" * 101}, 400, "prompt"),
    (IMAGES, {**IMAGE, "prompt": "x" * 2**20}, 400, "prompt"),
    (IMAGES, {**IMAGE, "negative_prompt": "x" * 101}, 400, "negative_prompt"),
    (IMAGES, {**IMAGE, "n": 0}, 400, "n"),
    (IMAGES, {**IMAGE, "n": 5}, 400, "n"),
    (IMAGES, {**IMAGE, "n": 10**30}, 400, "n"),
    (IMAGES, {**IMAGE, "n": 1.5}, 400, "n"),
    (IMAGES, {**IMAGE, "n": "many"}, 400, "n"),
    (IMAGES, {**IMAGE, "n": INF}, 400, "n"),
    (IMAGES, {**IMAGE, "size": "0x0"}, 400, "size"),
    (IMAGES, {**IMAGE, "size": "0x8"}, 400, "size"),
    (IMAGES, {**IMAGE, "size": "64x65"}, 400, "size"),
    (IMAGES, {**IMAGE, "size": "9999999x9999999"}, 400, "size"),
    (IMAGES, {**IMAGE, "size": "-8x8"}, 400, "size"),
    (IMAGES, {**IMAGE, "size": "8x"}, 400, "size"),
    (IMAGES, {**IMAGE, "size": "8X8"}, 400, "size"),
    (IMAGES, {**IMAGE, "size": "٣x٣"}, 400, "size"),
    (IMAGES, {**IMAGE, "size": 64}, 400, "size"),
    (IMAGES, {**IMAGE, "num_inference_steps": 0}, 400, "num_inference_steps"),
    (IMAGES, {**IMAGE, "num_inference_steps": 51}, 400, "num_inference_steps"),
    (IMAGES, {"model": "other-flux", "prompt": "x"}, 400, "size"),
    (IMAGES, {"model": "other-flux", "prompt": "x", "width": 8}, 400, "size"),
    (IMAGES, {**IMAGE, "guidance_scale": NAN}, 400, "guidance_scale"),
    (IMAGES, {**IMAGE, "guidance_scale": INF}, 400, "guidance_scale"),
    (IMAGES, {**IMAGE, "guidance_scale": -1}, 400, "guidance_scale"),
    (IMAGES, {**IMAGE, "true_cfg_scale": NAN}, 400, "true_cfg_scale"),
    (IMAGES, {**IMAGE, "seed": -1}, 400, "seed"),
    (IMAGES, {**IMAGE, "seed": 2**63}, 400, "seed"),
    (IMAGES, {**IMAGE, "seed": NAN}, 400, "seed"),
    (IMAGES, {**IMAGE, "steps": 5}, 400, "steps"),
    (IMAGES, {**IMAGE, "response_format": "url"}, 400, "response_format"),
    (IMAGES, {**IMAGE, "output_format": "gif"}, 400, "output_format"),
    (IMAGES, {**IMAGE, "lora": [{"name": "nothing"}]}, 404, "lora"),
    (IMAGES, {**IMAGE, "lora": [{"name": "thin"}]}, 404, "lora"),
    (IMAGES, {**IMAGE, "lora": [{"name": "flux"}]}, 404, "lora"),
    (IMAGES, {**IMAGE, "lora": [{"name": "torn"}]}, 503, "lora"),
    (IMAGES, {**IMAGE, "lora": [{"name": "bold", "scale": NAN}]}, 400, "lora.0.scale"),
    (IMAGES, {**IMAGE, "lora": [{"name": "bold", "scale": 11}]}, 400, "lora.0.scale"),
    (IMAGES, {**IMAGE, "lora": [{"name": "bold", "strength": 1}]}, 400, "lora.0.strength"),
    (IMAGES, {**IMAGE, "lora": "bold"}, 400, "lora"),
    (IMAGES, {**IMAGE, "\ud800": 1}, 400, None),
    (IMAGES, {**IMAGE, "prompt": "\ud800"}, 400, "prompt"),
    (IMAGES, {**IMAGE, "model": "\ud800"}, 400, "model"),
    (IMAGES, {**IMAGE, "model": "x" * 257}, 400, "model"),
    (IMAGES, {**IMAGE, "user": "x" * 1025}, 400, "user"),
    (IMAGES, {**IMAGE, "width": 2**31}, 400, "width"),
    (IMAGES, {**IMAGE, "max_sequence_length": 10**30}, 400, "max_sequence_length"),
    (IMAGES, {**IMAGE, "lora": [{"name": "bold"}] * 17}, 400, "lora"),
    (IMAGES, {**IMAGE, "lora": [{"name": "x" * 257}]}, 400, "lora.0.name"),
    (CHATS, {**CHAT, "model": "nothing"}, 404, "model"),
    (CHATS, {**CHAT, "model": "flux"}, 400, "model"),
    (CHATS, {**CHAT, "n": 2}, 400, "n"),
    (CHATS, {**CHAT, "logprobs": True}, 400, "logprobs"),
    (CHATS, {**CHAT, "top_logprobs": 3}, 400, "top_logprobs"),
    (CHATS, {**CHAT, "tools": []}, 400, "tools"),
    (CHATS, {**CHAT, "presence_penalty": 0.5}, 400, "presence_penalty"),
    (CHATS, {**CHAT, "frequency_penalty": NAN}, 400, "frequency_penalty"),
    (CHATS, {**CHAT, "response_format": {"type": "json_object"}}, 400, "response_format.type"),
    (CHATS, {**CHAT, "temperature": NAN}, 400, "temperature"),
    (CHATS, {**CHAT, "temperature": 2.5}, 400, "temperature"),
    (CHATS, {**CHAT, "temperature": "hot"}, 400, "temperature"),
    (CHATS, {**CHAT, "top_p": 0}, 400, "top_p"),
    (CHATS, {**CHAT, "top_p": NAN}, 400, "top_p"),
    (CHATS, {**CHAT, "top_k": -1}, 400, "top_k"),
    (CHATS, {**CHAT, "max_tokens": 0}, 400, "max_tokens"),
    (CHATS, {**CHAT, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (CHATS, {**CHAT, "stop": ["a"] * 5}, 400, "stop"),
    (CHATS, {**CHAT, "stop": ""}, 400, "stop"),
    (CHATS, {**CHAT, "stop": [1]}, 400, "stop"),
    (CHATS, {**CHAT, "stream": "maybe"}, 400, "stream"),
    (CHATS, {**CHAT, "messages": []}, 400, "messages"),
    (CHATS, {**CHAT, "messages": "x"}, 400, "messages"),
    (CHATS, {**CHAT, "messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role"),
    (CHATS, {**CHAT, "messages": [{"role": "user"}]}, 400, "messages.0.content"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": None}]}, 400, "messages.0.content"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": "x" * 60}] * 2}, 400, "messages"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": ""}] * 1025}, 400, "messages"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": "x", "name": "x" * 257}]}, 400, "messages.0.name"),
    (CHATS, {**CHAT, "max_tokens": 10**30}, 400, "max_tokens"),
    (CHATS, {**CHAT, "max_completion_tokens": 10**30}, 400, "max_completion_tokens"),
    (CHATS, {**CHAT, "top_k": 10**30}, 400, "top_k"),
    (CHATS, {**CHAT, "stop": "x" * 257}, 400, "stop"),
    (CHATS, {**CHAT, "metadata": {str(key): "" for key in range(17)}}, 400, "metadata"),
    (CHATS, {**CHAT, "metadata": {"x": "x" * 513}}, 400, "metadata.x"),
    (CHATS, {**CHAT, "prompt": "x"}, 400, "prompt"),
    (COMPLETIONS, {**COMPLETION, "model": "clip"}, 400, "model"),
    (COMPLETIONS, {**COMPLETION, "prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {**COMPLETION, "prompt": ["x", "y"]}, 400, "prompt"),
    (COMPLETIONS, {**COMPLETION, "prompt": "x" * 101}, 400, "prompt"),
    (COMPLETIONS, {**COMPLETION, "logprobs": 3}, 400, "logprobs"),
    (COMPLETIONS, {**COMPLETION, "best_of": 2}, 400, "best_of"),
    (COMPLETIONS, {**COMPLETION, "echo": True}, 400, "echo"),
    (EMBEDDINGS, {**EMBEDDING, "model": "flux"}, 400, "model"),
    (EMBEDDINGS, {**EMBEDDING, "model": "nothing"}, 404, "model"),
    (EMBEDDINGS, {**EMBEDDING, "input": ""}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": []}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": [""]}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": [[]]}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": 5}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": [1.0]}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": [True]}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": ["a", 1]}, 400, None),
    (EMBEDDINGS, {**EMBEDDING, "input": ["x"] * 2049}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": "x" * 101}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": [[1] * 101]}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": ["x" * 100] * 41}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": [[1] * 100] * 41}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "encoding_format": "hex"}, 400, "encoding_format"),
    (EMBEDDINGS, {**EMBEDDING, "dimensions": 2}, 400, "dimensions"),
    (EMBEDDINGS, {**EMBEDDING, "dimensions": 0}, 400, "dimensions"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD, ids=[f"{b[0]} {str(b[1])[:70]}" for b in BAD])
async def test_a_bad_request_is_refused_with_its_field(
    http: httpx.AsyncClient, replicas: Replicas, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    for options in ({}, {"stream": True}) if "completions" in path else ({},):
        content = json.dumps({**options, **body})
        response = await http.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
        error = problem(response)
        assert response.status_code == status, error
        if param:
            assert error["param"] == param, error
        assert len(error["message"]) < 500
        assert error["type"] == ("server_error" if status == 503 else "invalid_request_error")
        assert ("retry-after" in response.headers) == (status == 503)
    assert "dimensions" in body or not replicas.requests


async def test_defaults_of_a_family_are_bounded_by_every_way_in(replicas: Replicas) -> None:
    """`other-flux` draws 1,024 x 1,024 when nobody says otherwise, and 64 x 64 are allowed."""
    step = {"name": "picture", "model": "other-flux", "inputs": {"prompt": "$prompt"}}
    pipeline = {"id": "p", "inputs": {"prompt": "text"}, "stages": [step], "outputs": {"image": "$picture"}}
    config = ClusterConfig.model_validate(CONFIG.model_dump(mode="json") | {"pipelines": [pipeline]})
    watch = RegistrySnapshot(lambda: replicas)
    service = Service(config, watch, replicas, replicas)
    for model in ("other-flux", "p"):
        with pytest.raises(InvalidRequest, match=r"size: 1048576 pixels .the model's default., at most 4096"):
            await service.generate({"model": model, "prompt": "x"})
    app = httpx.ASGITransport(create_http_app(service, config), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=app, base_url="http://test") as http:
        for model in ("other-flux", "p"):
            prompt = {"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["x"]}
            response = await http.post(f"/v2/models/{model}/infer", json={"inputs": [prompt]})
            assert response.status_code == 400
            assert "1048576 pixels (the model's default)" in response.json()["error"]
    watch.close()
    assert not replicas.requests


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{'model': 1}",
        b"[]",
        b"[1]",
        b"3",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": "flux", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda content: content[:20],
)
@pytest.mark.parametrize("path", [IMAGES, CHATS, COMPLETIONS, EMBEDDINGS])
async def test_a_body_that_is_no_json_object_is_a_400(http: httpx.AsyncClient, path: str, content: bytes) -> None:
    response = await http.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert problem(response)["type"] == "invalid_request_error"
    assert response.status_code == 400


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "multipart/form-data", "application/x-www-form-urlencoded", "junk"]
)
async def test_another_content_type_is_a_400(http: httpx.AsyncClient, kind: str | None) -> None:
    headers = {"content-type": kind} if kind else {}
    response = await http.post(f"/v1/{IMAGES}", content=json.dumps(IMAGE).encode(), headers=headers)
    assert response.status_code == 400
    problem(response)


async def chunks(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 2**16):
        yield b" " * 2**16


async def test_a_body_over_the_limit_is_a_413_announced_or_not(http: httpx.AsyncClient, replicas: Replicas) -> None:
    large = CONFIG.ingress.limits.max_body_bytes + 2**16
    json_type = {"content-type": "application/json"}
    announced = await http.post(f"/v1/{IMAGES}", content=b" " * large, headers=json_type)
    chunked = await http.post(f"/v1/{IMAGES}", content=chunks(large), headers=json_type)
    assert "content-length" in announced.request.headers
    assert "content-length" not in chunked.request.headers
    for response in (announced, chunked):
        error = problem(response)
        assert (response.status_code, error["code"]) == (413, "request_too_large")
        assert "at most 2097152 are allowed" in error["message"]
    assert replicas.requests == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "unknown_url"),
        ("POST", "/v1/nothing", 404, "unknown_url"),
        ("GET", f"/v1/{IMAGES}", 405, "method_not_allowed"),
        ("GET", "/v1/models/nothing", 404, "model_not_found"),
        ("GET", "/v1/models/%ED%A0%80", 404, "model_not_found"),
    ],
)
async def test_urls_that_are_not_there(http: httpx.AsyncClient, method: str, path: str, status: int, code: str) -> None:
    response = await http.request(method, path)
    assert (response.status_code, problem(response)["code"]) == (status, code)


@pytest.mark.parametrize("path", [IMAGES, CHATS, COMPLETIONS, EMBEDDINGS])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (KeyError("secret_module.py"), 500, "internal"),
        (RayTaskError("f", "Traceback: secret", ZeroDivisionError("secret")), 500, "internal"),
        (RayTaskError("f", "Traceback: secret", Overloaded("no room")), 503, "overloaded"),
        (RayTaskError("f", "Traceback: secret", GenerationFailed("not finite")), 500, "generation_failed"),
        (RayActorError(), 503, "replica_unavailable"),
    ],
    ids=["own", "task", "overloaded", "failed", "actor"],
)
async def test_what_a_replica_raises(
    http: httpx.AsyncClient, replicas: Replicas, path: str, error: Exception, status: int, code: str
) -> None:
    replicas.error = error
    body = {IMAGES: IMAGE, CHATS: CHAT, COMPLETIONS: COMPLETION, EMBEDDINGS: EMBEDDING}[path]
    for stream in (False, True) if "completions" in path else (False,):
        response = await http.post(f"/v1/{path}", json={**body, "stream": True} if stream else body)
        assert (response.status_code, problem(response)["code"]) == (status, code)
        assert "secret" not in response.text
        assert problem(response)["type"] == "server_error"


async def test_an_error_in_the_middle_of_a_stream_is_an_event(
    http: httpx.AsyncClient, client: openai.AsyncOpenAI, replicas: Replicas
) -> None:
    replicas.error_after = 1
    stream = await client.chat.completions.create(model="chatty", messages=CHAT["messages"], stream=True)
    pieces: list[str | None] = []

    async def listen() -> None:
        async for chunk in stream:
            pieces.append(chunk.choices[0].delta.content)

    with pytest.raises(openai.APIError, match="failed at token 2") as caught:
        await listen()
    assert (pieces, caught.value.code) == (["", "Hel"], "generation_failed")
    response = await http.post(f"/v1/{CHATS}", json={**CHAT, "stream": True})
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    whole = await http.post(f"/v1/{CHATS}", json=CHAT)
    assert (whole.status_code, problem(whole)["code"]) == (500, "generation_failed")


@pytest.mark.parametrize(
    ("path", "body", "class_"), [(CHATS, CHAT, ChatChunk), (COMPLETIONS, COMPLETION, CompletionChunk)]
)
async def test_pieces_of_a_stream_are_of_their_class(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], class_: type[ChatChunk | CompletionChunk]
) -> None:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    response = await http.post(f"/v1/{path}", json=asked)
    *events, end = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
    pieces = [class_.model_validate_json(event, strict=True) for event in events]
    assert end == "[DONE]"
    assert {piece.id for piece in pieces} == {pieces[0].id}
    assert [bool(piece.choices) for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert pieces[-1].usage
    assert pieces[-2].choices[0].finish_reason == "stop"
    assert pieces[-2].timings_ms


# Large answers


async def test_large_embeddings_are_written_beside_the_event_loop(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: dict[int, list[int]] = {}
    write = openai_embeddings.to_json

    def noted(value: Any) -> bytes:
        writers.setdefault(threading.get_ident(), []).append(len(value["embedding"]))
        return write(value)

    monkeypatch.setattr(openai_embeddings, "to_json", noted)
    vectors = np.random.default_rng().standard_normal((20, 1024)).astype(np.float32)
    replicas.vectors = vectors
    for format_ in ("float", "base64"):
        writers.clear()
        answer = await http.post(
            f"/v1/{EMBEDDINGS}", json={**EMBEDDING, "input": ["x"] * 20, "encoding_format": format_}
        )
        assert threading.get_ident() not in writers
        assert sum(map(len, writers.values())) == 20
        found = [item["embedding"] for item in answer.json()["data"]]
        if format_ == "base64":
            found = [np.frombuffer(base64.b64decode(item), "<f4") for item in found]
        np.testing.assert_array_equal(np.float32(found), vectors)
    writers.clear()
    assert (await http.post(f"/v1/{EMBEDDINGS}", json=EMBEDDING)).status_code == 200
    assert list(writers) == [threading.get_ident()]  # a thread would cost more than the writing


@pytest.mark.parametrize("format_", ["float", "base64"])
async def test_an_embedding_that_is_no_number_is_an_error_and_not_an_answer(
    http: httpx.AsyncClient, replicas: Replicas, format_: str
) -> None:
    replicas.vectors = np.array([[0.5, np.nan]], np.float32)
    answer = await http.post(f"/v1/{EMBEDDINGS}", json={**EMBEDDING, "encoding_format": format_})
    assert (answer.status_code, problem(answer)["code"]) == (500, "generation_failed")


# More than the ingress takes


class Held(Replicas):
    """Holds all work."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def on_generate(self, request: ImageRequest) -> ImageResult:
        self.requests.append(request)
        await self.gate.wait()
        return await super().on_generate(request)


async def test_what_is_too_much_is_refused_at_once_and_probes_answer() -> None:
    replicas = Held()
    watch, handle = RegistrySnapshot(lambda: replicas), FakeHandle(replicas)
    few = CONFIG.model_copy(update={"ingress": CONFIG.ingress.model_copy(update={"max_ongoing_requests": 3})})
    transport = httpx.ASGITransport(create_http_app(Service(few, watch, handle, handle), few))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=10) as http:
        running = [asyncio.create_task(http.post(f"/v1/{IMAGES}", json=IMAGE)) for _ in range(3)]
        while len(replicas.requests) < 3:
            await asyncio.sleep(0)
        refused = await http.post(f"/v1/{CHATS}", json=CHAT)
        assert (refused.status_code, problem(refused)["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "1"
        other = await http.post("/v2/models/chatty/generate", json={"text_input": "x"})
        assert (other.status_code, set(other.json())) == (429, {"error"})
        for path in ("/healthz", "/v2/health/live", "/v2/health/ready", "/v1/models", "/admin/cluster"):
            assert (await http.get(path)).status_code == 200
        replicas.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 3
        assert (await http.post(f"/v1/{CHATS}", json=CHAT)).status_code == 200
    watch.close()


async def test_a_client_that_goes_ends_the_work() -> None:
    replicas = Held()
    watch, handle = RegistrySnapshot(lambda: replicas), FakeHandle(replicas)
    transport = httpx.ASGITransport(create_http_app(Service(CONFIG, watch, handle, handle), CONFIG))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        going = asyncio.create_task(http.post(f"/v1/{IMAGES}", json=IMAGE))
        while not replicas.requests:
            await asyncio.sleep(0)
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handle.responses[0].task
    watch.close()


@pytest.mark.parametrize("path", ["/v2/models/flux/infer", f"/v1/{IMAGES}"])
async def test_a_request_has_its_time_and_then_its_work_ends(path: str) -> None:
    replicas = Held()
    watch, handle = RegistrySnapshot(lambda: replicas), FakeHandle(replicas)
    short = CONFIG.model_copy(update={"http": HttpConfig(request_timeout_s=0.05)})
    transport = httpx.ASGITransport(create_http_app(Service(short, watch, handle, handle), short))
    tensor = {"name": "prompt", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.post(path, json={"inputs": [tensor]} if "infer" in path else IMAGE)
    assert answer.status_code == 504
    assert "timeout of 0.05 s is over" in answer.text
    for response in handle.responses:
        with pytest.raises(asyncio.CancelledError):
            await response.task
    watch.close()


async def test_a_prompt_that_is_refused_ends_the_work_on_the_others() -> None:
    class OneIsBad(Held):
        async def on_generate(self, request: ImageRequest) -> ImageResult:
            if request.prompt == "bad":
                raise InvalidRequest("prompt: bad", "prompt")
            return await super().on_generate(request)

    replicas = OneIsBad()
    watch, handle = RegistrySnapshot(lambda: replicas), FakeHandle(replicas)
    transport = httpx.ASGITransport(create_http_app(Service(CONFIG, watch, handle, handle), CONFIG))
    tensor = {"name": "prompt", "datatype": "BYTES", "shape": [3], "data": ["a", "bad", "b"]}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.post("/v2/models/flux/infer", json={"inputs": [tensor]})
    assert answer.status_code == 400
    outcomes = await asyncio.gather(*(response.task for response in handle.responses), return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes if isinstance(outcome, asyncio.CancelledError)) == [
        "CancelledError"
    ] * (len(outcomes) - 1)
    watch.close()


# Replicas that die

WORK = [(IMAGES, IMAGE), (CHATS, CHAT), (COMPLETIONS, COMPLETION), (EMBEDDINGS, EMBEDDING)]
STREAMS = [(CHATS, {**CHAT, "stream": True}), (COMPLETIONS, {**COMPLETION, "stream": True})]


@pytest.mark.parametrize(("path", "body"), WORK + STREAMS)
async def test_a_request_whose_replica_dies_is_answered_by_another(
    http: httpx.AsyncClient, replicas: Replicas, path: str, body: dict[str, Any]
) -> None:
    replicas.num_deaths = 1
    response = await http.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    assert "error" not in response.text
    assert len(replicas.requests) == 2
    assert replicas.requests[0] == replicas.requests[1]


@pytest.mark.parametrize(("path", "body"), WORK + STREAMS)
async def test_when_all_of_them_die_it_is_a_503(
    http: httpx.AsyncClient, replicas: Replicas, path: str, body: dict[str, Any]
) -> None:
    replicas.num_deaths = 99
    response = await http.post(f"/v1/{path}", json=body)
    assert (response.status_code, problem(response)["code"]) == (503, "replica_unavailable")
    assert problem(response)["message"] == "2 replicas were lost while they worked on this request"
    assert len(replicas.requests) == 2


async def test_the_death_of_a_replica_further_on_counts_and_an_error_does_not(
    http: httpx.AsyncClient, replicas: Replicas
) -> None:
    replicas.error = RayTaskError("generate", "Traceback", ActorUnavailableError("the encoder", None))
    assert (await http.post(f"/v1/{IMAGES}", json=IMAGE)).status_code == 503
    assert len(replicas.requests) == 2
    replicas.requests.clear()
    replicas.error = RayTaskError("generate", "Traceback", Overloaded("no room"))
    assert (await http.post(f"/v1/{IMAGES}", json=IMAGE)).status_code == 503
    assert len(replicas.requests) == 1


async def test_a_stream_that_has_begun_ends_with_a_typed_error(http: httpx.AsyncClient, replicas: Replicas) -> None:
    replicas.error_after, replicas.error_then = 2, ActorDiedError()
    response = await http.post(f"/v1/{CHATS}", json={**CHAT, "stream": True})
    last = json.loads(response.text.strip().split("data: ")[-1])
    assert (last["error"]["code"], last["error"]["type"]) == ("replica_unavailable", "server_error")
    assert "died after 2 pieces" in last["error"]["message"]
    assert len(replicas.requests) == 1


# The directory


async def test_known_models_cost_no_call_of_the_registry(http: httpx.AsyncClient, replicas: Replicas) -> None:
    for path, body in WORK:
        assert (await http.post(f"/v1/{path}", json=body)).status_code == 200
    assert (await http.get("/v1/models/bold")).status_code == 200
    assert replicas.questions == []
    assert (await http.get("/v1/models/nothing")).status_code == 404
    assert replicas.questions == ["nothing"]


async def test_a_model_that_the_copy_has_not_heard_of_yet_is_asked_for(
    http: httpx.AsyncClient, replicas: Replicas
) -> None:
    assert (await http.get("/healthz")).status_code == 200
    entry = ModelConfig.model_validate({"id": "new", "path": "/n", "defaults": {"width": 24, "height": 24}})
    replicas.states["new"] = ModelRecord("new", "ready", "diffusion", 1, "v1", entry=entry, class_name="FluxPipeline")
    assert (await http.post(f"/v1/{IMAGES}", json={**IMAGE, "model": "new"})).status_code == 200
    assert (replicas.requests[0].width, replicas.requests[0].model_version) == (24, "v1")


@pytest.mark.parametrize(("path", "body"), WORK)
async def test_requests_carry_the_version_that_was_current_and_clients_cannot_choose_it(
    http: httpx.AsyncClient, replicas: Replicas, path: str, body: dict[str, Any]
) -> None:
    response = await http.post(f"/v1/{path}", json={**body, "model_version": "mine"})
    assert (response.status_code, problem(response)["param"]) == (400, "model_version")
    await http.post(f"/v1/{path}", json=body)
    assert replicas.requests[0].model_version == f"version of {body['model']}"


async def test_requests_carry_the_versions_of_their_adapters(http: httpx.AsyncClient, replicas: Replicas) -> None:
    await http.post(f"/v1/{IMAGES}", json={**IMAGE, "lora": [{"name": "bold"}]})
    assert replicas.requests[0].adapter_versions == {"bold": "version of bold"}


# Operations


def state(id_: str, state: Any) -> ModelRecord:
    return ModelRecord(id_, state, KINDS.get(id_) if state in ("ready", "updating") else None)


@pytest.mark.parametrize(
    ("states", "status", "word"),
    [
        (["ready", "ready"], 200, "ok"),
        (["ready", "unavailable"], 200, "degraded"),
        (["ready", "updating"], 200, "ok"),
        (["unavailable", "unavailable"], 503, "degraded"),
        (["ready", "registering"], 503, "starting"),
        (["registering", "unavailable"], 503, "starting"),
    ],
)
async def test_health(http: httpx.AsyncClient, replicas: Replicas, states: list[str], status: int, word: str) -> None:
    replicas.states = {id_: state(id_, is_) for id_, is_ in zip(("flux", "clip"), states, strict=True)}
    response = await http.get("/healthz")
    assert (response.status_code, response.json()["status"]) == (status, word)
    assert (response.json()["models"], response.json()["models_ready"]) == (
        2,
        sum(is_ in ("ready", "updating") for is_ in states),
    )


async def test_health_does_not_wait_for_a_directory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.admin.routes.PROBE_TIMEOUT_S", 0.01)
    monkeypatch.setattr("deployments.ingress.kserve.models.PROBE_TIMEOUT_S", 0.01)

    class Silent(Replicas):
        async def on_watch(self, revision: int, epoch: str, timeout_s: float) -> DirectoryChange:
            await asyncio.Event().wait()
            raise AssertionError

    replicas = Silent()
    watch, handle = RegistrySnapshot(lambda: replicas), FakeHandle(replicas)
    transport = httpx.ASGITransport(create_http_app(Service(CONFIG, watch, handle, handle), CONFIG))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.get("/healthz")
        assert (answer.status_code, answer.json()["status"]) == (503, "starting")
        assert (await http.get("/v2/health/ready")).status_code == 503
        assert (await http.get("/v2/health/live")).status_code == 200
    watch.close()


@pytest.mark.parametrize(
    ("path", "body"), [(IMAGES, IMAGE), (CHATS, CHAT), (COMPLETIONS, COMPLETION), (EMBEDDINGS, EMBEDDING)]
)
async def test_stage_times_are_in_the_answer_and_its_header(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    response = await http.post(f"/v1/{path}", json=body)
    assert response.status_code == 200
    stages = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert {"total", "queue"} <= set(stages)
    assert all(float(ms) >= 0 for ms in stages.values())
    assert {stage: float(ms) for stage, ms in stages.items()} == response.json()["timings_ms"]


async def test_many_at_once(http: httpx.AsyncClient, replicas: Replicas) -> None:
    responses = await asyncio.gather(*(http.post(f"/v1/{IMAGES}", json={**IMAGE, "seed": i}) for i in range(20)))
    assert [response.json()["seed"] for response in responses] == list(range(20))
    assert len(replicas.requests) == 20
