"""The blocks of the KV cache as numbers: which are free and which are in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

BLOCK_SIZE = 16  # tokens


def blocks_for(num_tokens: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)


class BlockPool:
    """Hands out block numbers 0 to `num_blocks - 1`, each to one sequence at a time."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._in_use: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks. The caller has looked at `num_free` first.

        Raises:
            ValueError: fewer than `count` blocks are free; nothing was taken.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.popleft() for _ in range(count)]
        self._in_use.update(blocks)
        return blocks

    def release_blocks(self, blocks: Iterable[int]) -> None:
        """Make blocks free again.

        Raises:
            ValueError: a block is free already.
        """
        for block in blocks:
            if block not in self._in_use:
                raise ValueError(f"block {block} is not in use")
            self._in_use.remove(block)
            self._free.append(block)
