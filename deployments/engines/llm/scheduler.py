"""Continuous batching: which tokens of which sequences the next step computes. It never sees a tensor or a text."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from deployments.engines.llm.block_manager import BlockPool, blocks_for


class SequenceStatus(Enum):
    """The state of a sequence. A preempted sequence is WAITING again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one request.

    `token_ids` is the prompt followed by the completion. The keys and values of its first
    `num_computed_tokens` are in the KV cache, in the blocks of `block_table` in order.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a step: tokens `start` to `end` of a sequence, whose earlier tokens are in the KV cache.

    `is_last` tells that it reaches the end of what was known when it was made: then a token is sampled after
    it.
    """

    sequence: Sequence
    start: int
    end: int
    is_last: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class Scheduler:
    """Forms the batch of every step; requests join and leave between steps.

    - Waiting prompts come first, in order of arrival, as long as the token budget, a seat and blocks last.
      Nobody overtakes the first in line. Without a prompt to run, every running sequence decodes one token.
    - A prompt within the budget is never split; a longer one runs in chunks of the whole budget. So where a
      prompt is split does not depend on its batch-mates (nor, on the CPU, does the arithmetic: `model_runner.py`).
    - When blocks run out, the newest running sequence is preempted: it gives up its blocks, goes back to the
      head of the line and recomputes all its tokens later.

    One sequence of the greatest length must fit into the pool: then the oldest always proceeds.
    """

    def __init__(self, blocks: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._blocks = blocks
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add_sequence(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the line."""
        self._waiting.append(sequence)

    def schedule(self) -> tuple[Chunk, ...]:
        """Choose the next step's work; empty only when there is none. `complete` follows for each chunk."""
        return self._schedule_prefill() or self._schedule_decode()

    def complete(self, chunk: Chunk, token_id: int | None) -> None:
        """Note that `chunk` is in the KV cache and, when it was the last, append the sampled token."""
        chunk.sequence.num_computed_tokens = chunk.end
        if token_id is not None:
            chunk.sequence.token_ids.append(token_id)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks at once."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._release(sequence)

    def _schedule_prefill(self) -> tuple[Chunk, ...]:
        chunks: list[Chunk] = []
        budget = self._max_num_batched_tokens
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting[0]
            num_tokens = min(sequence.num_uncomputed_tokens, self._max_num_batched_tokens)
            if num_tokens > budget or not self._reserve(sequence):
                break
            start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
            chunks.append(Chunk(sequence, start, end, is_last=end == len(sequence)))
            budget -= num_tokens
            if not chunks[-1].is_last:
                break
            sequence.status = SequenceStatus.RUNNING
            self._running.append(self._waiting.popleft())
        return tuple(chunks)

    def _schedule_decode(self) -> tuple[Chunk, ...]:
        chunks: list[Chunk] = []
        # Preemption shortens the list from its end while it is walked from its head.
        while len(chunks) < len(self._running):
            sequence = self._running[len(chunks)]
            while not self._reserve(sequence):
                newest = self._running[-1]
                self._preempt(newest)
                if newest is sequence:
                    return tuple(chunks)
            chunks.append(Chunk(sequence, sequence.num_computed_tokens, len(sequence), is_last=True))
        return tuple(chunks)

    def _reserve(self, sequence: Sequence) -> bool:
        """Gives the sequence the blocks that all its known tokens need; False when there are not enough."""
        missing = blocks_for(len(sequence)) - len(sequence.block_table)
        if missing > self._blocks.num_free:
            return False
        sequence.block_table += self._blocks.allocate(missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        sequence.status = SequenceStatus.WAITING
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self._blocks.release_blocks(sequence.block_table)
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0
