"""TextService: texts of the language models that a module cache has built, and embeddings by them. Ray-free.

Prompts are tokenized beside the device thread, long ones in a thread of their own. All prompts and completions of a
request run in the model's engine together.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from deployments.engines.llm.answer_reader import AnswerReader
from deployments.engines.llm.chat import whole_calls
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.tokenizer import token_text
from deployments.engines.records.prompt_images import PromptImage
from deployments.engines.records.protocol import EngineError, TextDelta, TextLora, TextRequest, TokenLogprob
from deployments.modules.cache import Lease, ModuleCache
from deployments.modules.loading import is_denoise_component
from deployments.records import (
    CacheUse,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    EmbeddingResult,
    PromptTokens,
    SwitchReport,
    TextChoice,
    TextChunk,
    TextRequestRecord,
    TextResult,
    TokenText,
)
from deployments.records.errors import as_service_errors
from deployments.records.tasks import outcome_of
from deployments.replicas.step_loop import DeviceThread, EngineLoop
from deployments.services.text_prompts import (
    AnswerUse,
    embedding_requests,
    is_echoed,
    is_only_echoed,
    prompt_tokens,
    text_requests,
)

INLINE_CHARACTERS: Final = 2000  # of the texts of a request: tokenized on the event loop, within about a millisecond
_TEXT_CHARACTERS: Final = 100  # the fixed cost of a text or a turn of a chat, in characters
_RequestT = TypeVar("_RequestT", bound=TextRequestRecord | EmbeddingRequest)
_ReadT = TypeVar("_ReadT")


class TextService:
    """Writes text on one device thread, in batches of all requests of a model. Lives on one event loop."""

    def __init__(self, module_cache: ModuleCache, device: DeviceThread) -> None:
        self._module_cache = module_cache
        self._device = device
        # HAZARD: the first text that a tokenizer encodes may change it (its file can have truncation switched on), and
        # two at once would collide. One thread for all, or none while it is idle: no step waits for prompts.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._num_reading = 0  # requests in this thread
        self._seeing = ThreadPoolExecutor(1, thread_name_prefix="images")  # for long work, which delays no prompt

    async def write(
        self, request: TextRequestRecord, on_chunk: Callable[[TextChunk], None], *, coalesces: bool = False
    ) -> None:
        """Write the texts of a request. `on_chunk` gets each piece as it comes, on the event loop.

        With `coalesces` the first piece comes at once, and all others at the end. A cancelled caller ends the
        request; this call ends only when no step of the request runs any more.

        Raises the ServiceErrors of `deployments.records.errors`.
        """
        start = time.perf_counter()
        with as_service_errors():
            async with self._module_cache.lease(
                request.model,
                is_denoise_component,
                sorted(use.name for use in request.lora),
                version=request.model_version,
                adapter_versions=request.adapter_versions,
            ) as lease:
                engine: LLMEngine = lease.modules["model"]
                scored = request.model_copy(update={"max_tokens": 1}) if is_only_echoed(request) else request
                images = await self._images_of(engine, request)
                read = partial(text_requests, images=images)
                requests, form = await self._read(read, engine, scored)
                if request.lora:
                    loras = _loras(lease, request)
                    requests = [replace(one, loras=loras) for one in requests]
                for chunk in _echoes(engine, request, requests):
                    on_chunk(chunk)
                answer = _Answer(engine, request, len(requests), form, lease.report, start)
                await _run_all(
                    self._loop_of(lease),
                    requests,
                    lambda number, delta: on_chunk(answer.chunk(number, delta)),
                    coalesces,
                )

    async def embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        """Return one vector per input, of the model's hidden states. Raises as `write` does."""
        start = time.perf_counter()
        with as_service_errors():
            async with self._module_cache.lease(
                request.model, is_denoise_component, version=request.model_version
            ) as lease:
                engine: LLMEngine = lease.modules["model"]
                requests, warnings = await self._read(embedding_requests, engine, request)
                found: dict[int, TextDelta] = {}
                await _run_all(self._loop_of(lease), requests, found.__setitem__)
                switch_ms = lease.report.switch_ms
        num_cached = sum(delta.num_cached_tokens > 0 for delta in found.values())
        total_ms = (time.perf_counter() - start) * 1e3
        return EmbeddingResult(
            model=request.model,
            embeddings=[
                engine.embedding_rules.shorten(vector, request.dimensions)
                for _, one in sorted(found.items())
                if (vector := one.embedding) is not None
            ],
            num_tokens=sum(len(one.prompt_token_ids) for one in requests),
            timings_ms={"switch": switch_ms, "encode": total_ms - switch_ms, "total": total_ms},
            cache=CacheUse(num_cached, len(requests) - num_cached),
            warnings=warnings,
        )

    async def tokenize(self, request: TextRequestRecord, *, has_special_tokens: bool) -> PromptTokens:
        """Return the prompt of a request in the model's tokens. Raises as `write` does."""
        with as_service_errors():
            async with self._module_cache.lease(
                request.model, is_denoise_component, version=request.model_version
            ) as lease:
                engine: LLMEngine = lease.modules["model"]
                images = await self._images_of(engine, request)
                read = partial(prompt_tokens, images=images, has_special_tokens=has_special_tokens)
                return await self._read(read, engine, request)

    def _loop_of(self, lease: Lease) -> EngineLoop[TextRequest, TextDelta]:
        engine: LLMEngine = lease.modules["model"]
        loop: EngineLoop[TextRequest, TextDelta] = lease.bound(lambda: EngineLoop(self._device, engine, "text"))
        return loop

    async def _images_of(self, engine: LLMEngine, request: TextRequestRecord) -> list[PromptImage]:
        """Return the images of a chat in its model's form. Raises EngineError, naming the model."""
        messages = request.messages if isinstance(request, ChatRequest) else ()
        pixels = [image for message in messages for image in message.images]
        if not pixels:
            return []
        try:
            return await outcome_of(
                asyncio.get_running_loop().run_in_executor(self._seeing, engine.chats.read_images, pixels)
            )
        except EngineError as error:
            raise EngineError(f"model {request.model!r}: {error}") from error

    async def _read(
        self, read: Callable[[LLMEngine, _RequestT], _ReadT], engine: LLMEngine, request: _RequestT
    ) -> _ReadT:
        """Return the result of `read` for a request. Short texts are read without a thread."""
        if not self._num_reading and _is_short(request):
            return read(engine, request)
        self._num_reading += 1
        try:
            return await outcome_of(asyncio.get_running_loop().run_in_executor(self._tokenizing, read, engine, request))
        finally:
            self._num_reading -= 1


