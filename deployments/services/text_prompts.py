"""Requests for text and for embeddings, read for a model's engine: prompts as token ids, sampling, grammars."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from deployments.engines.llm.chat import Function
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.tokenizer import chat_template
from deployments.engines.llm.tool_calls import ToolCallReader, ToolForm, tool_form
from deployments.engines.protocol import EngineError, SamplingParams, TextRequest, TokenConstraint
from deployments.errors import InvalidRequest
from deployments.records import ChatRequest, CompletionRequest, EmbeddingRequest, TextRequestRecord

_DEFAULT_TEMPERATURE: Final = 1.0  # OpenAI's


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The way in which an answer calls tools; `functions` are those of which it must call one."""

    form: ToolForm
    functions: tuple[Function, ...] = ()

    def reader(self) -> ToolCallReader:
        """Return what reads the calls of one answer."""
        return ToolCallReader(self.form, is_begun=bool(self.functions))


def text_requests(engine: LLMEngine, request: TextRequestRecord) -> tuple[list[TextRequest], ToolUse | None]:
    """Return a request of the engine for each prompt, and its tools. Raises EngineError and InvalidRequest."""
    constraint: TokenConstraint | None = None
    tools: ToolUse | None = None
    if isinstance(request, ChatRequest):
        tools = _tool_use(engine, request)
        prompts = [_encode_chat(engine, request, tools)]
        constraint = _answer_grammar(engine, request, tools)
    else:
        prompts = [engine.encode_text(one) if isinstance(one, str) else one for one in request.prompts]
    found = [
        TextRequest(
            uuid.uuid4().hex,
            prompt,
            _sampling(request, engine, len(prompt)),
            request.n,
            constraint,
            scores_prompt=is_echoed(request) and request.logprobs is not None,
        )
        for prompt in prompts
    ]
    return found, tools


def embedding_requests(engine: LLMEngine, request: EmbeddingRequest) -> tuple[list[TextRequest], tuple[str, ...]]:
    """Return a request of the engine for each text, and warnings of those that were cut. Raises InvalidRequest."""
    try:
        engine.embedding_rules.check_dimensions(request.dimensions)
    except EngineError as error:
        raise InvalidRequest(str(error), "dimensions") from None
    pooling = request.pooling or engine.embedding_rules.pooling
    most = engine.max_model_len - 1
    requests, warnings = [], []
    inputs: Sequence[str | tuple[int, ...]] = request.input
    for number, text in enumerate(inputs):
        tokens = engine.encode_text(text) if isinstance(text, str) else text
        if len(tokens) > most:
            what = f"input {number} has {len(tokens)} tokens, and the model takes {most}"
            if request.long_text != "truncate":
                raise InvalidRequest(f"input: {what}", "input")
            warnings.append(f"{what}: it was cut")
        requests.append(TextRequest(uuid.uuid4().hex, tokens[:most], pooling=pooling))
    return requests, tuple(warnings)


def _tool_use(engine: LLMEngine, request: ChatRequest) -> ToolUse | None:
    """Return how the answer calls tools; None where it may not. Raises InvalidRequest."""
    functions = {tool.function.name: tool.function for tool in request.tools}
    choice = request.tool_choice
    if len(functions) < len(request.tools):
        raise InvalidRequest("tools: several have the same name", "tools")
    if not functions and choice not in ("auto", "none"):
        raise InvalidRequest("tool_choice: there are no tools to choose from", "tool_choice")
    if not functions or choice == "none":
        return None
    try:
        form = tool_form(chat_template(engine.tokenizer, has_tools=True))
    except EngineError as error:
        raise InvalidRequest(f"tools: {error}", "tools") from error
    if choice == "auto":
        return ToolUse(form)
    if choice == "required":
        return ToolUse(form, tuple(functions.values()))
    if choice.function.name not in functions:
        known = ", ".join(functions)
        raise InvalidRequest(f"tool_choice: no tool {choice.function.name!r} (tools: {known})", "tool_choice")
    return ToolUse(form, (functions[choice.function.name],))


def _encode_chat(engine: LLMEngine, request: ChatRequest, tools: ToolUse | None) -> tuple[int, ...]:
    """Return the prompt of a chat; where a tool must be called, with the opening of a call. Raises EngineError."""
    messages = [message.for_template() for message in request.messages]
    shown = [] if tools is None else [tool.for_template() for tool in request.tools]
    begun = tools.form.opening if tools is not None and tools.functions else ""
    try:
        return engine.encode_chat(messages, shown, begun)
    except EngineError as error:
        raise EngineError(f"model {request.model!r}: {error}") from error


def _answer_grammar(engine: LLMEngine, request: ChatRequest, tools: ToolUse | None) -> TokenConstraint | None:
    """Return what the answer must keep to. Raises InvalidRequest where its schema cannot be kept to."""
    if tools is not None and tools.functions:
        try:
            return engine.grammars.compile_lark(tools.form.grammar(tools.functions))
        except EngineError as error:
            raise InvalidRequest(f"tools: {error}", "tools") from error
    if request.response_format is None or (schema := request.response_format.schema_of_answer) is None:
        return None
    if tools is not None:
        raise InvalidRequest("response_format: a JSON answer beside tools needs tool_choice 'none'", "response_format")
    try:
        return engine.grammars.compile_schema(schema)
    except EngineError as error:
        raise InvalidRequest(f"response_format: {error}", "response_format") from error


def _sampling(request: TextRequestRecord, engine: LLMEngine, num_prompt_tokens: int) -> SamplingParams:
    defaults: dict[str, Any] = {"temperature": _DEFAULT_TEMPERATURE} | engine.generation_defaults
    defaults.setdefault("max_tokens", max(1, engine.max_model_len - num_prompt_tokens))
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
    given = {name: value for name in names if (value := getattr(request, name)) is not None}
    return SamplingParams(
        **defaults | given,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias=tuple(request.logit_bias.items()),
        seed=request.seed,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        num_logprobs=request.logprobs,
        ignore_eos=request.ignore_eos,
    )


def is_echoed(request: TextRequestRecord) -> bool:
    """Return whether the answer begins with the prompt."""
    return isinstance(request, CompletionRequest) and request.echo
