"""The model runner: runs the model for the chunks of one step. It owns the KV cache, and has no queue and no text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import torch
from torch.nn import functional as F

from deployments.engines.llm.models.own_cache import OwnCacheModel
from deployments.engines.llm.models.recurrent import StateStore, StepStates, plan_batches
from deployments.engines.llm.models.registry import LoadedModel
from deployments.engines.llm.models.step_rows import StepRows
from deployments.engines.llm.models.stock import StockLanguageModel
from deployments.engines.llm.native_decoder import NativeDecoder, TokenSpan
from deployments.engines.llm.sampling.prompt_logprobs import ROWS_AT_ONCE
from deployments.engines.llm.sequences.kv_cache import KVCache, KvDtype
from deployments.engines.llm.sequences.paged_attention import Planner, StepAttention, Visible, plan_attention
from deployments.engines.llm.sequences.sequence import Chunk, SequenceLora, SequenceState
from deployments.engines.llm.split_layers import SplitLayers, SplitStep
from deployments.engines.nn.batch_invariant import settled_rows
from deployments.engines.nn.lora import AdaptedRows, RowAdapter
from deployments.engines.records.prompt_images import PromptImages
from deployments.engines.records.protocol import EngineError
from weights.memory.block_stream import BlockStream
from weights.memory.devices import computes_on_host
from weights.operations.adapters import LoraPair


class ModelRunner:
    """Prefill and decode alike: every chunk's tokens go through the layers in one flat batch."""

    def __init__(
        self, model: LoadedModel | StockLanguageModel, num_blocks: int, kv_dtype: KvDtype = "auto", num_states: int = 0
    ) -> None:
        self._model = model
        self._adapted = AdaptedRows(model.module)
        stored = NativeDecoder.cache_dtype(model)
        is_split = isinstance(model, LoadedModel) and model.is_split
        places = model.layer_devices if isinstance(model, LoadedModel) else ()
        self._cache = KVCache(model.spec, num_blocks, model.dtype, model.device, kv_dtype, stored=stored, places=places)
        recurrent = model.spec.recurrent if isinstance(model, StockLanguageModel) else None
        self._states = StateStore(recurrent, num_states, model.device) if recurrent else None
        self._decoder = NativeDecoder.create(model, self._cache)
        self._split = SplitLayers(model, self._cache) if isinstance(model, LoadedModel) and is_split else None
        # On the host, products of few rows round by their number: a token's result must not depend on its batch-mates.
        on_host = any(map(computes_on_host, (model.device, *places)))
        multiple = model.row_multiple if isinstance(model, StockLanguageModel) else settled_rows()
        self._row_multiple = multiple if model.pads_rows and on_host else 1

    def stream_layers(self, stream: BlockStream) -> None:
        """Stream layers of the host to the device through `stream`, for steps of many tokens."""
        assert self._split is not None
        self._split.stream_layers(stream)

    def plan_reading(self, chunks: Collection[Chunk]) -> Planner:
        """Return the planner of attention to what the cache has up to each of the chunks' tokens."""
        return lambda window, visible: plan_attention(chunks, self._cache, self._model.device, window, visible)

    @torch.inference_mode()
    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks of the KV cache, each (from, to) in this order."""
        self._cache.copy_blocks(copies)

    @torch.inference_mode()
    def run(self, chunks: Collection[Chunk], check: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Store the chunks' keys and values and return float32 logits.

        The result is (N, vocabulary) with a row for each token that has logits, in order. Running
        the same chunks again is harmless: the same slots get the same values. `check` is called before each layer, and
        once if the kernels compute all layers in one call; its exception ends the step there (`StepAborted`).
        """
        check()
        # All tokens of a sequence take the same way in any batch, so they come out the same.
        has_kernels = self._decoder is not None or (self._split is not None and self._split.has_kernels)
        taken = [chunk for chunk in chunks if has_kernels and not chunk.sequence.loras]
        if taken and len(taken) == len(chunks):
            return self._run_kernels(taken, check)
        if not taken:
            return self._run_layers(chunks, check)
        left = [chunk for chunk in chunks if chunk not in taken]
        parts = {True: self._run_kernels(taken, check), False: self._run_layers(left, check)}
        are_taken = [is_taken for chunk in chunks for is_taken in [chunk in taken] * chunk.num_logits]
        of_kernels = torch.tensor(are_taken, device=self._model.device)
        logits = torch.empty(len(of_kernels), self._model.spec.vocab_size, device=self._model.device)
        for is_taken, part in parts.items():
            logits[of_kernels == is_taken] = part
        return logits

    def _run_layers(self, chunks: Collection[Chunk], check: Callable[[], None]) -> torch.Tensor:
        """Run the module, layer by layer."""
        if self._split is not None:
            return self._run_split(chunks, check)
        model = self._model
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        multiple = self._row_multiple
        if isinstance(model, StockLanguageModel) and not model.pads_completions and _are_completions(chunks):
            multiple = len(tokens) if len(tokens) > 1 else 2  # parts of a single row are contiguous, those of more not
        token_ids_T = _padded(torch.tensor(tokens), multiple).to(model.device)
        positions_T = _padded(_positions(chunks), multiple).to(model.device)
        vision = model.vision if isinstance(model, StockLanguageModel) else None
        seen = vision.seen(token_ids_T, _shown_images(chunks)) if vision else None

        def plan(window: int, visible: Visible | None) -> StepAttention:
            sees_spans = vision is not None and vision.sees_itself(window)
            return plan_attention(chunks, self._cache, model.device, window, visible, sees_spans=sees_spans)

        arguments = (token_ids_T, positions_T if positions_T.ndim == 1 else positions_T.T, plan, check)
        with self._adapted.adding(_row_adapters(chunks, model.device)):
            if isinstance(model, StockLanguageModel):
                rows = _kernel_rows(chunks, len(token_ids_T), self._row_multiple)
                hidden = model.hidden_states(*arguments, rows, seen, self._step_states(model, chunks, check))
            else:
                hidden = model.hidden_states(*arguments)
        self._note_states(chunks, hidden)
        with self._adapted.adding(_row_adapters(chunks, model.device, of_head=True)):
            return self._logits(hidden, _last_rows(chunks))

    def _step_states(
        self, model: StockLanguageModel, chunks: Collection[Chunk], check: Callable[[], None]
    ) -> StepStates | None:
        if self._states is None:
            return None
        assert model.spec.recurrent is not None
        is_whole = not model.spec.recurrent.piece_tokens
        batches = plan_batches(
            chunks, model.device, self._row_multiple, has_kernels=model.has_kernels, pads_completions=is_whole
        )
        return StepStates(self._states, batches, check)

    def _run_split(
        self, chunks: Collection[Chunk], check: Callable[[], None], spans: list[TokenSpan] | None = None
    ) -> torch.Tensor:
        """Run the layers where they are, with `spans` by the host's kernels if there are any."""
        assert self._split is not None
        tokens = [token for chunk in chunks for token in chunk.token_ids]

        def plan(window: int, device: torch.device) -> StepAttention:
            return plan_attention(chunks, self._cache, device, window)

        ids_T, positions_T = self._padded(torch.tensor(tokens)), self._padded(_positions(chunks))
        is_adapted = any(chunk.sequence.loras for chunk in chunks)
        step = SplitStep(ids_T, positions_T, len(tokens), plan, check, spans, is_adapted)
        with self._adapted.adding(_by_place(_row_adapters(chunks, self._model.device))):
            hidden = self._split.hidden_states(step)
        self._note_states(chunks, hidden)
        with self._adapted.adding(_row_adapters(chunks, self._model.device, of_head=True)):
            return self._logits(hidden, _last_rows(chunks))

    def _run_kernels(self, chunks: Collection[Chunk], check: Callable[[], None]) -> torch.Tensor:
        spans = [TokenSpan(chunk.token_ids, chunk.start, chunk.sequence.block_table) for chunk in chunks]
        if self._decoder is None:
            return self._run_split(chunks, check, spans)
        rows = _last_rows(chunks)
        hidden, logits = self._decoder.run_step(spans, rows, check)
        self._note_states(chunks, hidden)
        if logits is None:
            return self._logits(hidden, rows)
        assert isinstance(self._model, LoadedModel)
        return self._model.whole_logits(logits) if rows else logits.new_empty(0, self._model.spec.vocab_size)

    def _note_states(self, chunks: Iterable[Chunk], hidden: torch.Tensor) -> None:
        """Note hidden states, and log probabilities of prompts, for sequences that ask for them.

        For these, a few rows at a time go through the head.
        """
        first = 0
        for chunk in chunks:
            if chunk.sequence.last_states is not None and chunk.num_logits:
                end = first + chunk.num_tokens
                chunk.sequence.last_states.note_states(
                    chunk.end - chunk.num_logits, hidden[end - chunk.num_logits : end]
                )
            if chunk.sequence.pooled is not None:
                chunk.sequence.pooled.note_states(chunk.start, hidden[first : first + chunk.num_tokens])
            scores = chunk.sequence.prompt_logprobs
            last = min(chunk.end, scores.end) if scores else chunk.start
            for begin in range(chunk.start, last, ROWS_AT_ONCE):
                end = min(begin + ROWS_AT_ONCE, chunk.end)
                part = replace(chunk, start=begin, end=end)
                adapters = _row_adapters([part], self._model.device, of_head=True, all_rows=True)
                with self._adapted.adding(adapters):
                    logits = self._logits(hidden, list(range(first + begin - chunk.start, first + end - chunk.start)))
                assert scores is not None
                scores.note_logits(begin, logits)
            first += chunk.num_tokens

    def _logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        if not rows:
            return torch.empty(0, self._model.spec.vocab_size, device=self._model.device)
        model, chosen = self._model, hidden[rows]
        if isinstance(model, StockLanguageModel):
            logits = model.logits(self._padded(chosen) if model.pads_completions else chosen, len(rows))
        else:
            logits = model.logits(self._padded(chosen))
        return logits[: len(rows)].float()

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        return _padded(rows, self._row_multiple)


