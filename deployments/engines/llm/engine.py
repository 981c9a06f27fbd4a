"""The LLM engine: schedule, run, postprocess. Single-threaded; the caller decides when to step."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from deployments.engines.building.build import converted_bytes
from deployments.engines.costs.memory_limits import MemoryLimits, run_in_parts
from deployments.engines.graph.workspace import UNBOUNDED, Workspace
from deployments.engines.llm.chat_reader import ChatReader
from deployments.engines.llm.completion import Completion, check_request, no_proposer
from deployments.engines.llm.draft_model import DraftedModel, create_draft, divided, open_draft
from deployments.engines.llm.engine_config import STEP_KIND, LLMEngineConfig, LLMEngineStats
from deployments.engines.llm.grammar import GrammarCompiler
from deployments.engines.llm.image_reader import ImageReader
from deployments.engines.llm.loras import DecoderLoras
from deployments.engines.llm.model_runner import ModelRunner, OwnCacheRunner
from deployments.engines.llm.models.llama import DecoderSpec
from deployments.engines.llm.models.own_cache import OwnCacheModel
from deployments.engines.llm.models.recurrent import RecurrentSpec
from deployments.engines.llm.models.registry import (
    AnyModel,
    LoadedModel,
    create_any_model,
    decoder_spec,
    decoder_tensors,
    is_stock,
    is_text_alone,
    load_config,
)
from deployments.engines.llm.models.stock import StockLanguageModel
from deployments.engines.llm.pooling import load_embedding_rules
from deployments.engines.llm.prefill_pace import PrefillPace
from deployments.engines.llm.ranked_steps import LeadingRunner, LoraReader, StepFollower
from deployments.engines.llm.sampling.prompt_logprobs import PromptLogprobs
from deployments.engines.llm.sampling.sampler import SampledToken, sample
from deployments.engines.llm.scheduler import Scheduler
from deployments.engines.llm.sequences.block_manager import BlockPool
from deployments.engines.llm.sequences.kv_cache import (
    CachePlan,
    KvDtype,
    bytes_per_block,
    cache_tensors,
    plan_blocks,
    plan_cache,
)
from deployments.engines.llm.sequences.prompt_lookup import PromptLookup
from deployments.engines.llm.sequences.sequence import Chunk, Sequence, SequenceStatus
from deployments.engines.llm.state_slots import SLOTS_PER_SEQUENCE, StateSlots
from deployments.engines.llm.tokenizer import (
    encode_text,
    load_eos_token_ids,
    load_generation_defaults,
    load_tokenizer,
)
from deployments.engines.ranks.following import RankChannel
from deployments.engines.ranks.group import RankGroup, RankLost
from deployments.engines.records.protocol import (
    ComputationFailed,
    EngineError,
    SharedDevice,
    StepAborted,
    TextDelta,
    TextRequest,
)
from weights.formats.own_draft import DRAFT
from weights.memory.block_stream import BlockStream
from weights.memory.devices import allocated_bytes
from weights.platform.panics import panics_as_errors

logger = logging.getLogger(__name__)


class LLMEngine:
    """Generates text for many requests at once with one model.

    Requests join with `add_request` and leave when they finish or with `abort`; `step` moves all of them on. Nothing
    here is thread-safe: call `add_request`, `abort` and `step` from one thread, or with a lock around them.

    On the CPU the tokens of a request do not depend on its batch-mates: neither greedy ones nor, with a seed, sampled
    ones. On CUDA rows are not padded for that: kernels are chosen by the number of rows and round differently, so a
    choice between two nearly equal tokens may depend on the batch.

    If the model fails in a step, the step's sequences run again one by one; if it runs out of memory, in smaller
    forwards, from then on. Those that fail alone, or whose logits are not finite, leave: their blocks are freed, and
    `failures` holds the reason until the next step. The others go on unaffected.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, torch.Tensor],
        config: LLMEngineConfig,
        *,
        workspace: Workspace = UNBOUNDED,
        ranks: RankChannel | None = None,
    ) -> None:
        """Build the model of a stock Hugging Face folder, or of a GGUF file, around `tensors`, which are shared and
        never written. Each step has the room of `STEP_KIND` in the device's `workspace`, which other engines share.
        Of several `ranks` this is the first: it says each step to the others (`StepFollower`). A draft model's tensors
        are among them (`weights.formats.own_draft.PREFIX`), and its config is in a folder of its own.

        The weights may be absent from the folder. `tensors` have the checkpoint's names and one floating
        dtype, which is also that of the computation and, unless `config.kv_dtype` is int8, of the KV cache.

        Raises:
            EngineError: the folder, the tensors or the limits do not fit together; the message tells which.
        """
        model_config = load_config(folder)
        device = torch.device(config.device)
        tensors, of_draft = divided(tensors)
        model = create_any_model(
            model_config,
            tensors,
            device,
            arithmetic=config.arithmetic,
            keeps_devices=config.keeps_devices,
            ranks=None if ranks is None else ranks.group,
        )
        draft = create_draft(folder, of_draft, model, config) if of_draft else None
        if model.pads_rows:
            config.check_padded_threads()
        places = model.layer_devices if isinstance(model, LoadedModel) else ()
        self._uses_host = any(place.type == "cpu" for place in (device, *places))
        plan, self._runner = plan_runner(model, config, ranks, draft)
        self._draft = None if draft is None else open_draft(draft, model, self._runner, plan, config)
        self._config, self._workspace, self._clock = config, workspace, time.perf_counter
        self._shares_prompts = isinstance(self._runner, ModelRunner)
        looks_up = config.prompt_lookup and self._shares_prompts
        self._proposer_within = self._draft.pace if self._draft else PromptLookup if looks_up else no_proposer
        self.max_model_len = plan.max_model_len
        self._max_positions = plan.max_positions if config.max_model_len is None else plan.max_model_len
        self.embedding_rules = load_embedding_rules(folder, model_config)
        self.tokenizer, self.generation_defaults = load_tokenizer(folder), load_generation_defaults(folder)
        vision = model.vision if isinstance(model, StockLanguageModel) else None
        images = ImageReader.load(folder, self.tokenizer, model_config) if vision else None
        self.chats = ChatReader(self.tokenizer, images, vision)
        self._vocab_size, self._eos_token_ids = model.spec.vocab_size, load_eos_token_ids(folder, model_config)
        self.grammars = GrammarCompiler(self.tokenizer, self._vocab_size, self._eos_token_ids)
        self._pace = PrefillPace(config.max_decode_delay, config.max_prefill_beside_decode)
        self._blocks = BlockPool(plan.num_blocks)
        recurrent = _recurrent_spec(model)
        self._scheduler = Scheduler(
            self._blocks,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            pace=self._pace,
            shares_completions=not config.is_deterministic,
            shares_prefixes=self._shares_prompts,
            states=StateSlots(plan.max_num_seqs, recurrent.piece_tokens) if recurrent else None,
        )
        self._loras, self._memory = DecoderLoras(model), MemoryLimits()
        self._requests: dict[str, list[Completion]] = {}
        self._stream: BlockStream | None = None
        self._cancelled: set[str] = set()
        self._verified: list[tuple[Chunk, torch.Tensor]] = []  # chunks, and the logits behind their proposed tokens
        self._other_step_s: float | None = None
        self.failures: dict[str, Exception] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def stats(self) -> LLMEngineStats:
        """Return the present numbers of sequences and blocks."""
        scheduler, blocks = self._scheduler, self._blocks
        return LLMEngineStats(
            scheduler.num_running, scheduler.num_waiting, scheduler.num_preemptions, blocks.num_blocks, blocks.num_free
        )

    def stream_layers(self, stream: BlockStream) -> None:
        """Stream layers of the host to the device for steps of many tokens. The engine closes the stream."""
        self._stream = stream
        assert isinstance(self._runner, ModelRunner)
        self._runner.stream_layers(stream)

    def close(self) -> None:
        """Free the memory of streamed layers. No step follows."""
        if self._stream is not None:
            self._stream.close()

    def encode_text(self, text: str, max_tokens: int | None = None) -> tuple[int, ...]:
        """Return the token ids of a plain prompt, cut to the limit."""
        return encode_text(self.tokenizer, text, max_tokens)

    def add_request(self, request: TextRequest) -> None:
        """Take in a request, at the end of the line. `max_tokens` is clipped to the room after the prompt.

        Raises:
            EngineError: the prompt is empty, too long or has unknown tokens, a sampling parameter is out of
            range, a LoRA does not fit, or a request of this id has not finished.
        """
        if request.request_id in self._requests:
            raise EngineError(f"request id {request.request_id!r} is in use by a request that has not finished")
        check_request(
            request,
            max_model_len=self.max_model_len,
            max_positions=self._max_positions,
            vocab_size=self._vocab_size,
            max_num_seqs=self._scheduler.max_num_seqs,
        )
        loras = self._loras.fit(request.loras)
        scores = None
        if request.scores_prompt:
            scores = PromptLogprobs(request.prompt_token_ids, request.sampling.num_logprobs or 0)
        completions = [
            Completion.create(
                request,
                index,
                tokenizer=self.tokenizer,
                max_model_len=self.max_model_len,
                eos_token_ids=self._eos_token_ids,
                loras=loras,
                prompt_logprobs=scores,
                proposer_within=self._proposer_within,
            )
            for index in range(request.n)
        ]
        self._requests[request.request_id] = completions
        if self._shares_prompts:
            completions[0].sequence.num_siblings = request.n - 1
        for completion in completions[: 1 if self._shares_prompts else None]:
            self._scheduler.add_sequence(completion.sequence)

    def request_cancel(self, request_id: str) -> None:
        """End a running step before its next layer, if half of its tokens or more are no longer wanted.

        Callable from any thread, at any time; `abort` follows. The step then begins anew with its other requests.
        """
        self._cancelled.add(request_id)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks at once; it gets no further delta. Unknown ids are ignored."""
        self._cancelled.discard(request_id)
        completions = self._requests.pop(request_id, [])
        has_forked = bool(completions) and not completions[0].sequence.num_siblings
        for completion in completions if has_forked else completions[:1]:
            self._scheduler.finish(completion.sequence)

    def yield_device(self, device: SharedDevice) -> None:
        """Make the next steps delay another engine with work by at most a few of its steps."""
        self._other_step_s = device.others_step_s

    def step(self) -> list[TextDelta]:
        """Move the scheduled requests on by one token or more, or compute a part of a long prompt.

        The result has a delta for every token of a completion, and for one that ended; it is empty without work.
        """
        self.failures, self._verified = {}, []
        plan = self._scheduler.schedule(self._other_step_s)
        num_threads = self._config.prefill_threads if plan.num_prompt_tokens else self._config.decode_threads
        leased = _leased_threads(self._config, num_threads) if self._uses_host else contextlib.nullcontext()
        with leased, _torch_threads(num_threads):
            start_s = self._clock()
            if plan.copies:
                self._runner.copy_blocks(plan.copies)
            with self._workspace.lend(STEP_KIND, 1, 1) if plan.chunks else contextlib.nullcontext():
                if self._draft is not None:
                    plan = self._draft.fill(plan, lambda one: _completions(self._requests, one)[0].picker)
                begin_s = self._clock()
                chunks, tokens = self._run_wanted(plan.chunks)
                if self._draft is not None:
                    self._draft.follow(chunks)
        deltas = self._postprocess(chunks, tokens)
        if plan.chunks and not self.failures and chunks == plan.chunks:
            end_s, num_beside = self._clock(), plan.num_prompt_tokens + plan.num_proposed_tokens
            self._pace.note_step(plan.num_decoding, num_beside, end_s - begin_s)
            if self._draft is not None:
                self._draft.note_step(plan, end_s - start_s, self._pace.decode_seconds(plan.num_decoding))
        return deltas

    def _run_wanted(self, chunks: tuple[Chunk, ...]) -> tuple[tuple[Chunk, ...], dict[Completion, SampledToken]]:
        """Run a step, and after an abort again without unwanted requests; return also the step that ran."""
        while True:
            try:
                return chunks, self._run(chunks)
            except StepAborted:
                for chunk in chunks:
                    if chunk.sequence.request_id in self._cancelled:
                        self.abort(chunk.sequence.request_id)
                chunks = tuple(chunk for chunk in chunks if chunk.sequence.request_id in self._requests)

    def _check_wanted(self, chunks: tuple[Chunk, ...]) -> None:
        """Raise StepAborted if the step would lose little by beginning anew without its unwanted requests."""
        if not self._cancelled:
            return
        sizes = [(chunk.num_tokens, chunk.sequence.request_id in self._cancelled) for chunk in chunks]
        if 2 * sum(size for size, is_cancelled in sizes if is_cancelled) >= sum(size for size, _ in sizes):
            raise StepAborted

    def _run(self, chunks: tuple[Chunk, ...]) -> dict[Completion, SampledToken]:
        """Return the sampled token of each completion after its last chunk. Notes failures in `failures`."""
        if not chunks:
            return {}
        try:
            with panics_as_errors():
                completions, outcomes = self._sampled(chunks)
        except (StepAborted, RankLost):
            raise
        except Exception as error:
            if len(chunks) == 1:
                request_id = chunks[0].sequence.request_id
                if not isinstance(error, EngineError):  # EngineErrors are the request's own fault
                    logger.exception("request %r ends: the model failed", request_id)
                self.failures[request_id] = error.with_traceback(None)  # frames would keep the step's tensors
                return {}
            logger.warning("a step of %d requests failed (%s); running them one by one", len(chunks), error)
            return {completion: token for chunk in chunks for completion, token in self._run((chunk,)).items()}
        tokens = {}
        for completion, outcome in zip(completions, outcomes, strict=True):
            if isinstance(outcome, SampledToken):
                tokens[completion] = outcome
            else:
                self.failures[completion.sequence.request_id] = outcome
        return tokens

    def _logits(self, chunks: tuple[Chunk, ...]) -> torch.Tensor:
        """Return one row per last chunk, from as few forwards as memory allows: running a chunk again is harmless."""
        longest = max(chunk.num_tokens for chunk in chunks)
        parts = run_in_parts(
            lambda start, stop: self._runner.run(chunks[start:stop], lambda: self._check_wanted(chunks)),
            len(chunks),
            len(chunks),
            self._memory,
            longest.bit_length(),
        )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _postprocess(self, chunks: tuple[Chunk, ...], tokens: Mapping[Completion, SampledToken]) -> list[TextDelta]:
        """Append the tokens, take out finished completions, and return the deltas."""
        deltas: list[TextDelta] = []
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.request_id not in self.failures:
                completions = _completions(self._requests, sequence) if chunk.is_last else []
                drawn = [tokens.get(completion) for completion in completions]
                self._scheduler.complete(chunk, drawn[0].token_id if drawn and drawn[0] else None)
                for completion in completions[1:]:
                    self._scheduler.fork(sequence, completion.sequence, tokens[completion].token_id)
                advanced = [self._advance(one, token) for one, token in zip(completions, drawn, strict=True)]
                deltas += [delta for delta in advanced if delta is not None]
        deltas += self._accept_proposals()
        for request_id in self.failures:
            self._fail(request_id)
        return [delta for delta in deltas if delta.request_id not in self.failures]

    def _sampled(self, chunks: tuple[Chunk, ...]) -> tuple[list[Completion], Items[SampledToken | Exception]]:
        """Run the model; return the completions that get a token, and the tokens. Raises the model's errors."""
        sampled = [chunk for chunk in chunks if chunk.has_logits]
        logits = self._logits(chunks)
        verified = list[tuple[Chunk, torch.Tensor]]()
        if any(chunk.proposed for chunk in sampled):
            rows = torch.split(logits, [chunk.num_logits for chunk in sampled])
            verified = [(chunk, own[1:]) for chunk, own in zip(sampled, rows, strict=True) if chunk.proposed]
            logits = torch.cat([own[:1] for own in rows])
        groups = [_completions(self._requests, chunk.sequence) for chunk in sampled]
        completions = [completion for group in groups for completion in group]
        if len(completions) > len(groups):  # a prompt's row is the first of all its completions
            logits = logits.repeat_interleave(torch.tensor([len(g) for g in groups], device=logits.device), 0)
        outcomes = sample(logits, [completion.picker for completion in completions])
        self._verified += verified
        return completions, outcomes

    def _accept_proposals(self) -> list[TextDelta]:
        """Accept the proposed tokens of sequences as long as they equal the drawn tokens."""
        deltas, place, going = [], 0, self._verified
        while going := [one for one in going if _is_right(one[0], place, self.failures)]:
            completions = [one for chunk, _ in going for one in _completions(self._requests, chunk.sequence)]
            logits = torch.stack([rows[place] for _, rows in going])
            outcomes = sample(logits, [completion.picker for completion in completions])
            place += 1
            for completion, outcome in zip(completions, outcomes, strict=True):
                if isinstance(outcome, Exception):
                    self.failures[completion.sequence.request_id] = outcome
                    continue
                self._scheduler.accept(completion.sequence, outcome.token_id)
                if (delta := self._advance(completion, outcome)) is not None:
                    deltas.append(delta)
        return deltas

    def _advance(self, completion: Completion, token: SampledToken | None) -> TextDelta | None:
        """Return the token's addition to the completion, or the prompt's embedding if there is no token.

        None where the model failed to make a text or an embedding.
        """
        sequence = completion.sequence
        completions = self._requests[sequence.request_id]
        try:
            with panics_as_errors():
                delta = completion.embedded() if token is None else completion.advance(token, len(completions) - 1)
        except Exception as error:
            if not isinstance(error, EngineError):
                logger.exception("request %r ends: its text failed", sequence.request_id)
            self.failures[sequence.request_id] = error.with_traceback(None)
            return None
        if delta.finish_reason is not None:
            self._scheduler.finish(sequence)
            self._requests[sequence.request_id] = left = [one for one in completions if one is not completion]
            if not left:
                del self._requests[sequence.request_id]
        return delta

    def _fail(self, request_id: str) -> None:
        """Drop a failed request, and note its progress in the failure."""
        completions = self._requests.get(request_id, [])
        num_tokens = sum(completion.sequence.num_completion_tokens for completion in completions)
        reason = self.failures[request_id]
        if isinstance(reason, EngineError):
            self.failures[request_id] = EngineError(f"after {num_tokens} tokens: {reason}")
        else:
            self.failures[request_id] = ComputationFailed(f"the model failed after {num_tokens} tokens: {reason}")
        self.abort(request_id)


