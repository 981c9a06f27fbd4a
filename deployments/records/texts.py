"""Generated text: requests for chats and completions, pieces of a stream, and the result."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from configs.cluster import MAX_MESSAGES
from configs.options import SamplingOptions
from deployments.engines.llm.chat import (
    AnswerGrammar,
    CalledTool,
    Message,
    ReasoningEffort,
    ResponseFormat,
    Tool,
    ToolChoice,
)
from deployments.records.requests import (
    MAX_INT32,
    MAX_SEED,
    SEED_RULE,
    Count,
    Loras,
    RequestModel,
    ServedRequest,
    SwitchReport,
    TimingsMs,
)

TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
MAX_TOOLS = 1024
LEAST_TOP_P = 1e-9  # the likeliest token alone
MAX_STOPS = 64  # OpenAI has 4, other servers no limit
# Strict: digits are a text, and no token.
_PromptToken = Annotated[int, Field(strict=True, ge=0, le=MAX_INT32)]
TokenIds = Annotated[tuple[_PromptToken, ...], Field(min_length=1)]
Prompts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...] | tuple[TokenIds, ...], Field(min_length=1)]


class TextOptions(RequestModel, SamplingOptions):
    """The options of generated text. Those that are None come from the model's defaults.

    The config's defaults of the model go before its own (generation_config.json, or general.sampling.* of a GGUF file),
    and what neither says is bounded as most servers of open models do: `temperature` 0.8, `top_p` 0.95, `top_k` 40,
    `min_p` 0.05. Temperature 0 is greedy, and 1 of `top_p` and 0 of the other two switch them off. `logprobs` asks for
    the log probability of each token, and of so many best ones.
    """

    n: Count = 1
    logit_bias: dict[TokenId, Bias] = Field({}, max_length=1024)
    logprobs: int | None = Field(None, ge=0, le=20)
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description=SEED_RULE)
    stop: tuple[Stop, ...] = Field((), max_length=MAX_STOPS)
    stop_token_ids: tuple[TokenId, ...] = Field((), max_length=64)
    ignore_eos: bool = False
    lora: Loras = ()


class _TextRequest(ServedRequest, TextOptions):
    """A request for text. The ingress sets `adapter_versions` (by name), which are as `model_version`."""

    adapter_versions: dict[str, str] = Field({})
    answer_grammar: AnswerGrammar | None = None

    @property
    def num_texts(self) -> int:
        """Return how many texts are asked for."""
        return self.n


class ChatRequest(_TextRequest):
    """A request for the next message of a chat.

    `chat_template_kwargs` are variables of the model's template; `reasoning_effort` and `enable_thinking` those that
    say how much it thinks, and behind `thinking_token_budget` tokens its reasoning is ended. `tool_form`
    and `reasoning_form` name how the model writes, where its template does not say. With `continue_final_message` the
    answer goes on with the last message.
    """

    messages: tuple[Message, ...] = Field(min_length=1, max_length=MAX_MESSAGES)
    response_format: ResponseFormat | None = None
    tools: tuple[Tool, ...] = Field((), max_length=MAX_TOOLS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=64)
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    tool_form: str | None = None
    reasoning_form: str | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=MAX_INT32)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _begins_or_continues(self) -> Self:
        if self.continue_final_message and self.tool_choice not in ("auto", "none"):
            raise ValueError("with continue_final_message no tool can be required")
        if self.answer_grammar is not None and (self.response_format is not None or self.tool_choice == "required"):
            raise ValueError("structured_outputs go with no other form of the answer (response_format, tool_choice)")
        return self


class CompletionRequest(_TextRequest):
    """A request for the continuations of a text, or of several: texts, or token ids already.

    With `echo`, each continuation begins with its prompt, whose tokens come with theirs where `logprobs` asks for them;
    with a `max_tokens` of 0 too, it is the prompt alone.
    """

    max_tokens: int | None = Field(None, ge=0, le=MAX_INT32)
    prompt: Annotated[str, Field(min_length=1)] | TokenIds | Prompts
    echo: bool = False

    @model_validator(mode="after")
    def _writes_or_echoes(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("a max_tokens of 0 needs echo, or nothing would be answered")
        return self

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """Return the prompts, one or several."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return (self.prompt,)
        return self.prompt

    @property
    def num_texts(self) -> int:
        return self.n * len(self.prompts)


