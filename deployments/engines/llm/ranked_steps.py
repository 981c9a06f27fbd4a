"""The steps of a language model that several ranks compute: rank 0 schedules and draws, and says each forward.

A follower has its slices of the weights and of the KV cache, whose blocks have the same numbers, and no requests: it
gets the tokens of each chunk and where they lie.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Any, Final

import torch

from deployments.engines.llm.loras import fitted_lora
from deployments.engines.llm.model_runner import ModelRunner
from deployments.engines.llm.models.registry import LoadedModel
from deployments.engines.llm.models.stock import StockLanguageModel
from deployments.engines.llm.sampling.prompt_logprobs import PromptLogprobs
from deployments.engines.llm.sequences.kv_cache import KvDtype
from deployments.engines.llm.sequences.sequence import Chunk, FittedLora, Sequence, SequenceLora
from deployments.engines.ranks.following import RankChannel
from deployments.engines.ranks.group import Plan, RankGroup, RankLost, forms_of
from weights.operations.adapters import LoraPair

_CHUNKS: Final = "chunks"
_COPIES: Final = "copies"
_GONE: Final = "gone"
_THREADS: Final = "threads"
_LORAS: Final = "loras"
_FORMS: Final = "forms"
_GONE_LORAS: Final = "gone_loras"
_TENSORS: Final = ("down", "up", "magnitude", "bias")  # of a pair
Copy = tuple[int, int]


@dataclass(slots=True)
class LoraWriter:
    """Says the LoRAs that followers do not have yet, whole: each rank takes its part."""

    _said: weakref.WeakValueDictionary[int, FittedLora] = field(default_factory=weakref.WeakValueDictionary)
    _serials: set[int] = field(default_factory=set)  # that followers keep

    def plan(self, chunks: Collection[Chunk]) -> tuple[Plan, list[torch.Tensor]]:
        """Return the part of a step's plan, and the tensors that are spread behind it."""
        used = {lora.fitted.serial: lora.fitted for chunk in chunks for lora in chunk.sequence.loras}
        gone = sorted(self._serials.difference(self._said.keys(), used))
        new = {serial: lora for serial, lora in used.items() if serial not in self._serials}
        self._said.update(new)
        self._serials = (self._serials | new.keys()).difference(gone)
        said, tensors = [], list[torch.Tensor]()
        for serial, lora in new.items():
            pairs = []
            for path, pair in lora.undivided.items():
                fields = [getattr(pair, name) for name in _TENSORS]
                pairs.append([path, pair.scale, pair.by_input, [one is not None for one in fields]])
                tensors += [one for one in fields if one is not None]
            said.append([serial, pairs])
        return {_LORAS: said, _FORMS: forms_of(tensors), _GONE_LORAS: gone}, tensors


@dataclass(slots=True)
class LoraReader:
    """Keeps a follower's parts of the LoRAs that rank 0 says."""

    _model: LoadedModel | StockLanguageModel
    _group: RankGroup
    _fitted: dict[int, FittedLora] = field(default_factory=dict)

    def read(self, plan: Plan) -> Mapping[int, FittedLora]:
        """Return all LoRAs that the steps may name, by serial, with those of this plan. Raises RankLost."""
        for serial in plan[_GONE_LORAS]:
            self._fitted.pop(serial, None)
        tensors = iter(self._group.receive(plan[_FORMS]))
        for serial, said in plan[_LORAS]:
            pairs = {}
            for path, scale, by_input, are_given in said:
                fields = {name: next(tensors) for name, is_given in zip(_TENSORS, are_given, strict=True) if is_given}
                pairs[path] = LoraPair(**fields, scale=scale, by_input=by_input)
            self._fitted[serial] = fitted_lora(self._model, serial, pairs)
        return self._fitted


@dataclass(slots=True)
class StepWriter:
    """Makes plans of chunks. Each sequence has a number, and of its blocks those are said that are new since its last
    chunk."""

    _numbers: weakref.WeakKeyDictionary[Sequence, int] = field(default_factory=weakref.WeakKeyDictionary)
    _said: dict[int, list[int]] = field(default_factory=dict)  # blocks by number
    _next: Iterator[int] = field(default_factory=count)

    def plan(self, chunks: Collection[Chunk], copies: Collection[Copy]) -> Plan:
        """Return the plan of a step, whose `copies` come first."""
        said = [self._chunk(chunk) for chunk in chunks]
        live = set(self._numbers.values())
        gone = [number for number in self._said if number not in live]
        for number in gone:
            del self._said[number]
        return {_CHUNKS: said, _COPIES: list(copies), _GONE: gone}

    def _chunk(self, chunk: Chunk) -> list[Any]:
        sequence = chunk.sequence
        number = self._numbers.get(sequence)
        if number is None:
            number = self._numbers[sequence] = next(self._next)
        table, said = sequence.block_table, self._said.get(number, [])
        num_known = len(said) if table[: len(said)] == said else 0
        self._said[number] = list(table)
        scores = sequence.prompt_logprobs
        return [
            number,
            num_known,
            table[num_known:],
            chunk.start,
            chunk.token_ids,
            len(chunk.proposed),
            chunk.num_logits,
            sequence.num_prompt_tokens,
            None if scores is None else scores.end,
            [[lora.key, lora.fitted.serial, lora.scale] for lora in sequence.loras],
        ]


