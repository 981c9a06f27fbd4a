"""The needs of a request: where it runs, how much work it is, and which part of a replica it takes."""

from __future__ import annotations

import math
from typing import Final

from cluster.admission.demand import Demand
from configs.cluster import ClusterConfig, ModelReplicaConfig
from deployments.ingress.terms import Terms
from deployments.records import (
    ChatRequest,
    ClipRequest,
    CompletionRequest,
    EmbeddingRequest,
    HeadRequest,
    ImageRequest,
    ProgramRequest,
    ScoringRequest,
)

WORKER: Final = "worker"
ENCODER: Final = "text_encoder"
PIPELINES: Final = "pipelines"
_CHARS_PER_TOKEN: Final = 4
_TOKENS_PER_TEXT: Final = 8  # what a text costs beside its tokens, in tokens
_MANY_TOKENS: Final = 256  # of an answer whose request does not say
_PROMPT_TOKENS: Final = 8  # of a language model's prompt, which take as long as one of an answer
_HEADS_AT_ONCE: Final = 64
Request = (
    ImageRequest
    | ClipRequest
    | ChatRequest
    | CompletionRequest
    | EmbeddingRequest
    | ScoringRequest
    | HeadRequest
    | ProgramRequest
)


def demand_of(
    request: Request, terms: Terms, timeout_s: float, config: ClusterConfig, *, is_stock: bool = False
) -> Demand:
    """Return what a request asks for. `terms` are checked, and `request` has its defaults.

    `is_stock`: diffusers' code runs its pipeline. Many of those requests leave the size to the class, which nobody
    knows here, so its work is counted in steps, whatever their size.
    """
    settings: ModelReplicaConfig = config.worker
    if isinstance(request, ImageRequest | ClipRequest):
        pool, count = WORKER, request.n if isinstance(request, ImageRequest) else 1
        pixels = 1 if is_stock else (request.width or 1) * (request.height or 1)
        work = float(pixels * count * (request.num_inference_steps or 1))
        share = count / config.worker.max_running_images
    elif isinstance(request, ChatRequest | CompletionRequest):
        num_texts = request.n * (len(request.prompts) if isinstance(request, CompletionRequest) else 1)
        pool, work = (
            WORKER,
            float(_MANY_TOKENS if request.max_tokens is None else max(1, request.max_tokens)) * num_texts,
        )
        share = num_texts / config.worker.max_num_seqs
    elif isinstance(request, EmbeddingRequest | ScoringRequest):
        pool, settings = ENCODER, config.text_encoder
        work = sum(_TOKENS_PER_TEXT + _num_tokens(text) for text in request.input)
        share = len(request.input) / config.text_encoder.max_running
        if isinstance(request, EmbeddingRequest) and request.by_language_model:
            pool, settings, work = WORKER, config.worker, work / _PROMPT_TOKENS
            share = len(request.input) / config.worker.max_num_seqs
    elif isinstance(request, ProgramRequest):
        pool, settings = ENCODER, config.text_encoder
        sizes = [array.shape for array in request.inputs.values() if array.ndim]
        work = float(max((math.prod(shape[:2]) for shape in sizes), default=1))  # rows and tokens of most programs
        share = max((shape[0] for shape in sizes), default=1) / config.text_encoder.max_running
    else:
        pool, settings = ENCODER, config.text_encoder
        work, share = float(len(request.features)), 1 / _HEADS_AT_ONCE
    share = min(1.0, max(share, 1 / settings.max_ongoing_requests))  # a replica refuses what Serve does not let in
    version = request.model_version or ""
    return Demand(pool, request.model, work, share, terms.priority, terms.tenant, timeout_s, terms.is_inner, version)


def _num_tokens(text: str | tuple[int | str, ...]) -> float:
    """Return about how many tokens a text has, a pair of texts, or what is tokens already."""
    if isinstance(text, str):
        return len(text) / _CHARS_PER_TOKEN
    return sum(1 if isinstance(part, int) else len(part) / _CHARS_PER_TOKEN for part in text)


def demand_of_pipeline(name: str, terms: Terms, timeout_s: float, max_running: int) -> Demand:
    """Return what a pipeline asks for: its place among the pipelines. Its stages ask for themselves."""
    return Demand(PIPELINES, name, 1.0, 1 / max_running, terms.priority, terms.tenant, timeout_s, terms.is_inner)
