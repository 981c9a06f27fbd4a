"""The LLM engine: schedule, run, postprocess. Single-threaded; the caller decides when to step."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from deployments.engines.llm.block_manager import BlockPool
from deployments.engines.llm.kv_cache import cache_shape, plan_cache
from deployments.engines.llm.model_runner import ModelRunner
from deployments.engines.llm.models.registry import create_model, decoder_spec, load_config
from deployments.engines.llm.sampler import SampledToken, sample
from deployments.engines.llm.scheduler import Chunk, Scheduler, Sequence
from deployments.engines.llm.token_picker import TokenPicker
from deployments.engines.llm.tokenizer import (
    IncrementalDecoder,
    StopMatcher,
    encode_chat,
    encode_text,
    load_eos_token_ids,
    load_tokenizer,
)
from deployments.engines.memory_limits import MemoryLimits, run_in_parts
from deployments.engines.protocol import ComputationFailed, EngineError, SamplingParams, TextDelta, TextRequest
from weights.memory.devices import allocated_bytes

logger = logging.getLogger(__name__)


class LLMEngine:
    """Generates text for many requests at once with one model.

    Requests join with `add_request` and leave when they finish or with `abort`; `step` moves all of them on. Nothing
    here is thread-safe: call `add_request`, `abort` and `step` from one thread, or with a lock around them.

    On the CPU the tokens of a request do not depend on its batch-mates: neither greedy ones nor, with a seed, sampled
    ones. On CUDA nothing is padded for that: kernels are chosen by the number of rows and round differently, so a
    choice between two tokens that are nearly as good may fall otherwise beside others.

    When the model fails in a step, the step's sequences run again one by one; when it runs out of memory, in smaller
    forwards, from then on. Those that fail alone, or whose logits are not finite, leave: their blocks are freed, and
    `failures` holds the reason until the next step. The others go on as if nothing had been.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, torch.Tensor],
        *,
        device: str | torch.device = "cpu",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        kv_cache_bytes: int = 64 * 2**20,
        max_model_len: int | None = None,
    ) -> None:
        """Builds the model of a stock Hugging Face folder around `tensors`, which are shared and never
        written.

        The weights may be absent from the folder. `tensors` have the checkpoint's names and one floating
        dtype, which is also that of the computation and of the KV cache. `max_model_len` None means all that
        the model and `kv_cache_bytes` allow.

        Raises:
            EngineError: the folder, the tensors or the limits do not fit together; the message tells which.
        """
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise EngineError(
                f"max_num_seqs is {max_num_seqs} and max_num_batched_tokens is {max_num_batched_tokens}; "
                "expected at least 1"
            )
        config = load_config(folder)
        model = create_model(config, tensors, torch.device(device))
        plan = plan_cache(
            model.spec,
            model.dtype,
            kv_cache_bytes=kv_cache_bytes,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        self.tokenizer = load_tokenizer(folder)
        self.max_model_len = plan.max_model_len
        self.failures: dict[str, Exception] = {}
        self._vocab_size = model.spec.vocab_size
        self._eos_token_ids = load_eos_token_ids(folder, config)
        self._blocks = BlockPool(plan.num_blocks)
        self._scheduler = Scheduler(
            self._blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self._runner = ModelRunner(model, plan.num_blocks)
        self._requests: dict[str, _RequestState] = {}
        self._memory = MemoryLimits()

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Return how many requests have not begun to decode, or were preempted."""
        return self._scheduler.num_waiting

    @property
    def num_preemptions(self) -> int:
        """Return how often, since the start, a sequence gave up its blocks for an older one."""
        return self._scheduler.num_preemptions

    @property
    def num_blocks(self) -> int:
        return self._blocks.num_blocks

    @property
    def _num_free_blocks(self) -> int:
        return self._blocks.num_free

    def encode_chat(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        """Return the token ids of a chat by the tokenizer's template. Raises EngineError if it has none or refuses."""
        return encode_chat(self.tokenizer, messages)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a plain prompt."""
        return encode_text(self.tokenizer, text)

    def add_request(self, request: TextRequest) -> None:
        """Take a request in, at the end of the line. `max_tokens` is clipped to what fits behind the prompt.

        Raises:
            EngineError: the prompt is empty, too long or has unknown tokens, a sampling parameter is out of
            range,
                or a request of this id has not finished.
        """
        if request.request_id in self._requests:
            raise EngineError(f"request id {request.request_id!r} is in use by a request that has not finished")
        _check_request(request, max_model_len=self.max_model_len, vocab_size=self._vocab_size)
        state = _RequestState.create(
            request,
            tokenizer=self.tokenizer,
            max_model_len=self.max_model_len,
            eos_token_ids=self._eos_token_ids,
        )
        self._requests[request.request_id] = state
        self._scheduler.add_sequence(state.sequence)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks at once; no delta of it follows. Unknown ids are ignored."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._scheduler.finish(state.sequence)

    def step(self) -> list[TextDelta]:
        """Move the scheduled requests on by one token, or compute a part of a long prompt.

        The result has one delta for every request that got a token or ended; it is empty without work.
        """
        self.failures = {}
        chunks = self._scheduler.schedule()
        token_ids = self._run(chunks)
        return self._postprocess(chunks, token_ids)

    def _run(self, chunks: tuple[Chunk, ...]) -> dict[str, int]:
        """The sampled token of each request whose last chunk this is. Notes in `failures` what cannot run."""
        if not chunks:
            return {}
        try:
            logits = self._logits(chunks)
            request_ids = [chunk.sequence.request_id for chunk in chunks if chunk.is_last]
            pickers = [self._requests[request_id].picker for request_id in request_ids]
            outcomes = dict(zip(request_ids, sample(logits, pickers), strict=True))
            self.failures |= {id_: outcome for id_, outcome in outcomes.items() if isinstance(outcome, Exception)}
            return {id_: outcome.token_id for id_, outcome in outcomes.items() if isinstance(outcome, SampledToken)}
        except Exception as error:
            if len(chunks) == 1:
                request_id = chunks[0].sequence.request_id
                logger.exception("request %r ends: the model failed", request_id)
                self.failures[request_id] = error.with_traceback(None)  # frames would keep the step's tensors
                return {}
            logger.warning("a step of %d requests failed (%s); running them one by one", len(chunks), error)
        return {request_id: token for chunk in chunks for request_id, token in self._run((chunk,)).items()}

    def _logits(self, chunks: tuple[Chunk, ...]) -> torch.Tensor:
        """One row per last chunk, from as few forwards as memory allows: running a chunk again is harmless."""
        longest = max(chunk.num_tokens for chunk in chunks)
        parts = run_in_parts(
            lambda start, stop: self._runner.run(chunks[start:stop]),
            len(chunks),
            len(chunks),
            self._memory,
            longest.bit_length(),
        )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _postprocess(self, chunks: tuple[Chunk, ...], token_ids: Mapping[str, int]) -> list[TextDelta]:
        """Appends the tokens, takes out what has finished, and tells what is new."""
        deltas = []
        for chunk in chunks:
            request_id = chunk.sequence.request_id
            state = self._requests[request_id]
            token_id = token_ids.get(request_id)
            if request_id not in self.failures:
                self._scheduler.complete(chunk, token_id)
                if token_id is None:
                    continue
                if (delta := self._delta(state, token_id)) is not None:
                    deltas.append(delta)
                    if delta.is_last:
                        self.abort(request_id)
            if request_id in self.failures:
                self._give_up(state)
        return deltas

    def _delta(self, state: _RequestState, token_id: int) -> TextDelta | None:
        """Return what the token adds to the request's text, or None when no text can be made of its tokens."""
        try:
            return state.advance(token_id)
        except Exception as error:
            request_id = state.sequence.request_id
            logger.exception("request %r ends: its text failed", request_id)
            self.failures[request_id] = error.with_traceback(None)
            return None

    def _give_up(self, state: _RequestState) -> None:
        """Drop a request that failed, and say of its failure how far it came."""
        request_id, num_tokens = state.sequence.request_id, state.sequence.num_completion_tokens
        reason = self.failures[request_id]
        self.failures[request_id] = ComputationFailed(f"the model failed after {num_tokens} tokens: {reason}")
        self.abort(request_id)


def working_bytes(
    folder: Path, dtype: torch.dtype, device: torch.device, *, kv_cache_bytes: int, max_num_seqs: int
) -> int:
    """Return the bytes of its device that an engine of these settings takes beside its weights, all its life.

    Raises EngineError as the engine does.
    """
    spec = decoder_spec(load_config(folder))
    plan = plan_cache(spec, dtype, kv_cache_bytes=kv_cache_bytes, max_num_seqs=max_num_seqs, max_model_len=None)
    half_bytes = math.prod(cache_shape(spec, plan.num_blocks)) * dtype.itemsize
    frequencies_bytes = spec.head_dim // 2 * torch.float32.itemsize
    return 2 * allocated_bytes(device, half_bytes) + allocated_bytes(device, frequencies_bytes)


_SEED_LIMITS = (-(2**63), 2**64 - 1)  # what torch.Generator.manual_seed takes


def _check_request(request: TextRequest, *, max_model_len: int, vocab_size: int) -> None:
    """Raise EngineError, with what came and what was expected, unless the request can run."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise EngineError("the prompt is empty; expected at least one token")
    if len(prompt) >= max_model_len:
        raise EngineError(
            f"the prompt has {len(prompt)} tokens; expected fewer than {max_model_len}, the greatest length"
        )
    for token_id in prompt:
        if not 0 <= token_id < vocab_size:
            raise EngineError(f"token id {token_id} in the prompt; expected 0 to {vocab_size - 1}")
    _check_sampling(request.sampling)


def _check_sampling(sampling: SamplingParams) -> None:
    """Raise EngineError unless every parameter is in its range."""
    low, high = _SEED_LIMITS
    rules = (
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 1, "at least 1"),
        ("temperature", sampling.temperature, 0 <= sampling.temperature < float("inf"), "0 or more"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "more than 0 and at most 1"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "0 or more"),
        ("seed", sampling.seed, sampling.seed is None or low <= sampling.seed <= high, f"{low} to {high}"),
        ("stop", sampling.stop, all(sampling.stop), "strings that are not empty"),
    )
    for name, value, holds, expected in rules:
        if not holds:
            raise EngineError(f"{name} is {value!r}; expected {expected}")


@dataclass(slots=True)
class _RequestState:
    """One request: its sequence for the scheduler, its picker for the sampler, its text for the caller."""

    sequence: Sequence
    picker: TokenPicker
    decoder: IncrementalDecoder
    matcher: StopMatcher
    max_tokens: int
    eos_token_ids: frozenset[int]

    @classmethod
    def create(
        cls,
        request: TextRequest,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_model_len: int,
        eos_token_ids: frozenset[int],
    ) -> _RequestState:
        """Return the state of a checked request; `max_tokens` is clipped to what fits behind the prompt."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        return cls(
            sequence=Sequence(request.request_id, list(prompt), len(prompt)),
            picker=TokenPicker.create(sampling, prompt),
            decoder=IncrementalDecoder(tokenizer, prompt),
            matcher=StopMatcher(sampling.stop),
            max_tokens=min(sampling.max_tokens, max_model_len - len(prompt)),
            eos_token_ids=frozenset() if sampling.ignore_eos else eos_token_ids,
        )

    def advance(self, token_id: int) -> TextDelta:
        """Return the delta of a token that the scheduler has appended to the sequence already."""
        self.picker.advance(token_id)
        finish_reason = None
        if token_id in self.eos_token_ids:
            # The end token is counted but not shown, whether the tokenizer calls it special or not.
            text, finish_reason = self._last_text(), "stop"
        else:
            text = self.matcher.feed(self.decoder.feed(token_id))
            if not self.matcher.stopped and self.sequence.num_completion_tokens >= self.max_tokens:
                text, finish_reason = text + self._last_text(), "length"
        if self.matcher.stopped:
            finish_reason = "stop"
        return self.delta(text, (token_id,), finish_reason)

    def delta(self, text: str, token_ids: tuple[int, ...], finish_reason: str | None) -> TextDelta:
        """Return a delta with the counts as they are now."""
        sequence = self.sequence
        return TextDelta(
            request_id=sequence.request_id,
            text=text,
            token_ids=token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_completion_tokens=sequence.num_completion_tokens,
            finish_reason=finish_reason,
        )

    def _last_text(self) -> str:
        return self.matcher.feed(self.decoder.flush()) + self.matcher.flush()
