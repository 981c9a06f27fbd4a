"""POST /v1/chat/completions and /v1/completions, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter
from pydantic import Field, field_validator
from starlette.responses import Response

from deployments.ingress.errors import INFERENCE_ERRORS, documented, error_response
from deployments.ingress.openai.answers import ChatAnswer, ChatForm, CompletionAnswer, CompletionForm, TextForm
from deployments.ingress.responses import EventStream, event_of, json_response, json_text, server_timing
from deployments.ingress.service import Service
from deployments.records import (
    ChatRequest,
    CompletionRequest,
    Count,
    Message,
    Name,
    RequestModel,
    TextChunk,
    TextOptions,
    UserName,
    as_record,
)


class StreamOptions(RequestModel):
    """Options of a stream. `include_usage`: a last piece has the token counts."""

    include_usage: bool = False


class TextPart(RequestModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(RequestModel):
    """One turn of a chat. Of a content in parts, only text parts mean something to a text model."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: Name | None = None

    def to_message(self) -> Message:
        """Return the turn with its parts joined."""
        parts = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message(role=self.role, content=parts)


class TextBody(TextOptions):
    """The options of both endpoints. Unsupported ones that would change the answer may only be neutral."""

    model: Name
    stop: str | tuple[str, ...] | None = None  # type: ignore[assignment]  # OpenAI's wider type, narrowed in `options`
    top_p: float | None = Field(None, gt=0, le=1)  # type: ignore[assignment]
    n: Literal[1] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logprobs: Literal[False] | None = None
    user: UserName | None = None

    @field_validator("presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _zero(cls, value: Any) -> Any:
        return int(value) if value == 0 else value

    def options(self) -> dict[str, Any]:
        """Return the fields of the record that both endpoints have."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": stop,
        }

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
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    metadata: dict[Name, Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=16)
    store: Literal[False] | None = None

    def to_record(self) -> ChatRequest:
        """Return the request as the service takes it. Raises: InvalidRequest."""
        options = self.options()
        options["max_tokens"] = self.max_completion_tokens or self.max_tokens
        return as_record(ChatRequest, {"messages": [message.to_message() for message in self.messages], **options})


class CompletionBody(TextBody):
    """OpenAI's completion request."""

    prompt: str = Field(min_length=1)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    def to_record(self) -> CompletionRequest:
        """Return the request as the service takes it. Raises: InvalidRequest."""
        return as_record(CompletionRequest, {"prompt": self.prompt, **self.options()})


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
    if not body.stream:
        result = await (service.chat(record) if isinstance(record, ChatRequest) else service.complete(record))
        return json_response(form.whole(result), headers=server_timing(result.timings_ms))
    chunks = service.stream(record)
    # The first piece is awaited here, so that a refused request is a 4xx and not an event in a 200.
    first = await anext(chunks)
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    events = _events(form, first, chunks, include_usage)
    return EventStream(events, chunks, headers={"Cache-Control": "no-cache"})


async def _events(
    form: TextForm, first: TextChunk, rest: AsyncIterator[TextChunk], include_usage: bool
) -> AsyncIterator[str]:
    for answer in (*form.opening(), form.piece(first)):
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
