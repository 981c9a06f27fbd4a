"""Counts of a batcher, read as one JSON-able snapshot."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

RECENT: Final = 1024  # durations that percentiles are of


@dataclass(frozen=True, slots=True)
class DurationStats:
    """Durations in seconds: count, sum and maximum since the start; percentiles of the last `RECENT`, 0 at first."""

    count: int
    sum_s: float
    max_s: float
    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class BatchingStats:
    """A snapshot of counts since the start; `queued` and `running` are requests by priority, now.

    `requests` and `items` are those that were started; `batch_sizes` counts batches by their items. `retried` counts
    requests that ran again, alone or with fewer others, after their batch had failed; those runs are not among
    `batches`. `cancelled` ones were taken back while they waited or ran. `failed` ones got an error of the model.
    """

    batches: int
    requests: int
    items: int
    batch_sizes: dict[int, int]
    queue_wait: DurationStats
    execution: DurationStats
    rejected: int
    expired: int
    cancelled: int
    retried: int
    failed: int
    queued: dict[int, int]
    running: dict[int, int]


class _Durations:
    """Durations in seconds, cheap to add to."""

    def __init__(self) -> None:
        self._count, self._sum_s, self._max_s = 0, 0.0, 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def add_duration(self, duration_s: float) -> None:
        self._count += 1
        self._sum_s += duration_s
        self._max_s = max(self._max_s, duration_s)
        self._recent.append(duration_s)

    def duration_stats(self) -> DurationStats:
        recent = sorted(self._recent)
        return DurationStats(self._count, self._sum_s, self._max_s, _nearest(recent, 0.5), _nearest(recent, 0.99))


@dataclass(slots=True)
class BatchingCounts:
    """The counters behind `BatchingStats`."""

    batches: int = 0
    requests: int = 0
    items: int = 0
    rejected: int = 0
    expired: int = 0
    cancelled: int = 0
    retried: int = 0
    failed: int = 0
    batch_sizes: Counter[int] = field(default_factory=Counter)
    running: Counter[int] = field(default_factory=Counter)
    queue_wait: _Durations = field(default_factory=_Durations)
    execution: _Durations = field(default_factory=_Durations)

    def batching_stats(self, queued: Counter[int]) -> BatchingStats:
        """Return a snapshot. `queued`: requests by priority."""
        return BatchingStats(
            batches=self.batches,
            requests=self.requests,
            items=self.items,
            batch_sizes=dict(sorted(self.batch_sizes.items())),
            queue_wait=self.queue_wait.duration_stats(),
            execution=self.execution.duration_stats(),
            rejected=self.rejected,
            expired=self.expired,
            cancelled=self.cancelled,
            retried=self.retried,
            failed=self.failed,
            queued={priority: count for priority, count in sorted(queued.items()) if count},
            running={priority: count for priority, count in sorted(self.running.items()) if count},
        )


def _nearest(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all are not above."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0
