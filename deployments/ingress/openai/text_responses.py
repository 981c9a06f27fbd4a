"""POST /v1/responses for text, whole or as server-sent events; and the responses that are kept, by their ids.

Items of a request's input are messages, tool calls and their results, and references to earlier answers.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request
from pydantic import AliasChoices, Discriminator, Field, Tag, TypeAdapter
from pydantic_core import to_json
from starlette.responses import Response

from configs.cluster import MAX_MESSAGES, LimitsConfig
from deployments.engines.llm.chat import CalledName, FunctionName, ReasoningEffort
from deployments.ingress.access.callers import current_tenant
from deployments.ingress.jobs.desk import JobDesk, is_for_later
from deployments.ingress.messages.bodies import ClientPart, JsonRoute, LeftOut, TopP, warning_header
from deployments.ingress.messages.responses import (
    INFERENCE_ERRORS,
    Answer,
    Failure,
    documented,
    failure_response,
    json_response,
    server_timing,
    stream_events,
)
from deployments.ingress.openai.background_responses import (
    begin,
    begin_stream,
    cancel_answer,
    find_answer,
    find_stream,
    forget_answer,
    running_id,
)
from deployments.ingress.openai.chat_images import ChatImages, Detail, ImageSource, content_of
from deployments.ingress.openai.kept import StoredResponse, StoredResponses
from deployments.ingress.openai.response_answers import ResponseAnswer, ResponseForm, response_id_of
from deployments.ingress.openai.text import allowed_names
from deployments.ingress.service.service import Service
from deployments.records import MAX_TOOLS, Count, Loras, Name, RequestModel, TextChunk, UserName
from deployments.records.errors import InvalidRequest, RequestTooLarge

_MAX_CHAIN: Final = 1024  # responses that follow on each other


class InputText(ClientPart, extra="ignore"):
    """A part of a message; those of earlier answers have more members."""

    type: Literal["input_text", "output_text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


class InputImage(ClientPart, extra="ignore"):
    """An image of a message, as in chats. Stored files with ids are not supported."""

    type: Literal["input_image"]
    image_url: str
    detail: Detail = "auto"


class InputMessage(ClientPart, extra="ignore"):
    """A message of the chat so far."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText | InputImage]


class InputCall(ClientPart, extra="ignore"):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Name
    name: CalledName
    arguments: str


class InputCustomCall(ClientPart, extra="ignore"):
    """A call of a tool that takes a text, of an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: Name
    name: CalledName
    input: str

    @property
    def arguments(self) -> str:
        """The text as the arguments of a function."""
        return json.dumps({"input": self.input})


class InputCallOutput(ClientPart, extra="ignore"):
    """The result of a tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: str | list[InputText | InputImage]


class ReasoningPart(ClientPart, extra="ignore"):
    """A piece of a thought, or of its summary."""

    type: str = "reasoning_text"
    text: str = ""


class InputReasoning(ClientPart, extra="ignore"):
    """The model's reasoning before an earlier answer, or a summary, without the part that only its server reads."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None
    summary: list[ReasoningPart] | None = None

    @property
    def text(self) -> str:
        """The thought, or else its summary."""
        return "".join(part.text for part in self.content or self.summary or ())


class ItemReference(ClientPart, extra="ignore"):
    """A message or tool call of a response that is kept, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: Name


class OtherItem(LeftOut, extra="ignore"):
    """An item of a tool that OpenAI's servers run."""


_OF_ITS_SERVERS: Final = re.compile("[a-z_]+_(call|output|request|response|tools)|compaction")
_KINDS: Final = {
    "message": "message",
    "function_call": "function_call",
    "custom_tool_call": "custom_tool_call",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
    "reasoning": "reasoning",
    "item_reference": "item_reference",
}


