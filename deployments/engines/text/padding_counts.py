"""Counts of the text encoders' work on tokens, and on padding."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EncodeStats:
    """Since the start. Positions that forwards worked on are the sum of the three kinds of tokens.

    `stock_padding_tokens` is padding that stock pipelines have too, and that models attend to; `merge_padding_tokens`
    was added to bring the texts of one forward to one length, and is masked. `max_texts` is the largest forward.
    """

    forwards: int = 0
    texts: int = 0
    max_texts: int = 0
    text_tokens: int = 0
    stock_padding_tokens: int = 0
    merge_padding_tokens: int = 0


class EncodeCounter:
    """Adds up forwards of any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = EncodeStats()

    def add(self, token_counts: Sequence[int], run_lengths: Sequence[int]) -> None:
        """Count one forward: tokens of each text, and its length with the stock padding."""
        with self._lock:
            old = self._stats
            self._stats = EncodeStats(
                forwards=old.forwards + 1,
                texts=old.texts + len(run_lengths),
                max_texts=max(old.max_texts, len(run_lengths)),
                text_tokens=old.text_tokens + sum(token_counts),
                stock_padding_tokens=old.stock_padding_tokens + sum(run_lengths) - sum(token_counts),
                merge_padding_tokens=old.merge_padding_tokens + len(run_lengths) * max(run_lengths) - sum(run_lengths),
            )

    def stats(self) -> EncodeStats:
        return self._stats
