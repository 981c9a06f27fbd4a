"""A draft model: a small language model of the same vocabulary, whose tokens the large one checks in one step.

The keys and values of most lie beside the large one's, in blocks of the same numbers: whoever shares, copies or frees a
block does so for both. Such a one computes prompts with the large one, and a completion's tokens when it proposes the
next ones. Its rounding, a LoRA that it lacks or a block that it did not compute cost right proposals, and change no
answer. An assistant has no keys of its own, and reads those of the large one (`models/assistant.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.model_runner import ModelRunner, OwnCacheRunner
from deployments.engines.llm.models.assistant import AssistantModel, create_assistant
from deployments.engines.llm.models.own_cache import OwnCacheModel
from deployments.engines.llm.models.registry import AnyModel, LoadedModel, create_any_model, load_config
from deployments.engines.llm.models.stock import StockLanguageModel
from deployments.engines.llm.models.stock_classes import DRAFTS_FOR
from deployments.engines.llm.sampling.sampler import SampledToken, sample
from deployments.engines.llm.sampling.token_picker import TokenPicker
from deployments.engines.llm.sequences.draft_pace import DraftCost, DraftPace
from deployments.engines.llm.sequences.kv_cache import CachePlan
from deployments.engines.llm.sequences.last_states import LastStates
from deployments.engines.llm.sequences.sequence import Chunk, Sequence, StepPlan
from deployments.engines.llm.sequences.slot_table import SlotTable
from deployments.engines.records.protocol import EngineError
from weights.formats.own_draft import DRAFT, PREFIX
from weights.platform.panics import panics_as_errors

logger = logging.getLogger(__name__)

DraftedModel = LoadedModel | StockLanguageModel | AssistantModel
_T = TypeVar("_T")


def divided(tensors: Mapping[str, _T]) -> tuple[Mapping[str, _T], Mapping[str, _T]]:
    """Return a model's own tensors, and those of its draft model by their names there."""
    drafts = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)} if drafts else tensors
    return own, drafts


def create_draft(
    folder: Path, tensors: Mapping[str, torch.Tensor], model: AnyModel, config: LLMEngineConfig
) -> DraftedModel:
    """Return the draft model of the `model` in a folder. Raises EngineError where one of them has no paged cache."""
    path = folder / DRAFT
    draft_config = load_config(path, is_draft=True)
    if draft_config.architectures[0] in DRAFTS_FOR:
        return create_assistant(draft_config, tensors, model, load_config(folder))
    options: Any = {"arithmetic": config.arithmetic, "keeps_devices": config.keeps_devices}
    draft = create_any_model(draft_config, tensors, torch.device(config.device), **options)
    for one, where in ((model, folder), (draft, path)):
        is_paged = isinstance(one, LoadedModel) or (isinstance(one, StockLanguageModel) and not one.spec.recurrent)
        if not is_paged or (isinstance(one, LoadedModel) and one.ranks is not None):
            kind = "that several ranks compute" if isinstance(one, LoadedModel) else "with a cache of its own"
            raise EngineError(f"{where}: a model {kind} has no draft model, and is none")
    assert not isinstance(draft, OwnCacheModel)
    return draft


def draft_runner(draft: DraftedModel, plan: CachePlan, config: LLMEngineConfig) -> ModelRunner | None:
    """Return the runner of a draft model with a cache of its own, of as many blocks as the large one's."""
    return None if isinstance(draft, AssistantModel) else ModelRunner(draft, plan.num_blocks, config.kv_dtype)


def open_draft(
    draft: DraftedModel,
    model: AnyModel,
    runner: ModelRunner | OwnCacheRunner,
    plan: CachePlan,
    config: LLMEngineConfig,
) -> DraftModel:
    """Return the draft model of a large one, which the `runner` runs."""
    if own := draft_runner(draft, plan, config):
        proposals = OwnProposals(
            own,
            vocab_size=model.spec.vocab_size,
            max_positions=draft.spec.max_positions,
            max_tokens=config.max_num_batched_tokens,
        )
        return DraftModel(proposals, draft.spec.max_positions, follower=proposals)
    assert isinstance(draft, AssistantModel)
    assert isinstance(runner, ModelRunner)
    return DraftModel(AssistantProposals(draft, runner), draft.spec.max_positions)


