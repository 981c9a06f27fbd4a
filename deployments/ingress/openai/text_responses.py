"""POST /v1/responses for text, whole or as server-sent events. Nothing is stored: each request has its whole chat."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.responses import Response

from deployments.engines.llm.chat import FunctionName
from deployments.ingress.errors import INFERENCE_ERRORS, documented, error_response
from deployments.ingress.openai.answers import ignored_fields, warning_header, warnings_of_ignored
from deployments.ingress.openai.response_answers import ResponseAnswer, ResponseForm
from deployments.ingress.responses import EventStream, json_response, server_timing
from deployments.ingress.service import Service
from deployments.records import ChatRequest, Count, LoraUse, Name, RequestModel, TextChunk, UserName, as_record


class InputText(RequestModel):
    """A part of a message; those of earlier answers have more members."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["input_text", "output_text"]
    text: str


class InputMessage(RequestModel):
    """A message of the chat so far."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]


class InputCall(RequestModel):
    """A tool call of an earlier answer."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function_call"]
    call_id: Name
    name: FunctionName
    arguments: str


class InputCallOutput(RequestModel):
    """The result of a tool call."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function_call_output"]
    call_id: Name
    output: str | list[InputText]


class FunctionTool(RequestModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


_FUNCTION_FIELDS: Final = {"name", "description", "parameters", "strict"}


class NamedFunction(RequestModel):
    """The one function that must be called."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(RequestModel):
    """The form of the answer."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextSettings(RequestModel):
    """Settings of the answer's text."""

    model_config = ConfigDict(extra="allow")

    format: TextFormat | None = None


class ResponsesBody(RequestModel):
    """OpenAI's request for a response. Fields that nobody here knows are ignored, and a warning says so."""

    model_config = ConfigDict(extra="allow")

    model: Name
    input: str | list[InputMessage | InputCall | InputCallOutput] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    text: TextSettings | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    metadata: dict[Name, Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=16)
    lora: tuple[LoraUse, ...] | None = None
    previous_response_id: None = Field(None, description="responses are not stored: send the whole chat")
    conversation: None = Field(None, description="conversations are not stored")
    background: Literal[False] | None = None
    store: bool | None = Field(None, description="nothing is stored")
    stream: bool | None = False
    user: UserName | None = None

    def to_record(self) -> ChatRequest:
        """Return the request as the service takes it. Raises InvalidRequest."""
        given: dict[str, Any] = {"model": self.model, "messages": self._messages()}
        given |= {
            "lora": self.lora or (),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        if self.text is not None and (form := self.text.format) is not None:
            schema = None
            if form.type == "json_schema":
                schema = {"name": form.name or "answer", "schema": form.schema_ or {"type": "object"}}
            given["response_format"] = {"type": form.type, "json_schema": schema}
        given["tools"] = [
            {"type": "function", "function": tool.model_dump(include=_FUNCTION_FIELDS, exclude_none=True)}
            for tool in self.tools or ()
        ]
        if isinstance(self.tool_choice, NamedFunction):
            given["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif self.tool_choice is not None:
            given["tool_choice"] = self.tool_choice
        return as_record(ChatRequest, given)

    def form(self) -> ResponseForm:
        """Return the form of the answer, which repeats the request."""
        choice = self.tool_choice
        asked = self.model_dump(include={"model", "instructions", "max_output_tokens", "temperature", "top_p"})
        return ResponseForm(
            asked
            | {
                "metadata": self.metadata or {},
                "tools": [tool.model_dump(include={"type", *_FUNCTION_FIELDS}) for tool in self.tools or ()],
                "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
            }
        )

    def warnings(self) -> tuple[str, ...]:
        """Return what was asked for and has no effect."""
        return warnings_of_ignored(ignored_fields(self))

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            if isinstance(item, InputMessage):
                messages.append({"role": item.role, "content": _joined(item.content)})
            elif isinstance(item, InputCall):
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant"})
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
        return messages


def _joined(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


# With `stream`, events of OpenAI's names.
_RESPONSES: Final = documented(*INFERENCE_ERRORS) | {200: {"content": {"text/event-stream": {}}}}


def create_responses_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["text"])

    @router.post("/v1/responses", response_model=ResponseAnswer, responses=_RESPONSES)
    async def respond(body: ResponsesBody) -> Response:
        """A response of a language model."""
        record, form, warnings = body.to_record(), body.form(), body.warnings()
        headers = warning_header(warnings)
        if not body.stream:
            result = await service.chat(record)
            return json_response(form.whole(result, warnings), headers=server_timing(result.timings_ms) | headers)
        chunks = service.stream_text(record)
        # The first piece is awaited here, so that a refused request is a 4xx and not an event in a 200.
        first = await anext(chunks)
        events = _events(form, first, chunks, warnings)
        return EventStream(events, chunks, headers={"Cache-Control": "no-cache"} | headers)

    return router


async def _events(
    form: ResponseForm, first: TextChunk, rest: AsyncIterator[TextChunk], warnings: tuple[str, ...]
) -> AsyncIterator[str]:
    for event in (*form.opening(), *form.events(first)):
        yield event
    try:
        async for chunk in rest:
            if chunk.finish_reason is not None:
                chunk = replace(chunk, warnings=(*chunk.warnings, *warnings))
            for event in form.events(chunk):
                yield event
    except Exception as error:
        yield form.failure(json.loads(bytes(error_response(error).body))["error"])
