"""POST /v1/chat/completions and /v1/completions, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter
from pydantic import ConfigDict, Field, StrictInt, field_validator
from starlette.responses import Response

from deployments.engines.llm.chat import ResponseFormat, Tool, ToolCall, ToolChoice
from deployments.errors import InvalidRequest
from deployments.ingress.errors import INFERENCE_ERRORS, documented, error_response
from deployments.ingress.openai.answers import ignored_fields, warning_header, warnings_of_ignored
from deployments.ingress.openai.text_answers import ChatAnswer, ChatForm, CompletionAnswer, CompletionForm, TextForm
from deployments.ingress.responses import EventStream, event_of, json_response, json_text, server_timing
from deployments.ingress.service import Service
from deployments.records import (
    MAX_INT32,
    MAX_SEED,
    SEED_RULE,
    ChatRequest,
    CompletionRequest,
    Count,
    LoraUse,
    Name,
    RequestModel,
    TextChunk,
    TextOptions,
    UserName,
    as_record,
)


class StreamOptions(RequestModel):
    """Options of a stream. `include_usage`: a last piece has the token counts."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool = False


class TextPart(RequestModel):
    """A part of a message."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text"]
    text: str


class ChatMessage(RequestModel):
    """One turn of a chat. Of a content in parts, only text parts mean something to a text model."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Name | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Name | None = None
    refusal: str | None = None

    def to_message(self) -> dict[str, Any]:
        """Return the turn as a mapping of the record's fields, with its parts joined."""
        message: dict[str, Any] = {
            "role": self.role,
            "tool_calls": self.tool_calls or (),
            "tool_call_id": self.tool_call_id,
        }
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        elif self.content is not None:
            message["content"] = self.content
        return message


class TextBody(RequestModel):
    """The options of both endpoints. Fields that nobody here knows are ignored, and a warning of the answer says so."""

    model_config = ConfigDict(extra="allow")

    model: Name
    max_tokens: Count | None = None
    n: Count | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_INT32)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description=SEED_RULE)
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    lora: tuple[LoraUse, ...] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: UserName | None = None

    def options(self) -> dict[str, Any]:
        """Return the fields of the record that both endpoints have."""
        given = self.model_dump(include=set(TextOptions.model_fields) - {"logprobs"}, exclude_none=True)
        if isinstance(self.stop, str):
            given["stop"] = (self.stop,)
        return {"model": self.model, **given}

    def warnings(self) -> tuple[str, ...]:
        """Return what was asked for and has no effect."""
        return warnings_of_ignored(ignored_fields(self))

    @field_validator("stop")
    @classmethod
    def _few(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        stops = (value,) if isinstance(value, str) else value or ()
        if len(stops) > 4 or any(not stop or len(stop) > 256 for stop in stops):
            raise ValueError("at most 4 stop strings of 1 to 256 characters are allowed")
        return value


class ChatBody(TextBody):
    """OpenAI's chat request."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: ToolChoice | None = None
    metadata: dict[Name, Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=16)
    store: bool | None = Field(None, description="nothing is stored")

    def to_record(self) -> ChatRequest:
        """Return the request as the service takes it. Raises InvalidRequest."""
        options = self.options()
        if self.max_completion_tokens:
            options["max_tokens"] = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs: true", "top_logprobs")
        options["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        for number, message in enumerate(self.messages):
            if message.content is None and not message.tool_calls:
                name = f"messages.{number}.content"
                raise InvalidRequest(f"{name}: a message without tool_calls needs one", name)
        options |= {"response_format": self.response_format, "tools": tuple(self.tools or ())}
        if self.tool_choice is not None:
            options["tool_choice"] = self.tool_choice
        return as_record(ChatRequest, {"messages": [message.to_message() for message in self.messages], **options})


class CompletionBody(TextBody):
    """OpenAI's completion request."""

    prompt: str | list[str] | list[StrictInt] | list[list[StrictInt]] = Field(min_length=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: Count | None = None
    suffix: None = None

    def to_record(self) -> CompletionRequest:
        """Return the request as the service takes it. Raises InvalidRequest."""
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest("best_of: only as many as n are made", "best_of")
        options = self.options() | {"echo": bool(self.echo), "logprobs": self.logprobs}
        return as_record(CompletionRequest, {"prompt": self.prompt, **options})


# With `stream`, chunks as server-sent events.
_RESPONSES: Final = documented(*INFERENCE_ERRORS) | {200: {"content": {"text/event-stream": {}}}}


def create_text_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["text"])

    @router.post("/v1/chat/completions", response_model=ChatAnswer, responses=_RESPONSES)
    async def chat(body: ChatBody) -> Response:
        """The next turn of a chat."""
        return await _respond(service, body, body.to_record(), ChatForm(body.model))

    @router.post("/v1/completions", response_model=CompletionAnswer, responses=_RESPONSES)
    async def complete(body: CompletionBody) -> Response:
        """The continuation of a text."""
        return await _respond(service, body, body.to_record(), CompletionForm(body.model))

    return router


async def _respond(
    service: Service, body: TextBody, record: ChatRequest | CompletionRequest, form: TextForm
) -> Response:
    warnings = body.warnings()
    headers = warning_header(warnings)
    if not body.stream:
        result = await (service.chat(record) if isinstance(record, ChatRequest) else service.complete(record))
        result = replace(result, warnings=(*result.warnings, *warnings))
        return json_response(form.whole(result), headers=server_timing(result.timings_ms) | headers)
    chunks = service.stream_text(record)
    # The first piece is awaited here, so that a refused request is a 4xx and not an event in a 200.
    first = await anext(chunks)
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    events = _events(form, first, chunks, include_usage, record.n * _num_prompts(record))
    return EventStream(events, chunks, headers={"Cache-Control": "no-cache"} | headers)


def _num_prompts(record: ChatRequest | CompletionRequest) -> int:
    return len(record.prompts) if isinstance(record, CompletionRequest) else 1


async def _events(
    form: TextForm, first: TextChunk, rest: AsyncIterator[TextChunk], include_usage: bool, num_choices: int
) -> AsyncIterator[str]:
    for answer in (*form.opening(num_choices), form.piece(first)):
        yield event_of(json_text(answer))
    last = first
    try:
        async for chunk in rest:
            last = chunk
            yield event_of(json_text(form.piece(chunk)))
    except Exception as error:
        yield event_of(bytes(error_response(error).body).decode())
        return
    if include_usage:
        yield event_of(json_text(form.usage(last)))
    yield event_of("[DONE]")
