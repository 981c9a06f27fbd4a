"""Places of buffers in one block of memory, by when each is alive. Pure.

Greedily by size, as in TFLite's memory planner: the largest first, each at the lowest place that is free for as long as
it lives. Where that ends above the lower bound, a few more tries: first what has ended above it so far, the more often
the sooner, then what lives longest. One of them met the bound for each denoiser that was tried (`infra.bench plan`).
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Generic, TypeVar

ALIGNMENT_BYTES: Final = 256  # what CUDA's allocator gives too, so kernels may load vectors
MAX_TRIES: Final = 36
_MAX_PLACED: Final = 40_000  # buffers in all tries; thousands of them take most of a second each time

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Lifetime(Generic[KeyT]):
    """A buffer of at most `nbytes`, written at position `first` and read last at `last` (inclusive)."""

    key: KeyT
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class MemoryPlan(Generic[KeyT]):
    """Places of buffers: offsets into an arena of `nbytes`.

    `live_bytes` is the most that is alive at once, a lower bound of every plan.
    """

    offsets: Mapping[KeyT, int]
    nbytes: int
    live_bytes: int


def place(lifetimes: Sequence[Lifetime[KeyT]]) -> MemoryPlan[KeyT]:
    """Return places for all buffers, whose keys differ; those that are alive at one position do not overlap."""
    live_bytes = _most_alive(lifetimes)
    # What a perfect plan may take: places are aligned, sizes are not.
    bound = _most_alive([Lifetime(one.key, _aligned(one.nbytes), one.first, one.last) for one in lifetimes])
    order = by_size = sorted(lifetimes, key=lambda one: (-one.nbytes, one.first))
    best = offsets, end = _placed(order)
    times_above: Counter[KeyT] = Counter()
    for _ in range(min(MAX_TRIES, _MAX_PLACED // max(1, len(order)))):
        if best[1] <= bound:
            break
        times_above.update(one.key for one in order if offsets[one.key] + one.nbytes > bound)
        order = sorted(by_size, key=lambda one: (-times_above[one.key], one.first - one.last, -one.nbytes))
        offsets, end = _placed(order)
        if end < best[1]:
            best = offsets, end
    return MemoryPlan(*best, live_bytes)


def _most_alive(lifetimes: Sequence[Lifetime[KeyT]]) -> int:
    """Return the most bytes that are alive at one position."""
    changes: Counter[int] = Counter()
    for one in lifetimes:
        changes[one.first] += one.nbytes
        changes[one.last + 1] -= one.nbytes
    return max(accumulate(nbytes for _, nbytes in sorted(changes.items())), default=0)


def _placed(order: Sequence[Lifetime[KeyT]]) -> tuple[dict[KeyT, int], int]:
    """Return the lowest free place of each, in this order, and where the last ends."""
    offsets: dict[KeyT, int] = {}
    placed: list[tuple[int, int, int, int]] = []  # by place: start, the next free place, first, last
    end = 0
    for one in order:
        offset = 0
        for start, after, first, last in placed:
            if first <= one.last and one.first <= last and after > offset:
                if offset + one.nbytes <= start:
                    break
                offset = after
        offsets[one.key] = offset
        end = max(end, offset + one.nbytes)
        bisect.insort(placed, (offset, _aligned(offset + one.nbytes), one.first, one.last))
    return offsets, end


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
