"""Answers of /v1/responses: whole, and as the events of a stream."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from typing import Any, Final, Literal

from deployments.ingress.messages.answer_parts import AnswerPart, AnswerParts
from deployments.ingress.messages.responses import Answer, TimesMs, event_of, failure_of, json_text, rounded
from deployments.records import TextChunk, TextResult

_ITEM_ID: Final = re.compile(r"(?:msg|fc|rs)_([0-9a-f]{32})_[0-9]{1,4}")
Status = Literal["in_progress", "completed", "incomplete"]
_PREFIX: Final = "resp_"


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: list[str]


class OutputMessage(Answer):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class OutputCall(Answer):
    """A tool call; `arguments` are JSON."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class ReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Answer):
    """A model's reasoning. There is no summary of it."""

    type: Literal["reasoning"]
    id: str
    summary: list[str]
    content: list[ReasoningText]
    status: Status


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, result: TextResult | TextChunk) -> ResponseUsage:
        """Return the token counts of an answer, or of a stream by its last piece."""
        return cls(
            input_tokens=result.num_prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=result.num_cached_tokens, cache_write_tokens=0),
            output_tokens=result.num_completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=result.num_reasoning_tokens),
            total_tokens=result.num_prompt_tokens + result.num_completion_tokens,
        )


class WhyIncomplete(Answer):
    reason: Literal["max_output_tokens"]


class ResponseError(Answer):
    """The reason why a response in the background has no output."""

    code: str
    message: str


class ResponseAnswer(Answer):
    """A response: the request's options, and the thoughts, messages and tool calls of the model."""

    id: str
    object: Literal["response"]
    created_at: int
    background: bool
    status: Status | Literal["queued", "failed", "cancelled"]
    model: str
    output: list[OutputItem]
    error: ResponseError | None
    incomplete_details: WhyIncomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float | None
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    usage: ResponseUsage | None
    timings_ms: TimesMs | None = None
    warnings: tuple[str, ...] | None = None


