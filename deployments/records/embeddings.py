"""Embeddings and scores of texts, scores of features, tensors of programs: requests and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from configs.model import LongText
from deployments.engines.records.protocol import InputType, Pooling
from deployments.records.requests import CacheUse, Count, Name, ServedRequest, TimingsMs


class EmbeddingRequest(ServedRequest):
    """A request for the embeddings of texts, or of texts that are token ids already.

    `dimensions` None is the model's size; fewer are for models that were trained for it. `pooling` is for language
    models only, and says which hidden states are meant: the mean of all tokens', or the last one's; None is what the
    model's files say, or the last one's. `prompt_name` and `input_type` choose which of the model's prompts stands
    before texts; without them it is the usual one, if the model has one. `long_text` None is the model's rule, which
    the ingress fills in, as it does whether the model is a language model.
    """

    input: tuple[str, ...] | tuple[tuple[int, ...], ...] = Field(min_length=1)
    dimensions: Count | None = None
    pooling: Pooling | None = None
    prompt_name: Name | None = None
    input_type: InputType | None = None
    by_language_model: bool = False
    long_text: LongText | None = None


class ScoringRequest(ServedRequest):
    """A request for a reranker's or classifier's scores of texts, or of pairs of texts: a query and a document, say.

    `raw` asks for logits, without the activation that makes scores of them. `max_second_tokens` is how much is read of
    the second text of each pair, a document; None for all that the model can. `long_text` None is the model's rule,
    which the ingress fills in.
    """

    input: tuple[str, ...] | tuple[tuple[str, str], ...] = Field(min_length=1)
    raw: bool = False
    max_second_tokens: Count | None = None
    long_text: LongText | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HeadRequest:
    """A request for a head's scores: `features` is a float array (n, in_features), the input of a linear layer.

    The ingress sets `model_version`.
    """

    model: Name
    features: npt.NDArray[np.floating[Any]]
    model_version: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ProgramRequest:
    """A request for a stored program: its inputs by name, as the program takes them, rows first.

    The ingress sets `model_version`.
    """

    model: Name
    inputs: Mapping[str, npt.NDArray[Any]]
    priority: int = 0
    timeout_s: float | None = None
    model_version: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ProgramResult:
    """The outputs of a program by name.

    What is longer in one row than in another has zeros behind it.
    """

    outputs: Mapping[str, npt.NDArray[Any]]
    timings_ms: TimingsMs


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """The answer to an EmbeddingRequest: one float32 array (dimensions,) per input.

    Of a ScoringRequest, an array has a score for each of the `labels`.
    """

    model: str
    embeddings: list[npt.NDArray[np.float32]]
    num_tokens: int
    timings_ms: TimingsMs
    cache: CacheUse
    warnings: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
