"""Continuous batching: the choice of tokens and sequences for the next step, without tensors and texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from typing import Final

from deployments.engines.llm.prefill_pace import PrefillPace
from deployments.engines.llm.sequences.block_manager import BLOCK_SIZE, BlockPool, blocks_for
from deployments.engines.llm.sequences.proposals import with_proposals
from deployments.engines.llm.sequences.sequence import Chunk, Sequence, SequenceStatus, StepPlan
from deployments.engines.llm.state_slots import StateSlots

MAX_PREFILLING: Final = 4  # prompts that share a step when each could fill it
MIN_SHARE: Final = 16  # tokens of a prompt's share of a step


class Scheduler:
    """Forms the batch of every step; requests join and leave between steps.

    - Every running sequence decodes one token in every step. Beside them, prompts are computed in chunks: as many
      tokens in all as the `pace` allows, or the whole budget when nothing decodes or there is no pace to keep.
    - Prompts are seated in order of arrival, while seats and blocks for all their tokens last. The seated ones share
      the chunk evenly, and the others get the rest of a short one's share: it does not wait for a long one before it.
    - Blocks with the beginning of a prompt are shared. A shared block is copied before it is written. A prompt
      waits, and others may pass it, while a seated one computes the block that it would begin with.
    - When blocks run out, the newest seated sequence is preempted: it gives up its blocks, goes back to the
      head of the line and recomputes all its tokens later.

    At most `max_num_seqs` have a seat. One sequence of the greatest length must fit into the pool: then the oldest
    always proceeds. With `shares_completions` False only blocks of prompts are found again: those of completions were
    computed token by token, and differ from a prompt's by rounding. With `shares_prefixes` False no block is ever found
    again. For a model with recurrent layers, which has `states`, only blocks up to a kept state are found.
    """

    def __init__(
        self,
        blocks: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        pace: PrefillPace | None = None,
        shares_completions: bool = True,
        shares_prefixes: bool = True,
        states: StateSlots | None = None,
    ) -> None:
        self._blocks = blocks
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._pace = pace
        self._shares_completions, self._shares_prefixes = shares_completions, shares_prefixes
        self._states = states
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # all seated ones, the oldest first
        self._prefilling: deque[Sequence] = deque()  # seated ones in prefill, the next turn first
        self._copies: list[tuple[int, int]] = []
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Return the number of sequences without a seat or still in prefill."""
        return len(self._waiting) + len(self._prefilling)

    @property
    def num_running(self) -> int:
        """Return the number of decoding sequences."""
        return len(self._running) - len(self._prefilling)

    def add_sequence(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the line."""
        self._waiting.append(sequence)

    def fork(self, parent: Sequence, child: Sequence, token_id: int) -> None:
        """Seat a fork of a sequence whose prompt was just computed.

        It shares the parent's blocks. If no seat is free it comes first in line, and later finds the kept blocks of
        the prompt.
        """
        child.num_cached_tokens = parent.num_cached_tokens
        child.num_drafted_tokens = parent.num_drafted_tokens
        child.token_ids.append(token_id)
        parent.num_siblings -= 1
        if len(self._running) >= self.max_num_seqs:
            self._waiting.appendleft(child)
            return
        child.block_table, child.block_keys = list(parent.block_table), list(parent.block_keys)
        child.known_keys = list(parent.block_keys)
        child.num_computed_tokens = parent.num_computed_tokens
        self._blocks.share_blocks(child.block_table)
        if self._states is not None:
            self._states.fork(parent, child)
        child.status = SequenceStatus.RUNNING
        self._running.insert(self._running.index(parent) + 1, child)

    def schedule(self, other_step_s: float | None = None) -> StepPlan:
        """Choose the next step's work; empty only when there is none. `complete` follows for each chunk.

        `other_step_s` is the time of a step of another engine that waits for the device, None if none does.
        """
        self._copies = []
        chunks = self._schedule_decode()
        num_decoding = len(chunks)
        budget = self._max_num_batched_tokens - num_decoding
        if chunks and self._pace is not None:
            budget = min(budget, self._pace.choose_tokens(num_decoding))
        if other_step_s is not None and self._pace is not None:
            budget = min(budget, self._pace.tokens_beside(num_decoding, other_step_s, budget))
        self._seat_waiting(budget)
        prompts = self._schedule_prefill(budget)
        if budget > 0 and not prompts:  # with a budget of 0 the pace asks for a step that measures decoding alone
            room = budget if self._pace is None or not chunks else min(budget, self._pace.free_tokens(num_decoding))
            chunks = with_proposals(chunks, room, self._blocks) if self._states is None else chunks
        return StepPlan((*chunks, *prompts), tuple(self._copies), num_decoding)

    def complete(self, chunk: Chunk, token_id: int | None) -> None:
        """Note that `chunk` is in the KV cache and, when it was the last, append the sampled token.

        `accept` follows for each of its proposed tokens that is right.
        """
        sequence = chunk.sequence
        sequence.num_computed_tokens = chunk.end - len(chunk.proposed)
        self._publish_blocks(sequence)
        if self._states is not None:
            self._states.settle(sequence, chunk)
        if token_id is not None:
            sequence.token_ids.append(token_id)
        if chunk.is_last and sequence in self._prefilling:
            self._prefilling.remove(sequence)

    def accept(self, sequence: Sequence, token_id: int) -> None:
        """Note that the last token, a proposed one, is in the KV cache, and append the token sampled after it."""
        sequence.num_computed_tokens += 1
        self._publish_blocks(sequence)
        sequence.token_ids.append(token_id)

    def finish(self, sequence: Sequence) -> None:
        """Take out a sequence in any state, and free its blocks at once."""
        if sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        self._release(sequence)
        sequence.status = SequenceStatus.FINISHED

    def _schedule_decode(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        prefilling = set(map(id, self._prefilling))
        place = 0
        # Preemption shortens the list from its end while it is walked from its head.
        while place < len(self._running):
            sequence = self._running[place]
            place += 1
            if id(sequence) in prefilling:
                continue
            while not self._reserve(sequence):
                newest = self._running[-1]
                self._preempt(newest)
                if newest is sequence:
                    return chunks
            chunks.append(self._chunk(sequence, sequence.num_computed_tokens, len(sequence)))
        return chunks

    def _chunk(self, sequence: Sequence, start: int, end: int) -> Chunk:
        kept = () if self._states is None else self._states.reserve(sequence, start, end)
        return Chunk(sequence, start, end, end == len(sequence), sequence.state_slot, kept)

    def _seat_waiting(self, budget: int) -> None:
        """Seat the first in line, while more prompts would make better use of the step.

        Seats are kept for what is forked of a prompt, as many as there are: it does not wait until all are free.
        """
        seats = self.max_num_seqs - sum(1 + sequence.num_siblings for sequence in self._running)
        wanted = sum(sequence.num_uncomputed_tokens for sequence in self._prefilling)
        coming = {key for one in self._prefilling for key in self._next_keys(one)}
        place = 0  # all before this place in line wait for a block that is being computed
        while place < len(self._waiting) and seats > 0 and (len(self._prefilling) < MAX_PREFILLING or wanted < budget):
            sequence = self._waiting[place]
            found = self._blocks.find_prefix(keys := sequence.findable_keys)
            if place < self.max_num_seqs and not coming.isdisjoint(keys[len(found) : len(found) + 1]):
                place += 1
                continue
            if not self._reserve_prompt(sequence, found):
                break
            del self._waiting[place]
            seats -= 1 + sequence.num_siblings
            wanted += sequence.num_uncomputed_tokens
            sequence.status = SequenceStatus.RUNNING
            self._running.append(sequence)
            self._prefilling.append(sequence)
            coming.update(self._next_keys(sequence))

    def _schedule_prefill(self, budget: int) -> list[Chunk]:
        chunks = []
        sequences = list(self._prefilling)
        least = MIN_SHARE if self._states is None else max(MIN_SHARE, self._states.least_tokens)
        shares = _even_shares([one.num_uncomputed_tokens for one in sequences], budget, least)
        for sequence, share in zip(sequences, shares, strict=True):
            if share and budget > 0:
                start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + share
                if sequence.images is not None:
                    end = sequence.images.whole_end(start, end)
                if self._states is not None:
                    end = self._states.chunk_end(sequence, start, end)
                chunks.append(self._chunk(sequence, start, end))
                budget -= end - start
                self._prefilling.remove(sequence)
                self._prefilling.append(sequence)  # its next turn comes after the others'
        return chunks

    def _next_keys(self, sequence: Sequence) -> list[bytes]:
        """Return the key of the block that a seated prompt publishes next; none if others cannot use more of it."""
        count = sequence.num_computed_tokens // BLOCK_SIZE + 1
        is_found = self._states is None and count * BLOCK_SIZE <= self._num_published(sequence, len(sequence))
        return sequence.keys_of(count)[-1:] if is_found else []

    def _reserve_prompt(self, sequence: Sequence, found: list[int]) -> bool:
        """Give a waiting sequence the blocks of all its tokens; it computes at least the last one."""
        keys = sequence.findable_keys
        if self._states is not None:
            found = found[: self._states.find_state(sequence, keys[: len(found)])]
        self._blocks.share_blocks(found)
        missing = blocks_for(len(sequence)) - len(found)
        if missing > self._blocks.num_free:
            self._blocks.release_blocks(reversed(found))
            if self._states is not None:
                self._states.release(sequence)
            return False
        after = found[-1] if found else None
        sequence.block_table = found + self._blocks.allocate(missing, after)
        sequence.block_keys = keys[: len(found)]
        sequence.num_computed_tokens = sequence.num_drafted_tokens = len(found) * BLOCK_SIZE
        if not sequence.num_completion_tokens:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        return True

    def _reserve(self, sequence: Sequence) -> bool:
        """Give the sequence its own block for its last token; False when there is none."""
        table = sequence.block_table
        place = (len(sequence) - 1) // BLOCK_SIZE
        if place < len(table) and not self._blocks.is_shared(table[place]):
            return True
        if not self._blocks.num_free:
            return False
        (block,) = self._blocks.allocate(1, table[place - 1] if place else None)
        if place == len(table):
            table.append(block)
        else:
            self._copies.append((table[place], block))
            self._blocks.release_blocks([table[place]])
            table[place] = block
        return True

    def _publish_blocks(self, sequence: Sequence) -> None:
        keys = sequence.block_keys
        count = self._num_published(sequence, sequence.num_computed_tokens) // BLOCK_SIZE
        if count > len(keys):
            for place, key in enumerate(sequence.keys_of(count)[len(keys) :], len(keys)):
                keys.append(key)
                self._blocks.publish(sequence.block_table[place], key)

    def _num_published(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the sequence's first tokens others may reuse after `num_tokens` are computed."""
        if not self._shares_prefixes:
            return 0
        return num_tokens if self._shares_completions else min(num_tokens, sequence.num_prompt_tokens)

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.status = SequenceStatus.WAITING
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        """Take its seat and its blocks from a sequence."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            if sequence in self._prefilling:
                self._prefilling.remove(sequence)
        self._blocks.release_blocks(reversed(sequence.block_table))  # the end of a text is the least reused part
        sequence.block_table.clear()
        sequence.block_keys.clear()
        sequence.num_computed_tokens = 0
        sequence.state = None
        if self._states is not None:
            self._states.release(sequence)


def _even_shares(wanted: Items[int], budget: int, least: int = MIN_SHARE) -> list[int]:
    """Divide the budget as evenly as possible, with at most its wish and at least `least` for each.

    If the budget is too small for that, the first ones get theirs.
    """
    shares = [0] * len(wanted)
    max_shares = max(1, budget // least)
    while budget > 0:
        left = [place for place, most in enumerate(wanted) if shares[place] < most][:max_shares]
        if not left:
            break
        share = max(1, budget // len(left))
        for place in left:
            more = min(share, wanted[place] - shares[place], budget)
            shares[place] += more
            budget -= more
    return shares
