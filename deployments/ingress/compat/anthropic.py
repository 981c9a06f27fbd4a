"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol over the chats of the service.

Source: Anthropic's API reference, "Messages". Citations and cached prompts are not here: their fields are
ignored, and the header `X-Atelier-Warning` names it. The KV cache finds equal beginnings by itself. Thoughts have no
signature: no client sends one back.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter
from pydantic import Discriminator, Field, Tag
from starlette.responses import Response

from configs.cluster import MAX_MESSAGES
from deployments.engines.llm.chat import CalledName, CalledTool, FunctionName, ReasoningEffort
from deployments.ingress.messages.answer_parts import AnswerPart, AnswerParts
from deployments.ingress.messages.bodies import JsonRoute, LeftOut, LenientBody, TextSeed, TopP, warning_header
from deployments.ingress.messages.responses import (
    INFERENCE_ERRORS,
    Answer,
    Failure,
    documented_as,
    event_of,
    failure_of,
    json_response,
    json_text,
    server_timing,
    stream_events,
)
from deployments.ingress.openai.chat_images import ChatImages, ImageSource, content_of
from deployments.ingress.service.service import Service
from deployments.records import MAX_INT32, MAX_TOOLS, Count, Loras, Name, RequestModel, TextChunk, TextResult
from deployments.records.errors import InvalidRequest

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
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
    """The message for a person, and the type for programs."""

    type: str
    message: str


class MessageError(Answer):
    """The envelope of every error under /v1/messages."""

    type: Literal["error"]
    error: MessageErrorBody
    request_id: str


def message_failure_response(failure: Failure) -> Response:
    """Return `failure` in Anthropic's envelope."""
    headers = _request_id()
    answer = MessageError(type="error", error=_error_body(failure), request_id=headers["request-id"])
    return json_response(answer, failure.status, headers | (failure.headers or {}))


def _request_id() -> dict[str, str]:
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


class ThinkingAnswer(Answer):
    """A model's reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: str


AnswerBlock = ThinkingAnswer | TextBlockAnswer | ToolUseAnswer


class MessageUsage(Answer):
    """The token counts. `input_tokens` are those that the KV cache lacked."""

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
    """A message of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Answer):
    """The tokens of a message's prompt, by the model's own template and tokenizer."""

    input_tokens: int


def _whole_message(result: TextResult) -> MessageAnswer:
    """Return the whole answer."""
    content: list[AnswerBlock] = []
    if result.reasoning:
        content.append(ThinkingAnswer(type="thinking", thinking=result.reasoning, signature=""))
    if result.text.strip() or not (content or result.tool_calls):
        content.append(TextBlockAnswer(type="text", text=result.text))
    for call in result.tool_calls:
        content.append(ToolUseAnswer(type="tool_use", id=call.id, name=call.name, input=_arguments(call)))
    return _message(result.model, content, result, **_end_of(result))


def _end_of(last: TextResult | TextChunk) -> dict[str, Any]:
    """Return why an answer has ended: that it calls tools goes before what ended it."""
    if isinstance(last.stopped_by, str) and last.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stopped_by}
    return {"stop_reason": _STOP_REASONS.get(last.finish_reason or "", "end_turn"), "stop_sequence": None}


def _message(
    model: str,
    content: list[AnswerBlock],
    counts: TextResult | TextChunk,
    stop_reason: StopReason | None = None,
    stop_sequence: str | None = None,
) -> MessageAnswer:
    return MessageAnswer(
        id=f"msg_{uuid.uuid4().hex}",
        type="message",
        role="assistant",
        model=model,
        content=content,
        stop_reason=stop_reason,
        stop_sequence=stop_sequence,
        usage=MessageUsage.of(counts),
    )


