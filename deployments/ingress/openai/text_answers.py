"""Answers of the text endpoints: one class each, which the OpenAPI page shows and which writes the JSON."""

from __future__ import annotations

import codecs
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from deployments.engines.llm.chat import CalledTool
from deployments.ingress.messages.responses import Answer, TimesMs, rounded
from deployments.records import TextChoice, TextChunk, TextResult, TokenText

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]
# The tool calls of an answer: all of the model's, the first, or the first in the old form.
Calls = Literal["any", "one", "function_call"]


class PromptTokensDetails(Answer):
    """The prompt tokens found in the KV cache."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    """The tokens of the texts that were thoughts."""

    reasoning_tokens: int


class TextUsage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, result: TextResult | TextChunk) -> TextUsage:
        """Return the token counts of an answer, or of a stream by its last piece."""
        num_prompt_tokens, num_completion_tokens = result.num_prompt_tokens, result.num_completion_tokens
        return cls(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=result.num_cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=result.num_reasoning_tokens),
        )


class BestToken(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(BestToken):
    """A token of the answer and the best ones in its place."""

    top_logprobs: list[BestToken]


class ChatLogprobs(Answer):
    content: list[ChatToken]
    refusal: None

    @classmethod
    def of(cls, tokens: Sequence[TokenText]) -> ChatLogprobs | None:
        """Return the log probabilities in the form of chats; None if not requested."""
        return cls(content=chat_tokens(tokens), refusal=None) if tokens else None


def chat_tokens(tokens: Sequence[TokenText]) -> list[ChatToken]:
    """Return tokens with their log probabilities, and the best ones in their places."""
    return [
        ChatToken(**_best_token(token), top_logprobs=[BestToken(**_best_token(best)) for best in token.best])
        for token in tokens
    ]


def _best_token(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.data)}


def _finite(logprob: float | None) -> float:
    """Return a number that JSON has: OpenAI's own value for minus infinity."""
    return -9999.0 if logprob is None else max(logprob, -9999.0)


class TextOffset:
    """The offset of a text's next token in characters. A character of several tokens counts with the last of them."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._num_characters = 0

    def before(self, token: TokenText) -> int:
        """Return the offset of this token, and move on behind it."""
        offset = self._num_characters
        self._num_characters += len(self._decoder.decode(token.data))
        return offset


class CompletionLogprobs(Answer):
    """The older form: a list for each property. The first token of an echoed prompt has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    @classmethod
    def of(cls, tokens: Sequence[TokenText], offset: TextOffset) -> CompletionLogprobs | None:
        """Return the log probabilities of a text's next tokens; None if not requested."""
        if not tokens:
            return None
        return cls(
            tokens=[token.text for token in tokens],
            token_logprobs=[None if token.logprob is None else _finite(token.logprob) for token in tokens],
            top_logprobs=[
                None if token.logprob is None else {best.text: _finite(best.logprob) for best in token.best}
                for token in tokens
            ],
            text_offset=[offset.before(token) for token in tokens],
        )


class CalledFunction(Answer):
    """The function of a call; `arguments` are JSON, or a piece of it. Pieces after the first one have no name."""

    name: str | None = None
    arguments: str


class CalledToolBody(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction

    @classmethod
    def of(cls, call: CalledTool) -> CalledToolBody:
        """Return a whole call."""
        return cls(id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.arguments))


class CalledToolDelta(Answer):
    """A piece of call number `index`; the first has its id and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class MessageBody(Answer):
    """The message; its content is null if it has only tool calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[CalledToolBody] | None = None
    function_call: CalledFunction | None = None

    @classmethod
    def of(cls, choice: TextChoice, form: Calls, reasoning: str = "") -> MessageBody:
        """Return one of the texts of an answer."""
        given: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if reasoning:
            given["reasoning_content"] = reasoning
        if not choice.tool_calls:
            return cls(**given)
        calls = [CalledToolBody.of(call) for call in choice.tool_calls]
        given["content"] = choice.text.strip() or None
        if form == "function_call":
            return cls(**given, function_call=calls[0].function)
        return cls(**given, tool_calls=calls if form == "any" else calls[:1])


