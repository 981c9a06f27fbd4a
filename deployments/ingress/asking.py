"""The needs of a request: where it runs, how much work it is, and which part of a replica it takes."""

from __future__ import annotations

import zlib
from typing import Final

from cluster.control.lanes import Ask
from configs.cluster import ClusterConfig, ModelReplicaConfig
from deployments.ingress.known_forms import mark_of_text
from deployments.ingress.terms import Terms
from deployments.records import ChatRequest, CompletionRequest, EmbeddingRequest, HeadRequest, ImageRequest

WORKER: Final = "worker"
ENCODER: Final = "text_encoder"
PIPELINES: Final = "pipelines"
_CHARS_PER_TOKEN: Final = 4
_TOKENS_PER_TEXT: Final = 8  # what a text costs beside its tokens, in tokens
_MANY_TOKENS: Final = 256  # of an answer whose request does not say
_PROMPT_TOKENS: Final = 8  # of a language model's prompt, which take as long as one of an answer
_HEADS_AT_ONCE: Final = 64
_MARKED: Final = 1024  # bytes of features, or tokens
Request = ImageRequest | ChatRequest | CompletionRequest | EmbeddingRequest | HeadRequest


def ask_of(request: Request, terms: Terms, timeout_s: float, config: ClusterConfig) -> Ask:
    """Return what a request asks for. `terms` are checked, and `request` has its defaults."""
    settings: ModelReplicaConfig = config.worker
    if isinstance(request, ImageRequest):
        pool = WORKER
        pixels = (request.width or 1) * (request.height or 1) * request.n
        work = float(pixels * (request.num_inference_steps or 1))
        share = request.n / config.worker.max_running_images
    elif isinstance(request, ChatRequest | CompletionRequest):
        num_texts = request.n * (len(request.prompts) if isinstance(request, CompletionRequest) else 1)
        pool, work = WORKER, float(request.max_tokens or _MANY_TOKENS) * num_texts
        share = num_texts / config.worker.max_num_seqs
    elif isinstance(request, EmbeddingRequest):
        pool, settings = ENCODER, config.text_encoder
        work = sum(
            _TOKENS_PER_TEXT + (len(text) / _CHARS_PER_TOKEN if isinstance(text, str) else len(text))
            for text in request.input
        )
        share = len(request.input) / config.text_encoder.max_running
        if request.by_language_model:
            pool, settings, work = WORKER, config.worker, work / _PROMPT_TOKENS
            share = len(request.input) / config.worker.max_num_seqs
    else:
        pool, settings = ENCODER, config.text_encoder
        work, share = float(len(request.features)), 1 / _HEADS_AT_ONCE
    share = min(1.0, max(share, 1 / settings.max_ongoing_requests))  # a replica refuses what Serve does not let in
    return Ask(
        pool,
        request.model,
        work,
        share,
        terms.priority,
        terms.tenant,
        timeout_s,
        is_inner=terms.is_inner,
        mark=_mark_of(request),
    )


def _mark_of(request: Request) -> int:
    if isinstance(request, HeadRequest):
        return zlib.crc32(request.features.tobytes()[:_MARKED]) or 1
    if isinstance(request, ImageRequest):
        content = request.prompt
    elif isinstance(request, ChatRequest):
        content = request.messages[-1].content
    else:
        first = request.prompts[0] if isinstance(request, CompletionRequest) else request.input[0]
        content = first if isinstance(first, str) else repr(first[:_MARKED])
    return mark_of_text(request.model, content)


def ask_of_pipeline(name: str, terms: Terms, timeout_s: float, max_running: int) -> Ask:
    """Return what a pipeline asks for: its place among the pipelines. Its stages ask for themselves."""
    return Ask(PIPELINES, name, 1.0, 1 / max_running, terms.priority, terms.tenant, timeout_s, terms.is_inner)
