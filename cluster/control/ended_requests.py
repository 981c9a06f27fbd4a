"""The requests that have ended lately: what `atelier trace` records. Pure: times are those of the queue's clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from cluster.control.places import Ended

MAX_KEPT: Final = 10_000


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has left its replica, answered or not. `work` is in the unit of its model."""

    pool: str
    model: str
    tenant: str
    priority: int
    work: float
    share: float
    replica: str
    arrived_s: float
    started_s: float
    ended_s: float
    switch_s: float
    is_answered: bool


@dataclass(frozen=True, slots=True)
class EndedRequests:
    """The requests after a number, oldest first. `next_number` asks for the following ones; `now_s` is the clock."""

    requests: tuple[EndedRequest, ...]
    next_number: int
    now_s: float


@dataclass(slots=True)
class EndedLog:
    """The last `MAX_KEPT` requests, numbered from 0 on."""

    _kept: deque[EndedRequest] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    _num_ended: int = 0

    def note_end(self, ended: Ended, now_s: float, switch_s: float, is_answered: bool) -> None:
        """Remember a request that ends now."""
        ask = ended.waiting.ask
        self._num_ended += 1
        self._kept.append(
            EndedRequest(
                ask.pool,
                ask.model,
                ask.tenant,
                ask.priority,
                ask.work,
                ask.share,
                ended.replica,
                ended.waiting.arrived_s,
                now_s - ended.latency_s,
                now_s,
                switch_s,
                is_answered,
            )
        )

    def after(self, number: int | None, now_s: float) -> EndedRequests:
        """Return the requests from `number` on that are still known; without one, none.

        A number that is not reached yet is of a queue before this one: then all count.
        """
        if number is None:
            return EndedRequests((), self._num_ended, now_s)
        first = self._num_ended - len(self._kept)
        skipped = max(0, number - first) if number <= self._num_ended else 0
        return EndedRequests(tuple(islice(self._kept, skipped, None)), self._num_ended, now_s)