TextRequestRecord = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token of an answer as text and as bytes (part of a character, maybe), and its natural log probability.

    `best` are the best tokens in its place, without any of their own. The first token of a prompt has None.
    """

    text: str
    data: bytes
    logprob: float | None
    best: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of completion `index` of a request; the completions of a prompt come before those of the next one.

    The finish reason comes with the last piece of each completion; timings, switch and warnings with the last of all.
    The counts are of the whole request so far; the KV cache had `num_cached_tokens` of the prompts, and of the tokens
    of its texts `num_reasoning_tokens` were thoughts. `stopped_by` is the stop string, or the token, that the request
    names and that ended this completion.
    """

    text: str
    num_prompt_tokens: int
    num_completion_tokens: int
    finish_reason: str | None = None
    timings_ms: TimingsMs = field(default_factory=dict)
    switch: SwitchReport | None = None
    warnings: tuple[str, ...] = ()
    index: int = 0
    logprobs: tuple[TokenText, ...] = ()
    num_cached_tokens: int = 0
    tool_calls: tuple[CalledTool, ...] = ()
    reasoning: str = ""
    num_reasoning_tokens: int = 0
    stopped_by: str | int | None = None


def merge_text_chunks(older: TextChunk, newer: TextChunk) -> TextChunk | None:
    """Return two pieces of one completion as one, with the counts of the older: pieces of others lie between.

    None where they are of two completions, or the newer one ends the answer.
    """
    if older.index != newer.index or newer.timings_ms:
        return None
    return replace(
        older,
        finish_reason=newer.finish_reason,
        stopped_by=newer.stopped_by,
        text=older.text + newer.text,
        logprobs=(*older.logprobs, *newer.logprobs),
        tool_calls=(*older.tool_calls, *newer.tool_calls),
        reasoning=older.reasoning + newer.reasoning,
    )


@dataclass(frozen=True, slots=True)
class TextChoice:
    """One of the texts of an answer."""

    text: str
    finish_reason: str
    logprobs: tuple[TokenText, ...] = ()
    tool_calls: tuple[CalledTool, ...] = ()
    reasoning: str = ""
    stopped_by: str | int | None = None


@dataclass(frozen=True, slots=True)
class TextResult:
    """The whole text of an answer, and the `others` where several were asked for."""

    model: str
    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_completion_tokens: int
    timings_ms: TimingsMs
    switch: SwitchReport | None = None
    warnings: tuple[str, ...] = ()
    logprobs: tuple[TokenText, ...] = ()
    others: tuple[TextChoice, ...] = ()
    num_cached_tokens: int = 0
    tool_calls: tuple[CalledTool, ...] = ()
    reasoning: str = ""
    num_reasoning_tokens: int = 0
    stopped_by: str | int | None = None

    @property
    def choices(self) -> tuple[TextChoice, ...]:
        """Return all texts in the order of their indices."""
        first = TextChoice(
            self.text, self.finish_reason, self.logprobs, self.tool_calls, self.reasoning, self.stopped_by
        )
        return (first, *self.others)

    def as_chunk(self) -> TextChunk:
        """Return the first text as the only piece of a stream."""
        return TextChunk(
            self.text,
            self.num_prompt_tokens,
            self.num_completion_tokens,
            self.finish_reason,
            self.timings_ms,
            warnings=self.warnings,
            num_cached_tokens=self.num_cached_tokens,
            tool_calls=self.tool_calls,
            reasoning=self.reasoning,
            num_reasoning_tokens=self.num_reasoning_tokens,
            stopped_by=self.stopped_by,
        )


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The prompt of a request in the tokens of its model, as text too: whole, and token by token.

    The model takes `max_model_len` tokens, prompt and answer together.
    """

    token_ids: tuple[int, ...]
    text: str
    pieces: tuple[str, ...]
    max_model_len: int
