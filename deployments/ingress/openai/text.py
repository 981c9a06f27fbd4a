"""POST /v1/chat/completions and /v1/completions, whole or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field, StrictInt, field_validator
from starlette.responses import Response

from configs.cluster import MAX_MESSAGES
from configs.options import SamplingOptions
from deployments.engines.llm.chat import (
    Function,
    FunctionCall,
    FunctionChoice,
    NamedTool,
    ReasoningEffort,
    ResponseFormat,
    Tool,
    ToolChoice,
)
from deployments.ingress.jobs.desk import JobDesk, is_for_later
from deployments.ingress.jobs.routes import BACKGROUND, BEGUN, begun_response
from deployments.ingress.messages.bodies import (
    ClientPart,
    JsonRoute,
    MaxTokens,
    NoneOrTokens,
    TextSeed,
    TopP,
    warning_header,
)
from deployments.ingress.messages.call_ids import WaitingCalls
from deployments.ingress.messages.responses import (
    INFERENCE_ERRORS,
    documented,
    error_response,
    event_of,
    json_response,
    json_text,
    server_timing,
    stream_events,
)
from deployments.ingress.openai.chat_images import ChatImages, Detail, ImageSource, content_of
from deployments.ingress.openai.text_answers import (
    Calls,
    ChatAnswer,
    ChatForm,
    CompletionAnswer,
    CompletionForm,
    TextForm,
)
from deployments.ingress.service.service import Service
from deployments.records import (
    MAX_INT32,
    MAX_STOPS,
    ChatRequest,
    CompletionRequest,
    Count,
    Loras,
    Name,
    TextChunk,
    TextOptions,
    UserName,
    as_record,
)
from deployments.records.errors import InvalidRequest


class StreamOptions(ClientPart):
    """Options of a stream. `include_usage`: a last piece has the token counts."""

    include_usage: bool = False


class TextPart(ClientPart):
    """A part of a message. The newer two types are those of /v1/responses, which some clients send to chats too."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class ThoughtPart(ClientPart):
    """The assistant's reasoning, as part of its message."""

    type: Literal["thinking"]
    thinking: str


class RefusalPart(ClientPart):
    """The assistant's refusal."""

    type: Literal["refusal"]
    refusal: str


class ImageUrl(ClientPart):
    """An image: a data URL, base64, or an http(s) address on a host that the server's config names.

    `detail` low scales it down to 512 x 512 pixels; high and auto leave it to the model.
    """

    url: str
    detail: Detail = "auto"


class ImagePart(ClientPart):
    """An image of a message."""

    type: Literal["image_url"]
    image_url: Annotated[ImageUrl, BeforeValidator(lambda given: {"url": given} if isinstance(given, str) else given)]


class ChatCall(ClientPart):
    """A call of an earlier answer. Some clients leave out its id."""

    id: Name | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


ContentPart = Annotated[TextPart | ImagePart | RefusalPart | ThoughtPart, Field(discriminator="type")]


class ChatMessage(ClientPart):
    """One turn of a chat. A content in parts has texts, and images where the model sees.

    `function_call`, and a result of the role `function`, are the old form of `tool_calls` and the role `tool`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: Name | None = None
    tool_calls: list[ChatCall] | None = Field(None, max_length=128)
    tool_call_id: Name | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None
    reasoning_content: str | None = Field(None, description="the assistant's reasoning before this answer")
    reasoning: str | None = Field(None, description="another name of reasoning_content")

    def to_message(self, number: int, waiting: WaitingCalls) -> dict[str, Any]:
        """Return turn `number` as a mapping of the record's fields, with its parts joined unless some are images."""
        message: dict[str, Any] = {
            "role": self.role,
            "tool_call_id": self.tool_call_id,
            "name": self.name,
            "reasoning": self.reasoning_content or self.reasoning,
        }
        if self.role == "function":
            message |= {"role": "tool", "tool_call_id": _id_of_function(self.name or "")}
        elif self.role == "tool" and (answered := waiting.answered(self.tool_call_id, self.name)):
            message["tool_call_id"] = answered.id
        if self.tool_calls:
            ids = waiting.called(number, ((call.id, call.function.name) for call in self.tool_calls))
            calls = zip(ids, self.tool_calls, strict=True)
            message["tool_calls"] = [{"id": id_, "function": call.function} for id_, call in calls]
        elif self.function_call is not None:
            message["tool_calls"] = ({"id": _id_of_function(self.function_call.name), "function": self.function_call},)
        if isinstance(self.content, list):
            thoughts = [part.thinking for part in self.content if isinstance(part, ThoughtPart)]
            message["reasoning"] = message["reasoning"] or "".join(thoughts) or None
            message["content"] = content_of(self._shown(self.content, number))
        elif self.content is not None:
            message["content"] = self.content
        elif self.role in ("assistant", "tool"):
            message["content"] = ""  # an answer that was cut or refused, a tool that said nothing
        return message

    @staticmethod
    def _shown(parts: Sequence[ContentPart], number: int) -> list[str | ImageSource]:
        found: list[str | ImageSource] = []
        for place, part in enumerate(parts):
            if isinstance(part, ImagePart):
                where = f"messages.{number}.content.{place}"
                found.append(ImageSource(where, part.image_url.url, part.image_url.detail))
            elif not isinstance(part, ThoughtPart):
                found.append(part.refusal if isinstance(part, RefusalPart) else part.text)
        return found


