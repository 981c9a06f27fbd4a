"""Which texts share a forward: as few forwards as pay off, with little padding. Pure: lengths in, groups out.

Cost model. A forward over n texts padded to L tokens works on n * L token positions, and costs as much as
`overhead_tokens` more positions for being a forward at all: weights are read once per forward, kernels are launched
once. Attention's L^2 is left out, which for encoders of up to 512 tokens is small beside the linear layers. Sorted
by length, an optimal partition is contiguous, so dynamic programming over the distinct lengths finds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class ForwardLimits:
    """`max_padding` is the share of a plan's positions that may be padding; 0 merges equal lengths only.

    `max_tokens` bounds the positions of one forward, and with them its activations; a longer text goes alone. With 1
    all do, and then outputs do not depend on batch-mates in a single bit.
    """

    max_padding: float = 0.25
    max_tokens: int = 16384
    overhead_tokens: int = 64

    def __post_init__(self) -> None:
        if not (0 <= self.max_padding < 1 and self.max_tokens >= 1 and self.overhead_tokens >= 0):
            raise ValueError(f"{self}: expected max_padding in [0, 1), max_tokens >= 1 and overhead_tokens >= 0")


DEFAULT_LIMITS = ForwardLimits()


def plan_forwards(lengths: Sequence[int], limits: ForwardLimits = DEFAULT_LIMITS) -> tuple[tuple[int, ...], ...]:
    """Group the indices into `lengths` (tokens, each at least 1): every index in one group, short texts first.

    Padding is at most `max_padding` of all positions, and never so much that one forward more would cost less.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    # ends[k]: how many texts are at most as long as the k-th distinct length.
    ends = [place for place in range(1, len(order) + 1) if place == len(order) or _grows(lengths, order, place)]
    groups = []
    for begin, end in _partition([lengths[index] for index in order], ends, limits):
        groups += _split(order[begin:end], lengths[order[end - 1]], limits.max_tokens)
    return tuple(groups)


def _grows(lengths: Sequence[int], order: Sequence[int], place: int) -> bool:
    return lengths[order[place]] > lengths[order[place - 1]]


def _partition(lengths: Sequence[int], ends: Sequence[int], limits: ForwardLimits) -> list[tuple[int, int]]:
    """Ranges of the ascending `lengths` with the lowest cost; a range begins and ends at 0 or one of `ends`."""
    bounds = [0, *ends]
    tokens = [0, *accumulate(lengths)]
    cost, previous = [0.0], [0]
    for end in bounds[1:]:
        longest, best, chosen = lengths[end - 1], math.inf, 0
        for number, begin in enumerate(bounds[: len(cost)]):
            positions = (end - begin) * longest
            if positions - (tokens[end] - tokens[begin]) > limits.max_padding * positions:
                continue
            if (total := cost[number] + limits.overhead_tokens + positions) < best:
                best, chosen = total, number
        cost.append(best)
        previous.append(chosen)
    ranges, number = [], len(bounds) - 1
    while number:
        ranges.append((bounds[previous[number]], bounds[number]))
        number = previous[number]
    return ranges[::-1]


def _split(group: Sequence[int], longest: int, max_tokens: int) -> list[tuple[int, ...]]:
    """Parts of nearly one size. No text gets more padding by it: a part's longest is at most the group's."""
    num_parts = math.ceil(len(group) / max(1, max_tokens // longest))
    cuts = [len(group) * part // num_parts for part in range(num_parts + 1)]
    return [tuple(group[begin:end]) for begin, end in pairwise(cuts)]