class OwnCacheRunner:
    """Runs models that keep a cache of their own, one sequence after the other, with the methods of `ModelRunner`.

    The states of a sequence are kept with it. If they do not end where a chunk begins, they are computed again.
    """

    def __init__(self, model: OwnCacheModel) -> None:
        self._model = model
        self._adapted = AdaptedRows(model.module)

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Do nothing: blocks count bytes here, and hold none."""

    @torch.inference_mode()
    def run(self, chunks: Collection[Chunk], check: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Compute the chunks, and return float32 logits (N, vocabulary): a row for each chunk that has some, in order.

        `check` is called before each sequence; its exception ends the step there.
        """
        rows = [torch.empty(0, self._model.spec.vocab_size, device=self._model.device)]
        for chunk in chunks:
            check()
            logits = self._compute(chunk)
            if chunk.has_logits:
                rows.append(logits)
        return torch.cat(rows)

    def _compute(self, chunk: Chunk) -> torch.Tensor:
        model, sequence = self._model, chunk.sequence
        if sequence.pooled is not None:
            raise EngineError(f"a {type(model.module).__name__} has no embeddings")
        if model.reads_whole and not chunk.is_last:
            return torch.empty(0, model.spec.vocab_size)
        state, sequence.state = sequence.state, None  # until it is whole again
        if state is None or state.num_tokens != chunk.start:
            state = SequenceState()
        start, scores = state.num_tokens, sequence.prompt_logprobs
        is_read = scores is not None and start < scores.end
        with self._adapted.adding(_adapters_of(chunk, chunk.end - start, is_read, model.device)):
            logits = model.advance(state, sequence.token_ids[: chunk.end], all_rows=is_read)
        sequence.state = state
        if scores is not None and is_read:
            for first in range(start, min(chunk.end, scores.end), ROWS_AT_ONCE):
                scores.note_logits(first, logits[first - start : first - start + ROWS_AT_ONCE].float())
        return logits[-1:].float()


