"""Ollama's API under /api over the same service: chats, prompts, embeddings, and the list of models.

Source: Ollama, "API". An option without a meaning here (`num_ctx`, `num_gpu`, `mirostat`, `keep_alive`: models
stay while there is room) is accepted and has no effect.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from pydantic_core import to_json
from starlette.responses import PlainTextResponse, Response

from configs.cluster import MAX_MESSAGES
from deployments.engines.llm.chat import CalledName, Tool
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
from deployments.ingress.messages.bodies import AnyTypeRoute
from deployments.ingress.messages.call_ids import WaitingCalls
from deployments.ingress.messages.responses import (
    INFERENCE_ERRORS,
    call_aside,
    documented_as,
    failure_of,
    json_response,
    json_text,
    json_with_list,
    server_timing,
    stream_events,
)
from deployments.ingress.openai.chat_images import SCHEMES, ChatImages, ImageSource, content_of
from deployments.ingress.service.operations import Page
from deployments.ingress.service.service import Service
from deployments.records import (
    LEAST_TOP_P,
    ChatRequest,
    CompletionRequest,
    Count,
    EmbeddingRequest,
    EmbeddingResult,
    Name,
    RequestModel,
    TextChunk,
    as_record,
)
from deployments.records.errors import GenerationFailed, InvalidRequest

_LATEST: Final = ":latest"  # the tag that Ollama's clients add to names
_OPTIONS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}

_OF_CHATS: Final = ("reasoning_effort", "enable_thinking")

RUNNING: Final = "Ollama is running"  # its clients look for this text at /
_LINES: Final = "application/x-ndjson"
_ENDPOINTS: Final = ("text", "embeddings")
_ERRORS: Final = documented_as(OllamaError, *INFERENCE_ERRORS)
_STREAMED: Final[dict[int | str, dict[str, Any]]] = _ERRORS | {200: {"content": {_LINES: {}}}}


class OllamaOptions(RequestModel, extra="ignore"):
    """The options with a meaning here. `num_predict` and `seed` below 0 count as not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_predict: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of a record."""
        found = {name: getattr(self, given) for given, name in _OPTIONS.items()}
        found |= {"max_tokens": self.num_predict if (self.num_predict or 0) > 0 else None}
        found |= {"seed": self.seed if (self.seed or 0) >= 0 else None}
        found |= {"top_k": None if self.top_k is None else max(0, self.top_k)}
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        found |= {"stop": tuple(stop for stop in stops if stop) or None}
        if self.top_p == 0:
            found["top_p"] = LEAST_TOP_P
        return {name: value for name, value in found.items() if value is not None}


class _ModelBody(RequestModel, extra="ignore"):
    model: Name = Field(min_length=1)

    @property
    def model_id(self) -> str:
        """The model's name without Ollama's tag."""
        return self.model.removesuffix(_LATEST)


class _TextBody(_ModelBody):
    """The fields that chats and prompts share."""

    format: str | dict[str, Any] | None = Field(None, description='"json", or a JSON schema')
    options: OllamaOptions | None = None
    stream: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(None, description="whether, or how much")

    @property
    def is_stream(self) -> bool:
        """Return whether the answer comes in lines: Ollama's default."""
        return self.stream is not False

    def text_fields(self) -> dict[str, Any]:
        """Return the fields of a record that do not depend on the prompt."""
        fields = self.options.fields() if self.options else {}
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        if isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        elif self.think is not None:
            fields["enable_thinking"] = self.think
        return {"model": self.model_id, **fields}

    def format_fields(self) -> dict[str, Any]:
        """Return the form of the answer as a chat has it. Raises InvalidRequest."""
        if not self.format:
            return {}
        if self.format == "json":
            return {"response_format": {"type": "json_object"}}
        if isinstance(self.format, str):
            raise InvalidRequest(f'format: expected "json" or a JSON schema, got {self.format[:64]!r}', "format")
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": self.format}}}


class OllamaCall(RequestModel, extra="ignore"):
    """The function of an earlier answer's call."""

    name: CalledName
    arguments: dict[str, Any] = Field({})


