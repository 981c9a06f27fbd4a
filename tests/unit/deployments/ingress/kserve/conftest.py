"""A service without replicas: what it answers follows from what it is asked, by plain formulas."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from configs.batching import BatchingConfig
from configs.cluster import LimitsConfig
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.messages.terms import ENCODER, WORKER
from deployments.ingress.service.catalog import Health, ModelCard
from deployments.pipelines.records import PipelineRequest, PipelineResult, Signature, TensorSpec, TensorValue
from deployments.records import (
    CacheUse,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    EmbeddingResult,
    HeadRequest,
    ImageRequest,
    ImageResult,
    ScoringRequest,
    SwitchReport,
    TextChunk,
    TextResult,
)
from deployments.records.errors import InvalidRequest, UnknownModel

LIMITS = LimitsConfig(
    max_images=4, max_prompts=5, max_embedding_inputs=6, max_head_rows=7, max_pipeline_items=8, max_body_bytes=2**20
)
SWITCH = SwitchReport("m", 1.0, 0.5, 0.5, 10, (), ())


def number_of(text: str) -> int:
    """Return the fake models' outputs for a text."""
    return zlib.crc32(text.encode()) % 251


class FakePipelines:
    """`scale` multiplies FP32 (n, 3) by `factor`; its outputs are FP32, FP16 and text."""

    SIGNATURE = Signature(
        inputs=(TensorSpec("x", "FP32", (-1, 3)), TensorSpec("factor", "FP64", (1,), optional=True)),
        outputs=(
            TensorSpec("y", "FP32", (-1, 3)),
            TensorSpec("half", "FP16", (-1, 3)),
            TensorSpec("note", "BYTES", (-1,)),
        ),
    )

    def __init__(self) -> None:
        self.requests: list[PipelineRequest] = []

    def names(self) -> list[str]:
        return ["scale"]

    def signature(self, name: str) -> Signature:
        assert name == "scale"
        return self.SIGNATURE

    def labels(self, name: str) -> dict[str, list[str]]:
        assert name == "scale"
        return {"y": ["red", "green", "blue"], "half": []}

    async def run_pipeline(self, request: PipelineRequest) -> PipelineResult:
        self.requests.append(request)
        factor = request.inputs["factor"].data[0] if "factor" in request.inputs else 2.0
        y = (request.inputs["x"].data * factor).astype(np.float32)
        note = np.empty(len(y), np.object_)
        note[:] = [b"\xff\x00raw"] * len(y)
        outputs = [TensorValue("y", "FP32", y), TensorValue("half", "FP16", y.astype(np.float16))]
        outputs.append(TensorValue("note", "BYTES", note))
        return PipelineResult({value.name: value for value in outputs}, {"multiply": 1.0, "total": 2.0})


