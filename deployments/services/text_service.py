"""TextService: texts of the language models that a module cache has built. Ray-free.

Prompts are tokenized beside the device thread; all completions of a request run in the model's engine together.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.tokenizer import token_text
from deployments.engines.protocol import (
    EngineError,
    SamplingParams,
    TextDelta,
    TextRequest,
    TokenConstraint,
    TokenLogprob,
)
from deployments.errors import InvalidRequest, as_service_errors
from deployments.modules.cache import ModuleCache
from deployments.modules.loading import is_denoise_component
from deployments.records import ChatRequest, TextChoice, TextChunk, TextRequestRecord, TextResult, TokenText
from deployments.services.step_loop import DeviceThread, EngineLoop
from deployments.tasks import outcome_of

DEFAULT_TEMPERATURE = 1.0  # OpenAI's


class TextService:
    """Writes text on one device thread, in batches of all requests of a model. Lives on one event loop."""

    def __init__(self, module_cache: ModuleCache, device: DeviceThread) -> None:
        self._module_cache = module_cache
        self._device = device
        # HAZARD: the first text that a tokenizer encodes may change it (its file can have truncation switched on), and
        # two at once would meet. One thread for all: prompts take milliseconds, and no step waits for them.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def stream(self, request: TextRequestRecord) -> AsyncGenerator[TextChunk, None]:
        """Yield text as it comes. Raises the ServiceErrors of `deployments.errors`."""
        start = time.perf_counter()
        with as_service_errors():
            async with self._module_cache.lease(
                request.model, is_denoise_component, version=request.model_version
            ) as lease:
                engine: LLMEngine = lease.modules["model"]
                loop: EngineLoop[TextRequest, TextDelta] = lease.bound(lambda: EngineLoop(self._device, engine))
                reading = asyncio.get_running_loop().run_in_executor(self._tokenizing, _text_requests, engine, request)
                requests = await outcome_of(reading)
                added = time.perf_counter()
                first: float | None = None
                counts = _Counts()
                for chunk in _echoes(engine, request, requests):
                    yield chunk
                # Closed before the lease ends: the engine may be in a step of this request when the stream is left.
                async with contextlib.aclosing(_merged(loop, requests)) as deltas:
                    async for number, delta in deltas:
                        first = first or time.perf_counter()
                        counts.count(number, delta)
                        chunk = counts.chunk(number * request.n, delta, _logprobs(engine, delta.logprob))
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


def whole_text(model: str, chunks: Sequence[TextChunk]) -> TextResult:
    """Return the answer that all chunks of a stream make."""
    last = chunks[-1]
    choices = []
    for index in range(max(chunk.index for chunk in chunks) + 1):
        own = [chunk for chunk in chunks if chunk.index == index]
        reasons = [chunk.finish_reason for chunk in own if chunk.finish_reason]
        logprobs = tuple(token for chunk in own for token in chunk.logprobs)
        choices.append(TextChoice("".join(chunk.text for chunk in own), reasons[-1] if reasons else "stop", logprobs))
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
        )


async def _merged(
    loop: EngineLoop[TextRequest, TextDelta], requests: Sequence[TextRequest]
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yield the deltas of all requests as they come, with the number of the request. Raises what one of them raises."""
    if len(requests) == 1:
        async with contextlib.aclosing(loop.stream_outputs(requests[0])) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, TextDelta | Exception]] = asyncio.Queue()

    async def read(number: int, request: TextRequest) -> None:
        try:
            async with contextlib.aclosing(loop.stream_outputs(request)) as deltas:
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


def _text_requests(engine: LLMEngine, request: TextRequestRecord) -> list[TextRequest]:
    """Return a request of the engine for each prompt. Raises EngineError."""
    constraint: TokenConstraint | None = None
    if isinstance(request, ChatRequest):
        prompts = [engine.encode_chat([message.for_template() for message in request.messages])]
        constraint = _answer_grammar(engine, request)
    else:
        prompts = [engine.encode_text(one) if isinstance(one, str) else one for one in request.prompts]
    return [
        TextRequest(uuid.uuid4().hex, prompt, _sampling(request, engine, len(prompt)), request.n, constraint)
        for prompt in prompts
    ]


def _answer_grammar(engine: LLMEngine, request: ChatRequest) -> TokenConstraint | None:
    """Return what the answer's format asks for. Raises InvalidRequest where its schema cannot be kept to."""
    if request.response_format is None or (schema := request.response_format.schema_of_answer) is None:
        return None
    try:
        return engine.grammars.compile_schema(schema)
    except EngineError as error:
        raise InvalidRequest(f"response_format: {error}", "response_format") from error


def _sampling(request: TextRequestRecord, engine: LLMEngine, num_prompt_tokens: int) -> SamplingParams:
    defaults: dict[str, Any] = {"temperature": DEFAULT_TEMPERATURE} | engine.generation_defaults
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


def _echoes(engine: LLMEngine, request: TextRequestRecord, requests: Sequence[TextRequest]) -> list[TextChunk]:
    """Return the prompts as the first pieces of their completions, where they were asked for."""
    if isinstance(request, ChatRequest) or not request.echo:
        return []
    texts = [prompt if isinstance(prompt, str) else str(engine.tokenizer.decode(prompt)) for prompt in request.prompts]
    num_tokens = sum(len(one.prompt_token_ids) for one in requests)
    return [
        TextChunk(text, num_tokens, 0, index=number * request.n + index)
        for number, text in enumerate(texts)
        for index in range(request.n)
    ]


def _logprobs(engine: LLMEngine, logprob: TokenLogprob | None) -> tuple[TokenText, ...]:
    if logprob is None:
        return ()
    best = tuple(TokenText(*token_text(engine.tokenizer, token), value) for token, value in logprob.best)
    return (TokenText(*token_text(engine.tokenizer, logprob.token_id), logprob.logprob, best),)
