"""How an answer in text is written down: OpenAI's objects, whole and in pieces."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from typing import Any

from deployments.ingress.timing import rounded
from deployments.records import TextChunk, TextResult


class AnswerForm(ABC):
    """How an answer of one endpoint is written down."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str) -> None:
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, result: TextResult) -> dict[str, Any]:
        choice = {
            "index": 0,
            "finish_reason": result.finish_reason,
            "logprobs": None,
            **self.content(result.text),
        }
        usage = _usage(result.num_prompt_tokens, result.num_completion_tokens)
        timings = rounded(result.timings_ms)
        return {
            "object": self.whole_object,
            **self._head,
            "choices": [choice],
            "usage": usage,
            "timings_ms": timings,
            "warnings": result.warnings,
        }

    def chunk(self, text: str, finish_reason: str | None, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "finish_reason": finish_reason, "logprobs": None, **self.delta(text)}
        return {"object": self.chunk_object, **self._head, "choices": [choice], **more}

    def usage_chunk(self, last: TextChunk) -> dict[str, Any]:
        usage = _usage(last.num_prompt_tokens, last.num_completion_tokens)
        return {"object": self.chunk_object, **self._head, "choices": [], "usage": usage}

    def first(self) -> list[dict[str, Any]]:
        return []

    @abstractmethod
    def content(self, text: str) -> dict[str, Any]:
        """The choice of a whole answer."""

    @abstractmethod
    def delta(self, text: str) -> dict[str, Any]:
        """The choice of one piece of a stream."""


class ChatForm(AnswerForm):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def first(self) -> list[dict[str, Any]]:
        opening = self.chunk("", None)
        opening["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        return [opening]


class CompletionForm(AnswerForm):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    delta = content


def _usage(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }
