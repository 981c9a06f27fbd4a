"""Requests for text and for embeddings, read for a model's engine: prompts as token ids, sampling, grammars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from cluster.request_ids import part_id
from deployments.engines.llm.chat import Function
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.tokenizer import chat_template, token_text
from deployments.engines.llm.tool_calls import ToolCallReader, ToolForm, tool_form
from deployments.engines.prompt_images import PromptImage, PromptImages
from deployments.engines.protocol import EngineError, SamplingParams, TextRequest, TokenConstraint
from deployments.errors import InvalidRequest
from deployments.records import ChatRequest, CompletionRequest, EmbeddingRequest, PromptTokens, TextRequestRecord

# Without bounds, small and quantized models draw nonsense; these are llama.cpp's.
_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05})
_SAMPLING_NAMES: Final = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The way in which an answer calls tools; `functions` are those of which it must call one."""

    form: ToolForm
    functions: tuple[Function, ...] = ()

    def reader(self) -> ToolCallReader:
        """Return what reads the calls of one answer."""
        return ToolCallReader(self.form, is_begun=bool(self.functions))


def text_requests(
    engine: LLMEngine, request: TextRequestRecord, images: Sequence[PromptImage] = ()
) -> tuple[list[TextRequest], ToolUse | None]:
    """Return a request of the engine for each prompt, and its tools. `images` are those of a chat, read already.

    Raises EngineError and InvalidRequest.
    """
    constraint: TokenConstraint | None = None
    tools: ToolUse | None = None
    if isinstance(request, ChatRequest):
        tools = _tool_use(engine, request)
        chat, placed = _encode_chat(engine, request, tools, images)
        prompts = [chat]
        constraint = _answer_grammar(engine, request, tools)
    else:
        prompts = [engine.encode_text(one) if isinstance(one, str) else one for one in request.prompts]
        placed = None
    found = [
        TextRequest(
            part_id(),
            prompt,
            _sampling(request, engine, len(prompt)),
            request.n,
            constraint,
            scores_prompt=is_echoed(request) and request.logprobs is not None,
            images=placed,
        )
        for prompt in prompts
    ]
    return found, tools


def prompt_tokens(
    engine: LLMEngine,
    request: TextRequestRecord,
    images: Sequence[PromptImage] = (),
    *,
    has_special_tokens: bool,
) -> PromptTokens:
    """Return the tokens of a chat or of one prompt. Raises EngineError and InvalidRequest.

    `has_special_tokens`: a text gets those that the tokenizer adds. A chat has those of its template.
    """
    if isinstance(request, ChatRequest):
        tokens, _ = _encode_chat(engine, request, _tool_use(engine, request), images)
    else:
        (prompt,) = request.prompts
        if not isinstance(prompt, str):
            tokens, most = prompt, len(engine.tokenizer) - 1
            if max(tokens) > most:
                raise InvalidRequest(f"tokens: no token {max(tokens)}, the last one is {most}", "tokens")
        elif has_special_tokens:
            tokens = engine.encode_text(prompt)
        else:
            tokens = tuple(engine.tokenizer(prompt, add_special_tokens=False)["input_ids"])
    text = str(engine.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
    pieces = tuple(token_text(engine.tokenizer, token)[0] for token in tokens)
    return PromptTokens(tuple(tokens), text, pieces, engine.max_model_len)


def embedding_requests(engine: LLMEngine, request: EmbeddingRequest) -> tuple[list[TextRequest], tuple[str, ...]]:
    """Return a request of the engine for each text, and warnings of those that were cut. Raises InvalidRequest."""
    rules = engine.embedding_rules
    try:
        rules.check_dimensions(request.dimensions)
    except EngineError as error:
        raise InvalidRequest(str(error), "dimensions") from None
    try:
        before = rules.prompts.before(request.prompt_name, request.input_type)
    except EngineError as error:
        raise InvalidRequest(str(error), "prompt_name") from None
    pooling = request.pooling or rules.pooling
    most = engine.max_model_len - 1
    requests, warnings = [], []
    inputs: Sequence[str | tuple[int, ...]] = request.input
    for number, text in enumerate(inputs):
        tokens = engine.encode_text(before + text) if isinstance(text, str) else text
        if len(tokens) > most:
            what = f"input {number} has {len(tokens)} tokens, and the model takes {most}"
            if request.long_text != "truncate":
                raise InvalidRequest(f"input: {what}", "input")
            warnings.append(f"{what}: it was cut")
        requests.append(TextRequest(part_id(), tokens[:most], pooling=pooling))
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


def _encode_chat(
    engine: LLMEngine, request: ChatRequest, tools: ToolUse | None, images: Sequence[PromptImage]
) -> tuple[tuple[int, ...], PromptImages | None]:
    """Return the prompt of a chat, and its images; where a tool must be called, with the opening of a call.

    Raises EngineError.
    """
    messages = [message.for_template() for message in request.messages]
    shown = [] if tools is None else [tool.for_template() for tool in request.tools]
    begun = tools.form.opening if tools is not None and tools.functions else ""
    try:
        return engine.read_chat(messages, images, shown, begun)
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
        raise InvalidRequest("response_format: a JSON answer with tools needs tool_choice 'none'", "response_format")
    try:
        return engine.grammars.compile_schema(schema)
    except EngineError as error:
        raise InvalidRequest(f"response_format: {error}", "response_format") from error


def _sampling(request: TextRequestRecord, engine: LLMEngine, num_prompt_tokens: int) -> SamplingParams:
    most: dict[str, Any] = {"max_tokens": max(1, engine.max_model_len - num_prompt_tokens)}
    given = {name: value for name in _SAMPLING_NAMES if (value := getattr(request, name)) is not None}
    return SamplingParams(
        **{**most, **_DEFAULTS, **engine.generation_defaults, **given},
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


def is_only_echoed(request: TextRequestRecord) -> bool:
    """Return whether the answer is the prompt, and no token more: for its log probabilities."""
    return request.max_tokens == 0