class _UnreadLogprobs(PromptLogprobs):
    """Those of a prompt on a follower, whose part of the logits goes to rank 0."""

    def note_logits(self, position: int, logits_NV: torch.Tensor) -> None:
        """Note nothing."""


@dataclass(slots=True)
class StepReader:
    """Makes chunks of plans."""

    _blocks: dict[int, list[int]] = field(default_factory=dict)  # by number of a sequence

    def chunks(self, plan: Plan, loras: Mapping[int, FittedLora] = MappingProxyType({})) -> list[Chunk]:
        """Return the chunks of a step, whose sequences have some of these LoRAs."""
        for number in plan[_GONE]:
            self._blocks.pop(number, None)
        return [self._chunk(loras, *one) for one in plan[_CHUNKS]]

    def _chunk(
        self,
        loras: Mapping[int, FittedLora],
        number: int,
        num_known: int,
        new_blocks: list[int],
        start: int,
        token_ids: list[int],
        num_proposed: int,
        num_logits: int,
        num_prompt_tokens: int,
        scored_end: int | None,
        own_loras: list[tuple[str, int, float]],
    ) -> Chunk:
        blocks = self._blocks[number] = [*self._blocks.get(number, [])[:num_known], *new_blocks]
        num_own = len(token_ids) - num_proposed
        sequence = Sequence(
            str(number),
            [0] * start + token_ids[:num_own],  # only a chunk's own tokens are read
            num_prompt_tokens,
            prompt_logprobs=None if scored_end is None else _UnreadLogprobs((0,) * (scored_end + 1), 0),
            block_table=blocks,
            loras=tuple(SequenceLora(key, loras[serial], scale) for key, serial, scale in own_loras),
        )
        end, proposed = start + len(token_ids), tuple(token_ids[num_own:])
        return Chunk(sequence, start, end, num_logits > 0, proposed=proposed)


class LeadingRunner(ModelRunner):
    """The runner of rank 0. A step that fails on one rank leaves the others within it: the group ends (RankLost)."""

    def __init__(
        self, model: LoadedModel | StockLanguageModel, num_blocks: int, kv_dtype: KvDtype, ranks: RankChannel
    ) -> None:
        super().__init__(model, num_blocks, kv_dtype)
        self._ranks, self._writer, self._loras = ranks, StepWriter(), LoraWriter()
        self._copies: list[Copy] = []  # that the followers do not know of

    def copy_blocks(self, copies: Iterable[Copy]) -> None:
        """Copy whole blocks of the KV cache, each (from, to) in this order; the followers do with the next step."""
        own = list(copies)
        super().copy_blocks(own)
        self._copies += own

    def run(self, chunks: Collection[Chunk], check: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Run a step on all ranks; `check` may end it before it begins. Raises RankLost."""
        check()
        plan = self._writer.plan(chunks, self._copies)
        self._copies = []
        of_loras, tensors = self._loras.plan(chunks)
        self._ranks.say({**plan, **of_loras, _THREADS: torch.get_num_threads()})
        self._ranks.group.spread(tensors)
        try:
            return super().run(chunks)
        except RankLost:
            raise
        except Exception as error:
            raise self._ranks.broken(error) from error


class StepFollower:
    """The forwards of another rank than 0. Call it with each plan of its channel."""

    def __init__(self, runner: ModelRunner, loras: LoraReader) -> None:
        self._runner, self._reader, self._loras = runner, StepReader(), loras

    def __call__(self, plan: Plan) -> None:
        """Run a step as rank 0 does."""
        if torch.get_num_threads() != plan[_THREADS]:
            torch.set_num_threads(plan[_THREADS])
        loras = self._loras.read(plan)
        self._runner.copy_blocks(plan[_COPIES])
        self._runner.run(self._reader.chunks(plan, loras))