class ChatChoice(Answer):
    """One of the texts. `stop_reason` is what ended it of the request's `stop` and `stop_token_ids`, as vLLM has it."""

    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: ChatLogprobs | None
    message: MessageBody


class CompletionChoice(Answer):
    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: CompletionLogprobs | None
    text: str


class _TextAnswer(Answer):
    id: str
    created: int
    model: str
    usage: TextUsage
    timings_ms: TimesMs
    warnings: tuple[str, ...]


class ChatAnswer(_TextAnswer):
    """The next turn of a chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionAnswer(_TextAnswer):
    """The continuation of a text."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class MessageDelta(Answer):
    """The next part of a message; the role comes with the first piece alone, before any content."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledToolDelta] | None = None
    function_call: CalledFunction | None = None


class ChatChunkChoice(Answer):
    index: int
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None
    delta: MessageDelta


class CompletionChunkChoice(Answer):
    index: int
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: CompletionLogprobs | None
    text: str


class _TextChunk(Answer):
    """A piece of a stream. The last one has times and warnings; token counts come in a piece without text."""

    id: str
    created: int
    model: str
    usage: TextUsage | None = None
    timings_ms: TimesMs | None = None
    warnings: tuple[str, ...] | None = None


class ChatChunk(_TextChunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionChunk(_TextChunk):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


class TextForm(ABC):
    """The form of one endpoint's answers, whole and in pieces. All pieces of a stream have one id."""

    id_prefix: str

    def __init__(self, model: str) -> None:
        self._head: dict[str, Any] = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._offsets: dict[int, TextOffset] = defaultdict(TextOffset)  # by choice

    @abstractmethod
    def whole(self, result: TextResult) -> ChatAnswer | CompletionAnswer:
        """Return the whole answer."""

    @abstractmethod
    def opening(self, num_choices: int) -> list[Answer]:
        """Return the pieces of a stream before any text."""

    @abstractmethod
    def piece(self, chunk: TextChunk) -> Answer:
        """Return one piece of a stream."""

    @abstractmethod
    def usage(self, last: TextChunk) -> Answer:
        """Return the piece with the token counts of a stream, which follows the last one."""

    def _whole_fields(self, result: TextResult) -> dict[str, Any]:
        return self._head | {
            "usage": TextUsage.of(result),
            "timings_ms": rounded(result.timings_ms),
            "warnings": result.warnings,
        }

    def _piece_fields(self, chunk: TextChunk) -> dict[str, Any]:
        times = {"timings_ms": rounded(chunk.timings_ms)} if chunk.timings_ms else {}
        return self._head | times | ({"warnings": chunk.warnings} if chunk.warnings else {})


