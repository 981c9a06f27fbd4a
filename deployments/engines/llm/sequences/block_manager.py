"""The blocks of the KV cache as numbers: their users, and those that can be reused for their contents."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

BLOCK_SIZE: Final = 16  # tokens


def blocks_for(num_tokens: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)


def block_key(before: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the identity of a full block's keys and values: of its tokens after all earlier ones.

    `before` is the key of the previous block. For the first one it is the key of the adapters.
    """
    return hashlib.blake2b(before + np.asarray(token_ids, np.int64).tobytes(), digest_size=16).digest()


class BlockPool:
    """Hands out block numbers 0 to `num_blocks - 1` and counts the users of each.

    A full block can be published under its key. Without users it stays findable until its room is
    needed; the least recently used goes first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._uses = [0] * num_blocks
        self._is_free = np.ones(num_blocks, bool)  # unused, without contents to find
        self._num_free = num_blocks
        self._unused: OrderedDict[int, None] = OrderedDict()  # published and unused, the oldest first
        self._keys: dict[int, bytes] = {}  # of published blocks
        self._published: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Return the number of blocks that `allocate` could hand out."""
        return self._num_free + len(self._unused)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Allocate `count` blocks. The caller has looked at `num_free` first.

        They follow the block `after`, or each other, if possible: runs are read without a copy.

        Raises:
            ValueError: fewer than `count` blocks are free; nothing was taken.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} of {self.num_blocks} are free")
        while self._num_free < count:
            block, _ = self._unused.popitem(last=False)
            self._forget(block)
            self._is_free[block] = True
            self._num_free += 1
        blocks = self._run_behind(after, count)
        if len(blocks) < count:
            for first, end in self._other_runs(blocks):
                blocks += range(first, min(end, first + count - len(blocks)))
                if len(blocks) == count:
                    break
        for block in blocks:
            self._uses[block] = 1
        self._is_free[blocks] = False
        self._num_free -= count
        return blocks

    def share_blocks(self, blocks: Iterable[int]) -> None:
        """Count one more user of blocks that are in use or published."""
        for block in blocks:
            if self._uses[block] == 0:
                del self._unused[block]
            self._uses[block] += 1

    def is_shared(self, block: int) -> bool:
        """Return whether the block has several users, so that none of them may write into it."""
        return self._uses[block] > 1

    def release_blocks(self, blocks: Iterable[int]) -> None:
        """Count one user less of each block.

        Raises:
            ValueError: a block is free already.
        """
        for block in blocks:
            if self._uses[block] == 0:
                raise ValueError(f"block {block} is not in use")
            self._uses[block] -= 1
            if self._uses[block]:
                continue
            if block in self._keys:
                self._unused[block] = None
            else:
                self._is_free[block] = True
                self._num_free += 1

    def publish(self, block: int, key: bytes) -> None:
        """Publish a full block under its key. Of several with the same contents, the first stays."""
        if key not in self._published and block not in self._keys:
            self._published[key] = block
            self._keys[block] = key

    def find_prefix(self, keys: Iterable[bytes]) -> list[int]:
        """Return the published blocks of the keys, up to the first missing one."""
        found: list[int] = []
        for key in keys:
            block = self._published.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def _forget(self, block: int) -> None:
        del self._published[self._keys.pop(block)]

    def _run_behind(self, block: int | None, count: int) -> list[int]:
        """Return the free blocks that follow `block`, at most `count`."""
        first = self.num_blocks if block is None else block + 1
        end = first
        while end < self.num_blocks and end - first < count and self._is_free[end]:
            end += 1
        return list(range(first, end))

    def _other_runs(self, taken: list[int]) -> Iterator[tuple[int, int]]:
        """Yield the runs of free blocks without those taken, each from and to, the longest first."""
        is_free = self._is_free.view(np.int8).copy()
        is_free[taken] = 0
        edges = np.flatnonzero(np.diff(np.concatenate(([0], is_free, [0]))))
        starts, ends = edges[::2], edges[1::2]
        for place in np.argsort(starts - ends, kind="stable"):
            yield int(starts[place]), int(ends[place])
