"""The slots of a sequence's tokens in the paged cache, by its blocks."""

from __future__ import annotations

import torch

from deployments.engines.llm.sequences.block_manager import BLOCK_SIZE, blocks_for


class SlotTable:
    """The slots of a sequence's tokens, by the blocks that it had when it was last asked, the first of which follow
    each other. A step adds a block at most, and does not go through the others again.
    """

    def __init__(self) -> None:
        self._blocks: list[int] = []
        self._num_run = 0
        self._first_slots: torch.Tensor | None = None  # of the blocks, once requested

    def follow(self, blocks: list[int]) -> None:
        """Take over the present blocks."""
        known = self._blocks
        if blocks[: len(known)] != known:  # lists compare identical objects without a look into them
            known.clear()
            self._num_run, self._first_slots = 0, None
        for block in blocks[len(known) :]:
            if self._num_run == len(known) and (not known or block == known[-1] + 1):
                self._num_run += 1
            known.append(block)

    def run(self, num_tokens: int) -> int | None:
        """Return the first slot, if those of the first so many tokens are consecutive."""
        return self._blocks[0] * BLOCK_SIZE if num_tokens <= self._num_run * BLOCK_SIZE else None

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return the slots of the tokens `start` to `stop`."""
        if (first := self.run(stop)) is not None:
            return torch.arange(first + start, first + stop)
        first_block, last_block = start // BLOCK_SIZE, blocks_for(stop)
        slots = (self._known_slots()[first_block:last_block, None] + torch.arange(BLOCK_SIZE)).flatten()
        return slots[start - first_block * BLOCK_SIZE : stop - first_block * BLOCK_SIZE]

    def _known_slots(self) -> torch.Tensor:
        """Return the first slots of the blocks."""
        known = self._first_slots
        new = self._blocks if known is None else self._blocks[len(known) :]
        if new or known is None:
            added = torch.tensor(new) * BLOCK_SIZE
            known = self._first_slots = added if known is None else torch.cat([known, added])
        return known