class OllamaToolCallBody(RequestModel, extra="ignore"):
    """A tool call of an earlier answer. Ollama's clients send no ids."""

    id: Name | None = None
    function: OllamaCall


class OllamaTurn(RequestModel, extra="ignore"):
    """One turn of a chat. A turn of the role `tool` answers the call of `tool_name`, or else the next one."""

    role: str
    content: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaToolCallBody] | None = Field(None, max_length=128)
    thinking: str | None = None
    tool_name: str | None = None
    tool_call_id: Name | None = None


class OllamaChatBody(_TextBody):
    """A chat. Without messages it asks to load the model."""

    messages: list[OllamaTurn] = Field([], max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(None, max_length=128)

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of the record, as `ChatImages` takes them. Raises InvalidRequest."""
        messages: list[dict[str, Any]] = []
        waiting = WaitingCalls()
        for number, turn in enumerate(self.messages):
            messages.append(_message_of(turn, number, waiting))
        given = {"messages": messages, "tools": tuple(self.tools or ())}
        return self.text_fields() | self.format_fields() | given


def _message_of(turn: OllamaTurn, number: int, waiting: WaitingCalls) -> dict[str, Any]:
    content = _with_images(turn.images, turn.content or "", f"messages.{number}.images")
    message: dict[str, Any] = {"role": turn.role, "content": content, "reasoning": turn.thinking}
    if turn.tool_calls:
        ids = waiting.called(number, ((call.id, call.function.name) for call in turn.tool_calls))
        calls = zip(ids, turn.tool_calls, strict=True)
        message["tool_calls"] = [{"id": id_, "function": call.function.model_dump()} for id_, call in calls]
    if turn.role == "tool":
        answered = waiting.answered(turn.tool_call_id, turn.tool_name)
        message["name"] = turn.tool_name or (answered.name if answered else None)
        message["tool_call_id"] = answered.id if answered else turn.tool_call_id or f"call_{number}"
    return message


class OllamaGenerateBody(_TextBody):
    """A prompt: one turn of a chat, or with `raw` a text to continue. An empty one only asks to load the model."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None

    async def to_record(self, images: ChatImages) -> ChatRequest | CompletionRequest:
        """Return the request as the service takes it. Raises as `ChatImages.record_of` does."""
        if self.suffix:
            raise InvalidRequest("suffix: no model here fills a gap in a text", "suffix")
        if self.template:
            raise InvalidRequest("template: a model's own is used; write the whole prompt, with raw: true", "template")
        if self.context:
            raise InvalidRequest("context: earlier turns are not kept; send them to /api/chat", "context")
        if self.raw:
            if self.format:
                raise InvalidRequest("format: a raw prompt has none; leave out raw", "format")
            if self.images:
                raise InvalidRequest("images: a raw prompt has none; leave out raw", "images")
            fields = self.text_fields() | {"prompt": self.prompt}
            return as_record(CompletionRequest, {key: fields[key] for key in fields if key not in _OF_CHATS})
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": _with_images(self.images, self.prompt or "", "images")})
        return await images.record_of(self.text_fields() | self.format_fields() | {"messages": messages})


def _with_images(images: list[str] | None, text: str, where: str) -> str | list[str | ImageSource]:
    """Return the content of a turn: its images, which are base64, before its text. Ollama fetches none."""
    for number, image in enumerate(images or ()):
        if image.startswith(SCHEMES):
            raise InvalidRequest(f"{where}.{number}: expected an image file in base64", f"{where}.{number}")
    return content_of([*(ImageSource(f"{where}.{number}", one) for number, one in enumerate(images or ())), text])


class OllamaEmbedBody(_ModelBody):
    """Texts to embed."""

    input: str | list[str]
    dimensions: Count | None = None
    truncate: bool | None = Field(None, description="false: a text that is too long is refused")

    def to_record(self) -> EmbeddingRequest:
        """Return the request as the service takes it. Raises InvalidRequest."""
        texts = [self.input] if isinstance(self.input, str) else self.input
        long_text = {None: None, True: "truncate", False: "error"}[self.truncate]
        fields = {"model": self.model_id, "input": texts, "dimensions": self.dimensions, "long_text": long_text}
        return as_record(EmbeddingRequest, fields)


class OllamaEmbeddingsBody(_ModelBody):
    """A text to embed, in the older form."""

    prompt: str = Field(min_length=1)

    def to_record(self) -> EmbeddingRequest:
        """Return the request as the service takes it. Raises InvalidRequest."""
        return as_record(EmbeddingRequest, {"model": self.model_id, "input": [self.prompt]})


class OllamaShowBody(RequestModel, extra="ignore"):
    """The name of a model, in the newer or in the older field."""

    model: Name | None = None
    name: Name | None = None

    @property
    def model_id(self) -> str:
        """The model's name without Ollama's tag. Raises InvalidRequest without a name."""
        if not (name := self.model or self.name):
            raise InvalidRequest("model: which one?", "model")
        return name.removesuffix(_LATEST)


def create_ollama_router(service: Service, images: ChatImages) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["ollama"], route_class=AnyTypeRoute)
    _add_text_routes(router, service, images)
    _add_embedding_routes(router, service)
    _add_model_routes(router, service)
    return router