def whole_text(model: str, chunks: Sequence[TextChunk]) -> TextResult:
    """Return the answer made of all chunks of a stream."""
    last = chunks[-1]
    choices = []
    for index in range(max(chunk.index for chunk in chunks) + 1):
        own = [chunk for chunk in chunks if chunk.index == index]
        ends = [chunk for chunk in own if chunk.finish_reason]
        reason, stopped_by = (ends[-1].finish_reason or "stop", ends[-1].stopped_by) if ends else ("stop", None)
        logprobs = tuple(token for chunk in own for token in chunk.logprobs)
        calls = whole_calls([call for chunk in own for call in chunk.tool_calls])
        text = "".join(chunk.text for chunk in own)
        reasoning = "".join(chunk.reasoning for chunk in own)
        choices.append(TextChoice(text, reason, logprobs, calls, reasoning, stopped_by))
    return TextResult(
        model=model,
        text=choices[0].text,
        finish_reason=choices[0].finish_reason,
        num_prompt_tokens=last.num_prompt_tokens,
        num_completion_tokens=last.num_completion_tokens,
        timings_ms=last.timings_ms,
        switch=last.switch,
        warnings=last.warnings,
        logprobs=choices[0].logprobs,
        others=tuple(choices[1:]),
        tool_calls=choices[0].tool_calls,
        reasoning=choices[0].reasoning,
        num_cached_tokens=last.num_cached_tokens,
        num_reasoning_tokens=last.num_reasoning_tokens,
        stopped_by=choices[0].stopped_by,
    )


class _Answer:
    """The pieces of an answer, made of the deltas of its prompts and their completions.

    `form` is that of a chat's answers. The request began at `start`.
    """

    def __init__(
        self,
        engine: LLMEngine,
        request: TextRequestRecord,
        num_prompts: int,
        form: AnswerUse | None,
        report: SwitchReport,
        start: float,
    ) -> None:
        self._engine = engine
        self._request = request
        self._num_running = num_prompts  # prompts with completions under way
        self._readers: dict[int, AnswerReader] | None
        self._readers = defaultdict(form.reader) if form and not form.form.is_plain else None
        self._warnings = form.warnings if form else ()
        self._report = report
        self._start, self._added, self._first = start, time.perf_counter(), 0.0
        self._prompts: dict[int, TextDelta] = {}
        self._completions: dict[tuple[int, int], int] = {}
        self._num_reasoning_tokens = 0

    def chunk(self, number: int, delta: TextDelta) -> TextChunk:
        """Return the next delta, of prompt `number`, as a piece of the answer."""
        self._first = self._first or time.perf_counter()
        if is_only_echoed(self._request):  # the token after the prompt is dropped
            delta = replace(delta, text="", logprob=None, num_completion_tokens=0, finish_reason="length")
        self._prompts.setdefault(number, delta)
        num_new = delta.num_completion_tokens - self._completions.get((number, delta.index), 0)
        self._completions[number, delta.index] = delta.num_completion_tokens
        self._num_running -= delta.is_last
        index = number * self._request.n + delta.index
        reader = self._readers[index] if self._readers is not None else None
        self._num_reasoning_tokens += num_new if reader is not None and reader.is_thinking else 0
        chunk = TextChunk(
            delta.text,
            sum(one.num_prompt_tokens for one in self._prompts.values()),
            sum(self._completions.values()),
            delta.finish_reason,
            index=index,
            logprobs=_logprobs(self._engine, delta),
            num_cached_tokens=sum(one.num_cached_tokens for one in self._prompts.values()),
            num_reasoning_tokens=self._num_reasoning_tokens,
            stopped_by=delta.stopped_by,
        )
        if delta.prompt_logprobs:
            chunk = replace(chunk, text=_prompt_text(self._engine, self._request, number) + chunk.text)
        if reader is not None:
            chunk = _read(chunk, reader)
        if self._num_running:
            return chunk
        return replace(chunk, timings_ms=self._timings_ms(), switch=self._report, warnings=self._warnings)

    def _timings_ms(self) -> dict[str, float]:
        now = time.perf_counter()
        return {
            "switch": self._report.switch_ms,
            "prefill": (self._first - self._added) * 1e3,
            "generate": (now - self._first) * 1e3,
            "total": (now - self._start) * 1e3,
        }


