"""What the embedding service is asked for an image, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.encodings.packed import PackedTensor
from configs.model import LongText, TextPadding
from deployments.records import CacheUse
from deployments.text.cache import Encoding


@dataclass(frozen=True, slots=True)
class ConditioningRequest:
    """The text half of an image request. `use_negative`: whether guidance will be run.

    `text_padding` and `long_text` are the model's (see `Family.plan_texts`); `priority` 0 is the encoder's default, and
    `timeout_s` bounds the wait for a turn.
    """

    model: str
    prompt: str
    negative_prompt: str | None
    use_negative: bool
    max_sequence_length: int | None
    model_version: str | None = None
    text_padding: TextPadding = "stock"
    long_text: LongText = "truncate"
    priority: int = 0
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """Outputs in the order asked, how many came from the cache, and what the caller should be told.

    `num_tokens` counts the tokens of the texts, without padding. `sources` counts encodings by where they came from:
    the cache's "local", "joined", "shared" and "computed", and "repeated" within the request.
    """

    outputs: tuple[Encoding, ...]
    cache: CacheUse
    num_tokens: int
    warnings: tuple[str, ...]
    sources: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Conditioning on its way to a worker."""

    tensors: dict[str, PackedTensor]
    encode_ms: float
    cache: CacheUse
    warnings: tuple[str, ...]
