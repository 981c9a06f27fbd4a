"""Answers of /v1/messages: whole, as the events of a stream, and errors in Anthropic's envelope."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

from starlette.responses import Response

from deployments.engines.llm.chat import CalledTool
from deployments.ingress.errors import Failure, failure_of
from deployments.ingress.responses import Answer, event_of, json_response, json_text
from deployments.records import TextChunk, TextResult

StopReason = Literal["end_turn", "max_tokens", "tool_use"]
_STOP_REASONS: Final[dict[str, StopReason]] = {"length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageErrorBody(Answer):
    """The message for a person, and the type by which programs tell errors apart."""

    type: str
    message: str


class MessageError(Answer):
    """The envelope of every error under /v1/messages."""

    type: Literal["error"]
    error: MessageErrorBody
    request_id: str


def message_failure_response(failure: Failure) -> Response:
    """Return `failure` in Anthropic's envelope."""
    headers = request_id()
    answer = MessageError(type="error", error=_error_body(failure), request_id=headers["request-id"])
    return json_response(answer, failure.status, headers | (failure.headers or {}))


def request_id() -> dict[str, str]:
    """Return the header that Anthropic's clients show beside an answer."""
    return {"request-id": f"req_{uuid.uuid4().hex}"}


def _error_body(failure: Failure) -> MessageErrorBody:
    return MessageErrorBody(type=_ERROR_TYPES.get(failure.status, "api_error"), message=failure.message)


class TextBlockAnswer(Answer):
    type: Literal["text"]
    text: str


class ToolUseAnswer(Answer):
    """A tool call of the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    """The token counts. `input_tokens` are those that the KV cache had not."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, result: TextResult | TextChunk) -> MessageUsage:
        """Return the token counts of an answer, or of a stream so far."""
        return cls(
            input_tokens=result.num_prompt_tokens - result.num_cached_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=result.num_cached_tokens,
            output_tokens=result.num_completion_tokens,
        )


class MessageAnswer(Answer):
    """A message of the model. `stop_sequence` stays null: a stop string ends a turn like any other end."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlockAnswer | ToolUseAnswer]
    stop_reason: StopReason | None
    stop_sequence: None
    usage: MessageUsage


class TokenCount(Answer):
    """The tokens of a message's prompt, by the model's own template and tokenizer."""

    input_tokens: int


def whole_message(result: TextResult) -> MessageAnswer:
    """Return the whole answer."""
    content: list[TextBlockAnswer | ToolUseAnswer] = []
    if result.text.strip() or not result.tool_calls:
        content.append(TextBlockAnswer(type="text", text=result.text))
    for call in result.tool_calls:
        content.append(ToolUseAnswer(type="tool_use", id=call.id, name=call.name, input=_arguments(call)))
    return _message(result.model, content, _STOP_REASONS.get(result.finish_reason, "end_turn"), result)


def _message(
    model: str,
    content: list[TextBlockAnswer | ToolUseAnswer],
    stop_reason: StopReason | None,
    counts: TextResult | TextChunk,
) -> MessageAnswer:
    return MessageAnswer(
        id=f"msg_{uuid.uuid4().hex}",
        type="message",
        role="assistant",
        model=model,
        content=content,
        stop_reason=stop_reason,
        stop_sequence=None,
        usage=MessageUsage.of(counts),
    )


def _arguments(call: CalledTool) -> dict[str, Any]:
    """Return the arguments of a call; none where `max_tokens` cut them off, which the stop reason says."""
    try:
        found = json.loads(call.arguments or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class MessageEvents:
    """The events of one stream: blocks of text and of tool calls, one after the other."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._has_begun = False
        self._num_blocks = 0
        self._open: str = ""  # the type of the last block, while it grows
        self._num_calls = 0

    def events(self, chunk: TextChunk) -> Iterator[str]:
        """Yield the events of a piece; the first one begins the message, and the last one ends it."""
        if not self._has_begun:
            self._has_begun = True
            message = _message(self._model, [], None, chunk).model_dump()
            message["usage"]["output_tokens"] = 0
            yield _event("message_start", message=message)
        if chunk.text and (chunk.text.strip() or self._open == "text" or not chunk.tool_calls):
            yield from self._add_text(chunk.text)
        yield from self._add_calls(chunk.tool_calls)
        if chunk.finish_reason is not None:
            yield from self._close()
            delta = {"stop_reason": _STOP_REASONS.get(chunk.finish_reason, "end_turn"), "stop_sequence": None}
            yield _event("message_delta", delta=delta, usage=MessageUsage.of(chunk).model_dump())
            yield _event("message_stop")

    def failure(self, error: Exception) -> str:
        """Return the event of an error on the way."""
        return _event("error", error=_error_body(failure_of(error)).model_dump())

    def _add_text(self, text: str) -> Iterator[str]:
        if self._open != "text":
            yield from self._begin({"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def _add_calls(self, calls: Sequence[CalledTool]) -> Iterator[str]:
        for call in calls:
            if call.index >= self._num_calls:
                self._num_calls = call.index + 1
                yield from self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            if call.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _begin(self, block: dict[str, Any]) -> Iterator[str]:
        yield from self._close()
        self._open = block["type"]
        self._num_blocks += 1
        yield _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _close(self) -> Iterator[str]:
        if self._open:
            self._open = ""
            yield _event("content_block_stop", index=self._num_blocks - 1)

    def _delta(self, delta: dict[str, str]) -> str:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)


def _event(type_: str, **fields: Any) -> str:
    return event_of(json_text({"type": type_, **fields}), type_)