class ChatForm(TextForm):
    """Chat completions."""

    id_prefix = "chatcmpl"

    def __init__(self, model: str, calls: Calls = "any", *, shows_reasoning: bool = True, echo: str = "") -> None:
        """Texts begin with `echo`."""
        super().__init__(model)
        self._calls = calls
        self._shows_reasoning, self._echo = shows_reasoning, echo
        self._begun_calls: set[tuple[int, int]] = set()  # of each choice

    def whole(self, result: TextResult) -> ChatAnswer:
        choices = [
            ChatChoice(
                index=index,
                finish_reason=self._reason(choice.finish_reason),
                stop_reason=choice.stopped_by,
                logprobs=ChatLogprobs.of(choice.logprobs),
                message=MessageBody.of(
                    replace(choice, text=self._echo + choice.text) if self._echo else choice,
                    self._calls,
                    choice.reasoning if self._shows_reasoning else "",
                ),
            )
            for index, choice in enumerate(result.choices)
        ]
        return ChatAnswer(object="chat.completion", choices=choices, **self._whole_fields(result))

    def opening(self, num_choices: int) -> list[Answer]:
        delta = MessageDelta(role="assistant", content=self._echo)
        choices = [
            ChatChunkChoice(index=index, finish_reason=None, logprobs=None, delta=delta) for index in range(num_choices)
        ]
        return [ChatChunk(object="chat.completion.chunk", choices=[choice], **self._head) for choice in choices]

    def piece(self, chunk: TextChunk) -> ChatChunk:
        has_called = any(choice == chunk.index for choice, _ in self._begun_calls)
        given: dict[str, Any] = {"content": chunk.text} if chunk.text.strip() or (chunk.text and not has_called) else {}
        if chunk.reasoning and self._shows_reasoning:
            given["reasoning_content"] = chunk.reasoning
        calls = [call for call in chunk.tool_calls if self._calls == "any" or call.index == 0]
        if calls and self._calls == "function_call":
            pieces = [self._call_delta(chunk.index, call).function for call in calls]
            arguments = "".join(piece.arguments for piece in pieces)
            given["function_call"] = pieces[0].model_copy(update={"arguments": arguments})
        elif calls:
            given["tool_calls"] = [self._call_delta(chunk.index, call) for call in calls]
        delta = MessageDelta(**given)
        reason = None if chunk.finish_reason is None else self._reason(chunk.finish_reason)
        logprobs = ChatLogprobs.of(chunk.logprobs)
        ended = {} if reason is None else {"stop_reason": chunk.stopped_by}
        choice = ChatChunkChoice(index=chunk.index, finish_reason=reason, logprobs=logprobs, delta=delta, **ended)
        return ChatChunk(object="chat.completion.chunk", choices=[choice], **self._piece_fields(chunk))

    def _reason(self, reason: str) -> FinishReason:
        is_older = reason == "tool_calls" and self._calls == "function_call"
        return "function_call" if is_older else cast("FinishReason", reason)

    def _call_delta(self, choice: int, call: CalledTool) -> CalledToolDelta:
        if (choice, call.index) in self._begun_calls:
            return CalledToolDelta(index=call.index, function=CalledFunction(arguments=call.arguments))
        self._begun_calls.add((choice, call.index))
        function = CalledFunction(name=call.name, arguments=call.arguments)
        return CalledToolDelta(index=call.index, id=call.id, type="function", function=function)

    def usage(self, last: TextChunk) -> ChatChunk:
        return ChatChunk(object="chat.completion.chunk", choices=[], usage=TextUsage.of(last), **self._head)


class CompletionForm(TextForm):
    """Completions."""

    id_prefix = "cmpl"

    def whole(self, result: TextResult) -> CompletionAnswer:
        choices = [
            CompletionChoice(
                index=index,
                finish_reason=cast("FinishReason", choice.finish_reason),
                stop_reason=choice.stopped_by,
                logprobs=CompletionLogprobs.of(choice.logprobs, TextOffset()),
                text=choice.text,
            )
            for index, choice in enumerate(result.choices)
        ]
        return CompletionAnswer(object="text_completion", choices=choices, **self._whole_fields(result))

    def opening(self, num_choices: int) -> list[Answer]:
        return []

    def piece(self, chunk: TextChunk) -> CompletionChunk:
        reason = cast("FinishReason | None", chunk.finish_reason)
        logprobs = CompletionLogprobs.of(chunk.logprobs, self._offsets[chunk.index])
        ended = {} if reason is None else {"stop_reason": chunk.stopped_by}
        choice = CompletionChunkChoice(
            index=chunk.index, finish_reason=reason, logprobs=logprobs, text=chunk.text, **ended
        )
        return CompletionChunk(object="text_completion", choices=[choice], **self._piece_fields(chunk))

    def usage(self, last: TextChunk) -> CompletionChunk:
        return CompletionChunk(object="text_completion", choices=[], usage=TextUsage.of(last), **self._head)
