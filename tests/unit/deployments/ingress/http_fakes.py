"""Replicas and registry behind the HTTP edge, without Ray, and one request for each endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import numpy as np
from ray.exceptions import ActorDiedError, RayTaskError
from unit.deployments.serve_fakes import FakeHandle

from cluster.process.ray_calls import NamedActor
from cluster.records.errors import ModelUnknown
from cluster.registry.directory import Directory, DirectoryChange, ModelRecord
from cluster.registry.snapshot import RegistrySnapshot
from configs.admission import AdmissionConfig
from configs.cluster import ClusterConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.service.service import Service
from deployments.records import (
    CacheUse,
    ChatRequest,
    EmbeddingRequest,
    EmbeddingResult,
    ImageProgress,
    ImageRequest,
    ImageResult,
    PromptTokens,
    ScoringRequest,
    SwitchReport,
    TextChunk,
    TextResult,
)
from deployments.records.errors import GenerationFailed
from deployments.services.text_service import whole_text
from weights.formats.language_models import LanguageModelDetails

IMAGE: dict[str, Any] = {"model": "flux", "prompt": "x"}
CHAT: dict[str, Any] = {"model": "chatty", "messages": [{"role": "user", "content": "x"}]}
COMPLETION: dict[str, Any] = {"model": "chatty", "prompt": "x"}
EMBEDDING: dict[str, Any] = {"model": "clip", "input": "x"}
IMAGES, CHATS, COMPLETIONS, EMBEDDINGS = "images/generations", "chat/completions", "completions", "embeddings"
SWITCH = SwitchReport("m", 1.0, 0.5, 0.5, 10, ("vae",), ())
CONFIG = ClusterConfig.model_validate(
    {
        "access": {"allowed_hosts": ["test"]},
        "ingress": {
            "limits": {
                "max_upload_bytes": 2**22,
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
            {"id": "ranker", "path": "/rank"},
            {"id": "sorter", "path": "/sort"},
            {"id": "broken", "path": "/b"},
        ],
        "adapters": [
            {"id": "bold", "path": "/l", "base": ["flux"], "merged_scale": 0.8},
            {"id": "strokes", "path": "/c", "base": ["flux"]},
            {"id": "thin", "path": "/t", "base": ["other-flux"]},
            {"id": "torn", "path": "/r", "base": ["flux"]},
            {"id": "polite", "path": "/y", "base": ["chatty"]},
        ],
    }
)
KINDS = {"flux": "diffusion", "other-flux": "diffusion", "chatty": "llm", "plain": "llm", "clip": "embedding"}
CLASSES = {"flux": "FluxPipeline", "other-flux": "FluxPipeline", "sdxl": "StableDiffusionXLPipeline"}
KINDS |= {"ranker": "reranker", "sorter": "classifier"}
KINDS |= {"bold": "adapter", "thin": "adapter", "polite": "adapter", "strokes": "controlnet"}
STATUSES = {
    entry.id: ModelRecord(
        entry.id,
        "ready",
        KINDS[entry.id],
        10,
        f"version of {entry.id}",
        entry=entry,
        class_name=CLASSES.get(entry.id, ""),
        variant={"pixels_per_latent": 4},
    )
    if entry.id in KINDS
    else ModelRecord(entry.id, "unavailable", error="model.safetensors: tensor 'w' is torn", entry=entry)
    for entry in (*CONFIG.models, *CONFIG.adapters)
}


class Served(NamedTuple):
    """A client, the service behind it, and the handle of its replicas."""

    http: httpx.AsyncClient
    service: Service
    handle: FakeHandle


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
        self.chunks: list[TextChunk] = []  # instead of pieces
        self.states = dict(STATUSES)
        self.details: dict[str, LanguageModelDetails] = {}
        self.solvers: dict[str, dict[str, Any]] = {}
        self.remembered: AdmissionConfig | None = None
        self.tokenized: list[tuple[Any, bool]] = []
        self.enlarges_by = 1

    def options(self, *, stream: bool) -> Replicas:
        assert stream
        return self

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=getattr(type(self), f"on_{method}").__get__(self))

    async def on_find_job(self, key: str, id_: str) -> None:
        """Return no job: none is kept."""

    async def on_watch(self, revision: int, epoch: str, timeout_s: float, replica: str | None) -> DirectoryChange:
        if epoch:
            await asyncio.Event().wait()
        directory = Directory("first")
        for found in self.states.values():
            directory.apply(found)
        return directory.changes_since(revision, epoch)

    async def on_find_model(self, model: str) -> ModelRecord:
        self.questions.append(model)
        if model not in self.states:
            cause = ModelUnknown(f"no model {model!r} (known: {', '.join(self.states)})")
            raise RayTaskError("find_model", "Traceback of the actor", cause)
        return self.states[model]

    async def on_model_details(self, model: str) -> LanguageModelDetails:
        return self.details.get(model, LanguageModelDetails())

    async def on_solver_config(self, model: str) -> dict[str, Any]:
        return self.solvers.get(model, {})

    async def on_set_admission(self, admission: AdmissionConfig) -> None:
        self.remembered = admission

    async def on_admission(self) -> AdmissionConfig | None:
        return self.remembered

    async def on_residency(self, *_: Any) -> dict[str, Any]:
        return {"num_nodes": 0, "nodes": [], "models": {}}

    def broadcast(self, method: str) -> Any:
        async def results_async(**_: Any) -> list[dict[str, Any]]:
            empty = dict.fromkeys(("resident_bytes", "leased_bytes", "budget_bytes", "num_switches"), 0)
            return [{"name": name, "answers": method, "modules": [], **empty} for name in ("a", "b")]

        return SimpleNamespace(results_async=results_async)

    async def on_generate(self, request: ImageRequest) -> ImageResult:
        self._arrived(request)
        scale = self.enlarges_by if self.states[request.model].kind == "upscaler" else 1
        size = (request.height or 8) * scale, (request.width or 8) * scale, 3
        images = [np.full(size, 10 * i, np.uint8) for i in range(request.n)]
        times: Any = {"denoise": 2.0, "total": 3.0}
        return ImageResult(request.model, images, request.seed or 0, 3, times, SWITCH, CacheUse(1, 2), ("a note",))

    async def on_stream_images(self, request: ImageRequest) -> AsyncIterator[ImageProgress | ImageResult]:
        """Four steps; the previews come after the first ones, each as bright as its step."""
        self._arrived(request)
        for step in range(1, 4):
            if step == self.error_after:
                raise self.error_then
            index = step - 1 if step <= request.partial_images else None
            size = (request.height or 8, request.width or 8, 3)
            previews = () if index is None else (np.full(size, 10 * step, np.uint8),)
            if previews or request.reports_steps:
                yield ImageProgress(step, 4, previews, index)
        self.requests.pop()  # the same request
        yield await self.on_generate(request)

    async def on_embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        self._arrived(request)
        small = [np.array([i, 0.1, -2.5], np.float32) for i in range(len(request.input))]
        vectors = small if self.vectors is None else list(self.vectors[: len(request.input)])
        return EmbeddingResult(request.model, vectors, 7, {"encode": 1.0, "total": 1.0}, CacheUse(0, 1))

    async def on_score(self, request: ScoringRequest) -> EmbeddingResult:
        """Return of a pair the share of the query's words that the text has, of a text the shares of two words."""
        self._arrived(request)
        labels = ("alpha", "beta") if request.model == "sorter" else ("LABEL_0",)

        def share(words: Sequence[str], text: str) -> float:
            return sum(word in text.split() for word in words) / len(words)

        rows = [
            [share([label], one) for label in labels] if isinstance(one, str) else [share(one[0].split(), one[1])]
            for one in request.input
        ]
        vectors = [np.array(row, np.float32) for row in rows]
        times = {"encode": 1.0, "total": 1.0}
        return EmbeddingResult(request.model, vectors, 7, times, CacheUse(0, 1), labels=labels)

    async def on_stream_text(self, request: Any) -> AsyncIterator[TextChunk]:
        self._arrived(request)
        for chunk in self.chunks:
            yield chunk
        for number, piece in enumerate([] if self.chunks else self.pieces):
            if number == self.error_after:
                raise self.error_then
            last = number == len(self.pieces) - 1
            yield TextChunk(
                piece, 4, number + 1, "stop" if last else None, {"total": 5.0} if last else {}, SWITCH if last else None
            )

    async def on_tokenize(self, request: Any, has_special_tokens: bool) -> PromptTokens:
        """A token for each character."""
        self._arrived(request)
        self.tokenized.append((request, has_special_tokens))
        if isinstance(request, ChatRequest):
            text = "".join(message.text for message in request.messages)
        else:
            text = request.prompt if isinstance(request.prompt, str) else "".join(map(chr, request.prompt))
        return PromptTokens(tuple(map(ord, text)), text, tuple(text), 512)

    async def on_write_text(self, request: Any) -> TextResult:
        chunks = [chunk async for chunk in self.on_stream_text(request)]
        if self.chunks:
            return whole_text(request.model, chunks)
        text, last = "".join(chunk.text for chunk in chunks), chunks[-1]
        return TextResult(request.model, text, "stop", 4, last.num_completion_tokens, last.timings_ms, SWITCH)

    def _arrived(self, request: Any) -> None:
        self.requests.append(request)
        if self.num_deaths:
            self.num_deaths -= 1
            raise ActorDiedError()
        if self.error:
            raise self.error


class Held(Replicas):
    """Holds all images until `gate` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def on_generate(self, request: ImageRequest) -> ImageResult:
        self.requests.append(request)
        await self.gate.wait()
        return await super().on_generate(request)


def client_over(app: Any, base_url: str = "http://test", **options: Any) -> httpx.AsyncClient:
    """Return a client of an application in this process, which answers even what it did not expect."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=base_url, **options)


@asynccontextmanager
async def served(replicas: Any, config: ClusterConfig = CONFIG, **options: Any) -> AsyncIterator[Served]:
    """Yield a client of an application over replicas, and what is behind it. `options` are those of `client_over`."""
    watch, handle = RegistrySnapshot(NamedActor(lambda: replicas)), FakeHandle(replicas)
    service = Service(config, watch, handle, handle)
    async with client_over(create_http_app(service, config), **options) as http:
        yield Served(http, service, handle)
    watch.close()


def problem(response: httpx.Response) -> dict[str, Any]:
    """The error, after checking that it is in OpenAI's envelope and tells nothing of the inside."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert "Traceback" not in response.text
    return body["error"]
