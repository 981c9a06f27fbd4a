"""Answers under /v1: one class each, which the OpenAPI page shows and which writes the JSON.

Large lists are the exception: `ImageData` and `EmbeddingData` are written one by one and joined.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from typing import Any, Literal, cast

from pydantic import with_config
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from deployments.ingress.openai.image_files import ImageFormat
from deployments.ingress.responses import Answer, rounded
from deployments.records import CacheUse, EmbeddingResult, ImageResult, ModelCard, SwitchReport, TextChunk, TextResult

TimesMs = dict[str, float]  # by stage
FinishReason = Literal["stop", "length"]


@with_config({"extra": "forbid"})
class ImageData(TypedDict, total=False):
    """An image file in base64, or a link to it that lasts for a while."""

    b64_json: str
    url: str


class ImagesAnswer(Answer):
    """The images of one request, and how they were made. Pipelines know no `seed`, `switch` and step count."""

    created: int
    data: list[ImageData]
    output_format: ImageFormat
    model: str
    seed: int | None
    num_inference_steps: int | None
    timings_ms: TimesMs
    switch: SwitchReport | None
    encoder_cache: CacheUse
    warnings: tuple[str, ...]

    @classmethod
    def without_data(cls, result: ImageResult, format_: ImageFormat) -> ImagesAnswer:
        """Return the answer without its images."""
        return cls(
            created=int(time.time()),
            data=[],
            output_format=format_,
            model=result.model,
            seed=result.seed,
            num_inference_steps=result.num_inference_steps,
            timings_ms=rounded(result.timings_ms),
            switch=result.switch,
            encoder_cache=result.cache,
            warnings=result.warnings,
        )


@with_config({"extra": "forbid"})
class EmbeddingData(TypedDict):
    """One vector: numbers, or their little-endian float32 in base64 where that was asked for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(Answer):
    """The vectors of one request, in the order of its inputs."""

    object: Literal["list"]
    model: str
    data: list[EmbeddingData]
    usage: EmbeddingUsage
    timings_ms: TimesMs
    encoder_cache: CacheUse
    warnings: tuple[str, ...]

    @classmethod
    def without_data(cls, result: EmbeddingResult) -> EmbeddingsAnswer:
        """Return the answer without its vectors."""
        return cls(
            object="list",
            model=result.model,
            data=[],
            usage=EmbeddingUsage(prompt_tokens=result.num_tokens, total_tokens=result.num_tokens),
            timings_ms=rounded(result.timings_ms),
            encoder_cache=result.cache,
            warnings=result.warnings,
        )


class TextUsage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, result: TextResult | TextChunk) -> TextUsage:
        """Return the token counts of an answer, or of a stream by its last piece."""
        num_prompt_tokens, num_completion_tokens = result.num_prompt_tokens, result.num_completion_tokens
        return cls(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
        )


class MessageBody(Answer):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    index: int
    finish_reason: FinishReason
    logprobs: None
    message: MessageBody


class CompletionChoice(Answer):
    index: int
    finish_reason: FinishReason
    logprobs: None
    text: str


class _TextAnswer(Answer):
    id: str
    created: int
    model: str
    usage: TextUsage
    timings_ms: TimesMs
    warnings: tuple[str, ...]


