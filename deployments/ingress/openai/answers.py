"""Answers under /v1: one class each, which the OpenAPI page shows and which writes the JSON.

Large lists are the exception: `ImageData` and `EmbeddingData` are written one by one and joined.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NotRequired

from pydantic import BaseModel, with_config
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from deployments.ingress.admin.picture import Nearness, NearTier
from deployments.ingress.catalog import Endpoint, ModelCard
from deployments.ingress.openai.image_files import ImageFormat
from deployments.ingress.responses import Answer, rounded
from deployments.records import CacheUse, EmbeddingResult, ImageResult, SwitchReport

TimesMs = dict[str, float]  # by phase
_PATHS: Final[dict[Endpoint, tuple[str, ...]]] = {
    "images": ("/v1/images/generations",),
    "larger images": ("/v1/images/variations", "/v1/images/edits"),
    "video": ("/v1/videos",),
    "audio": ("/v1/audio/generations",),
    "text": ("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    "embeddings": ("/v1/embeddings",),
    "ranks": ("/v1/rerank", "/v1/classify"),
    "classes": ("/v1/classify",),
}


def warnings_of_ignored(names: Iterable[str]) -> tuple[str, ...]:
    """Return the warning of unknown fields in a body: OpenAI adds some now and then, and its clients send them."""
    shown = ", ".join(repr(name[:64]) for name in sorted(set(names))[:8])
    return (f"unknown fields were ignored: {shown}",) if shown else ()


def ignored_fields(part: BaseModel, place: str = "") -> list[str]:
    """Return the unknown fields of a body and of all parts of it, with the names that lead to them."""
    found = [f"{place}{name}" for name in part.model_extra or ()]
    for name in type(part).model_fields:
        value = getattr(part, name)
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, BaseModel):
                found += ignored_fields(one, f"{place}{name}.")
    return found


def warning_header(warnings: Sequence[str]) -> dict[str, str]:
    """Return the header with the warnings of a request, in printable ASCII."""
    text = "".join(character if " " <= character <= "~" else "?" for character in "; ".join(warnings))[:512]
    return {"X-Atelier-Warning": text} if text else {}


@with_config({"extra": "forbid"})
class ImageData(TypedDict, total=False):
    """An image file in base64, or a link to it that lasts for a while."""

    b64_json: str
    url: str


class ImageOrigin(Answer):
    """The origin of images: model, seed, steps and times. Pipelines know no `seed`, `switch` and step count."""

    model: str
    seed: int | None
    num_inference_steps: int | None
    timings_ms: TimesMs
    switch: SwitchReport | None
    encoder_cache: CacheUse
    warnings: tuple[str, ...]


def origin_of(result: ImageResult) -> dict[str, Any]:
    """Return the members of an `ImageOrigin`."""
    return {
        "model": result.model,
        "seed": result.seed,
        "num_inference_steps": result.num_inference_steps,
        "timings_ms": rounded(result.timings_ms),
        "switch": result.switch,
        "encoder_cache": result.cache,
        "warnings": result.warnings,
    }


class ImagesAnswer(ImageOrigin):
    """The images of one request, and how they were made."""

    created: int
    data: list[ImageData]
    output_format: ImageFormat

    @classmethod
    def without_data(cls, result: ImageResult, format_: ImageFormat) -> ImagesAnswer:
        """Return the answer without its images."""
        return cls(
            created=int(time.time()),
            data=[],
            output_format=format_,
            **origin_of(result),
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


class ScoresAnswer(Answer):
    """The part of every answer with scores that tells of its making."""

    id: str
    object: Literal["list"]
    model: str
    usage: EmbeddingUsage
    timings_ms: TimesMs
    encoder_cache: CacheUse
    warnings: tuple[str, ...]


def scores_origin(result: EmbeddingResult, kind: str) -> dict[str, Any]:
    """Return the members of a `ScoresAnswer`; `kind` begins its id."""
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "model": result.model,
        "usage": EmbeddingUsage(prompt_tokens=result.num_tokens, total_tokens=result.num_tokens),
        "timings_ms": rounded(result.timings_ms),
        "encoder_cache": result.cache,
        "warnings": result.warnings,
    }


@with_config({"extra": "forbid"})
class RankedDocument(TypedDict):
    text: str


@with_config({"extra": "forbid"})
class RankData(TypedDict):
    """A document's place in the request, its score, and itself where that was asked for."""

    index: int
    relevance_score: float
    document: NotRequired[RankedDocument]


class RankTokens(Answer):
    input_tokens: int


class RankMeta(Answer):
    """The place where Cohere tells the number of tokens."""

    tokens: RankTokens


class RerankAnswer(ScoresAnswer):
    """Documents, the most relevant one first."""

    results: list[RankData]
    meta: RankMeta


@with_config({"extra": "forbid"})
class ClassData(TypedDict):
    """The class of a text with the highest score, and the scores of all classes, in the order of `labels`."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(ScoresAnswer):
    """The classes of one request's texts, in their order; `labels` names the classes."""

    created: int
    data: list[ClassData]
    labels: tuple[str, ...]


class ModelAnswer(Answer):
    """A model, adapter or pipeline: OpenAI's model object, and what else is known.

    `endpoints` are the paths under /v1 that take its name as their model; none of an adapter, say. One that
    `encodes_itself` has its text encoders in the worker, and not in the text encoder service. One that `sees` takes
    images in chats. `tier` and `ready_in_s`, seconds until a worker could start it, are there where they are asked for
    and known.
    """

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
    endpoints: tuple[str, ...]
    encodes_itself: bool
    sees: bool
    tier: NearTier | None = None
    ready_in_s: float | None = None

    @classmethod
    def of(cls, card: ModelCard, near: Nearness | None = None) -> ModelAnswer:
        """Return the object of a model."""
        paths = _PATHS[card.endpoint] if card.endpoint else ()
        answer = cls(
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
            endpoints=paths + _PATHS["embeddings"] if card.kind == "llm" else paths,
            encodes_itself=card.encodes_itself,
            sees=card.sees,
        )
        return answer.model_copy(update={"tier": near.tier, "ready_in_s": near.ready_in_s}) if near else answer


class ModelsAnswer(Answer):
    """Models, adapters and pipelines."""

    object: Literal["list"]
    data: list[ModelAnswer]