async def _run_all(
    loop: EngineLoop[TextRequest, TextDelta],
    requests: Sequence[TextRequest],
    on_delta: Callable[[int, TextDelta], None],
    coalesces: bool = False,
) -> None:
    """Run all requests together; `on_delta` gets their deltas as they come, with the number of the request.

    Raises the error of the first failed request, once none runs any more.
    """
    running = [
        asyncio.ensure_future(loop.run_request(request, partial(on_delta, number), coalesces=coalesces))
        for number, request in enumerate(requests)
    ]
    try:
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _read(chunk: TextChunk, reader: AnswerReader) -> TextChunk:
    """Return a piece of an answer, with reasoning and tool calls separated from the text."""
    reason = chunk.finish_reason
    piece = reader.feed(chunk.text)
    text, thought, calls = piece.text, piece.reasoning, piece.calls
    if reason is not None:
        last = reader.flush(is_cut=reason == "length")
        text, thought, calls = text + last.text, thought + last.reasoning, (*calls, *last.calls)
        reason = "tool_calls" if reason == "stop" and reader.num_calls else reason
    return replace(chunk, text=text, reasoning=thought, tool_calls=calls, finish_reason=reason)


def _is_short(request: TextRequestRecord | EmbeddingRequest) -> bool:
    """Return whether the event loop can read a request: nothing is compiled for it, it has no images,
    and its texts are few and short."""
    if isinstance(request, ChatRequest):
        long = [message for message in request.messages if message.tool_calls or message.images]
        if long or request.tools or request.response_format is not None:
            return False
        sizes = [len(message.text) for message in request.messages]
    else:
        sizes = [len(text) for text in (request.prompts if isinstance(request, CompletionRequest) else request.input)]
    return sum(sizes) + _TEXT_CHARACTERS * len(sizes) <= INLINE_CHARACTERS


def _loras(lease: Lease, request: TextRequestRecord) -> tuple[TextLora, ...]:
    """Return the LoRAs of a request, built."""
    adapters, keys = lease.adapters, lease.adapter_keys
    return tuple(TextLora(keys[use.name], adapters[use.name], use.scale) for use in request.lora)


def _prompt_text(engine: LLMEngine, request: TextRequestRecord, number: int) -> str:
    """Return prompt `number` of a completion as text."""
    assert isinstance(request, CompletionRequest)
    prompt = request.prompts[number]
    return prompt if isinstance(prompt, str) else str(engine.tokenizer.decode(prompt))


def _echoes(engine: LLMEngine, request: TextRequestRecord, requests: Sequence[TextRequest]) -> list[TextChunk]:
    """Return the prompts as the first pieces of their completions, if they were requested.

    Those with log probabilities come with the first token instead, when these are known.
    """
    if not is_echoed(request) or request.logprobs is not None:
        return []
    num_tokens = sum(len(one.prompt_token_ids) for one in requests)
    return [
        TextChunk(_prompt_text(engine, request, number), num_tokens, 0, index=number * request.n + index)
        for number in range(len(requests))
        for index in range(request.n)
    ]


def _logprobs(engine: LLMEngine, delta: TextDelta) -> tuple[TokenText, ...]:
    """Return the tokens of a delta, after the prompt's, if their log probabilities were requested."""
    return tuple(_token_text(engine, one) for one in (*delta.prompt_logprobs, delta.logprob) if one is not None)


def _token_text(engine: LLMEngine, logprob: TokenLogprob) -> TokenText:
    best = tuple(TokenText(*token_text(engine.tokenizer, token), value) for token, value in logprob.best)
    return TokenText(*token_text(engine.tokenizer, logprob.token_id), logprob.logprob, best)