class Proposals(Protocol):
    """The source of a draft model's tokens."""

    def prepare(self, plan: StepPlan) -> None:
        """Make ready for a step, before its blocks are used."""

    def propose(self, asked: Collection[Chunk], pickers: Items[TokenPicker]) -> list[tuple[int, ...]]:
        """Return tokens for the places that chunks propose, in order, as their pickers choose; at most as many."""


class DraftModel:
    """Fills in the proposals of a step, for all of its sequences together."""

    def __init__(self, proposals: Proposals, max_positions: int, *, follower: OwnProposals | None = None) -> None:
        """`follower` are proposals with a cache of their own, which keeps up with the steps."""
        self._proposals, self._max_positions, self._follower = proposals, max_positions, follower
        self.cost = DraftCost()

    def pace(self, limit: int) -> DraftPace:
        """Return the proposer of a completion that has with its prompt at most `limit` tokens."""
        return DraftPace(min(limit, self._max_positions), self.cost)

    def follow(self, chunks: Collection[Chunk]) -> None:
        """Let a cache of its own keep up with a step that was computed."""
        if self._follower is None:
            return
        try:
            with panics_as_errors():
                self._follower.follow(chunks)
        except Exception:  # its blocks then have other contents, as any that it did not compute
            logger.exception("the draft model failed in a step of %d chunks", len(chunks))

    def fill(self, plan: StepPlan, picker_of: Callable[[Sequence], TokenPicker]) -> StepPlan:
        """Return a step with tokens in the places of its proposals; without these if the draft fails.

        They are drawn with the numbers with which the sequence's own picker draws its next tokens: where both models
        find the same tokens likely, these draws agree far more often than with the likeliest token. Blocks are copied
        first, as the step says.
        """
        self._proposals.prepare(plan)
        asked = [chunk for chunk in plan.chunks if chunk.proposed]
        if not asked:
            return plan
        try:
            with panics_as_errors():
                made = self._proposals.propose(asked, [picker_of(chunk.sequence).ahead() for chunk in asked])
                found = {id(chunk): tokens for chunk, tokens in zip(asked, made, strict=True)}
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


class OwnProposals:
    """Proposals of a model with a cache of its own, beside that of the large one."""

    def __init__(self, runner: ModelRunner, *, vocab_size: int, max_positions: int, max_tokens: int) -> None:
        """The large model has tokens below `vocab_size`; the draft knows `max_positions`, and computes `max_tokens`."""
        self._runner = runner
        self._vocab_size, self._max_positions, self._max_tokens = vocab_size, max_positions, max_tokens

    def prepare(self, plan: StepPlan) -> None:
        """Copy the blocks that the step copies."""
        if plan.copies:
            self._runner.copy_blocks(plan.copies)

    def follow(self, chunks: Iterable[Chunk]) -> None:
        """Compute the prompts' parts of a step that the large model has computed."""
        parts = []
        for chunk in chunks:
            sequence = chunk.sequence
            is_wanted = isinstance(sequence.proposer, DraftPace) and chunk.end <= self._max_positions
            if is_wanted and not chunk.proposed and chunk.num_tokens > 1:
                parts.append(Chunk(_twin(sequence), sequence.num_drafted_tokens, chunk.end, is_last=False))
                sequence.num_drafted_tokens = chunk.end
        self._run(parts)

    def propose(self, asked: Collection[Chunk], pickers: Items[TokenPicker]) -> list[tuple[int, ...]]:
        """Return tokens, each behind those before it."""
        found: list[tuple[int, ...]] = [()] * len(asked)
        parts = []
        for chunk in asked:
            sequence = chunk.sequence
            parts.append(Chunk(_twin(sequence), sequence.num_drafted_tokens, len(sequence), is_last=True))
        for place in range(max(len(chunk.proposed) for chunk in asked)):
            going = [number for number, chunk in enumerate(asked) if place < len(chunk.proposed)]
            logits = torch.cat(self._run([parts[number] for number in going]))
            drawn = _chosen(logits[:, : self._vocab_size], [pickers[number] for number in going])
            for number, token in zip(going, drawn, strict=True):
                found[number] += (token,)
                end = parts[number].end
                parts[number] = replace(parts[number], start=end, end=end + 1, proposed=(token,))
        for chunk in asked:
            chunk.sequence.num_drafted_tokens = len(chunk.sequence)
        return found

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


