"""Leases: the ingresses that run jobs, by a clock that is never set. Pure.

An ingress sends heartbeats for its running jobs. Jobs of an ingress silent for `LOST_S` are begun again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

LOST_S: Final = 20.0  # without a heartbeat of the ingress


@dataclass(slots=True)
class _Lease:
    start: int
    key: str
    runner: str
    until_s: float
    is_batch: bool = False
    progress: int | None = None


class JobLeases:
    """The leases of the jobs that run, by id."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}

    def add(self, id_: str, start: int, key: str, runner: str, now_s: float, *, is_batch: bool = False) -> None:
        """Give a job to an ingress, "" for one not known yet."""
        self._leases[id_] = _Lease(start, key, runner, now_s + LOST_S, is_batch)

    def renew(self, runner: str, progress: Mapping[str, tuple[int, int | None]], now_s: float) -> tuple[str, ...]:
        """Take in an ingress's heartbeat for these starts, with their progress; return those with new progress."""
        changed = []
        for id_, (start, percent) in progress.items():
            lease = self._leases.get(id_)
            if lease is not None and lease.start == start:
                lease.runner, lease.until_s = runner, now_s + LOST_S
                if lease.progress != percent:
                    lease.progress = percent
                    changed.append(id_)
        return tuple(changed)

    def starts(self) -> dict[str, int]:
        """Return the start that each job runs by."""
        return {id_: lease.start for id_, lease in self._leases.items()}

    def held_by(self, runner: str, *, are_batches: bool = False) -> Counter[str]:
        """Return the numbers of an ingress's batches, or of its other jobs, by key."""
        held = (lease for lease in self._leases.values() if lease.runner == runner)
        return Counter(lease.key for lease in held if lease.is_batch == are_batches)

    def of(self, runner: str) -> list[tuple[str, int]]:
        """Return id and start of an ingress's jobs."""
        return [(id_, lease.start) for id_, lease in self._leases.items() if lease.runner == runner]

    def progress(self, id_: str) -> int | None:
        """Return the progress of a job in percent."""
        return lease.progress if (lease := self._leases.get(id_)) else None

    def lost(self, now_s: float) -> list[tuple[str, int]]:
        """Return id and start of the jobs whose ingress has been silent for too long."""
        return [(id_, lease.start) for id_, lease in self._leases.items() if lease.until_s < now_s]

    def drop(self, ids: Iterable[str]) -> None:
        """Forget the leases of jobs that no longer run."""
        for id_ in ids:
            self._leases.pop(id_, None)

    def drop_starts(self, starts: Iterable[tuple[str, int]]) -> None:
        """Forget the leases of these starts; a job that was begun again since keeps its own."""
        self.drop([id_ for id_, start in starts if id_ in self._leases and self._leases[id_].start == start])