def _kind_of(item: Any) -> str:
    """Return the tag of an item, which messages and references may omit."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind is None:
        has_role = "role" in item if isinstance(item, dict) else hasattr(item, "role")
        return "message" if has_role else "item_reference"
    if not isinstance(kind, str):
        return "message"
    return "other" if kind not in _KINDS and _OF_ITS_SERVERS.fullmatch(kind) else _KINDS.get(kind, kind)


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCustomCall, Tag("custom_tool_call")]
    | Annotated[InputCallOutput, Tag("output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind_of),
]
InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCustomCall, Tag("custom_tool_call")]
    | Annotated[InputCallOutput, Tag("output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind_of),
]
InputItems = Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)]
_ITEMS: Final[TypeAdapter[list[Item]]] = TypeAdapter(list[Item])


class KeptItems:
    """The items that one tenant may name by the ids of responses. Calls block, and read at most `max_bytes` in all."""

    def __init__(self, stored: StoredResponses | None, tenant: str, max_bytes: int) -> None:
        self._stored = stored
        self._tenant = tenant
        self._left_bytes = self._max_bytes = max_bytes
        self._found: dict[str, StoredResponse] = {}
        self._outputs: dict[str, dict[str, Item]] = {}  # of found responses, by id

    def before(self, previous_id: str) -> list[Item]:
        """Return the items of the conversation up to a response. Raises InvalidRequest, RequestTooLarge."""
        chain: list[StoredResponse] = []
        next_: str | None = previous_id
        while next_ is not None:
            if len(chain) == _MAX_CHAIN:
                raise InvalidRequest(f"previous_response_id: more than {_MAX_CHAIN} responses", "previous_response_id")
            chain.append(self._find(next_, next_, "previous_response_id"))
            next_ = chain[-1].previous_id
        return [item for response in reversed(chain) for item in _items_of(response)]

    def resolved(self, items: Sequence[InputItem]) -> list[Item]:
        """Return the items with references resolved. Raises InvalidRequest, RequestTooLarge."""
        found: list[Item] = []
        for place, item in enumerate(items):
            if not isinstance(item, ItemReference):
                found.append(item)
                continue
            response = self._find(response_id_of(item.id) or item.id, item.id, f"input.{place}.id")
            output = self._outputs_of(response).get(item.id)
            if output is None:
                raise _unknown(item.id, f"input.{place}.id")
            found.append(output)
        return found

    def _outputs_of(self, response: StoredResponse) -> Mapping[str, Item]:
        """Return the items of an answer by id, read once: an item referenced a thousand times is one object."""
        if response.id not in self._outputs:
            outputs = json.loads(response.answer)["output"]
            items = _ITEMS.validate_python(outputs)
            self._outputs[response.id] = {output["id"]: item for output, item in zip(outputs, items, strict=True)}
        return self._outputs[response.id]

    def _find(self, response_id: str, shown_id: str, field: str) -> StoredResponse:
        if (known := self._found.get(response_id)) is not None:
            return known
        if self._stored is None:
            raise InvalidRequest(f"{field}: this server keeps no responses; send the whole chat", field)
        if (found := self._stored.find(self._tenant, response_id)) is None:
            raise _unknown(shown_id, field)
        self._left_bytes -= len(found.input) + len(found.answer)
        if self._left_bytes < 0:
            raise RequestTooLarge(f"{field}: the responses meant have more than {self._max_bytes} bytes", field)
        self._found[response_id] = found
        return found


def _unknown(id_: str, field: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: nothing is kept here as {id_[:80]!r}. Responses end some time after their last use, or are not kept "
        "(`store: false`), and only the key that they were for finds them; send the whole chat instead",
        field,
    )


def _items_of(response: StoredResponse) -> list[Item]:
    return _ITEMS.validate_json(response.input) + _ITEMS.validate_python(json.loads(response.answer)["output"])


def _as_stored(answer: ResponseAnswer, items: Sequence[Item]) -> StoredResponse:
    """Return a response in its stored form, with the items of its own request."""
    given = to_json([item.model_dump() for item in items])
    content = answer.model_dump_json(exclude_unset=True).encode()
    return StoredResponse(answer.id, answer.previous_response_id, given, content)


def _messages_of(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat that items are, as `ChatImages` takes them: calls of one answer are one message."""
    open_: dict[str, Any] | None = None  # the assistant's, which may have calls
    thought = ""  # of the assistant's next message
    for number, item in enumerate(items):
        if isinstance(item, InputReasoning):
            if open_ is not None:
                yield open_
                open_ = None
            thought += item.text
            continue
        if isinstance(item, OtherItem):
            continue
        if isinstance(item, InputCall | InputCustomCall):
            if open_ is None:
                open_, thought = {"role": "assistant", "reasoning": thought}, ""
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            open_.setdefault("tool_calls", []).append(call)
            continue
        if open_ is not None:
            yield open_
            open_ = None
        if isinstance(item, InputCallOutput):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _join_parts(item.output, number)}
        elif item.role == "assistant":
            open_ = {"role": item.role, "content": _join_parts(item.content, number), "reasoning": thought}
            thought = ""
        else:
            yield {"role": item.role, "content": _join_parts(item.content, number)}
    if open_ is not None:
        yield open_


