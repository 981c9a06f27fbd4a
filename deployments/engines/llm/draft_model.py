"""A draft model: a small language model of the same vocabulary, whose tokens the large one checks in one step.

Its keys and values lie beside the large one's, in blocks of the same numbers: whoever shares, copies or frees a block
does so for both. It computes prompts with the large one, and a completion's tokens when it proposes the next ones. Its
rounding, a LoRA that it lacks or a block that it did not compute cost right proposals, and change no answer.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.model_runner import ModelRunner
from deployments.engines.llm.models.own_cache import OwnCacheModel
from deployments.engines.llm.models.registry import AnyModel, LoadedModel, create_any_model, load_config
from deployments.engines.llm.models.stock import StockLanguageModel
from deployments.engines.llm.sequences.draft_pace import DraftCost, DraftPace
from deployments.engines.llm.sequences.kv_cache import CachePlan
from deployments.engines.llm.sequences.sequence import Chunk, Sequence, StepPlan
from deployments.engines.records.protocol import EngineError
from weights.formats.own_draft import DRAFT, PREFIX
from weights.platform.panics import panics_as_errors

logger = logging.getLogger(__name__)

PagedModel = LoadedModel | StockLanguageModel
_T = TypeVar("_T")


def divided(tensors: Mapping[str, _T]) -> tuple[Mapping[str, _T], Mapping[str, _T]]:
    """Return a model's own tensors, and those of its draft model by their names there."""
    drafts = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)} if drafts else tensors
    return own, drafts


def create_draft(
    folder: Path, tensors: Mapping[str, torch.Tensor], model: AnyModel, config: LLMEngineConfig
) -> PagedModel:
    """Return the draft model of the `model` in a folder. Raises EngineError where one of them has no paged cache."""
    path = folder / DRAFT
    options: Any = {"arithmetic": config.arithmetic, "keeps_devices": config.keeps_devices}
    draft = create_any_model(load_config(path), tensors, torch.device(config.device), **options)
    for one, where in ((model, folder), (draft, path)):
        is_paged = isinstance(one, LoadedModel) or (isinstance(one, StockLanguageModel) and not one.spec.recurrent)
        if not is_paged or (isinstance(one, LoadedModel) and one.ranks is not None):
            kind = "that several ranks compute" if isinstance(one, LoadedModel) else "with a cache of its own"
            raise EngineError(f"{where}: a model {kind} has no draft model, and is none")
    assert not isinstance(draft, OwnCacheModel)
    return draft


def open_draft(draft: PagedModel, vocab_size: int, plan: CachePlan, config: LLMEngineConfig) -> DraftModel:
    """Return the draft model of a large one of so many tokens, with a cache of as many blocks."""
    return DraftModel(
        ModelRunner(draft, plan.num_blocks, config.kv_dtype),
        vocab_size=vocab_size,
        max_positions=draft.spec.max_positions,
        max_tokens=config.max_num_batched_tokens,
    )


