"""The slots of recurrent states as numbers: those of a sequence's next step, and those that are found again."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from deployments.engines.llm.sequences.block_manager import BLOCK_SIZE, BlockPool

if TYPE_CHECKING:
    from deployments.engines.llm.sequences.sequence import Chunk, Sequence

SLOTS_PER_SEQUENCE = 3  # for each running one: its state, its next one, and one at a cut of a prompt


class StateSlots:
    """Gives sequences slots for their states, in a step each a new one, and keeps those of beginnings of prompts.

    A prompt is cut at multiples of `piece_tokens`. The state after the last of these is kept under the key of the
    block that ends there, for sequences that go on from this prompt, and that after its common beginning with another,
    for a third with the same beginning. If `piece_tokens` is 0, a prompt is computed in one piece and nothing is kept.
    """

    def __init__(self, max_num_seqs: int, piece_tokens: int) -> None:
        self._pool = BlockPool(SLOTS_PER_SEQUENCE * max_num_seqs)
        self._max_num_seqs, self._piece_tokens = max_num_seqs, piece_tokens

    @property
    def least_tokens(self) -> int:
        """Return the least tokens of a prompt for a step, unless the prompt ends before."""
        return max(1, self._piece_tokens)

    def find_state(self, sequence: Sequence, keys: Items[bytes]) -> int:
        """Give a sequence the state after as many of these first blocks as possible; return their number."""
        blocks = self._piece_tokens // BLOCK_SIZE
        if not blocks:
            return 0
        most = len(keys) // blocks * blocks
        sequence.state_cut = most * BLOCK_SIZE
        for count in range(most, 0, -blocks):
            if slots := self._pool.find_prefix([keys[count - 1]]):
                self._pool.share_blocks(slots)
                (sequence.state_slot,) = slots
                return count
        return 0

    def chunk_end(self, sequence: Sequence, start: int, end: int) -> int:
        """Return the end of a chunk that may reach to `end`. Each token of a completion is a chunk of its own."""
        prompt_end, piece = sequence.num_prompt_tokens, self._piece_tokens
        if start >= prompt_end:
            return start + 1
        if end >= prompt_end or not piece:
            return prompt_end
        return min(max(end // piece, start // piece + 1) * piece, prompt_end)

    def reserve(self, sequence: Sequence, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return the places in a chunk after which a state is kept, the last of them its end, each with a slot."""
        places, piece, prompt_end = [end], self._piece_tokens, sequence.num_prompt_tokens
        if piece and start < prompt_end:
            cuts = sorted({sequence.state_cut, (prompt_end - 1) // piece * piece})
            # Slots needed for each sequence's next state are not taken for states that may be useful.
            if self._pool.num_free > self._max_num_seqs + len(cuts):
                places = [place for place in cuts if start < place < end] + places
        sequence.next_states = tuple(zip(places, self._pool.allocate(len(places)), strict=True))
        return sequence.next_states

    def settle(self, sequence: Sequence, chunk: Chunk) -> None:
        """Let a sequence go on after a computed chunk; its blocks have their keys."""
        *before, (_, slot) = chunk.kept_states
        for place, one in chunk.kept_states:
            count = place // BLOCK_SIZE
            is_cut = bool(self._piece_tokens) and place % self._piece_tokens == 0
            if is_cut and place <= sequence.num_prompt_tokens and count <= len(sequence.block_keys):
                self._pool.publish(one, sequence.block_keys[count - 1])
        old = [] if sequence.state_slot is None else [sequence.state_slot]
        self._pool.release_blocks([*old, *(one for _, one in before)])
        sequence.state_slot, sequence.next_states = slot, ()

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a sequence go on from its parent's state."""
        if parent.state_slot is not None:
            self._pool.share_blocks([parent.state_slot])
            child.state_slot = parent.state_slot

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's states from it."""
        used = [] if sequence.state_slot is None else [sequence.state_slot]
        self._pool.release_blocks([*used, *(slot for _, slot in sequence.next_states)])
        sequence.state_slot, sequence.next_states = None, ()