def _join_parts(content: str | Sequence[InputText | InputImage], number: int) -> str | list[str | ImageSource]:
    if isinstance(content, str):
        return content
    return content_of(
        [
            part.text
            if isinstance(part, InputText)
            else ImageSource(f"input.{number}.content.{place}", part.image_url, part.detail)
            for place, part in enumerate(content)
        ]
    )


class OtherTool(LeftOut, extra="ignore"):
    """A tool that only OpenAI's servers run."""


class FunctionTool(ClientPart):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")],
    Discriminator(
        lambda tool: (
            "function"
            if (tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)) in (None, "function")
            else "other"
        )
    ),
]
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


class AllowedTool(RequestModel, extra="ignore"):
    """One of the tools that may be called; those of OpenAI's servers are not there."""

    type: str
    name: Name = ""


class AllowedTools(RequestModel):
    """The choice of some of the tools: an answer may call one of them, or must."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1, max_length=MAX_TOOLS)


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


class ReasoningSettings(ClientPart, extra="ignore"):
    """The amount of reasoning. There are no summaries."""

    effort: ReasoningEffort | None = None
    max_tokens: Count | None = None
    summary: str | None = None


class ResponsesBody(ClientPart):
    """OpenAI's request for a response."""

    model: Name
    input: str | InputItems = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: TopP = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    tools: list[AnyTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    metadata: dict[Name, Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=16)
    lora: Loras | None = None
    parallel_tool_calls: bool = Field(True, description="false: the first call of an answer is the only one")
    previous_response_id: Name | None = Field(None, description="the conversation up to that response goes before")
    conversation: None = Field(None, description="conversations are not kept; say `previous_response_id`")
    background: bool | None = Field(None, description="true: answer at once; fetch the response by its id")
    store: bool = Field(True, description="the response is kept for a while, for those that follow on it")
    stream: bool | None = False
    user: UserName | None = None

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that are functions."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    @property
    def items(self) -> InputItems:
        """The items of the input; a text is a message."""
        return [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def means_kept_items(self) -> bool:
        """Return whether the request names earlier items or a response by id."""
        return self.previous_response_id is not None or any(isinstance(item, ItemReference) for item in self.items)

    def to_fields(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return the fields of the record with the whole conversation, for `ChatImages`."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        given: dict[str, Any] = {"model": self.model, "messages": [*messages, *_messages_of(items)]}
        given |= {
            "lora": self.lora or (),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "thinking_token_budget": self.reasoning.max_tokens if self.reasoning is not None else None,
        }
        if self.text is not None and (form := self.text.format) is not None:
            schema = None
            if form.type == "json_schema":
                schema = {"name": form.name or "answer", "schema": form.schema_ or {"type": "object"}}
            given["response_format"] = {"type": form.type, "json_schema": schema}
        given["tools"] = [
            {"type": "function", "function": tool.model_dump(include=_FUNCTION_FIELDS, exclude_none=True)}
            for tool in self.functions
        ]
        if isinstance(self.tool_choice, NamedFunction):
            given["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif isinstance(self.tool_choice, AllowedTools):
            functions = (tool.name for tool in self.tool_choice.tools if tool.type == "function")
            names = allowed_names(functions, [tool.name for tool in self.functions])
            given["tools"] = [tool for tool in given["tools"] if tool["function"]["name"] in names]
            given["tool_choice"] = self.tool_choice.mode
        elif self.tool_choice is not None:
            given["tool_choice"] = self.tool_choice
        return given

    def asked(self, *, is_stored: bool) -> dict[str, Any]:
        """Return the members of the answer that repeat the request."""
        choice = self.tool_choice
        return self.model_dump(include=_REPEATED) | {
            "store": is_stored,
            "metadata": self.metadata or {},
            "tools": [tool.model_dump(include={"type", *_FUNCTION_FIELDS}) for tool in self.functions],
            "tool_choice": choice.model_dump() if isinstance(choice, RequestModel) else choice or "auto",
        }


# With `stream`, events of OpenAI's names.
_RESPONSES: Final = documented(*INFERENCE_ERRORS) | {200: {"content": {"text/event-stream": {}}}}


_GONE: Final = {"_404": "no such response: it has ended, was not kept, or is another key's"}


class ResponseDeleted(Answer):
    """The deletion of a kept response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


def create_responses_router(
    service: Service, stored: StoredResponses | None, limits: LimitsConfig, images: ChatImages, desk: JobDesk
) -> APIRouter:
    """Return the routes. Without `stored`, no response is kept, but for those in the background: they are jobs."""
    router = APIRouter(tags=["text"], route_class=JsonRoute)

    @router.post("/v1/responses", response_model=ResponseAnswer, responses=_RESPONSES)
    async def respond(body: ResponsesBody, request: Request) -> Response:
        """A response of a language model."""
        before, own = await _conversation(body, KeptItems(stored, current_tenant.get(), limits.max_upload_bytes))
        keeping = _Keeping(stored if body.store else None, current_tenant.get(), own)
        record, warnings = await images.record_of(body.to_fields([*before, *own])), body.warnings()
        asked, headers = body.asked(is_stored=keeping.stored is not None), warning_header(warnings)
        if is_for_later(body.background):
            if body.stream:
                return await begin_stream(desk, request, asked, headers)
            return json_response(await begin(desk, request, asked), headers=headers)
        form = ResponseForm(asked, running_id())
        if not body.stream:
            result = await service.chat(record)
            answer = await keeping.keep(form.whole(result, warnings))
            return json_response(answer, headers=server_timing(result.timings_ms) | headers)

        async def events_of(chunks: AsyncIterator[TextChunk]) -> AsyncIterator[str]:
            for event in form.opening():
                yield event
            async for chunk in chunks:
                for event in form.events(chunk):
                    yield event
            # Kept first: a client with the last event may follow on it.
            yield form.ending(await keeping.keep(form.answer(chunk, warnings)))

        return await stream_events(service.texts.stream_text(record), events_of, form.failure, headers=headers)

    @router.get(
        "/v1/responses/{response_id}",
        response_model=ResponseAnswer,
        responses=documented(400, **_GONE) | {200: {"content": {"text/event-stream": {}}}},
    )
    async def read(
        response_id: str, stream: bool = False, starting_after: Annotated[int, Query(ge=-1)] = -1
    ) -> Response:
        """A response that is kept, or in the background; with `stream`, the events of one that began as a stream.

        `starting_after` is the `sequence_number` of the last event that is known.
        """
        if stream:
            events = await find_stream(desk, response_id, starting_after)
            return _not_found(response_id) if events is None else events
        found = await asyncio.to_thread(stored.find, current_tenant.get(), response_id) if stored is not None else None
        if found is not None and not json.loads(found.answer).get("background"):
            return json_response(found.answer)
        answer = await find_answer(desk, response_id)  # it may have been cancelled while it was kept
        if answer is None and found is not None:
            answer = found.answer
        return _not_found(response_id) if answer is None else json_response(answer)

    @router.post(
        "/v1/responses/{response_id}/cancel", response_model=ResponseAnswer, responses=documented(400, **_GONE)
    )
    async def cancel(response_id: str) -> Response:
        """End a response in the background."""
        answer = await cancel_answer(desk, response_id)
        return _not_found(response_id) if answer is None else json_response(answer)

    @router.delete("/v1/responses/{response_id}", response_model=ResponseDeleted, responses=documented(**_GONE))
    async def delete(response_id: str) -> Response:
        """Forget a response. Later responses that follow on it can no longer be continued."""
        was_job = await forget_answer(desk, response_id)
        was_kept = stored is not None and await asyncio.to_thread(stored.forget, current_tenant.get(), response_id)
        if not (was_job or was_kept):
            return _not_found(response_id)
        return json_response(ResponseDeleted(id=response_id, object="response", deleted=True))

    return router


async def _conversation(body: ResponsesBody, kept: KeptItems) -> tuple[list[Item], list[Item]]:
    """Return the items of the conversation before a request, and its own. Raises InvalidRequest, RequestTooLarge."""

    def find() -> tuple[list[Item], list[Item]]:
        before = kept.before(body.previous_response_id) if body.previous_response_id is not None else []
        return before, kept.resolved(body.items)

    return await asyncio.to_thread(find) if body.means_kept_items else find()


@dataclass(frozen=True, slots=True)
class _Keeping:
    """The store of a response, its tenant, and the items of its request."""

    stored: StoredResponses | None
    tenant: str
    items: Sequence[Item]

    async def keep(self, answer: ResponseAnswer) -> ResponseAnswer:
        """Keep an answer, and return it. If it cannot be kept, the answer says so."""
        if self.stored is None:
            return answer
        try:
            stored = await asyncio.to_thread(_as_stored, answer, self.items)
            await asyncio.to_thread(self.stored.keep, self.tenant, stored)
        except OSError as error:
            warnings = (*(answer.warnings or ()), f"store: the response could not be kept: {error}")
            return answer.model_copy(update={"store": False, "warnings": warnings})
        return answer


def _not_found(response_id: str) -> Response:
    message = f"no response {response_id[:80]!r} is kept here for this key: they end some time after their last use"
    return failure_response(Failure(404, message, "invalid_request_error", "response_not_found", "response_id"))