def _padded(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return `rows` padded with zeros to a multiple."""
    missing = -len(rows) % multiple
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


def _positions(chunks: Collection[Chunk]) -> torch.Tensor:
    """Return the positions of a step's tokens, (T,), or (T, 3) if a prompt's images have rows and columns."""
    found, is_plain = [], True
    for chunk in chunks:
        images = chunk.sequence.images
        if images is None or images.known_positions is None:
            found.append(torch.arange(chunk.start, chunk.end))
        else:
            is_plain = False
            found.append(images.positions(chunk.start, chunk.end).T)
    return torch.cat(found if is_plain else [one if one.ndim == 2 else one[:, None].expand(-1, 3) for one in found])


def _shown_images(chunks: Collection[Chunk]) -> list[tuple[int, int, int, PromptImages]]:
    """Return the first row, the tokens and the images of each chunk of a prompt with images."""
    shown, first = [], 0
    for chunk in chunks:
        if chunk.sequence.images is not None and chunk.start < chunk.sequence.num_prompt_tokens:
            shown.append((first, chunk.start, chunk.end, chunk.sequence.images))
        first += chunk.num_tokens
    return shown


def _last_rows(chunks: Collection[Chunk]) -> list[int]:
    """The rows of the tokens after which a token may be sampled."""
    rows, end = list[int](), 0
    for chunk in chunks:
        end += chunk.num_tokens
        rows.extend(range(end - chunk.num_logits, end))
    return rows


def _are_completions(chunks: Iterable[Chunk]) -> bool:
    return all(chunk.start >= chunk.sequence.num_prompt_tokens for chunk in chunks)


def _kernel_rows(chunks: Collection[Chunk], num_rows: int, row_multiple: int) -> StepRows | None:
    """Return the rows of a step's completions, of `num_rows` with its padding; None where there are none."""
    rows, end = list[int](), 0
    for chunk in chunks:
        completed = max(0, chunk.end - max(chunk.start, chunk.sequence.num_prompt_tokens))
        end += chunk.num_tokens
        rows.extend(range(end - completed, end))
    if len(rows) == end:
        return StepRows((1, num_rows), end, row_multiple)
    return StepRows((1, num_rows), torch.tensor(rows), row_multiple) if rows else None


def _by_place(adapters: Iterable[RowAdapter]) -> list[RowAdapter]:
    """Return the adapters with their numbers of rows, for each device with layers that they change."""
    found = []
    for one in adapters:
        places: dict[torch.device, dict[str, LoraPair]] = {}
        for path, pair in one.pairs.items():
            places.setdefault(pair.down.device, {})[path] = pair
        for device, pairs in places.items():
            row_multiple = settled_rows() if computes_on_host(device) else 1
            found.append(RowAdapter(pairs, one.strength, one.rows.to(device), row_multiple))
    return found


def _row_adapters(
    chunks: Iterable[Chunk], device: torch.device, *, of_head: bool = False, all_rows: bool = False
) -> list[RowAdapter]:
    """Return the LoRAs of a step with their rows: those of its tokens, or those of its logits.

    With `all_rows`, every token has logits.
    """
    rows: dict[SequenceLora, list[int]] = {}
    end = 0
    for chunk in chunks:
        start, end = end, end + (chunk.num_logits if of_head and not all_rows else chunk.num_tokens)
        for lora in chunk.sequence.loras:
            rows.setdefault(lora, []).extend(range(start, end))
    row_multiple = settled_rows() if computes_on_host(device) else 1
    found = []
    for lora in sorted(rows, key=lambda lora: lora.place):
        pairs = lora.fitted.head if of_head else lora.fitted.layers
        if pairs and rows[lora]:
            found.append(RowAdapter(pairs, lora.scale, torch.tensor(rows[lora], device=device), row_multiple))
    return found


def _adapters_of(chunk: Chunk, num_rows: int, all_rows: bool, device: torch.device) -> list[RowAdapter]:
    """Return the LoRAs of all rows of a forward; the head has all rows, or the last one alone."""
    found = []
    for lora in chunk.sequence.loras:
        for pairs, count in ((lora.fitted.layers, num_rows), (lora.fitted.head, num_rows if all_rows else 1)):
            if pairs:
                found.append(RowAdapter(pairs, lora.scale, torch.arange(count, device=device), 1))
    return found
