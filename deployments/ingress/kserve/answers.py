"""What the service answers, as named tensors: one function for each kind of model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from configs.batching import BatchingConfig
from deployments.errors import InvalidRequest
from deployments.pipelines.records import PipelineRequest, PipelineResult, Signature, TensorValue, text_tensor
from deployments.pipelines.runner import together
from deployments.records import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    EmbeddingResult,
    HeadRequest,
    ImageRequest,
    ImageResult,
    ModelCard,
    TextChunk,
    TextResult,
    TimingsMs,
    warnings_by_item,
)


class Pipelines(Protocol):
    """The pipelines of the cluster, as this protocol uses them."""

    def signature(self, name: str) -> Signature: ...

    async def run(self, request: PipelineRequest) -> PipelineResult: ...


class Backend(Protocol):
    """`deployments.ingress.service.Service`, as this protocol uses it."""

    @property
    def pipelines(self) -> Pipelines: ...

    async def generate(self, request: ImageRequest) -> ImageResult: ...

    async def embed(self, request: EmbeddingRequest) -> EmbeddingResult: ...

    async def apply_head(self, request: HeadRequest) -> npt.NDArray[np.float32]: ...

    async def chat(self, request: ChatRequest) -> TextResult: ...

    async def complete(self, request: CompletionRequest) -> TextResult: ...

    def stream(self, request: ChatRequest | CompletionRequest) -> AsyncGenerator[TextChunk]: ...

    async def models(self) -> list[ModelCard]: ...

    async def model(self, id_: str) -> ModelCard: ...

    async def entering(self) -> list[str]: ...

    async def batching(self) -> BatchingConfig: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """All outputs of a model for one request, in the order of its signature; what its caller should be told."""

    outputs: tuple[TensorValue, ...]
    timings_ms: Mapping[str, float]
    batch_size: int = 1
    cache_hits: int = 0
    cache_misses: int = 0
    warnings: tuple[str, ...] = ()


async def images(service: Backend, requests: Sequence[ImageRequest]) -> Answer:
    """The prompts run side by side: at the same step loop, they share its forwards."""
    results = await together([service.generate(request) for request in requests])
    pictures = [result.images[0] for result in results]
    return Answer(
        outputs=(
            TensorValue("images", "UINT8", np.stack(pictures)),
            TensorValue("seed", "INT64", np.array([result.seed for result in results], np.int64)),
        ),
        timings_ms=slowest([result.timings_ms for result in results]),
        batch_size=len(results),
        cache_hits=sum(result.cache.hits for result in results),
        cache_misses=sum(result.cache.misses for result in results),
        warnings=warnings_by_item([result.warnings for result in results]),
    )


async def texts(service: Backend, requests: Sequence[ChatRequest | CompletionRequest]) -> Answer:
    results = await together(
        [
            service.chat(request) if isinstance(request, ChatRequest) else service.complete(request)
            for request in requests
        ]
    )
    return Answer(
        outputs=text_outputs(results),
        timings_ms=slowest([result.timings_ms for result in results]),
        batch_size=len(results),
        warnings=warnings_by_item([result.warnings for result in results]),
    )


def text_outputs(results: Sequence[TextResult | TextChunk]) -> tuple[TensorValue, ...]:
    """The outputs of an LLM. A piece of a stream has its part of the text, and no finish reason before the last."""
    num_output_tokens = [result.num_completion_tokens for result in results]
    return (
        text_tensor("text_output", [result.text for result in results]),
        text_tensor("finish_reason", [result.finish_reason or "" for result in results]),
        TensorValue("num_input_tokens", "INT64", np.array([result.num_prompt_tokens for result in results], np.int64)),
        TensorValue("num_output_tokens", "INT64", np.array(num_output_tokens, np.int64)),
    )


async def embeddings(service: Backend, request: EmbeddingRequest) -> Answer:
    result = await service.embed(request)
    if len({vector.shape for vector in result.embeddings}) > 1:
        raise InvalidRequest(f"model {request.model!r} gives these texts embeddings of different sizes; ask one by one")
    return Answer(
        outputs=(TensorValue("embedding", "FP32", np.stack(result.embeddings)),),
        timings_ms=result.timings_ms,
        batch_size=len(result.embeddings),
        cache_hits=result.cache.hits,
        cache_misses=result.cache.misses,
        warnings=result.warnings,
    )


async def scores(service: Backend, request: HeadRequest) -> Answer:
    found = await service.apply_head(request)
    return Answer((TensorValue("scores", "FP32", found),), {}, len(found))


async def pipeline(service: Backend, request: PipelineRequest, batch_size: int) -> Answer:
    result = await service.pipelines.run(request)
    return Answer(tuple(result.outputs.values()), result.timings_ms, batch_size, warnings=result.warnings)


def slowest(timings_ms: Sequence[TimingsMs]) -> TimingsMs:
    """Of parts that ran side by side, by stage."""
    stages = {stage: None for timings in timings_ms for stage in timings}
    return {stage: max(timings.get(stage, 0.0) for timings in timings_ms) for stage in stages}
