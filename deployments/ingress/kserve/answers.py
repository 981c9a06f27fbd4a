"""Answers of the service as named tensors, one function for each kind of model, and Triton's classification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.errors import InvalidRequest
from deployments.ingress.service import Service
from deployments.pipelines.records import PipelineRequest, TensorValue, text_tensor
from deployments.pipelines.runner import run_together
from deployments.records import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    HeadRequest,
    ImageRequest,
    TextChunk,
    TextResult,
    TimingsMs,
    warnings_by_item,
)


@dataclass(frozen=True, slots=True)
class Outputs:
    """All outputs of a model for one request, in the order of its signature, and figures and warnings about them."""

    outputs: tuple[TensorValue, ...]
    timings_ms: Mapping[str, float]
    batch_size: int = 1
    cache_hits: int = 0
    cache_misses: int = 0
    warnings: tuple[str, ...] = ()


async def infer_images(service: Service, requests: Sequence[ImageRequest]) -> Outputs:
    """Return one image for each request. The requests run side by side and share the forwards of a step loop."""
    results = await run_together([service.generate(request) for request in requests])
    arrays = [result.images[0] for result in results]
    return Outputs(
        outputs=(
            TensorValue("images", "UINT8", np.stack(arrays)),
            TensorValue("seed", "INT64", np.array([result.seed for result in results], np.int64)),
        ),
        timings_ms=_slowest([result.timings_ms for result in results]),
        batch_size=len(results),
        cache_hits=sum(result.cache.hits for result in results),
        cache_misses=sum(result.cache.misses for result in results),
        warnings=warnings_by_item([result.warnings for result in results]),
    )


async def infer_texts(service: Service, requests: Sequence[ChatRequest | CompletionRequest]) -> Outputs:
    """Return one text for each request. They run side by side."""
    results = await run_together(
        [
            service.chat(request) if isinstance(request, ChatRequest) else service.complete(request)
            for request in requests
        ]
    )
    return Outputs(
        outputs=text_outputs(results),
        timings_ms=_slowest([result.timings_ms for result in results]),
        batch_size=len(results),
        warnings=warnings_by_item([result.warnings for result in results]),
    )


def text_outputs(results: Sequence[TextResult | TextChunk]) -> tuple[TensorValue, ...]:
    """Return the outputs of an LLM.

    A piece of a stream has its part of the text, and no finish reason before the last.
    """
    num_output_tokens = [result.num_completion_tokens for result in results]
    return (
        text_tensor("text_output", [result.text for result in results]),
        text_tensor("finish_reason", [result.finish_reason or "" for result in results]),
        TensorValue("num_input_tokens", "INT64", np.array([result.num_prompt_tokens for result in results], np.int64)),
        TensorValue("num_output_tokens", "INT64", np.array(num_output_tokens, np.int64)),
    )


async def infer_embeddings(service: Service, request: EmbeddingRequest) -> Outputs:
    """Return one vector for each input. Raises: InvalidRequest when they differ in size."""
    result = await service.embed(request)
    if len({vector.shape for vector in result.embeddings}) > 1:
        raise InvalidRequest(f"model {request.model!r} gives these texts embeddings of different sizes; ask one by one")
    return Outputs(
        outputs=(TensorValue("embedding", "FP32", np.stack(result.embeddings)),),
        timings_ms=result.timings_ms,
        batch_size=len(result.embeddings),
        cache_hits=result.cache.hits,
        cache_misses=result.cache.misses,
        warnings=result.warnings,
    )


async def infer_scores(service: Service, request: HeadRequest) -> Outputs:
    """Return what a head gives for each row of features."""
    found = await service.apply_head(request)
    return Outputs((TensorValue("scores", "FP32", found),), {}, len(found))


async def infer_pipeline(service: Service, request: PipelineRequest, batch_size: int) -> Outputs:
    """Return the outputs of a pipeline for a request of `batch_size` items."""
    result = await service.run_pipeline(request)
    return Outputs(tuple(result.outputs.values()), result.timings_ms, batch_size, warnings=result.warnings)


def _slowest(timings_ms: Sequence[TimingsMs]) -> TimingsMs:
    """Return the longest time of each stage, of parts that ran side by side."""
    stages = {stage: None for timings in timings_ms for stage in timings}
    return {stage: max(timings.get(stage, 0.0) for timings in timings_ms) for stage in stages}


def classify_output(value: TensorValue, num_classes: int, labels: Sequence[str] = ()) -> TensorValue:
    """Return the highest values of an output with their places, as text, instead of the output.

    That is `value:index` of the `num_classes` highest elements of each item: BYTES (items, at most num_classes); with
    `labels`, one for each element of an item, `value:index:label`. The first dimension counts items; the others are
    one row of classes. Of equal values the earlier comes first, and what is not a number comes last.
    """
    if value.datatype == "BYTES":
        raise InvalidRequest(f"output {value.name!r} is text: it has no highest values", value.name)
    num_items = value.shape[0] if value.shape else 1
    data = value.data.astype(np.uint8) if value.data.dtype == np.bool_ else value.data
    rows = data.reshape(num_items, -1) if data.size else data.reshape(num_items, 0)
    best = [_descending(row)[:num_classes] for row in rows]
    named = [f":{label}" for label in labels] if len(labels) == rows.shape[1] else [""] * rows.shape[1]
    cells = [f"{row[index]}:{index}{named[index]}" for row, order in zip(rows, best, strict=True) for index in order]
    found = text_tensor(value.name, cells)
    return TensorValue(value.name, "BYTES", found.data.reshape(num_items, min(num_classes, rows.shape[1])))


def _descending(row: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    if row.dtype.kind not in "biu":  # bfloat16 is of no kind that numpy knows
        row = row.astype(np.float64)
        row = np.where(np.isnan(row), -np.inf, row)
    # Ascending and stable from the end: reversed, that is descending with the earlier of equal values first.
    return (len(row) - 1 - np.argsort(row[::-1], kind="stable"))[::-1]