def _add_text_routes(router: APIRouter, service: Service, images: ChatImages) -> None:
    @router.post("/api/chat", response_model=ChatLine, responses=_STREAMED)
    async def chat(body: OllamaChatBody) -> Response:
        """The next turn of a chat, as lines of JSON or, without `stream`, whole."""
        lines = TextLines(body.model, is_chat=True, shows_thoughts=body.think is not False)
        if not body.messages:
            await service.listing.model(body.model_id)
            return json_response(lines.loaded())
        record = await images.record_of(body.to_fields())
        return await _respond(service, record, lines, is_stream=body.is_stream)

    @router.post("/api/generate", response_model=GenerateLine, responses=_STREAMED)
    async def generate(body: OllamaGenerateBody) -> Response:
        """The answer to a prompt, or with `raw` its continuation."""
        lines = TextLines(body.model, is_chat=False, shows_thoughts=body.think is not False)
        if not body.prompt:
            await service.listing.model(body.model_id)
            return json_response(lines.loaded())
        return await _respond(service, await body.to_record(images), lines, is_stream=body.is_stream)


async def _respond(
    service: Service, record: ChatRequest | CompletionRequest, lines: TextLines, *, is_stream: bool
) -> Response:
    if not is_stream:
        result = await (service.chat(record) if isinstance(record, ChatRequest) else service.complete(record))
        return json_response(lines.whole(result), headers=server_timing(result.timings_ms))

    async def lines_of(chunks: AsyncIterator[TextChunk]) -> AsyncIterator[str]:
        async for chunk in chunks:
            for line in lines.pieces(chunk):
                yield f"{json_text(line)}\n"

    return await stream_events(service.texts.stream_text(record), lines_of, _error_line, media_type=_LINES)


def _error_line(error: Exception) -> str:
    return f"{json_text(OllamaError(error=failure_of(error).message))}\n"


def _add_embedding_routes(router: APIRouter, service: Service) -> None:
    @router.post("/api/embed", response_model=OllamaEmbeddings, responses=_ERRORS)
    async def embed(body: OllamaEmbedBody) -> Response:
        """The vectors of texts."""
        if not any(body.input):
            await service.listing.model(body.model_id)
            return json_response(OllamaEmbeddings.empty(body.model))
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
        """The models that clients can use here."""
        cards = [card for card in await service.listing.models() if card.endpoint in _ENDPOINTS]
        return json_response(OllamaModels(models=[listed_model(card) for card in cards]))

    @router.get("/api/ps", response_model=OllamaModels, responses=errors)
    async def running() -> Response:
        """The models that replicas have built, with their memory there."""
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
        card = await service.listing.model(body.model_id)
        if card.endpoint not in _ENDPOINTS:
            raise InvalidRequest(f"model {card.id!r} ({card.kind}) writes no text and embeds none", "model")
        return json_response(shown_model(card, await service.listing.details(card)))
