"""Requests and results of handle calls, CLI and HTTP alike. Free of Ray and of HTTP.

Requests are strict pydantic models: a handle call with a typo fails as clearly as an HTTP body with one. Results
are plain dataclasses that hold numpy arrays, which Ray moves without a copy.
"""

from deployments.engines.llm.chat import Message
from deployments.records.embeddings import EmbeddingRequest, EmbeddingResult, HeadRequest
from deployments.records.images import (
    MAX_PARTIAL_IMAGES,
    ControlNetUse,
    ImageOptions,
    ImageProgress,
    ImageRequest,
    ImageResult,
)
from deployments.records.reports import CacheUse, SwitchReport, TimingsMs, warnings_by_item
from deployments.records.requests import (
    MAX_INT32,
    MAX_SEED,
    SEED_RULE,
    Count,
    LoraUse,
    Name,
    RequestModel,
    UserName,
    as_record,
)
from deployments.records.texts import (
    ChatRequest,
    CompletionRequest,
    TextChoice,
    TextChunk,
    TextOptions,
    TextRequestRecord,
    TextResult,
    TokenText,
)

__all__ = [
    "MAX_INT32",
    "MAX_PARTIAL_IMAGES",
    "MAX_SEED",
    "SEED_RULE",
    "CacheUse",
    "ChatRequest",
    "CompletionRequest",
    "ControlNetUse",
    "Count",
    "EmbeddingRequest",
    "EmbeddingResult",
    "HeadRequest",
    "ImageOptions",
    "ImageProgress",
    "ImageRequest",
    "ImageResult",
    "LoraUse",
    "Message",
    "Name",
    "RequestModel",
    "SwitchReport",
    "TextChoice",
    "TextChunk",
    "TextOptions",
    "TextRequestRecord",
    "TextResult",
    "TimingsMs",
    "TokenText",
    "UserName",
    "as_record",
    "warnings_by_item",
]
