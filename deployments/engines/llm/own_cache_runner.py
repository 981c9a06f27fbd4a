"""Runs models that keep a cache of their own, one sequence after the other. Knows no queue and no text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch

from deployments.engines.llm.models.own_cache import OwnCacheModel, SequenceState
from deployments.engines.llm.prompt_logprobs import ROWS_AT_ONCE
from deployments.engines.llm.scheduler import Chunk
from deployments.engines.nn.lora import RowAdapter, adapted_rows
from deployments.engines.protocol import EngineError


class OwnCacheRunner:
    """The states of a sequence lie with it. Where they are not what a chunk begins behind, they are computed again."""

    def __init__(self, model: OwnCacheModel) -> None:
        self._model = model

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Do nothing: blocks count bytes here, and hold none."""

    @torch.inference_mode()
    def run(self, chunks: Collection[Chunk], check: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Compute the chunks, and return float32 logits (N, vocabulary): a row for each chunk that has some, in order.

        `check` is called before each sequence; what it raises ends the step there.
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
        with adapted_rows(model.module, _adapters(chunk, chunk.end - start, is_read, model.device)):
            logits = model.advance(state, sequence.token_ids[: chunk.end], all_rows=is_read)
        sequence.state = state
        if scores is not None and is_read:
            for first in range(start, min(chunk.end, scores.end), ROWS_AT_ONCE):
                scores.note_logits(first, logits[first - start : first - start + ROWS_AT_ONCE].float())
        return logits[-1:].float()


def _adapters(chunk: Chunk, num_rows: int, all_rows: bool, device: torch.device) -> list[RowAdapter]:
    """Return the LoRAs of all rows that a forward computes; the head has them all, or the last one alone."""
    found = []
    for lora in chunk.sequence.loras:
        for pairs, count in ((lora.fitted.layers, num_rows), (lora.fitted.head, num_rows if all_rows else 1)):
            if pairs:
                found.append(RowAdapter(pairs, lora.scale, torch.arange(count, device=device), 1))
    return found
