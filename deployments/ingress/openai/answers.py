"""Answers under /v1: one class each, which the OpenAPI page shows and which writes the JSON.

Large lists are the exception: `ImageData` and `EmbeddingData` are written one by one and joined.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, with_config
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from deployments.ingress.catalog import ModelCard
from deployments.ingress.openai.image_files import ImageFormat
from deployments.ingress.responses import Answer, rounded
from deployments.records import CacheUse, EmbeddingResult, ImageResult, SwitchReport

TimesMs = dict[str, float]  # by phase


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
