"""Requests and results of handle calls, CLI and HTTP alike. Free of Ray and of HTTP.

Requests are strict pydantic models: a handle call with a typo fails as clearly as an HTTP body with one. Results
are plain dataclasses that hold numpy arrays, which Ray moves without a copy.
"""

from deployments.engines.llm.chat import Message
from deployments.records.clips import ClipOptions, ClipRequest, ClipResult, VideoFormat, VideoOptions
from deployments.records.embeddings import (
    EmbeddingRequest,
    EmbeddingResult,
    HeadRequest,
    ProgramRequest,
    ProgramResult,
    ScoringRequest,
)
from deployments.records.images import (
    MAX_NAMED_IMAGES,
    MAX_PARTIAL_IMAGES,
    NO_PROMPT,
    ControlNetUse,
    ImageOptions,
    ImageProgress,
    ImagePromptUse,
    ImageRequest,
    ImageResult,
    merge_progress,
)
from deployments.records.reports import CacheUse, SwitchReport, TimingsMs, warnings_by_item
from deployments.records.requests import (
    MAX_INT32,
    MAX_SEED,
    SEED_RULE,
    Count,
    Loras,
    LoraUse,
    Name,
    RequestModel,
    UserName,
    as_record,
)
from deployments.records.texts import (
    MAX_STOPS,
    ChatRequest,
    CompletionRequest,
    PromptTokens,
    TextChoice,
    TextChunk,
    TextOptions,
    TextRequestRecord,
    TextResult,
    TokenText,
    merge_text_chunks,
)

__all__ = [
    "MAX_INT32",
    "MAX_NAMED_IMAGES",
    "MAX_PARTIAL_IMAGES",
    "MAX_SEED",
    "MAX_STOPS",
    "NO_PROMPT",
    "SEED_RULE",
    "CacheUse",
    "ChatRequest",
    "ClipOptions",
    "ClipRequest",
    "ClipResult",
    "CompletionRequest",
    "ControlNetUse",
    "Count",
    "EmbeddingRequest",
    "EmbeddingResult",
    "HeadRequest",
    "ImageOptions",
    "ImageProgress",
    "ImagePromptUse",
    "ImageRequest",
    "ImageResult",
    "LoraUse",
    "Loras",
    "Message",
    "Name",
    "ProgramRequest",
    "ProgramResult",
    "PromptTokens",
    "RequestModel",
    "ScoringRequest",
    "SwitchReport",
    "TextChoice",
    "TextChunk",
    "TextOptions",
    "TextRequestRecord",
    "TextResult",
    "TimingsMs",
    "TokenText",
    "UserName",
    "VideoFormat",
    "VideoOptions",
    "as_record",
    "merge_progress",
    "merge_text_chunks",
    "warnings_by_item",
]
