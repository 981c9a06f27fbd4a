"""Requests for text and for embeddings, read for a model's engine: prompts as token ids, sampling, grammars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, TypeVar

from cluster.ray_seam.request_ids import part_id
from configs.options import Sampling, said
from deployments.engines.llm.answer_forms import HARMONY_THOUGHT, AnswerForm
from deployments.engines.llm.answer_grammars import call_rule
from deployments.engines.llm.answer_reader import AnswerReader
from deployments.engines.llm.chat import AnswerGrammar, Function
from deployments.engines.llm.chat_prompts import ChatOptions, switches_thinking, template_variables, unknown_variables
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.schemas import left_out_of, prepare_schema
from deployments.engines.llm.template_forms import answer_form, is_thought
from deployments.engines.llm.thought_budget import ThoughtBudget, ThoughtMarks
from deployments.engines.llm.tokenizer import token_text
from deployments.engines.records.prompt_images import PromptImage
from deployments.engines.records.protocol import EngineError, SamplingParams, TextRequest, TokenConstraint
from deployments.records import ChatRequest, CompletionRequest, EmbeddingRequest, PromptTokens, TextRequestRecord
from deployments.records.errors import InvalidRequest

# Without bounds, small and quantized models sample nonsense; these are llama.cpp's.
_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05})
_ReadT = TypeVar("_ReadT")


@dataclass(frozen=True, slots=True)
class AnswerUse:
    """The reading of a chat's answers: their form, the functions that they may call, the beginning that the prompt has
    already, and the most calls that count. An answer calls one of the `forced` functions, if there are any."""

    form: AnswerForm
    functions: tuple[Function, ...] = ()
    forced: tuple[Function, ...] = ()
    begun: str = ""
    max_calls: int | None = None
    warnings: tuple[str, ...] = ()

    def reader(self) -> AnswerReader:
        """Return a reader of one answer."""
        reader = AnswerReader(self.form, self.functions, self.max_calls)
        reader.feed(self.begun)
        return reader


def text_requests(
    engine: LLMEngine, request: TextRequestRecord, images: Sequence[PromptImage] = ()
) -> tuple[list[TextRequest], AnswerUse | None]:
    """Return an engine request for each prompt, and the reading of a chat's answers. `images` are those of a chat.

    Raises EngineError and InvalidRequest.
    """
    constraint: TokenConstraint | None = None
    use: AnswerUse | None = None
    hidden: frozenset[int] | None = None
    placed = None
    if isinstance(request, ChatRequest):
        text, use = _chat_prompt(engine, request)
        chat, placed = _naming_model(request, lambda: engine.chats.encode_rendered(text, images))
        prompts = [chat]
        constraint = _answer_grammar(engine, request, use)
        hidden = _hidden_tokens(engine, use.form)
    else:
        prompts = [engine.encode_text(one) if isinstance(one, str) else one for one in request.prompts]
    if request.answer_grammar is not None:
        constraint = _grammar_of(engine, request.answer_grammar, use)
    if isinstance(request, ChatRequest) and use is not None and request.thinking_token_budget is not None:
        constraint = _within_budget(engine, request.thinking_token_budget, use, constraint)
    found = [
        TextRequest(
            part_id(),
            prompt,
            _sampling(request, engine, len(prompt)),
            request.n,
            constraint,
            scores_prompt=is_echoed(request) and request.logprobs is not None,
            images=placed,
            hidden_token_ids=hidden,
        )
        for prompt in prompts
    ]
    return found, use


def prompt_tokens(
    engine: LLMEngine,
    request: TextRequestRecord,
    images: Sequence[PromptImage] = (),
    *,
    has_special_tokens: bool,
) -> PromptTokens:
    """Return the tokens of a chat or of one prompt. Raises EngineError and InvalidRequest.

    `has_special_tokens`: a text gets the tokenizer's special tokens. A chat has those of its template.
    """
    if isinstance(request, ChatRequest):
        text, _ = _chat_prompt(engine, request)
        tokens, _ = _naming_model(request, lambda: engine.chats.encode_rendered(text, images))
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
    most = engine.max_model_len
    requests, warnings = [], []
    inputs: Sequence[str | tuple[int, ...]] = request.input
    for number, text in enumerate(inputs):
        tokens = engine.encode_text(before + text) if isinstance(text, str) else text
        if len(tokens) > most:
            what = f"input {number} has {len(tokens)} tokens, and the model takes {most}"
            if request.long_text not in ("truncate", None):
                raise InvalidRequest(f"input: {what}", "input")
            warnings.append(f"{what}: it was cut")
            tokens = engine.encode_text(before + text, most) if isinstance(text, str) else text[:most]
        requests.append(TextRequest(part_id(), tokens, pooling=pooling))
    return requests, tuple(warnings)


def _answer_use(engine: LLMEngine, request: ChatRequest) -> AnswerUse:
    """Return the reading of a chat's answers. Raises InvalidRequest."""
    functions = {tool.function.name: tool.function for tool in request.tools}
    choice = request.tool_choice
    if len(functions) < len(request.tools):
        raise InvalidRequest("tools: several have the same name", "tools")
    if not functions and choice not in ("auto", "none"):
        raise InvalidRequest("tool_choice: there are no tools to choose from", "tool_choice")
    offered = () if choice == "none" else tuple(functions.values())
    if not isinstance(choice, str) and choice.function.name not in functions:
        known = ", ".join(functions)
        raise InvalidRequest(f"tool_choice: no tool {choice.function.name!r} (tools: {known})", "tool_choice")
    try:
        form = answer_form(
            engine.tokenizer,
            has_tools=bool(offered),
            tool_form=request.tool_form,
            reasoning_form=request.reasoning_form,
        )
    except EngineError as error:
        if not offered:
            raise EngineError(f"model {request.model!r}: {error}") from error
        raise InvalidRequest(f"tools: {error}", "tools") from error
    forced = offered if choice == "required" else ()
    if not isinstance(choice, str):
        forced = (functions[choice.function.name],)
    warnings = _warnings(engine, request, form, has_tools=bool(offered))
    return AnswerUse(form, offered, forced, "", None if request.parallel_tool_calls else 1, warnings)


