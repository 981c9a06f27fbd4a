"""Reports of where the time of a load went, stage by stage."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from weights.memory.host_pool import PoolStats
from weights.reading.strategy import Medium, ReadStrategy

# `copy`: from staging to its place, verified on the way. `verify`: where it was read into its place at once.
# `put`: room made for it in a node's store. `decode`: plain bytes made of a delta and its base.
Stage = Literal["open", "read", "decode", "verify", "copy", "put", "attach", "upload"]

_STREAMED: Final[frozenset[Stage]] = frozenset(
    {"open", "read", "decode", "verify", "copy", "put"}
)  # done by all threads at once


@dataclass(frozen=True, slots=True)
class StageFigures:
    """The work of one stage: `busy_s` summed over threads, `elapsed_s` while any thread was at it."""

    nbytes: int = 0
    busy_s: float = 0.0
    elapsed_s: float = 0.0

    @property
    def gbps(self) -> float:
        """10^9 bytes per second of `elapsed_s`."""
        return self.nbytes / self.elapsed_s / 1e9 if self.elapsed_s else 0.0


@dataclass(slots=True)
class _PhaseTotals:
    nbytes: int = 0
    busy_s: float = 0.0
    elapsed_s: float = 0.0
    num_threads: int = 0
    since_s: float = 0.0


class StageClock:
    """Collects figures from many threads."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now_s = clock
        self._lock = threading.Lock()
        self._stages: dict[Stage, _PhaseTotals] = {}

    @contextlib.contextmanager
    def measure(self, stage: Stage, nbytes: int = 0) -> Iterator[None]:
        """Count the time inside for the stage, and the bytes when it ends without an error."""
        with self._lock:
            # Read under the lock, so that a stage never ends before it began.
            start_s = self.now_s()
            running = self._stages.setdefault(stage, _PhaseTotals())
            if running.num_threads == 0:
                running.since_s = start_s
            running.num_threads += 1
        try:
            yield
        except BaseException:
            nbytes = 0
            raise
        finally:
            with self._lock:
                end_s = self.now_s()
                running.nbytes += nbytes
                running.busy_s += end_s - start_s
                running.num_threads -= 1
                if running.num_threads == 0:
                    running.elapsed_s += end_s - running.since_s

    def add_bytes(self, stage: Stage, nbytes: int) -> None:
        """Count bytes for a stage where they are known only when it is over."""
        with self._lock:
            self._stages.setdefault(stage, _PhaseTotals()).nbytes += nbytes

    def figures(self) -> dict[Stage, StageFigures]:
        with self._lock:
            return {
                stage: StageFigures(found.nbytes, found.busy_s, found.elapsed_s)
                for stage, found in self._stages.items()
            }


@dataclass(frozen=True)
class LoadReport:
    """A report on one load of `nbytes` in `wall_s` seconds. `peak_gbps`: what the medium's probe reached, or None.

    `sources`: bytes by where they came from, where that is more than one place.
    """

    what: str
    nbytes: int
    wall_s: float
    stages: dict[Stage, StageFigures]
    medium: Medium
    strategy: ReadStrategy
    verified: bool
    peak_gbps: float | None = None
    pool: PoolStats | None = None
    advice: str | None = field(default=None, kw_only=True)
    sources: dict[str, int] = field(default_factory=dict, kw_only=True)

    @property
    def gbps(self) -> float:
        return self.nbytes / self.wall_s / 1e9 if self.wall_s else 0.0

    @property
    def share_of_peak(self) -> float | None:
        """Share of the medium's measured rate, 0 to 1 mostly; None where nobody measured it."""
        return self.gbps / self.peak_gbps if self.peak_gbps else None

    @property
    def limiting_stage(self) -> Stage | None:
        """The stage where a thread spent most time: stages of one extent exclude each other, several overlap."""
        times_s: dict[Stage, float] = {
            stage: found.busy_s / self.strategy.num_threads if stage in _STREAMED else found.busy_s
            for stage, found in self.stages.items()
        }
        return max(times_s, key=lambda stage: times_s[stage], default=None)

    def with_stage(self, stage: Stage, nbytes: int, seconds: float) -> LoadReport:
        """Return the report with a later stage added: attaching tensors, uploading to a device."""
        figures = StageFigures(nbytes, seconds, seconds)
        return replace(self, stages={**self.stages, stage: figures}, wall_s=self.wall_s + seconds)

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-able record; rates in GB/s (10^9 bytes per second)."""
        return {
            "what": self.what,
            "nbytes": self.nbytes,
            "wall_s": self.wall_s,
            "gbps": self.gbps,
            "peak_gbps": self.peak_gbps,
            "share_of_peak": self.share_of_peak,
            "limiting_stage": self.limiting_stage,
            "verified": self.verified,
            "medium": {"kind": self.medium.kind, "fs_type": self.medium.fs_type, "device": self.medium.device},
            "strategy": str(self.strategy),
            "advice": self.advice,
            "sources": self.sources,
            "stages": {
                stage: {
                    "nbytes": found.nbytes,
                    "busy_s": found.busy_s,
                    "elapsed_s": found.elapsed_s,
                    "gbps": found.gbps,
                }
                for stage, found in self.stages.items()
            },
            "pool": self.pool
            and {
                "max_bytes": self.pool.max_bytes,
                "held_bytes": self.pool.held_bytes,
                "hit_rate": self.pool.hit_rate,
                "waits": self.pool.waits,
            },
        }
