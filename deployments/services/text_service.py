"""TextService: texts of the language models that a module cache has built, and embeddings by them. Ray-free.

Prompts are tokenized beside the device thread, long ones in a thread of their own. All prompts and completions of a
request run in the model's engine together.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, TypeVar

from deployments.engines.llm.chat import whole_calls
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.tokenizer import token_text
from deployments.engines.llm.tool_calls import ToolCallReader
from deployments.engines.protocol import (
    TextDelta,
    TextLora,
    TextRequest,
    TokenLogprob,
)
from deployments.errors import as_service_errors
from deployments.modules.cache import ModuleCache
from deployments.modules.lease import Lease
from deployments.modules.loading import is_denoise_component
from deployments.records import (
    CacheUse,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    EmbeddingResult,
    TextChoice,
    TextChunk,
    TextRequestRecord,
    TextResult,
    TokenText,
)
from deployments.services.step_loop import DeviceThread, EngineLoop
from deployments.services.text_prompts import embedding_requests, is_echoed, text_requests
from deployments.tasks import outcome_of

INLINE_CHARACTERS: Final = 2000  # of the texts of a request: tokenized on the event loop, within about a millisecond
_TEXT_CHARACTERS: Final = 100  # what a text or a turn of a chat takes beside its characters, in characters
_RequestT = TypeVar("_RequestT", bound=TextRequestRecord | EmbeddingRequest)
_ReadT = TypeVar("_ReadT")


class TextService:
    """Writes text on one device thread, in batches of all requests of a model. Lives on one event loop."""

    def __init__(self, module_cache: ModuleCache, device: DeviceThread) -> None:
        self._module_cache = module_cache
        self._device = device
        # HAZARD: the first text that a tokenizer encodes may change it (its file can have truncation switched on), and
        # two at once would meet. One thread for all, or none while it has nothing to do: no step waits for prompts.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._num_reading = 0  # requests that this thread has

    async def stream_text(
        self, request: TextRequestRecord, *, is_patient: bool = False
    ) -> AsyncGenerator[TextChunk, None]:
        """Yield text as it comes; with `is_patient`, the first piece, and all others at the end.

        Raises the ServiceErrors of `deployments.errors`.
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
                loop: EngineLoop[TextRequest, TextDelta] = lease.bound(lambda: EngineLoop(self._device, engine))
                requests, tools = await self._read(text_requests, engine, request)
                if request.lora:
                    loras = _loras(lease, request)
                    requests = [replace(one, loras=loras) for one in requests]
                readers: dict[int, ToolCallReader] | None = defaultdict(tools.reader) if tools else None
                added = time.perf_counter()
                first: float | None = None
                counts = _Counts()
                for chunk in _echoes(engine, request, requests):
                    yield chunk
                # Closed before the lease ends: the engine may be in a step of this request when the stream is left.
                async with contextlib.aclosing(_merged(loop, requests, is_patient)) as deltas:
                    async for number, delta in deltas:
                        first = first or time.perf_counter()
                        counts.count(number, delta)
                        chunk = counts.chunk(number * request.n, delta, _logprobs(engine, delta))
                        if delta.prompt_logprobs:
                            chunk = replace(chunk, text=_prompt_text(engine, request, number) + chunk.text)
                        if readers is not None:
                            chunk = _with_calls(chunk, readers[chunk.index])
                        if counts.num_running(len(requests)):
                            yield chunk
                            continue
                        now = time.perf_counter()
                        timings = {
                            "switch": lease.report.switch_ms,
                            "prefill": (first - added) * 1e3,
                            "generate": (now - first) * 1e3,
                            "total": (now - start) * 1e3,
                        }
                        yield counts.last_chunk(chunk, timings, lease.report)

    async def embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        """Return one vector per input, of the model's hidden states. Raises as `stream` does."""
        start = time.perf_counter()
        with as_service_errors():
            async with self._module_cache.lease(
                request.model, is_denoise_component, version=request.model_version
            ) as lease:
                engine: LLMEngine = lease.modules["model"]
                loop: EngineLoop[TextRequest, TextDelta] = lease.bound(lambda: EngineLoop(self._device, engine))
                requests, warnings = await self._read(embedding_requests, engine, request)
                async with contextlib.aclosing(_merged(loop, requests)) as deltas:
                    found = {number: delta async for number, delta in deltas}
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

    async def _read(
        self, read: Callable[[LLMEngine, _RequestT], _ReadT], engine: LLMEngine, request: _RequestT
    ) -> _ReadT:
        """Return what `read` makes of a request. Short texts are not worth the way to a thread and back."""
        if not self._num_reading and _is_short(request):
            return read(engine, request)
        self._num_reading += 1
        try:
            return await outcome_of(asyncio.get_running_loop().run_in_executor(self._tokenizing, read, engine, request))
        finally:
            self._num_reading -= 1