def _warnings(engine: LLMEngine, request: ChatRequest, form: AnswerForm, *, has_tools: bool) -> tuple[str, ...]:
    """Return the requested options that have no effect in the model's template."""
    names = list(request.chat_template_kwargs)
    unknown = unknown_variables(engine.tokenizer, names, has_tools=has_tools)
    found = [f"chat_template_kwargs: the model's chat template does not know {name[:64]!r}" for name in unknown[:8]]
    asked = [name for name in ("reasoning_effort", "enable_thinking") if getattr(request, name) is not None]
    if asked and not switches_thinking(engine.tokenizer, has_tools=has_tools):
        found.append(f"{asked[0]}: the model's chat template does not know how much is to be thought")
    if request.thinking_token_budget is not None and form.reasoning is None:
        found.append("thinking_token_budget: no reasoning is known of the model")
    schema = None if request.response_format is None else request.response_format.schema_of_answer
    return (*found, *_left_out("response_format", schema))


def _left_out(field: str, schema: Mapping[str, Any] | None) -> list[str]:
    """Return the parts of a schema that are not enforced on answers. Raises InvalidRequest."""
    try:
        parts = () if schema is None else left_out_of(schema)
    except EngineError as error:
        raise InvalidRequest(f"{field}: {error}", field) from error
    return [f"{field}: an answer cannot be kept to {part}, which is left out" for part in parts[:8]]


def _chat_prompt(engine: LLMEngine, request: ChatRequest) -> tuple[str, AnswerUse]:
    """Return the prompt of a chat, and the reading of its answers. If a tool must be called, the prompt has the
    beginning of the call, after closed reasoning.

    Raises EngineError, InvalidRequest.
    """
    use = _answer_use(engine, request)
    messages = [message.for_template() for message in request.messages]
    tools = [tool.for_template() for tool in request.tools] if use.functions else []
    try:
        variables = template_variables(request.chat_template_kwargs, request.enable_thinking, request.reasoning_effort)
    except EngineError as error:
        raise InvalidRequest(str(error), "chat_template_kwargs") from error
    options = ChatOptions(
        tools, variables, opens_turn=request.add_generation_prompt, continues=request.continue_final_message
    )
    text = _naming_model(request, lambda: engine.chats.render(messages, options))
    begun = "" if request.continue_final_message else use.form.begun(text)
    if use.forced and use.form.tools is not None:
        thought = use.form.reasoning
        closing = f"{thought.closings[0]}\n\n" if thought is not None and begun in thought.openings else ""
        text += closing + use.form.tools.prefix
        begun += closing + use.form.tools.prefix
    return text, replace(use, begun=begun)