def _completions(requests: Mapping[str, list[Completion]], sequence: Sequence) -> list[Completion]:
    """Return the completions that start with the sequence's next token: its own, and its forks."""
    completions = requests[sequence.request_id]
    return completions if sequence.num_siblings else [one for one in completions if one.sequence is sequence]


def _is_right(chunk: Chunk, place: int, failures: Collection[str]) -> bool:
    """Return whether a chunk's proposed token of that place equals the sequence's last drawn one, and it goes on.

    If not, the sequence's proposer gets the number of right ones.
    """
    sequence, proposed = chunk.sequence, chunk.proposed
    is_on = sequence.status is SequenceStatus.RUNNING and sequence.request_id not in failures
    if is_on and place < len(proposed) and sequence.token_ids[-1] == proposed[place]:
        return True
    if sequence.proposer is not None:
        sequence.proposer.note(len(proposed), place)
        sequence.num_drafted_tokens += min(place, len(proposed) - 1)
    return False


def _leased_threads(config: LLMEngineConfig, count: int | None) -> AbstractContextManager[object]:
    """Hold threads of the node for a step computed on the host, wholly or partly."""
    threads = config.node_threads
    return contextlib.nullcontext() if threads is None else threads.leased(count or torch.get_num_threads())


def plan_runner(
    model: AnyModel, config: LLMEngineConfig, ranks: RankChannel | None = None, draft: DraftedModel | None = None
) -> tuple[CachePlan, ModelRunner | OwnCacheRunner]:
    """Return the plan of a model's cache, and its runner, which leads those of other `ranks`. Raises EngineError.

    Blocks of the cache have room for the keys and values of a `draft` model, too.
    """
    limits: Any = {
        "kv_cache_bytes": config.kv_cache_bytes,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
    }
    if isinstance(model, OwnCacheModel):
        spec = model.spec
        plan = plan_blocks(spec.block_bytes, spec.max_positions, **limits, fixed_bytes=spec.fixed_bytes)
        return plan, OwnCacheRunner(model)
    recurrent = _recurrent_spec(model)
    limits["fixed_bytes"] = SLOTS_PER_SEQUENCE * recurrent.slot_bytes if recurrent else 0
    beside = bytes_per_block(draft.spec, draft.dtype, config.kv_dtype) if draft else 0
    plan = plan_cache(model.spec, model.dtype, **limits, kv_dtype=config.kv_dtype, beside_bytes=beside)
    num_states = SLOTS_PER_SEQUENCE * plan.max_num_seqs if recurrent else 0
    if ranks is not None and model.ranks is not None:
        return plan, LeadingRunner(model, plan.num_blocks, config.kv_dtype, ranks)
    return plan, ModelRunner(model, plan.num_blocks, config.kv_dtype, num_states)


