"""The plan of forwards: texts share few forwards with little padding; and a counter of both. The plan is pure.

Cost model. A forward over n texts padded to L tokens works on n * L token positions, and costs as much as
`overhead_tokens` more positions for being a forward at all: weights are read once per forward, kernels are launched
once. Attention's L^2 is left out, which for encoders of up to 512 tokens is small beside the linear layers. Sorted
by length, an optimal partition is contiguous, so dynamic programming over the distinct lengths finds it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class ForwardLimits:
    """Bounds of the forwards of a plan.

    `max_padding` is the share of positions that may be padding; 0 batches equal lengths only. `max_tokens` bounds the
    positions of one forward, and so its activations; a longer text goes alone. With 1 every text does, and outputs
    do not depend on batch-mates in a single bit.
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

    Padding is at most `max_padding` of all positions, and never so much that another forward would cost less.
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
    """Return ranges of the ascending `lengths` with the lowest cost; a range begins and ends at 0 or one of `ends`."""
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


@dataclass(frozen=True, slots=True)
class EncodeStats:
    """Counts since the start. The positions of all forwards are the sum of the three kinds of tokens.

    `stock_padding_tokens` is padding that stock pipelines have too, and that models attend to; `batch_padding_tokens`
    brings the texts of one forward to one length, and is masked. `max_texts` is the largest forward.
    """

    forwards: int = 0
    texts: int = 0
    max_texts: int = 0
    text_tokens: int = 0
    stock_padding_tokens: int = 0
    batch_padding_tokens: int = 0


class EncodeCounter:
    """Adds up forwards of any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = EncodeStats()

    def count_forward(self, token_counts: Sequence[int], run_lengths: Sequence[int]) -> None:
        """Count one forward: tokens of each text, and its length with the stock padding."""
        with self._lock:
            old = self._stats
            self._stats = EncodeStats(
                forwards=old.forwards + 1,
                texts=old.texts + len(run_lengths),
                max_texts=max(old.max_texts, len(run_lengths)),
                text_tokens=old.text_tokens + sum(token_counts),
                stock_padding_tokens=old.stock_padding_tokens + sum(run_lengths) - sum(token_counts),
                batch_padding_tokens=old.batch_padding_tokens + len(run_lengths) * max(run_lengths) - sum(run_lengths),
            )

    def encode_stats(self) -> EncodeStats:
        """Return a snapshot of the counts."""
        return self._stats