class ResponseForm:
    """One response in progress. `asked` are the members of the answer that repeat the request.

    Ids of its items have that of the response in them: `response_id_of` finds it. `id_` is that of a response in the
    background, which was given before.
    """

    def __init__(self, asked: dict[str, Any], id_: str | None = None) -> None:
        self._hex = id_.removeprefix(_PREFIX) if id_ is not None else uuid.uuid4().hex
        self._head = _head_of(asked, f"{_PREFIX}{self._hex}", int(time.time()), is_in_background=id_ is not None)
        self._parts = AnswerParts(None if asked["parallel_tool_calls"] else 1)
        self._items: list[OutputItem] = []
        self._is_open = False  # the last of the items
        self._num_events = 0

    def whole(self, result: TextResult, warnings: tuple[str, ...]) -> ResponseAnswer:
        """Return the whole answer."""
        chunk = result.as_chunk()
        for _ in self.events(chunk):
            pass
        return self.answer(chunk, warnings)

    def opening(self) -> Iterator[str]:
        """Yield the events before any text."""
        answer = ResponseAnswer(**self._head, status="in_progress", output=[], incomplete_details=None, usage=None)
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=answer.model_dump(exclude_unset=True))

    def events(self, chunk: TextChunk) -> Iterator[str]:
        """Yield the events of a piece; the last event of the stream is left to `ending`."""
        for part in self._parts.of(chunk):
            if part.begins:
                yield from self._close("completed")
                yield from self._begin(part)
            yield from self._add(part)
        if chunk.finish_reason is not None:
            yield from self._close("incomplete" if chunk.finish_reason == "length" else "completed")

    def ending(self, answer: ResponseAnswer) -> str:
        """Return the last event."""
        return self._event(f"response.{answer.status}", response=answer.model_dump(exclude_unset=True))

    def failure(self, error: Exception) -> str:
        """Return the event of an error on the way."""
        failure = failure_of(error)
        return self._event("error", code=failure.code, message=failure.message, param=failure.param)

    def answer(self, last: TextChunk, warnings: tuple[str, ...]) -> ResponseAnswer:
        """Return the whole answer, after the events of its last piece."""
        is_cut = last.finish_reason == "length"
        return ResponseAnswer(
            **self._head,
            status="incomplete" if is_cut else "completed",
            output=self._items,
            incomplete_details=WhyIncomplete(reason="max_output_tokens") if is_cut else None,
            usage=ResponseUsage.of(last),
            timings_ms=rounded(last.timings_ms),
            warnings=(*last.warnings, *warnings),
        )

    def _begin(self, part: AnswerPart) -> Iterator[str]:
        """Yield the events of a new item."""
        item: OutputItem
        content: OutputText | ReasoningText
        if part.call is not None:
            id_, call = self._item_id("fc"), part.call
            yield from self._open(
                OutputCall(
                    type="function_call", id=id_, call_id=call.id, name=call.name, arguments="", status="in_progress"
                )
            )
            return
        if part.kind == "text":
            content = OutputText(type="output_text", text="", annotations=[], logprobs=[])
            id_ = self._item_id("msg")
            item = OutputMessage(type="message", id=id_, role="assistant", status="in_progress", content=[])
            yield from self._open(item)
            item.content.append(content)
        else:
            content = ReasoningText(type="reasoning_text", text="")
            id_ = self._item_id("rs")
            item = OutputReasoning(type="reasoning", id=id_, summary=[], content=[], status="in_progress")
            yield from self._open(item)
            item.content.append(content)
        yield self._item_event("response.content_part.added", content_index=0, part=content.model_dump())

    def _add(self, part: AnswerPart) -> Iterator[str]:
        """Yield the event of an addition to the last item."""
        item = self._items[-1]
        if part.kind == "call":
            if isinstance(item, OutputCall) and part.text:
                item.arguments += part.text
                yield self._item_event("response.function_call_arguments.delta", delta=part.text)
        elif isinstance(item, OutputMessage):
            item.content[0].text += part.text
            yield self._item_event("response.output_text.delta", content_index=0, delta=part.text, logprobs=[])
        elif isinstance(item, OutputReasoning):
            item.content[0].text += part.text
            yield self._item_event("response.reasoning_text.delta", content_index=0, delta=part.text)

    def _open(self, item: OutputItem) -> Iterator[str]:
        self._items.append(item)
        self._is_open = True
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item.model_dump())

    def _close(self, status: Status) -> Iterator[str]:
        if not self._is_open:
            return
        item, self._is_open = self._items[-1], False
        item.status = status
        if isinstance(item, OutputMessage):
            part = item.content[0]
            yield self._item_event("response.output_text.done", content_index=0, text=part.text, logprobs=[])
            yield self._item_event("response.content_part.done", content_index=0, part=part.model_dump())
        elif isinstance(item, OutputReasoning):
            thought = item.content[0]
            yield self._item_event("response.reasoning_text.done", content_index=0, text=thought.text)
            yield self._item_event("response.content_part.done", content_index=0, part=thought.model_dump())
        else:
            yield self._item_event("response.function_call_arguments.done", arguments=item.arguments, name=item.name)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item.model_dump())

    def _item_event(self, type_: str, **fields: Any) -> str:
        return self._event(type_, output_index=len(self._items) - 1, item_id=self._items[-1].id, **fields)

    def _event(self, type_: str, **fields: Any) -> str:
        self._num_events += 1
        return event_of(json_text({"type": type_, "sequence_number": self._num_events - 1, **fields}), type_)

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._hex}_{len(self._items)}"


def unfinished_answer(
    asked: dict[str, Any],
    id_: str,
    created_at: int,
    status: Literal["queued", "in_progress", "failed", "cancelled"],
    error: ResponseError | None = None,
) -> ResponseAnswer:
    """Return a response in the background that has no output, or none yet."""
    head = _head_of(asked, id_, created_at, is_in_background=True) | {"error": error}
    return ResponseAnswer(**head, status=status, output=[], incomplete_details=None, usage=None)


def _head_of(asked: dict[str, Any], id_: str, created_at: int, *, is_in_background: bool) -> dict[str, Any]:
    own = {"id": id_, "object": "response", "created_at": created_at, "background": is_in_background, "error": None}
    return asked | own


def response_id_of(item_id: str) -> str | None:
    """Return the id of the response that an item belongs to; None for a foreign id."""
    found = _ITEM_ID.fullmatch(item_id)
    return found and f"resp_{found[1]}"