def whole_text(model: str, chunks: Sequence[TextChunk]) -> TextResult:
    """Return the answer that all chunks of a stream make."""
    last = chunks[-1]
    choices = []
    for index in range(max(chunk.index for chunk in chunks) + 1):
        own = [chunk for chunk in chunks if chunk.index == index]
        reasons = [chunk.finish_reason for chunk in own if chunk.finish_reason]
        logprobs = tuple(token for chunk in own for token in chunk.logprobs)
        calls = whole_calls([call for chunk in own for call in chunk.tool_calls])
        text = "".join(chunk.text for chunk in own)
        choices.append(TextChoice(text, reasons[-1] if reasons else "stop", logprobs, calls))
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
        num_cached_tokens=last.num_cached_tokens,
    )


class _Counts:
    """The token counts of a request, over its prompts and their completions."""

    def __init__(self) -> None:
        self._prompts: dict[int, TextDelta] = {}
        self._completions: dict[tuple[int, int], int] = {}
        self._num_ended = 0

    def count(self, number: int, delta: TextDelta) -> None:
        """Count a delta of prompt `number`."""
        self._prompts.setdefault(number, delta)
        self._completions[number, delta.index] = delta.num_completion_tokens
        self._num_ended += delta.is_last

    def num_running(self, num_prompts: int) -> int:
        """Return how many prompts have completions under way."""
        return num_prompts - self._num_ended

    def chunk(self, first_index: int, delta: TextDelta, logprobs: tuple[TokenText, ...]) -> TextChunk:
        """Return a delta as a piece of the answer."""
        return TextChunk(
            delta.text,
            sum(one.num_prompt_tokens for one in self._prompts.values()),
            sum(self._completions.values()),
            delta.finish_reason,
            index=first_index + delta.index,
            logprobs=logprobs,
            num_cached_tokens=sum(one.num_cached_tokens for one in self._prompts.values()),
        )

    def last_chunk(self, chunk: TextChunk, timings_ms: dict[str, float], switch: Any) -> TextChunk:
        """Return the last piece, with what is known at the end."""
        return TextChunk(
            chunk.text,
            chunk.num_prompt_tokens,
            chunk.num_completion_tokens,
            chunk.finish_reason,
            timings_ms,
            switch,
            index=chunk.index,
            logprobs=chunk.logprobs,
            num_cached_tokens=chunk.num_cached_tokens,
            tool_calls=chunk.tool_calls,
        )


async def _merged(
    loop: EngineLoop[TextRequest, TextDelta], requests: Sequence[TextRequest], is_patient: bool = False
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yield the deltas of all requests as they come, with the number of the request. Raises what one of them raises."""
    if len(requests) == 1:
        async with contextlib.aclosing(loop.stream_outputs(requests[0], is_patient=is_patient)) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, TextDelta | Exception]] = asyncio.Queue()

    async def read(number: int, request: TextRequest) -> None:
        try:
            async with contextlib.aclosing(loop.stream_outputs(request, is_patient=is_patient)) as deltas:
                async for delta in deltas:
                    queue.put_nowait((number, delta))
        except Exception as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.ensure_future(read(number, request)) for number, request in enumerate(requests)]
    num_left = len(tasks)
    try:
        while num_left:
            number, found = await queue.get()
            if isinstance(found, Exception):
                raise found
            num_left -= found.is_last
            yield number, found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _with_calls(chunk: TextChunk, reader: ToolCallReader) -> TextChunk:
    """Return a piece of an answer with its tool calls taken out of its text."""
    text, calls = reader.feed(chunk.text)
    reason = chunk.finish_reason
    if reason is not None:
        text += reader.flush()
        reason = "tool_calls" if reason == "stop" and reader.num_calls else reason
    return replace(chunk, text=text, tool_calls=calls, finish_reason=reason)


def _is_short(request: TextRequestRecord | EmbeddingRequest) -> bool:
    """Return whether the event loop can read a request: nothing is compiled for it, and its texts are few and short."""
    if isinstance(request, ChatRequest):
        calls = [call for message in request.messages for call in message.tool_calls]
        if calls or request.tools or request.response_format is not None:
            return False
        sizes = [len(message.content or "") for message in request.messages]
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
    """Return the prompts as the first pieces of their completions, where they were asked for.

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
    """Return the tokens of a delta, and before them the prompt's, where their log probabilities were asked for."""
    return tuple(_token_text(engine, one) for one in (*delta.prompt_logprobs, delta.logprob) if one is not None)


def _token_text(engine: LLMEngine, logprob: TokenLogprob) -> TokenText:
    best = tuple(TokenText(*token_text(engine.tokenizer, token), value) for token, value in logprob.best)
    return TokenText(*token_text(engine.tokenizer, logprob.token_id), logprob.logprob, best)
