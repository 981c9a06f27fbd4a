"""The peer of the planner: ggml's allocator in one chunk, best fit in time. Written from its description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weights.memory.lifetimes import Lifetime

ALIGNMENT = 256


def best_fit_bytes(lifetimes: Sequence[Lifetime[Any]]) -> int:
    """Return the size of the arena: each goes into the smallest free block that holds it, else onto the end."""
    events = sorted(
        [(one.first, 1, n) for n, one in enumerate(lifetimes)] + [(one.last, 2, n) for n, one in enumerate(lifetimes)]
    )
    free: list[tuple[int, int]] = []  # start, end
    places: dict[int, tuple[int, int]] = {}
    end = 0
    for _, kind, number in events:
        if kind == 2:
            free = _merged([*free, places.pop(number)])
            continue
        nbytes = -(-lifetimes[number].nbytes // ALIGNMENT) * ALIGNMENT
        fitting = [block for block in free if block[1] - block[0] >= nbytes]
        if fitting:
            start, stop = min(fitting, key=lambda block: (block[1] - block[0], block[0]))
            free.remove((start, stop))
            free += [(start + nbytes, stop)] if start + nbytes < stop else []
        else:  # the last free block grows
            start = next((low for low, high in free if high == end), end)
            free = [block for block in free if block[0] != start]
            end = start + nbytes
        places[number] = start, start + nbytes
    return end


def _merged(blocks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(block for block in blocks if block[0] < block[1]):
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((start, end))
    return merged
