"""POST /v1/responses for text, whole or as server-sent events; and the responses that are kept, by their ids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from configs.cluster import LimitsConfig
from deployments.engines.llm.chat import FunctionName
from deployments.ingress.access.callers import current_tenant
from deployments.ingress.errors import INFERENCE_ERRORS, Failure, documented, error_response, failure_response
from deployments.ingress.json_route import JsonRoute
from deployments.ingress.openai.answers import warning_header
from deployments.ingress.openai.chat_images import ChatImages
from deployments.ingress.openai.client_parts import ClientPart
from deployments.ingress.openai.response_answers import ResponseAnswer, ResponseForm
from deployments.ingress.openai.response_items import (
    InputItems,
    InputMessage,
    Item,
    ItemReference,
    KeptItems,
    as_stored,
    messages_of,
)
from deployments.ingress.openai.stored_responses import StoredResponses
from deployments.ingress.responses import Answer, EventStream, json_response, server_timing
from deployments.ingress.service import Service
from deployments.records import Count, Loras, Name, RequestModel, TextChunk, UserName


class FunctionTool(ClientPart):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


_FUNCTION_FIELDS: Final = {"name", "description", "parameters", "strict"}
_REPEATED: Final = {
    "model",
    "instructions",
    "max_output_tokens",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "previous_response_id",
}


class NamedFunction(RequestModel):
    """The one function that must be called."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(ClientPart):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextSettings(ClientPart):
    """Settings of the answer's text."""

    format: TextFormat | None = None


class ResponsesBody(ClientPart):
    """OpenAI's request for a response."""

    model: Name
    input: str | InputItems = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    text: TextSettings | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    metadata: dict[Name, Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=16)
    lora: Loras | None = None
    parallel_tool_calls: bool = Field(True, description="false: the first call of an answer is the only one")
    previous_response_id: Name | None = Field(None, description="what was asked and answered up to there goes before")
    conversation: None = Field(None, description="conversations are not kept; say `previous_response_id`")
    background: Literal[False] | None = None
    store: bool = Field(True, description="the response is kept for a while, for those that follow on it")
    stream: bool | None = False
    user: UserName | None = None

    @property
    def items(self) -> InputItems:
        """The items of the input; a text is a message."""
        return [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def means_kept_items(self) -> bool:
        """Return whether some of what was said is meant by ids."""
        return self.previous_response_id is not None or any(isinstance(item, ItemReference) for item in self.items)

    def to_fields(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return the fields of the record, with all that was said, as `ChatImages` takes them."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        given: dict[str, Any] = {"model": self.model, "messages": [*messages, *messages_of(items)]}
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
        return given

    def form(self, *, is_stored: bool) -> ResponseForm:
        """Return the form of the answer, which repeats the request."""
        choice = self.tool_choice
        return ResponseForm(
            self.model_dump(include=_REPEATED)
            | {
                "store": is_stored,
                "metadata": self.metadata or {},
                "tools": [tool.model_dump(include={"type", *_FUNCTION_FIELDS}) for tool in self.tools or ()],
                "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
            }
        )


# With `stream`, events of OpenAI's names.
_RESPONSES: Final = documented(*INFERENCE_ERRORS) | {200: {"content": {"text/event-stream": {}}}}


_GONE: Final = {"_404": "no such response: it has ended, was not kept, or is another key's"}


class ResponseDeleted(Answer):
    """The end of a response that was kept."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


def create_responses_router(
    service: Service, stored: StoredResponses | None, limits: LimitsConfig, images: ChatImages
) -> APIRouter:
    """Return the routes. Without `stored`, no response is kept."""
    router = APIRouter(tags=["text"], route_class=JsonRoute)

    @router.post("/v1/responses", response_model=ResponseAnswer, responses=_RESPONSES)
    async def respond(body: ResponsesBody) -> Response:
        """A response of a language model."""
        before, own = await _said(body, KeptItems(stored, current_tenant.get(), limits.max_upload_bytes))
        keeping = _Keeping(stored if body.store else None, current_tenant.get(), own)
        record, warnings = await images.record_of(body.to_fields([*before, *own])), body.warnings()
        form, headers = body.form(is_stored=keeping.stored is not None), warning_header(warnings)
        if not body.stream:
            result = await service.chat(record)
            answer = await keeping.keep(form.whole(result, warnings))
            return json_response(answer, headers=server_timing(result.timings_ms) | headers)
        chunks = service.stream_text(record)
        # The first piece is awaited here, so that a refused request is a 4xx and not an event in a 200.
        first = await anext(chunks)
        events = _events(form, first, chunks, warnings, keeping)
        return EventStream(events, chunks, headers={"Cache-Control": "no-cache"} | headers)

    @router.get("/v1/responses/{response_id}", response_model=ResponseAnswer, responses=documented(**_GONE))
    async def read(response_id: str) -> Response:
        """A response that is kept."""
        if stored is None or not (found := await asyncio.to_thread(stored.find, current_tenant.get(), response_id)):
            return _not_found(response_id)
        return json_response(found.answer)

    @router.delete("/v1/responses/{response_id}", response_model=ResponseDeleted, responses=documented(**_GONE))
    async def delete(response_id: str) -> Response:
        """Forget a response. What follows on it cannot be followed on any more."""
        if stored is None or not await asyncio.to_thread(stored.forget, current_tenant.get(), response_id):
            return _not_found(response_id)
        return json_response(ResponseDeleted(id=response_id, object="response", deleted=True))

    return router


async def _said(body: ResponsesBody, kept: KeptItems) -> tuple[list[Item], list[Item]]:
    """Return what was said before a request, and its own items. Raises InvalidRequest, RequestTooLarge."""

    def find() -> tuple[list[Item], list[Item]]:
        before = kept.before(body.previous_response_id) if body.previous_response_id is not None else []
        return before, kept.resolved(body.items)

    return await asyncio.to_thread(find) if body.means_kept_items else find()


@dataclass(frozen=True, slots=True)
class _Keeping:
    """The store that a response goes to, for which tenant, and the items of its request."""

    stored: StoredResponses | None
    tenant: str
    items: Sequence[Item]

    async def keep(self, answer: ResponseAnswer) -> ResponseAnswer:
        """Keep an answer, and return it. Where that cannot be done, it says so."""
        if self.stored is None:
            return answer
        try:
            stored = await asyncio.to_thread(as_stored, answer, self.items)
            await asyncio.to_thread(self.stored.keep, self.tenant, stored)
        except OSError as error:
            warnings = (*(answer.warnings or ()), f"store: the response could not be kept: {error}")
            return answer.model_copy(update={"store": False, "warnings": warnings})
        return answer


def _not_found(response_id: str) -> Response:
    message = f"no response {response_id[:80]!r} is kept here for this key: they end some time after their last use"
    return failure_response(Failure(404, message, "invalid_request_error", "response_not_found", "response_id"))


async def _events(
    form: ResponseForm,
    first: TextChunk,
    rest: AsyncIterator[TextChunk],
    warnings: tuple[str, ...],
    keeping: _Keeping,
) -> AsyncIterator[str]:
    last = first
    for event in (*form.opening(), *form.events(first)):
        yield event
    try:
        async for last in rest:
            for event in form.events(last):
                yield event
    except Exception as error:
        yield form.failure(json.loads(bytes(error_response(error).body))["error"])
        return
    # Kept first: who has the last event may follow on it.
    yield form.ending(await keeping.keep(form.answer(last, warnings)))
