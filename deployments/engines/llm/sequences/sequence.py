"""A sequence, its LoRAs and its state; the chunks of sequences that make a step."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from deployments.engines.llm.sampling.prompt_logprobs import PromptLogprobs
from deployments.engines.llm.sequences.block_manager import BLOCK_SIZE, block_key
from deployments.engines.llm.sequences.last_states import LastStates
from deployments.engines.llm.sequences.pooled_states import PooledStates
from deployments.engines.llm.sequences.slot_table import SlotTable
from deployments.engines.nn.lora import Pairs
from deployments.engines.records.prompt_images import PromptImages


@dataclass(slots=True, eq=False)
class SequenceState:
    """A class's state after the first `num_tokens` of a sequence: arguments of its next forward.

    `in_modules` are values of attributes that its modules have during a forward.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    num_tokens: int = 0
    in_modules: Items[Any] = ()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class FittedLora:
    """One adapter's pairs for the layers, and for the head, which has other rows.

    No other adapter ever has its `serial`. Where ranks divide the layers, rank 0 has the `undivided` pairs as well.
    """

    serial: int
    layers: Pairs
    head: Pairs
    undivided: Pairs = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SequenceLora:
    """A sequence's LoRA, and its strength. Equal ones change a token alike."""

    key: str
    fitted: FittedLora
    scale: float

    @property
    def place(self) -> tuple[str, float, int]:
        """Return its place among the LoRAs of a row: sums round, so they are always added in one order."""
        return self.key, self.scale, self.fitted.serial


class SequenceStatus(Enum):
    """The state of a sequence. A preempted sequence is WAITING again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Proposer(Protocol):
    """Proposes tokens of one sequence, which are checked in its next step."""

    def propose(self, token_ids: Items[int], most: int) -> tuple[int, ...]:
        """Return up to `most` tokens that may follow."""

    def note(self, num_proposed: int, num_right: int) -> None:
        """Take in the number of proposed tokens that were drawn."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """Mutable state of one completion.

    `token_ids` is the prompt followed by the completion. The keys and values of its first
    `num_computed_tokens` are in the KV cache, in the blocks of `block_table` in order; `num_cached_tokens` of them were
    there when the sequence came. `scope` is the key of the `loras`, on which they depend, too. `num_siblings`
    sequences will be forked from this one when its prompt is computed: their seats are kept. With `prompt_logprobs`, or
    if all of its hidden states are `pooled`, every token of the prompt is computed, even cached ones.
    A model with a cache of its own keeps its `state` here, for as long as the sequence has its blocks. One with
    recurrent layers has the state after the computed tokens in `state_slot`, and those that the next chunk leaves in
    `next_states`; it keeps one at `state_cut`. Some of the prompt's tokens stand for its `images`.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    scope: bytes = b""
    loras: tuple[SequenceLora, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    pooled: PooledStates | None = None
    images: PromptImages | None = None
    num_siblings: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # of the full blocks
    known_keys: list[bytes] = field(default_factory=list)  # of all requested blocks: tokens do not change
    state: SequenceState | None = None
    slots: SlotTable | None = None  # attention's table of its blocks
    state_slot: int | None = None
    state_cut: int = 0
    next_states: tuple[tuple[int, int], ...] = ()
    proposer: Proposer | None = None
    num_drafted_tokens: int = 0  # first ones that the draft model has computed
    last_states: LastStates | None = None  # for a draft model that reads them

    def __len__(self) -> int:
        return len(self.token_ids)

    def keys_of(self, count: int) -> list[bytes]:
        """Return the identities of its first `count` blocks, which are full. Each is computed once."""
        for place in range(len(self.known_keys), count):
            before = self.known_keys[-1] if place else self.scope
            start, end = place * BLOCK_SIZE, (place + 1) * BLOCK_SIZE
            if self.images is not None:
                before += self.images.identity(start, end)
            self.known_keys.append(block_key(before, self.token_ids[start:end]))
        return self.known_keys[:count]

    @property
    def findable_keys(self) -> list[bytes]:
        """Return the identities of the blocks that it may find computed: its last token is always computed.

        There are none while outputs of each token are wanted.
        """
        is_scored = self.prompt_logprobs is not None and not self.num_completion_tokens
        is_read = is_scored or (self.pooled is not None and self.pooled.needs_all)
        return [] if is_read else self.keys_of((len(self) - 1) // BLOCK_SIZE)

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens drawn so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens whose keys and values are still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a step: tokens `start` to `end` of a sequence, whose earlier tokens are in the KV cache.

    `is_last`: the chunk ends at the last known token, so a token is sampled after it, unless
    only hidden states are wanted. Recurrent layers begin with the `state` in a slot, None for the first
    token, and leave others: each the place in the sequence that it follows, and its slot. The last tokens may be
    `proposed` ones, which the sequence does not have: after each of them a token may be sampled, too.
    """

    sequence: Sequence
    start: int
    end: int
    is_last: bool
    state: int | None = None
    kept_states: tuple[tuple[int, int], ...] = ()
    proposed: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def token_ids(self) -> list[int]:
        return [*self.sequence.token_ids[self.start : self.end - len(self.proposed)], *self.proposed]

    @property
    def has_logits(self) -> bool:
        """Return whether a token is sampled after the chunk."""
        return self.is_last and self.sequence.pooled is None

    @property
    def num_logits(self) -> int:
        """Return the number of its last tokens that have logits."""
        return min(1 + len(self.proposed), self.num_tokens) * self.has_logits


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of a step: first whole blocks are copied, each (from, to) in this order, then the chunks are run.

    The first `num_decoding` chunks are tokens of decoding sequences, the others are parts of prompts.
    """

    chunks: tuple[Chunk, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    num_decoding: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of prompt tokens that the step computes."""
        return sum(chunk.num_tokens for chunk in self.chunks[self.num_decoding :])

    @property
    def num_proposed_tokens(self) -> int:
        """Return the number of proposed tokens that the step verifies."""
        return sum(len(chunk.proposed) for chunk in self.chunks)
