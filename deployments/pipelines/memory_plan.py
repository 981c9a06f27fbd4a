"""Where the intermediate tensors of a segment lie: one arena, shared by those that are never alive together. Pure.

Greedy by size, as ggml's allocator and TFLite's memory planner do it: the largest first, each at the lowest place
that is free for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ALIGNMENT_BYTES = 256  # what CUDA's allocator gives too, so kernels may load vectors


@dataclass(frozen=True, slots=True)
class BufferNeed(Generic[KeyT]):
    """A tensor of at most `nbytes`, written by step `first` and read last by step `last` (positions, inclusive)."""

    key: KeyT
    nbytes: int
    first: int
    last: int

    def meets(self, other: BufferNeed[KeyT]) -> bool:
        """Whether both are alive during some step. What a step reads lives while it writes."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class MemoryPlan(Generic[KeyT]):
    """Offsets into an arena of `nbytes`. `live_bytes`: the most that is alive at once, which no plan can go below."""

    offsets: dict[KeyT, int]
    nbytes: int
    live_bytes: int


def plan_memory(needs: Sequence[BufferNeed[KeyT]]) -> MemoryPlan[KeyT]:
    offsets: dict[KeyT, int] = {}
    placed: list[BufferNeed[KeyT]] = []
    for need in sorted(needs, key=lambda need: (-need.nbytes, need.first)):
        neighbours = sorted((offsets[other.key], other.nbytes) for other in placed if other.meets(need))
        offset = 0
        for start, nbytes in neighbours:
            if offset + need.nbytes <= start:
                break
            offset = max(offset, _aligned(start + nbytes))
        offsets[need.key] = offset
        placed.append(need)
    end = max((offsets[need.key] + need.nbytes for need in needs), default=0)
    return MemoryPlan(offsets, end, _most_alive(needs))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _most_alive(needs: Sequence[BufferNeed[KeyT]]) -> int:
    return max((sum(n.nbytes for n in needs if n.first <= at <= n.last) for at in {n.first for n in needs}), default=0)