def _naming_model(request: ChatRequest, read: Callable[[], _ReadT]) -> _ReadT:
    """Read a chat, and return the result. Raises EngineError that names the model."""
    try:
        return read()
    except EngineError as error:
        raise EngineError(f"model {request.model!r}: {error}") from error


def _hidden_tokens(engine: LLMEngine, form: AnswerForm) -> frozenset[int] | None:
    """Return the special tokens hidden from answers; None, which is all, if the form's markers contain none."""
    special, markers = engine.grammars.special_tokens, "\n".join(form.markers)
    hidden = frozenset(id_ for text, id_ in special.items() if text not in markers)
    return None if len(hidden) == len(special) else hidden


def _grammar_of(engine: LLMEngine, form: AnswerGrammar, use: AnswerUse | None) -> TokenConstraint:
    """Return the constraint of an answer, after reasoning if that has begun. Raises InvalidRequest."""
    lark = engine.grammars.lark()
    try:
        answer = lark.answer(form)
        thought = use.form.reasoning if use is not None else None
        is_begun = use is not None and thought is not None and use.begun in thought.openings
        answer = lark.behind_thought(thought, answer, is_begun=is_begun, may_begin=False)
        return engine.grammars.compile_lark(lark.text(answer))
    except EngineError as error:
        raise InvalidRequest(f"structured_outputs: {error}", "structured_outputs") from error


def _within_budget(
    engine: LLMEngine, budget: int, use: AnswerUse, inner: TokenConstraint | None
) -> TokenConstraint | None:
    """Return a constraint that ends reasoning after so many tokens; `inner` alone without reasoning."""
    form = use.form.reasoning
    if form is None or use.forced or not form.closings:
        return inner
    tokenizer = engine.tokenizer
    end = tuple(tokenizer(form.closings[0], add_special_tokens=False)["input_ids"])
    marks = ThoughtMarks(
        form.openings or (HARMONY_THOUGHT,), form.closings, end, lambda token: token_text(tokenizer, token)[0]
    )
    return ThoughtBudget(marks, budget, is_thought(form, use.begun), inner)


def _answer_grammar(engine: LLMEngine, request: ChatRequest, use: AnswerUse) -> TokenConstraint | None:
    """Return the constraint of the answer. Raises InvalidRequest for a schema that cannot be enforced.

    If tools may be called and the answer has a schema, both forms are allowed.
    """
    form = use.form
    schema = None if request.response_format is None else request.response_format.schema_of_answer
    if use.forced and form.tools is not None:
        lark = engine.grammars.lark()
        try:
            return engine.grammars.compile_lark(lark.text(call_rule(lark, form.tools, use.forced)))
        except EngineError as error:
            raise InvalidRequest(f"tools: {error}", "tools") from error
    if schema is None:
        return None
    is_thought = form.reasoning is not None and use.begun in form.reasoning.openings
    try:
        if form.tools is None and not is_thought:
            return engine.grammars.compile_schema(schema)
        lark = engine.grammars.lark()
        answer = lark.json(prepare_schema(schema), is_free=True)
        if form.tools is not None and use.functions:
            answer += f" | {lark.literal(form.tools.prefix)} ({call_rule(lark, form.tools, use.functions)})"
        answer = lark.behind_thought(form.reasoning, answer, is_begun=is_thought, may_begin=False)
        return engine.grammars.compile_lark(lark.text(answer))
    except EngineError as error:
        raise InvalidRequest(f"response_format: {error}", "response_format") from error


def _sampling(request: TextRequestRecord, engine: LLMEngine, num_prompt_tokens: int) -> SamplingParams:
    most: dict[str, Any] = {"max_tokens": max(1, engine.max_model_len - num_prompt_tokens)}
    return SamplingParams(
        **{**most, **_DEFAULTS, **engine.generation_defaults, **said(request, Sampling)},
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
    """Return whether the answer is the prompt alone, without a new token: for its log probabilities."""
    return request.max_tokens == 0
