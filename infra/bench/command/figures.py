"""Figures from samples, and from what the kernel says about a process."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_Result = TypeVar("_Result")
OnProgress = Callable[[int, int], None]  # done, total
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)$")


class Parts:
    """Counts the parts of a measurement that are done, as their results go by."""

    def __init__(self, total: int, progress: OnProgress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0

    def done(self, result: _Result) -> _Result:
        """Return the result of a part that has just ended."""
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)
        return result


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that at least `share` of all are not above (nearest rank)."""
    if not samples or not 0 < share <= 1:
        raise ValueError(f"a percentile needs samples and a share in (0, 1]; got {len(samples)} and {share}")
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Return median, 95th percentile, range and number."""
    return {
        "p50": statistics.median(samples),
        "p95": percentile(samples, 0.95),
        "low": min(samples),
        "high": max(samples),
        "n": len(samples),
    }


def pss_bytes(smaps: str, file: str) -> int:
    """Return the proportional set size of mappings whose path contains `file`: a page n processes map counts 1/n.

    Format of `smaps` (and of `smaps_rollup`, whose one mapping is "[rollup]"): proc_pid_smaps(5).
    """
    total_kib, is_wanted = 0, False
    for line in smaps.splitlines():
        if (mapping := _MAPPING.match(line)) is not None:
            is_wanted = file in mapping[1]
        elif is_wanted and line.startswith("Pss:"):
            total_kib += int(line.split()[1])
    return total_kib * 1024


def private_bytes(rollup: str) -> int:
    """Return a process's own memory from /proc/<pid>/smaps_rollup text, without files and shared memory."""
    return int(next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss_Anon:"))) * 1024
