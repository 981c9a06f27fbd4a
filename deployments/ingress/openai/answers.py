"""What the OpenAI routes answer, for the OpenAPI page. The routes write the JSON themselves."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

TimingsBody = dict[str, float]  # milliseconds by stage


class _Answer(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class CacheUseBody(BaseModel):
    """Text encodings that were in the cache, and those that were computed."""

    hits: int
    misses: int


class ImageData(BaseModel):
    b64_json: str


class ImagesAnswer(_Answer):
    created: int
    data: list[ImageData]
    output_format: Literal["png", "jpeg", "webp"]
    model: str
    seed: int | None
    num_inference_steps: int | None
    timings_ms: TimingsBody
    switch: dict[str, Any] | None
    encoder_cache: CacheUseBody
    warnings: list[str]


class EmbeddingData(BaseModel):
    """`embedding` is a text where base64 was asked for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(_Answer):
    object: Literal["list"]
    model: str
    data: list[EmbeddingData]
    usage: EmbeddingUsage
    timings_ms: TimingsBody
    encoder_cache: CacheUseBody
    warnings: list[str]


class TextUsage(EmbeddingUsage):
    completion_tokens: int


class _Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length"]
    logprobs: None


class MessageBody(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Choice):
    message: MessageBody


class CompletionChoice(_Choice):
    text: str


class _TextAnswer(_Answer):
    id: str
    created: int
    model: str
    usage: TextUsage
    timings_ms: TimingsBody
    warnings: list[str]


class ChatAnswer(_TextAnswer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionAnswer(_TextAnswer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ModelBody(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    kind: str | None
    state: str
    bytes: int
    base: list[str]
    description: str
    defaults: dict[str, Any]
    error: str


class ModelsAnswer(_Answer):
    object: Literal["list"]
    data: list[ModelBody]


class HealthBody(_Answer):
    status: Literal["starting", "ok", "degraded"]
    models_ready: int
    models: int