class ChatAnswer(_TextAnswer):
    """The next turn of a chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionAnswer(_TextAnswer):
    """The continuation of a text."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class MessageDelta(Answer):
    """The next part of a message; the role comes with the first piece alone, before any content."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Answer):
    index: int
    finish_reason: FinishReason | None
    logprobs: None
    delta: MessageDelta


class CompletionChunkChoice(Answer):
    index: int
    finish_reason: FinishReason | None
    logprobs: None
    text: str


class _TextChunk(Answer):
    """A piece of a stream. The last one has times and warnings; token counts come in one of their own, without text."""

    id: str
    created: int
    model: str
    usage: TextUsage | None = None
    timings_ms: TimesMs | None = None
    warnings: tuple[str, ...] | None = None


class ChatChunk(_TextChunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionChunk(_TextChunk):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


class TextForm(ABC):
    """The form of one endpoint's answers, whole and in pieces. All pieces of a stream have one id."""

    id_prefix: str

    def __init__(self, model: str) -> None:
        self._head: dict[str, Any] = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    @abstractmethod
    def whole(self, result: TextResult) -> ChatAnswer | CompletionAnswer:
        """Return the whole answer."""

    @abstractmethod
    def opening(self) -> list[Answer]:
        """Return the pieces of a stream that come before any text."""

    @abstractmethod
    def piece(self, chunk: TextChunk) -> Answer:
        """Return one piece of a stream."""

    @abstractmethod
    def usage(self, last: TextChunk) -> Answer:
        """Return the piece with the token counts of a stream, which follows the last one."""

    def _whole_fields(self, result: TextResult) -> dict[str, Any]:
        return self._head | {
            "usage": TextUsage.of(result),
            "timings_ms": rounded(result.timings_ms),
            "warnings": result.warnings,
        }

    def _piece_fields(self, chunk: TextChunk) -> dict[str, Any]:
        times = {"timings_ms": rounded(chunk.timings_ms)} if chunk.timings_ms else {}
        return self._head | times | ({"warnings": chunk.warnings} if chunk.warnings else {})


class ChatForm(TextForm):
    """Chat completions."""

    id_prefix = "chatcmpl"

    def whole(self, result: TextResult) -> ChatAnswer:
        message = MessageBody(role="assistant", content=result.text, refusal=None)
        reason = cast("FinishReason", result.finish_reason)
        choice = ChatChoice(index=0, finish_reason=reason, logprobs=None, message=message)
        return ChatAnswer(object="chat.completion", choices=[choice], **self._whole_fields(result))

    def opening(self) -> list[Answer]:
        delta = MessageDelta(role="assistant", content="")
        choice = ChatChunkChoice(index=0, finish_reason=None, logprobs=None, delta=delta)
        return [ChatChunk(object="chat.completion.chunk", choices=[choice], **self._head)]

    def piece(self, chunk: TextChunk) -> ChatChunk:
        delta = MessageDelta(content=chunk.text) if chunk.text else MessageDelta()
        reason = cast("FinishReason | None", chunk.finish_reason)
        choice = ChatChunkChoice(index=0, finish_reason=reason, logprobs=None, delta=delta)
        return ChatChunk(object="chat.completion.chunk", choices=[choice], **self._piece_fields(chunk))

    def usage(self, last: TextChunk) -> ChatChunk:
        return ChatChunk(object="chat.completion.chunk", choices=[], usage=TextUsage.of(last), **self._head)


class CompletionForm(TextForm):
    """Completions."""

    id_prefix = "cmpl"

    def whole(self, result: TextResult) -> CompletionAnswer:
        reason = cast("FinishReason", result.finish_reason)
        choice = CompletionChoice(index=0, finish_reason=reason, logprobs=None, text=result.text)
        return CompletionAnswer(object="text_completion", choices=[choice], **self._whole_fields(result))

    def opening(self) -> list[Answer]:
        return []

    def piece(self, chunk: TextChunk) -> CompletionChunk:
        reason = cast("FinishReason | None", chunk.finish_reason)
        choice = CompletionChunkChoice(index=0, finish_reason=reason, logprobs=None, text=chunk.text)
        return CompletionChunk(object="text_completion", choices=[choice], **self._piece_fields(chunk))

    def usage(self, last: TextChunk) -> CompletionChunk:
        return CompletionChunk(object="text_completion", choices=[], usage=TextUsage.of(last), **self._head)


class ModelAnswer(Answer):
    """A model, adapter or pipeline: OpenAI's model object, and what else is known."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    kind: str | None
    state: str
    bytes: int
    base: tuple[str, ...]
    description: str
    defaults: dict[str, Any]
    error: str

    @classmethod
    def of(cls, card: ModelCard) -> ModelAnswer:
        """Return the object of a model."""
        return cls(
            id=card.id,
            object="model",
            created=0,
            owned_by="atelier",
            kind=card.kind,
            state=card.state,
            bytes=card.nbytes,
            base=card.base,
            description=card.description,
            defaults=card.defaults,
            error=card.error,
        )


class ModelsAnswer(Answer):
    """Every model, adapter and pipeline."""

    object: Literal["list"]
    data: list[ModelAnswer]
