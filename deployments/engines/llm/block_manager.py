"""The blocks of the KV cache as numbers: a list of free ones and a reference count for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

BLOCK_SIZE = 16  # tokens


def blocks_for(num_tokens: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)


class BlockPool:
    """Hands out block numbers 0 to `num_blocks - 1`.

    A block is free when nobody references it. `allocate` gives blocks with one reference, `retain_blocks` adds one
    (a second sequence that shares a prefix), `release_blocks` takes one away.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks, each with one reference. The caller has looked at `num_free` first.

        Raises:
            ValueError: fewer than `count` blocks are free; nothing was taken.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def retain_blocks(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that are in use."""
        for block in blocks:
            self._check_in_use(block)
            self._references[block] += 1

    def release_blocks(self, blocks: Iterable[int]) -> None:
        """Take a reference away; blocks without any are free again.

        Raises:
            ValueError: a block is free already.
        """
        for block in blocks:
            self._check_in_use(block)
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def _check_in_use(self, block: int) -> None:
        if self._references[block] == 0:
            raise ValueError(f"block {block} is not in use")