def _arguments(call: CalledTool) -> dict[str, Any]:
    """Return the arguments of a call; none if `max_tokens` cut them off, as the stop reason shows."""
    try:
        found = json.loads(call.arguments or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


_DELTAS: Final = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class _MessageEvents:
    """The events of one stream: blocks of thoughts, of text and of tool calls, one after the other."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._has_begun = False
        self._num_blocks = 0
        self._open: str = ""  # the type of the last block, while it grows
        self._parts = AnswerParts()

    def events(self, chunk: TextChunk) -> Iterator[str]:
        """Yield the events of a piece; the first one begins the message, and the last one ends it."""
        if not self._has_begun:
            self._has_begun = True
            message = _message(self._model, [], chunk).model_dump()
            message["usage"]["output_tokens"] = 0
            yield _event("message_start", message=message)
        for part in self._parts.of(chunk):
            if part.begins:
                yield from self._begin(_block_of(part))
            if part.text:
                type_, member = _DELTAS[part.kind]
                yield self._delta({"type": type_, member: part.text})
        if chunk.finish_reason is not None:
            if not self._num_blocks:
                yield from self._begin({"type": "text", "text": ""})
            yield from self._close()
            yield _event("message_delta", delta=_end_of(chunk), usage=MessageUsage.of(chunk).model_dump())
            yield _event("message_stop")

    def failure(self, error: Exception) -> str:
        """Return the event of an error on the way."""
        return _event("error", error=_error_body(failure_of(error)).model_dump())

    def _begin(self, block: dict[str, Any]) -> Iterator[str]:
        yield from self._close()
        self._open = block["type"]
        self._num_blocks += 1
        yield _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _close(self) -> Iterator[str]:
        if self._open:
            if self._open == "thinking":  # clients wait for it
                yield self._delta({"type": "signature_delta", "signature": ""})
            self._open = ""
            yield _event("content_block_stop", index=self._num_blocks - 1)

    def _delta(self, delta: dict[str, str]) -> str:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)


def _block_of(part: AnswerPart) -> dict[str, Any]:
    """Return the block that a part of the answer begins."""
    if part.call is not None:
        return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": {}}
    if part.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _event(type_: str, **fields: Any) -> str:
    return event_of(json_text({"type": type_, **fields}), type_)


class _MessagePart(RequestModel, extra="ignore"):
    """A part of a request. Unknown members, `cache_control` say, are ignored."""


class TextBlock(_MessagePart):
    type: Literal["text"]
    text: str


class Base64Image(_MessagePart):
    """An image in base64."""

    type: Literal["base64"]
    data: str
    media_type: Literal["image/jpeg", "image/png", "image/webp"]


class UrlImage(_MessagePart):
    """An image at an http(s) address, on a host that the server's config names."""

    type: Literal["url"]
    url: str


class ImageBlock(_MessagePart):
    """An image, for models that see."""

    type: Literal["image"]
    source: Annotated[Base64Image | UrlImage, Field(discriminator="type")]


class DocumentBlock(_MessagePart):
    """A document. Those of plain text are read, as text; others are refused: no language model here reads them."""

    type: Literal["document"]
    source: dict[str, Any] | None = None
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str | None:
        """Return the text of a plain document; None of any other."""
        source = self.source or {}
        text = source.get("data" if source.get("type") == "text" else "content")
        if isinstance(text, list):
            parts = [one.get("text") if isinstance(one, dict) else None for one in text]
            text = "".join(map(str, parts)) if None not in parts else None
        if source.get("type") not in ("text", "content") or not isinstance(text, str):
            return None
        return "\n".join(one for one in (self.title, self.context, text) if one)


class ThinkingBlock(_MessagePart):
    """A thought of an earlier answer; a redacted one is left out."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


class ToolUseBlock(_MessagePart):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: Name
    name: CalledName
    input: dict[str, Any]


class SearchResultBlock(_MessagePart):
    """The results of a search, as text."""

    type: Literal["search_result"]
    title: str = ""
    content: list[TextBlock] = Field([])


class OtherBlock(_MessagePart, LeftOut):
    """A block that only Anthropic's servers make or understand: it is left out."""


def _kind_of(block: Any) -> str:
    """Return the tag of a block, by its type."""
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    kind = "thinking" if kind == "redacted_thinking" else kind
    if not isinstance(kind, str):
        return "text"
    return "other" if _OF_ITS_SERVERS.fullmatch(kind) else kind


_OF_ITS_SERVERS: Final = re.compile("[a-z_]+_tool_(use|result)|tool_reference|container_upload|compaction")
_BLOCK_KIND: Final = Discriminator(_kind_of)
Shown = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | OtherBlock
ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(lambda block: kind if (kind := _kind_of(block)) not in _NOT_IN_RESULTS else "other"),
]
_NOT_IN_RESULTS: Final = ("thinking", "tool_use", "tool_result")