class FakeService:
    """`requests` are those that arrived. While `gate` is closed nothing is answered; `error` is raised by each call."""

    def __init__(self) -> None:
        self.pipelines = FakePipelines()
        self.requests: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_cancelled = 0
        self.batching_config = BatchingConfig(preferred_batch_sizes=(4,), priority_levels=2)
        self.warnings: tuple[str, ...] = ()
        self.error: Callable[[Any], Exception | None] = lambda request: None
        self.pieces = ["Hel", "lö", ""]
        self.cards = {
            card.id: card
            for card in (
                ModelCard("flux", "diffusion", "ready", description="images"),
                ModelCard("adder", "llm", "ready"),
                ModelCard("minilm", "embedding", "updating", fingerprint="9f"),
                ModelCard("bold", "adapter", "ready", base=("flux",)),
                ModelCard("scale", "pipeline", "ready", description="x times factor"),
                ModelCard("broken", None, "unavailable", error="tensor 'w' is torn"),
            )
        }

    async def _arrived(self, request: Any) -> None:
        self.requests.append(request)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        error = self.error(request)
        if error is not None:
            raise error

    async def generate(self, request: ImageRequest) -> ImageResult:
        await self._arrived(request)
        size = (request.height or 4, request.width or 6, 3)
        image = np.full(size, number_of(request.prompt), np.uint8)
        times = {"queue": 1.0, "denoise": 2.0 + len(self.requests), "total": 3.0}
        return ImageResult(request.model, [image], request.seed or 7, 3, times, SWITCH, CacheUse(1, 2), self.warnings)

    async def embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        await self._arrived(request)
        vectors = [
            np.array([number_of(text) if isinstance(text, str) else sum(text), 0.1, -3, 2], np.float32)
            for text in request.input
        ]
        times = {"encode": 1.0, "total": 1.5}
        return EmbeddingResult(request.model, vectors, 5, times, CacheUse(0, 1), self.warnings)

    async def score(self, request: ScoringRequest) -> EmbeddingResult:
        await self._arrived(request)
        given = [(one,) if isinstance(one, str) else one for one in request.input]
        rows = [[sum(map(number_of, texts)), *([-1.0] if len(texts) == 1 else [])] for texts in given]
        vectors = [np.array(row, np.float32) for row in rows]
        return EmbeddingResult(request.model, vectors, 5, {"encode": 1.0, "total": 1.5}, CacheUse(2, 1), self.warnings)

    async def apply_head(self, request: HeadRequest) -> np.ndarray[Any, Any]:
        """Sum and difference of two features."""
        await self._arrived(request)
        if request.features.shape[1] != 2:
            raise InvalidRequest(f"expected floating vectors (B, 2), got {list(request.features.shape)}")
        return (request.features @ np.array([[1, 1], [1, -1]], np.float32)).astype(np.float32)

    async def run_pipeline(self, request: PipelineRequest) -> PipelineResult:
        return await self.pipelines.run_pipeline(request)

    async def batching(self) -> BatchingConfig:
        return self.batching_config

    async def chat(self, request: ChatRequest) -> TextResult:
        await self._arrived(request)
        return TextResult(request.model, f"chat:{request.messages[0].content}", "stop", 2, 3, {"total": 1.0})

    async def complete(self, request: CompletionRequest) -> TextResult:
        await self._arrived(request)
        return TextResult(request.model, f"more:{request.prompt}", "length", 2, 3, {"total": 1.0})

    async def write_text(
        self, request: ChatRequest | CompletionRequest, on_chunk: Callable[[TextChunk], Awaitable[None]]
    ) -> None:
        self.requests.append(request)
        for position, piece in enumerate(self.pieces):
            await self.gate.wait()
            error = self.error(position)
            if error is not None:
                raise error
            is_last = position == len(self.pieces) - 1
            reason, times = ("stop", {"total": 2.0}) if is_last else (None, {})
            await on_chunk(TextChunk(piece, 2, position + 1, reason, times))

    @property
    def listing(self) -> FakeService:
        return self

    texts = listing

    async def models(self) -> list[ModelCard]:
        return list(self.cards.values())

    async def model(self, id_: str) -> ModelCard:
        if id_ not in self.cards:
            raise UnknownModel(f"no model {id_!r} (known: {', '.join(self.cards)})", "model")
        return self.cards[id_]

    async def health(self) -> Health:
        states = [(card.kind, card.state) for card in await self.models()]
        return Health.of(states, {WORKER, ENCODER}, is_entering=any(state == "registering" for _, state in states))


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def scoring(service: FakeService) -> FakeService:
    """Return the service with a reranker and a classifier."""
    service.cards["ranker"] = ModelCard("ranker", "reranker", "ready", labels=("LABEL_0",))
    service.cards["sorter"] = ModelCard("sorter", "classifier", "ready", labels=("odd", "even"))
    return service


@pytest.fixture
def limits() -> LimitsConfig:
    return LIMITS


@pytest.fixture
def inference(service: FakeService) -> Inference:
    return Inference(service, LIMITS)


@pytest.fixture
def refused() -> Callable[[Any], Exception | None]:
    """For `service.error`: every call fails as a request that the model does not like."""
    return lambda request: InvalidRequest("the model does not like it", "prompt")