def _recurrent_spec(model: AnyModel) -> RecurrentSpec | None:
    """Return the spec of a model's states in the shared batch."""
    return model.spec.recurrent if isinstance(model, StockLanguageModel) else None


@contextlib.contextmanager
def _torch_threads(count: int | None) -> Iterator[None]:
    """Let torch and the kernels use so many threads for this thread's work; None changes nothing."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def working_bytes(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_cache_bytes: int,
    max_num_seqs: int,
    kv_dtype: KvDtype = "auto",
    tensor_bytes: Mapping[str, int] = MappingProxyType({}),
) -> int:
    """Return the device bytes that an engine of these settings always takes beside its weights.

    `tensor_bytes` are those of its checkpoint: transformers' classes need some of them converted.

    Raises EngineError as the engine does.
    """
    own, of_draft = divided(tensor_bytes)
    configs = [
        (load_config(folder), own),
        *([(load_config(folder / DRAFT, is_draft=True), of_draft)] if of_draft else []),
    ]
    if any(is_stock(config) for config, _ in configs):  # the caches of its layers are known only when it runs
        stock = [(config, given) for config, given in configs if is_stock(config)]
        return kv_cache_bytes + sum(converted_bytes(config, decoder_tensors(config, given)) for config, given in stock)
    sizes = (dtype, device, kv_cache_bytes, max_num_seqs, kv_dtype)
    return _layer_caches([decoder_spec(config) for config, _ in configs], *sizes)[-1]


def layer_caches(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_cache_bytes: int,
    max_num_seqs: int,
    kv_dtype: KvDtype = "auto",
    has_draft: bool = False,
) -> list[int] | None:
    """Return an engine's device bytes beside weights, with 0, 1, ... of its layers on the device.

    None for a model of transformers, or a part of one, which has all layers there. A draft model has them there, too.
    Raises EngineError as the engine does.
    """
    configs = [load_config(folder), *([load_config(folder / DRAFT, is_draft=True)] if has_draft else [])]
    if any(is_stock(config) or is_text_alone(config) for config in configs):
        return None
    specs = [decoder_spec(config) for config in configs]
    return _layer_caches(specs, dtype, device, kv_cache_bytes, max_num_seqs, kv_dtype)


def _layer_caches(
    specs: Items[DecoderSpec],
    dtype: torch.dtype,
    device: torch.device,
    kv_cache_bytes: int,
    max_num_seqs: int,
    kv_dtype: KvDtype,
) -> list[int]:
    """Return the bytes with 0, 1, ... layers of the first decoder, and all of another one, its draft."""
    spec, *others = specs
    plan = plan_cache(
        spec,
        dtype,
        kv_cache_bytes=kv_cache_bytes,
        max_num_seqs=max_num_seqs,
        max_model_len=None,
        kv_dtype=kv_dtype,
        beside_bytes=sum(bytes_per_block(one, dtype, kv_dtype) for one in others),
    )

    def allocated(one: DecoderSpec) -> int:
        tensors = cache_tensors(one, plan.num_blocks, dtype, kv_dtype)
        sizes = [math.prod(shape) * kind.itemsize for shape, kind in tensors]
        sizes.append(one.head_dim // 2 * torch.float32.itemsize)  # the frequencies
        return sum(allocated_bytes(device, size) for size in sizes)

    beside = sum(map(allocated, others))
    return [beside + allocated(replace(spec, num_layers=count)) for count in range(spec.num_layers + 1)]


def step_follower(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: LLMEngineConfig, group: RankGroup
) -> StepFollower:
    """Return the follower of an `LLMEngine` of the same arguments, which runs its steps on another rank.

    Raises EngineError as the engine does.
    """
    device = torch.device(config.device)
    options: Any = {"arithmetic": config.arithmetic, "keeps_devices": config.keeps_devices, "ranks": group}
    model = create_any_model(load_config(folder), tensors, device, **options)
    _, runner = plan_runner(model, config)
    assert isinstance(runner, ModelRunner)
    assert not isinstance(model, OwnCacheModel)
    return StepFollower(runner, LoraReader(model, group))