class AssistantProposals:
    """Proposals of an assistant, which reads the cache and the states of the large model."""

    def __init__(self, model: AssistantModel, runner: ModelRunner) -> None:
        self._model, self._runner = model, runner

    def prepare(self, plan: StepPlan) -> None:
        """Let the step keep the states from which the next proposals go on."""
        for chunk in plan.chunks:
            if chunk.sequence.last_states is None and isinstance(chunk.sequence.proposer, DraftPace):
                chunk.sequence.last_states = LastStates()

    def propose(self, asked: Collection[Chunk], pickers: Items[TokenPicker]) -> list[tuple[int, ...]]:
        """Return tokens of the sequences whose last computed token has a known state."""
        states = [_last_state(chunk.sequence) for chunk in asked]
        known = [(chunk.sequence, state) for chunk, state in zip(asked, states, strict=True) if state is not None]
        if not known:
            return [()] * len(asked)
        device, ends = known[0][1].device, [len(sequence) - 1 for sequence, _ in known]
        before = [
            Chunk(_twin(sequence, num_prompt_tokens=0), end - 1, end, is_last=True)
            for (sequence, _), end in zip(known, ends, strict=True)
        ]
        found = self._model.propose(
            torch.tensor([sequence.token_ids[-1] for sequence, _ in known], device=device),
            torch.stack([state for _, state in known]),
            torch.tensor(ends, device=device),
            self._runner.plan_reading(before),
            max(len(chunk.proposed) for chunk in asked),
            partial(_chosen, pickers=[one for one, state in zip(pickers, states, strict=True) if state is not None]),
        )
        rows = iter(found.tolist())
        return [
            () if state is None else tuple(next(rows)[: len(chunk.proposed)])
            for chunk, state in zip(asked, states, strict=True)
        ]


def _chosen(logits_NV: torch.Tensor, pickers: Items[TokenPicker]) -> list[int]:
    """Return the token of each row that its picker chooses; the first one where the logits are not finite."""
    outcomes = sample(logits_NV.float().contiguous(), pickers)
    return [one.token_id if isinstance(one, SampledToken) else 0 for one in outcomes]


def _last_state(sequence: Sequence) -> torch.Tensor | None:
    """Return the large model's state from which the last token was drawn; None where the last step has not made it."""
    return None if sequence.last_states is None else sequence.last_states.at(len(sequence) - 2)


def _with_tokens(chunk: Chunk, tokens: tuple[int, ...]) -> Chunk:
    """Return a chunk with these tokens in place of those proposed."""
    return replace(chunk, end=chunk.end - len(chunk.proposed) + len(tokens), proposed=tokens)


def _twin(sequence: Sequence, num_prompt_tokens: int | None = None) -> Sequence:
    """Return a sequence with the tokens and blocks of another, of which nothing but these is asked."""
    if sequence.slots is None:
        sequence.slots = SlotTable()
    return Sequence(
        sequence.request_id,
        sequence.token_ids,
        sequence.num_prompt_tokens if num_prompt_tokens is None else num_prompt_tokens,
        block_table=sequence.block_table,
        slots=sequence.slots,
    )