class ToolResultBlock(_MessagePart):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | list[ResultBlock] | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[OtherBlock, Tag("other")],
    _BLOCK_KIND,
]


class MessageTurn(_MessagePart):
    """One turn of a chat."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class OtherTool(_MessagePart, LeftOut):
    """A tool that only Anthropic's servers run."""


class MessageTool(_MessagePart):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]


_TOOL_KIND: Final = Discriminator(
    lambda tool: (
        "custom"
        if (tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)) in (None, "custom")
        else "other"
    )
)
AnyTool = Annotated[Annotated[MessageTool, Tag("custom")] | Annotated[OtherTool, Tag("other")], _TOOL_KIND]


class MessageToolChoice(_MessagePart):
    """The choice of tools; `name` is for `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool = False


class Thinking(_MessagePart):
    """The switch of reasoning before an answer, and its most tokens."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None


class PromptBody(LenientBody):
    """The part of a request that becomes its prompt."""

    model: Name
    messages: list[MessageTurn] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[TextBlock] | None = None
    tools: list[AnyTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of the record, as `ChatImages` takes them. Raises InvalidRequest."""
        last = self.messages[-1]
        blocks = last.content if isinstance(last.content, list) else []
        if last.role == "assistant" and any(isinstance(block, ToolUseBlock) for block in blocks):
            text = "the last turn calls tools, whose results are to follow"
            raise InvalidRequest(f"messages.{len(self.messages) - 1}.content: {text}", "messages")
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": content_of(_shown(self.system, "system"))})
        for number, turn in enumerate(self.messages):
            messages += _messages_of(turn, f"messages.{number}.content")
        tools = [
            {
                "type": "function",
                "function": {"name": one.name, "description": one.description, "parameters": one.input_schema},
            }
            for one in self.tools or ()
            if isinstance(one, MessageTool)
        ]
        if self.tools and not tools:
            kind = self.tools[0].type
            raise InvalidRequest(f"tools.0: only tools that Anthropic's servers run ({kind!r})", "tools.0")
        given: dict[str, Any] = {"model": self.model, "messages": messages, "tools": tools}
        given["continue_final_message"] = last.role == "assistant"  # the answer goes on with what it says
        if (choice := self.tool_choice) is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            choices: dict[str, Any] = {"any": "required", "tool": named}
            given["tool_choice"] = choices.get(choice.type, choice.type)
            given["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.thinking is not None:
            given["enable_thinking"] = self.thinking.type != "disabled"
            given["thinking_token_budget"] = self.thinking.budget_tokens
        return given


class OutputFormat(_MessagePart):
    """The JSON schema that the text of the answer keeps to."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_MessagePart):
    """The form of the answer, and the effort of its reasoning."""

    format: OutputFormat | None = None
    effort: ReasoningEffort | None = None


class CountBody(PromptBody):
    """Anthropic's request for the number of tokens of a prompt."""


class MessagesBody(PromptBody):
    """Anthropic's request for a message, with `seed` and `lora` beside its own fields."""

    max_tokens: Count
    output_config: OutputConfig | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: TopP = None
    top_k: int | None = Field(None, ge=0, le=MAX_INT32)
    seed: TextSeed = None
    lora: Loras | None = None
    stream: bool | None = False
    metadata: dict[str, Any] | None = Field(None, description="nobody looks at it")

    def to_fields(self) -> dict[str, Any]:
        if self.thinking is not None and (self.thinking.budget_tokens or 0) >= self.max_tokens:
            raise InvalidRequest(
                f"`max_tokens` must be greater than `thinking.budget_tokens`: got {self.max_tokens} and "
                f"{self.thinking.budget_tokens}",
                "max_tokens",
            )
        names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.output_config is not None and (form := self.output_config.format) is not None:
            given["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        if self.output_config is not None:
            given["reasoning_effort"] = self.output_config.effort
        return super().to_fields() | given | {"stop": self.stop_sequences or (), "lora": self.lora or ()}


def _messages_of(turn: MessageTurn, where: str) -> list[dict[str, Any]]:
    """Return a turn as messages of the record: each tool result is one of its own. Raises InvalidRequest."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    messages: list[dict[str, Any]] = []
    for number, block in enumerate(turn.content):
        place = f"{where}.{number}"
        if isinstance(block, ToolResultBlock):
            parts = _shown(block.content or "", f"{place}.content")
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": parts})
            continue
        if not messages or messages[-1]["role"] != turn.role:
            messages.append({"role": turn.role, "content": []})
        if isinstance(block, ThinkingBlock):
            messages[-1]["reasoning"] = messages[-1].get("reasoning", "") + block.thinking
            continue
        if isinstance(block, ToolUseBlock):
            call = {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input)}}
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages[-1]["content"] += _shown([block], where, number)
    for message in messages:
        message["content"] = content_of(message["content"])
    return messages or [{"role": turn.role, "content": ""}]


def _shown(content: str | Sequence[Shown], where: str, first: int = 0) -> list[str | ImageSource]:
    """Return the texts and images of blocks. Raises InvalidRequest for a document that is no plain text."""
    if isinstance(content, str):
        return [content]
    parts: list[str | ImageSource] = []
    for number, block in enumerate(content, start=first):
        name = f"{where}.{number}"
        if isinstance(block, DocumentBlock):
            if block.text is None:
                kind = f"block of type {block.type!r}"
                raise InvalidRequest(f"{name}: language models here read no {kind} but of plain text", name)
            parts.append(block.text)
            continue
        if isinstance(block, OtherBlock):
            continue
        if isinstance(block, SearchResultBlock):
            parts.append("\n".join([block.title, *(one.text for one in block.content)]))
        elif isinstance(block, TextBlock):
            parts.append(block.text)
        else:
            source = block.source
            parts.append(ImageSource(f"{name}.source", source.url if isinstance(source, UrlImage) else source.data))
    return parts


# With `stream`, events of Anthropic's names.
_RESPONSES: Final = documented_as(MessageError, *INFERENCE_ERRORS) | {200: {"content": {"text/event-stream": {}}}}


def create_messages_router(service: Service, images: ChatImages) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["anthropic"], route_class=JsonRoute)

    @router.post("/v1/messages", response_model=MessageAnswer, responses=_RESPONSES)
    async def message(body: MessagesBody) -> Response:
        """The next message of a chat, in Anthropic's protocol."""
        record = await images.record_of(body.to_fields())
        headers = _request_id() | warning_header(body.warnings())
        if not body.stream:
            result = await service.chat(record)
            return json_response(_whole_message(result), headers=server_timing(result.timings_ms) | headers)
        form = _MessageEvents(body.model)

        async def events_of(chunks: AsyncIterator[TextChunk]) -> AsyncIterator[str]:
            async for chunk in chunks:
                for event in form.events(chunk):
                    yield event

        return await stream_events(service.texts.stream_text(record), events_of, form.failure, headers=headers)

    @router.post(
        "/v1/messages/count_tokens",
        response_model=TokenCount,
        responses=documented_as(MessageError, *INFERENCE_ERRORS),
    )
    async def count_tokens(body: CountBody) -> Response:
        """The number of tokens that a message's prompt has."""
        result = await service.texts.tokenize(await images.record_of(body.to_fields()))
        count = TokenCount(input_tokens=len(result.token_ids))
        return json_response(count, headers=_request_id() | warning_header(body.warnings()))

    return router
