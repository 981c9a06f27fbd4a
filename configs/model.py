"""The configuration of one model or adapter that a cluster may serve."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, StringConstraints

# Ids become file names in the store and path segments in URLs, so they are kept to one plain word.
ModelId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
DType = Literal["auto", "float32", "bfloat16", "float16"]
_UNITS = {
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


def _parse_source(value: Any) -> Any:
    """Return a folder or file as Path; a URL stays text, because a Path would make one slash of two."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError("expected a path or an s3:// URL")
    if not value.isprintable():  # a NUL or half a character is in no path, a line break makes two lines of a message
        raise ValueError("expected a path of printable characters")
    scheme, is_url, rest = value.partition("://")
    if not is_url:
        return Path(value)
    if scheme != "s3":
        raise ValueError(f"unknown scheme {scheme}:// (known: s3://; a path needs none)")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]+(/[^?#]*)?", rest):
        raise ValueError("expected s3://bucket/prefix; credentials come from the environment only")
    return value


def _parse_bytes(value: Any) -> Any:
    """Parse `"2 GiB"` to 2147483648. Numbers pass through; anything else is left to pydantic to refuse."""
    if not isinstance(value, str):
        return value
    text = value.strip().upper()
    for unit in sorted(_UNITS, key=len, reverse=True):
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.replace(".", "", 1).isdecimal():
            return int(Decimal(number) * _UNITS[unit])
    if text.isdecimal():
        return int(text)
    raise ValueError(f"not a size in bytes: {value!r} (expected a number or e.g. 512 MiB, 2 GiB)")


def _parse_spare_bytes(value: Any) -> Any:
    """Parse a size, or leave "auto" and None as they are."""
    if value is None or value == "auto":
        return value
    found = _parse_bytes(value)
    if not isinstance(found, int) or isinstance(found, bool) or found <= 0:
        raise ValueError(f"not a size in bytes: {value!r} (expected auto, a number or e.g. 512 MiB, 2 GiB)")
    return found


Source = Annotated[Path | str, PlainValidator(_parse_source)]
Bytes = Annotated[int, BeforeValidator(_parse_bytes), Field(gt=0)]
SpareBytes = Annotated[int | Literal["auto"] | None, PlainValidator(_parse_spare_bytes)]


class StrictModel(BaseModel):
    """Immutable, and an unknown key is an error rather than a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# What happens to a text that is longer than its encoder takes.
LongText = Literal["truncate", "error", "chunk"]
# "stock": T5 and CLIP see the padding, as in diffusers. "trimmed": a T5 sees the real tokens only; no others are kept.
TextPadding = Literal["stock", "trimmed"]


class GenerationDefaults(StrictModel):
    """Defaults of requests for this model. None falls back to the engine's own default."""

    width: int | None = Field(None, ge=8, le=4096, description="pixels")
    height: int | None = Field(None, ge=8, le=4096, description="pixels")
    num_inference_steps: int | None = Field(None, ge=1, le=1000)
    guidance_scale: float | None = Field(None, ge=0, le=100)
    max_sequence_length: int | None = Field(None, ge=1, le=4096, description="tokens of the T5 prompt")
    max_tokens: int | None = Field(None, ge=1, description="tokens that an LLM may add")
    temperature: float | None = Field(None, ge=0, le=2)


class ModelConfig(StrictModel):
    """A checkpoint folder in a stock layout: diffusers pipeline, transformers LLM or sentence encoder.

    `path` is local, or an s3:// URL that is copied to the store's disk first (`store.object_storage` says how).
    `component` serves one component of a pipeline folder as a model of its own (its text encoder as an
    embedding model, say). `dtype` other than `auto` casts floating tensors once, when they enter the store.
    """

    id: ModelId
    path: Source
    component: str | None = None
    dtype: DType = "auto"
    long_text: LongText = Field("truncate", description="chunk: CLIP only, in pieces of 77 tokens")
    text_padding: TextPadding = "stock"
    preload: bool = Field(False, description="build it when a replica starts, if there is room without evicting")
    defaults: GenerationDefaults = GenerationDefaults()
    description: str = ""


class AdapterConfig(StrictModel):
    """A LoRA as diffusers, kohya's trainer or PEFT saves it, or a ControlNet's folder, and the models that it is for.

    A ControlNet needs the dtype of its models.

    A LoRA that most requests have is cheaper merged: those that name it alone and at `merged_scale` run it as private
    copies of the layers that it changes, in forwards of their own. Others have it on the side, which any LoRAs share.
    """

    id: ModelId
    path: Source
    base: tuple[ModelId, ...] = Field(min_length=1)
    dtype: DType = "auto"
    merged_scale: float | None = Field(
        None, gt=0, le=10, allow_inf_nan=False, description="of a LoRA for images; None: never merged"
    )