class DraftModel:
    """Fills in the proposals of a step, for all of its sequences together."""

    def __init__(self, runner: ModelRunner, *, vocab_size: int, max_positions: int, max_tokens: int) -> None:
        """The large model has tokens below `vocab_size`; the draft knows `max_positions`, and computes `max_tokens`."""
        self._runner = runner
        self._vocab_size, self._max_positions, self._max_tokens = vocab_size, max_positions, max_tokens
        self.cost = DraftCost()

    def pace(self, limit: int) -> DraftPace:
        """Return the proposer of a completion that has with its prompt at most `limit` tokens."""
        return DraftPace(min(limit, self._max_positions), self.cost)

    def follow(self, chunks: Iterable[Chunk]) -> None:
        """Compute the prompts' parts of a step, so that proposals can go on from there."""
        parts = []
        for chunk in chunks:
            sequence = chunk.sequence
            is_wanted = isinstance(sequence.proposer, DraftPace) and chunk.end <= self._max_positions
            if is_wanted and not chunk.proposed and chunk.num_tokens > 1:
                parts.append(Chunk(_twin(sequence), sequence.num_drafted_tokens, chunk.end, is_last=False))
                sequence.num_drafted_tokens = chunk.end
        try:
            with panics_as_errors():
                self._run(parts)
        except Exception:  # its blocks then have other contents, as any that it did not compute
            logger.exception("the draft model failed in %d prompts", len(parts))

    def fill(self, plan: StepPlan) -> StepPlan:
        """Return a step with tokens in the places of its proposals; without these if the draft fails.

        Blocks are copied first, as the step says.
        """
        if plan.copies:
            self._runner.copy_blocks(plan.copies)
        asked = [chunk for chunk in plan.chunks if chunk.proposed]
        if not asked:
            return plan
        try:
            with panics_as_errors():
                found = {id(chunk): tokens for chunk, tokens in zip(asked, self._propose(asked), strict=True)}
        except Exception:
            logger.exception("the draft model failed for %d sequences", len(asked))
            found = {}
            for chunk in asked:
                assert chunk.sequence.proposer is not None
                chunk.sequence.proposer.note(len(chunk.proposed), 0)
        return replace(plan, chunks=tuple(_with_tokens(chunk, found.get(id(chunk), ())) for chunk in plan.chunks))

    def note_step(self, plan: StepPlan, step_s: float, plain_s: float) -> None:
        """Take in the seconds of a step with its proposals, and those of one without; 0 where none was measured."""
        if (longest := max(len(chunk.proposed) for chunk in plan.chunks)) and plain_s:
            self.cost.note(longest, step_s - plain_s, plain_s)

    def _propose(self, asked: Collection[Chunk]) -> list[tuple[int, ...]]:
        twins = [_twin(chunk.sequence) for chunk in asked]
        starts = [chunk.sequence.num_drafted_tokens for chunk in asked]
        for place in range(max(len(chunk.proposed) for chunk in asked)):
            going = [number for number, chunk in enumerate(asked) if place < len(chunk.proposed)]
            parts = [Chunk(twins[number], starts[number], len(twins[number]), is_last=True) for number in going]
            tokens = torch.cat(self._run(parts))[:, : self._vocab_size].argmax(-1).tolist()
            for number, token in zip(going, tokens, strict=True):
                starts[number] = len(twins[number])
                twins[number].token_ids.append(token)
        for chunk in asked:
            chunk.sequence.num_drafted_tokens = len(chunk.sequence)
        return [tuple(twin.token_ids[len(chunk.sequence) :]) for twin, chunk in zip(twins, asked, strict=True)]

    def _run(self, chunks: Iterable[Chunk]) -> list[torch.Tensor]:
        """Return the logits behind the last ones of the chunks, in order, from forwards that a step has room for."""
        logits, batch, room = list[torch.Tensor](), list[Chunk](), self._max_tokens
        for chunk in chunks:
            start = chunk.start
            while start < chunk.end:
                end = min(chunk.end, start + room)
                batch.append(replace(chunk, start=start, end=end, is_last=chunk.is_last and end == chunk.end))
                room -= end - start
                start = end
                if not room:
                    logits.append(self._runner.run(batch))
                    batch, room = [], self._max_tokens
        if batch:
            logits.append(self._runner.run(batch))
        return logits


def _with_tokens(chunk: Chunk, tokens: tuple[int, ...]) -> Chunk:
    """Return a chunk with these tokens in place of those proposed."""
    return replace(chunk, end=chunk.end - len(chunk.proposed) + len(tokens), proposed=tokens)


def _twin(sequence: Sequence) -> Sequence:
    """Return a sequence of the same tokens in the same blocks, of which nothing but these is asked."""
    return Sequence(
        sequence.request_id, list(sequence.token_ids), sequence.num_prompt_tokens, block_table=sequence.block_table
    )