def messages_of(turns: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the turns of a chat as mappings of the record's fields. Raises InvalidRequest."""
    waiting = WaitingCalls()
    for number, turn in enumerate(turns):
        if turn.content is None and turn.role not in ("assistant", "tool"):
            name = f"messages.{number}.content"
            raise InvalidRequest(f"{name}: a message of the role {turn.role!r} needs one", name)
    messages = [turn.to_message(number, waiting) for number, turn in enumerate(turns)]
    for number, message in enumerate(messages):
        if message["role"] == "tool" and not message["tool_call_id"]:
            name = f"messages.{number}.tool_call_id"
            raise InvalidRequest(f"{name}: no call waits for a result, so give it", name)
    return messages


def _id_of_function(name: str) -> str:
    """Return the id of a call in the old form, which has one call an answer and its name only."""
    return f"call_{name}"


class StructuredOutputs(ClientPart):
    """The form of an answer in vLLM's fields, one of which is set."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="Lark or GBNF")
    structural_tag: dict[str, Any] | str | None = Field(None, description="text with parts of given forms")

    def to_record(self) -> dict[str, Any] | None:
        """Return the record's form of the answer; None if none is set. Raises InvalidRequest."""
        schema = _object_of(self.json_, "json")
        if schema is None and self.json_object:
            schema = {"type": "object"}
        tag = _object_of(self.structural_tag, "structural_tag")
        given = {"json_schema": schema, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        given |= {"structural_tag": tag}
        found = {name: value for name, value in given.items() if value is not None}
        return found or None


def _object_of(given: Any, field: str) -> Any:
    """Return a value that may come as JSON text too. Raises InvalidRequest."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs.{field}: no JSON: {error}", "structured_outputs") from None


class AnswerFormat(ResponseFormat, extra="allow"):
    """The form of an answer; also one in parts, as `structured_outputs.structural_tag`, whose members are its own."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]  # type: ignore[assignment]

    def to_record(self) -> ResponseFormat | None:
        """Return the record's form, None for one in parts."""
        if self.type == "structural_tag":
            return None
        return ResponseFormat(type=self.type, json_schema=self.json_schema, schema=self.schema_)


class TextBody(ClientPart, SamplingOptions):
    """The options of both endpoints."""

    model: Name
    max_tokens: NoneOrTokens = None
    n: Count | None = None
    top_p: TopP = None
    top_k: int | None = Field(None, ge=-1, le=MAX_INT32, description="0 or -1: no limit")
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    seed: TextSeed = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    lora: Loras | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="structured_outputs.json, as before")
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    background: bool | None = Field(None, description=BACKGROUND)
    user: UserName | None = None

    def options(self) -> dict[str, Any]:
        """Return the fields of the record that both endpoints have."""
        given = self.model_dump(include=set(TextOptions.model_fields) - {"logprobs"}, exclude_none=True)
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        given["stop"] = tuple(stop for stop in stops if stop)
        if self.top_k is not None:
            given["top_k"] = max(0, self.top_k)
        guided = {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
        older = {name: value for name, value in guided.items() if value is not None}
        forms = [self.structured_outputs, StructuredOutputs.model_validate(older) if older else None]
        said = [form for one in forms if one is not None and (form := one.to_record()) is not None]
        if len(said) > 1:
            raise InvalidRequest("structured_outputs: guided_* say the form of the answer too", "structured_outputs")
        given["answer_grammar"] = said[0] if said else None
        return {"model": self.model, **given}

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        stops = (value,) if isinstance(value, str) else value or ()
        if len(stops) > MAX_STOPS or any(len(stop) > 256 for stop in stops):
            raise ValueError(f"at most {MAX_STOPS} stop strings of up to 256 characters are allowed")
        return value


class ReasoningOptions(ClientPart, extra="ignore"):
    """The amount of reasoning, under the names that gateways use."""

    enabled: bool | None = None
    effort: ReasoningEffort | None = None
    max_tokens: NoneOrTokens = None
    exclude: bool | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of the record."""
        return {
            "enable_thinking": self.enabled,
            "reasoning_effort": self.effort,
            "thinking_token_budget": self.max_tokens,
        }


_ABOUT_PROMPT: Final = (
    "reasoning_effort",
    "enable_thinking",
    "thinking_token_budget",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)


class AllowedFunctions(ClientPart):
    """Some of the tools: an answer may call one of them, or must."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=128)


class AllowedTools(ClientPart):
    """The choice of some of the tools. The others are not shown to the model."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def allowed_names(names: Iterable[str], known: Collection[str]) -> frozenset[str]:
    """Return the names of tools that may be called. Raises InvalidRequest for one that is not known."""
    found = frozenset(names)
    for name in sorted(found - {*known}):
        raise InvalidRequest(f"tool_choice: no tool {name!r} (tools: {', '.join(known)})", "tool_choice")
    return found


class ChatBody(TextBody):
    """OpenAI's chat request."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: AnswerFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: ToolChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: the first call of an answer is the only one")
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="how much is thought, where the model knows that"
    )
    enable_thinking: bool | None = Field(None, description="false: the model answers without reasoning, if it can")
    reasoning: ReasoningOptions | None = Field(None, description="another way to say how much is thought")
    thinking_token_budget: int | None = Field(
        None, ge=-1, le=MAX_INT32, description="reasoning is ended behind so many tokens; -1: it ends by itself"
    )
    include_reasoning: bool | None = Field(None, description="false: reasoning is left out of the answer")
    chat_template_kwargs: dict[Name, Any] | None = Field(None, max_length=64)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="the answer goes on with the last message")
    echo: bool | None = Field(None, description="the answer begins with the last message, which it goes on with")
    functions: list[Function] | None = Field(None, max_length=128, description="what came before `tools`")
    function_call: Literal["none", "auto"] | FunctionChoice | None = None
    metadata: dict[Name, Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=16)
    store: bool | None = Field(None, description="nothing is stored")

    @property
    def calls(self) -> Calls:
        """The form of the answer's tool calls."""
        if self.has_functions:
            return "function_call"
        return "one" if self.parallel_tool_calls is False else "any"

    @property
    def shows_reasoning(self) -> bool:
        """Return whether the answer shows the reasoning."""
        return self.include_reasoning is not False and not (self.reasoning is not None and self.reasoning.exclude)

    @property
    def echoed(self) -> str:
        """Return the text of the last message, if the answer begins with it."""
        content = self.messages[-1].content if self.echo and self.continue_final_message else ""
        return content if isinstance(content, str) else ""

    @property
    def has_functions(self) -> bool:
        """Return whether the request has functions in the old form, so that the answer does, too."""
        return self.functions is not None and self.tools is None

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of the record, as `ChatImages` takes them. Raises InvalidRequest."""
        options = self.options()
        if self.max_completion_tokens:
            options["max_tokens"] = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs: true", "top_logprobs")
        options["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        form = self.response_format
        if form is not None and form.type == "structural_tag":
            if options["answer_grammar"] is not None:
                raise InvalidRequest("response_format: structured_outputs say the form too", "response_format")
            options["answer_grammar"] = {"structural_tag": form.model_extra or {}}
        options |= {"response_format": form and form.to_record(), "tools": tuple(self.tools or ())}
        said = self.reasoning.fields() if self.reasoning is not None else {}
        said |= {name: value for name in _ABOUT_PROMPT if (value := getattr(self, name)) is not None}
        if said.get("thinking_token_budget") == -1:
            del said["thinking_token_budget"]
        options |= said
        options["parallel_tool_calls"] = self.calls == "any"
        if isinstance(self.tool_choice, AllowedTools):
            allowed, tools = self.tool_choice.allowed_tools, self.tools or ()
            names = allowed_names((one.function.name for one in allowed.tools), [one.function.name for one in tools])
            options["tools"] = tuple(one for one in tools if one.function.name in names)
            options["tool_choice"] = allowed.mode
        elif self.tool_choice is not None:
            options["tool_choice"] = self.tool_choice
        if self.has_functions:
            options["tools"] = [{"type": "function", "function": function} for function in self.functions or ()]
            choice = self.function_call
            if isinstance(choice, FunctionChoice):
                options["tool_choice"] = {"type": "function", "function": choice}
            elif choice is not None:
                options["tool_choice"] = choice
        return {"messages": messages_of(self.messages), **options}


class CompletionBody(TextBody):
    """OpenAI's completion request."""

    max_tokens: NoneOrTokens = Field(None, description="-1, or none: as many as the model may; with `echo`, 0 is none")
    prompt: str | list[str] | list[StrictInt] | list[list[StrictInt]] = Field(min_length=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: Count | None = None
    suffix: Literal[""] | None = Field(None, description="no model here fills a gap in a text")

    def to_record(self) -> CompletionRequest:
        """Return the request as the service takes it. Raises InvalidRequest."""
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest("best_of: only as many as n are made", "best_of")
        options = self.options() | {"echo": bool(self.echo), "logprobs": self.logprobs}
        return as_record(CompletionRequest, {"prompt": self.prompt, **options})


# With `stream`, chunks as server-sent events.
_RESPONSES: Final = (
    documented(*INFERENCE_ERRORS, _409="the idempotency key is that of another request")
    | BEGUN
    | {200: {"content": {"text/event-stream": {}}}}
)


def create_text_router(service: Service, images: ChatImages, desk: JobDesk) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["text"], route_class=JsonRoute)

    @router.post("/v1/chat/completions", response_model=ChatAnswer, responses=_RESPONSES)
    async def chat(body: ChatBody, request: Request) -> Response:
        """The next turn of a chat."""
        record = await images.record_of(body.to_fields())
        if is_for_later(body.background, is_stream=bool(body.stream)):
            return begun_response(await desk.begin(request, {"model": body.model}), body.warnings())
        form = ChatForm(body.model, body.calls, shows_reasoning=body.shows_reasoning, echo=body.echoed)
        return await _respond(service, body, record, form)

    @router.post("/v1/completions", response_model=CompletionAnswer, responses=_RESPONSES)
    async def complete(body: CompletionBody, request: Request) -> Response:
        """The continuation of a text."""
        record = body.to_record()
        if is_for_later(body.background, is_stream=bool(body.stream)):
            return begun_response(await desk.begin(request, {"model": body.model}), body.warnings())
        return await _respond(service, body, record, CompletionForm(body.model))

    return router


async def _respond(
    service: Service, body: TextBody, record: ChatRequest | CompletionRequest, form: TextForm
) -> Response:
    warnings = body.warnings()
    headers = warning_header(warnings)
    if not body.stream:
        result = await (service.chat(record) if isinstance(record, ChatRequest) else service.complete(record))
        if warnings:
            result = replace(result, warnings=(*result.warnings, *warnings))
        return json_response(form.whole(result), headers=server_timing(result.timings_ms) | headers)

    async def events_of(chunks: AsyncIterator[TextChunk]) -> AsyncIterator[str]:
        for answer in form.opening(record.num_texts):
            yield event_of(json_text(answer))
        async for chunk in chunks:
            yield event_of(json_text(form.piece(chunk)))
        if body.stream_options and body.stream_options.include_usage:
            yield event_of(json_text(form.usage(chunk)))
        yield event_of("[DONE]")

    return await stream_events(service.texts.stream_text(record), events_of, _error_event, headers=headers)


def _error_event(error: Exception) -> str:
    return event_of(bytes(error_response(error).body).decode())
