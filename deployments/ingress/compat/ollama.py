"""Ollama's API under /api over the same service: chats, prompts, embeddings, and what models there are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import numpy as np
from fastapi import APIRouter
from pydantic_core import to_json
from starlette.responses import PlainTextResponse, Response

from deployments.errors import GenerationFailed, InvalidRequest
from deployments.ingress.admin.operations import Page
from deployments.ingress.compat.ollama_answers import (
    SPOKEN_VERSION,
    ChatLine,
    GenerateLine,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaError,
    OllamaModels,
    OllamaShown,
    OllamaVersion,
    TextLines,
    listed_model,
    running_model,
    shown_model,
)
from deployments.ingress.compat.ollama_bodies import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
from deployments.ingress.errors import INFERENCE_ERRORS, documented_as, failure_of
from deployments.ingress.json_route import JsonRoute
from deployments.ingress.openai.chat_images import ChatImages
from deployments.ingress.responses import (
    EventStream,
    call_aside,
    json_response,
    json_text,
    json_with_list,
    server_timing,
)
from deployments.ingress.service import Service
from deployments.records import ChatRequest, CompletionRequest, EmbeddingResult, TextChunk

RUNNING: Final = "Ollama is running"  # what its clients look for at /
_LINES: Final = "application/x-ndjson"
_ENDPOINTS: Final = ("text", "embeddings")
_ERRORS: Final = documented_as(OllamaError, *INFERENCE_ERRORS)
_STREAMED: Final[dict[int | str, dict[str, Any]]] = _ERRORS | {200: {"content": {_LINES: {}}}}


def create_ollama_router(service: Service, images: ChatImages) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["ollama"], route_class=JsonRoute)
    _add_text_routes(router, service, images)
    _add_embedding_routes(router, service)
    _add_model_routes(router, service)
    return router


def _add_text_routes(router: APIRouter, service: Service, images: ChatImages) -> None:
    @router.post("/api/chat", response_model=ChatLine, responses=_STREAMED)
    async def chat(body: OllamaChatBody) -> Response:
        """The next turn of a chat, as lines of JSON or, without `stream`, whole."""
        lines = TextLines(body.model, is_chat=True)
        if not body.messages:
            await service.model(body.model_id)
            return json_response(lines.loaded())
        record = await images.record_of(body.to_fields())
        return await _respond(service, record, lines, is_stream=body.is_stream)

    @router.post("/api/generate", response_model=GenerateLine, responses=_STREAMED)
    async def generate(body: OllamaGenerateBody) -> Response:
        """The answer to a prompt, or with `raw` its continuation."""
        lines = TextLines(body.model, is_chat=False)
        if not body.prompt:
            await service.model(body.model_id)
            return json_response(lines.loaded())
        return await _respond(service, await body.to_record(images), lines, is_stream=body.is_stream)


async def _respond(
    service: Service, record: ChatRequest | CompletionRequest, lines: TextLines, *, is_stream: bool
) -> Response:
    if not is_stream:
        result = await (service.chat(record) if isinstance(record, ChatRequest) else service.complete(record))
        return json_response(lines.whole(result), headers=server_timing(result.timings_ms))
    chunks = service.stream_text(record)
    # The first piece is awaited here, so that a refused request is a 4xx and not a line in a 200.
    first = await anext(chunks)
    return EventStream(_lines_of(lines, first, chunks), chunks, media_type=_LINES)


async def _lines_of(lines: TextLines, first: TextChunk, rest: AsyncIterator[TextChunk]) -> AsyncIterator[str]:
    yield f"{json_text(lines.piece(first))}\n"
    try:
        async for chunk in rest:
            yield f"{json_text(lines.piece(chunk))}\n"
    except Exception as error:
        yield f"{json_text(OllamaError(error=failure_of(error).message))}\n"


def _add_embedding_routes(router: APIRouter, service: Service) -> None:
    @router.post("/api/embed", response_model=OllamaEmbeddings, responses=_ERRORS)
    async def embed(body: OllamaEmbedBody) -> Response:
        """The vectors of texts."""
        result = await service.embed(body.to_record())
        answer = OllamaEmbeddings(
            model=body.model,
            embeddings=[],
            total_duration=int(result.timings_ms.get("total", 0.0) * 1e6),
            load_duration=int(result.timings_ms.get("switch", 0.0) * 1e6),
            prompt_eval_count=result.num_tokens,
        )
        num_bytes = sum(vector.nbytes for vector in result.embeddings)
        vectors = await call_aside(num_bytes, _written_vectors, result)
        content = json_with_list(answer, "embeddings", vectors)
        return json_response(content, headers=server_timing(result.timings_ms))

    @router.post("/api/embeddings", response_model=OllamaEmbedding, responses=_ERRORS)
    async def embed_one(body: OllamaEmbeddingsBody) -> Response:
        """The vector of a text, in the older form."""
        result = await service.embed(body.to_record())
        return json_response(b'{"embedding":' + _written_vectors(result)[0] + b"}")


def _written_vectors(result: EmbeddingResult) -> list[bytes]:
    """Return the vectors as JSON. Raises GenerationFailed for numbers that JSON cannot write."""
    if not all(np.isfinite(vector).all() for vector in result.embeddings):
        raise GenerationFailed("an embedding has numbers that are not finite")
    return [to_json(vector.tolist()) for vector in result.embeddings]


def _add_model_routes(router: APIRouter, service: Service) -> None:
    errors = documented_as(OllamaError, 400, 404, 503)

    @router.get("/", response_class=PlainTextResponse, include_in_schema=False)
    async def root() -> Response:
        return PlainTextResponse(RUNNING)

    @router.get("/api/version", response_model=OllamaVersion)
    async def version() -> Response:
        """The version of Ollama whose API this is."""
        return json_response(OllamaVersion(version=SPOKEN_VERSION))

    @router.get("/api/tags", response_model=OllamaModels, responses=errors)
    async def tags() -> Response:
        """The models that can be asked here."""
        cards = [card for card in await service.models() if card.endpoint in _ENDPOINTS]
        return json_response(OllamaModels(models=[listed_model(card) for card in cards]))

    @router.get("/api/ps", response_model=OllamaModels, responses=errors)
    async def running() -> Response:
        """The models that replicas have built, with the memory that they take there."""
        cluster = await service.operations.describe_cluster(Page())
        found = [
            running_model(one.id, one.kind, sum(built["bytes"] for built in one.built), one.fingerprint)
            for one in cluster.models
            if one.built and one.kind in ("llm", "embedding")
        ]
        return json_response(OllamaModels(models=found))

    @router.post("/api/show", response_model=OllamaShown, responses=errors)
    async def show(body: OllamaShowBody) -> Response:
        """One model."""
        card = await service.model(body.model_id)
        if card.endpoint not in _ENDPOINTS:
            raise InvalidRequest(f"model {card.id!r} ({card.kind}) writes no text and embeds none", "model")
        return json_response(shown_model(card))
