"""Outcomes of requests: the recently ended ones, which `atelier trace` records, and counts of starts and refusals.

Counts are by model and tenant, of a limited number of both. Pure: times are those of the queue's clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from cluster.admission.records import Demand, TenantKey, TenantLoad, Waiting
from cluster.admission.replica_slots import Ended
from weights.residency.recent import Recent

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
        demand = ended.waiting.demand
        self._num_ended += 1
        self._kept.append(
            EndedRequest(
                demand.pool,
                demand.model,
                demand.tenant,
                demand.priority,
                demand.work,
                demand.share,
                ended.replica,
                ended.waiting.arrived_s,
                now_s - ended.latency_s,
                now_s,
                switch_s,
                is_answered,
            )
        )

    def take_over(self, ended: EndedRequests, now_s: float, known: int) -> None:
        """Take over the requests of another log from its number `known` on; `now_s` is this clock."""
        first, later_s = ended.next_number - len(ended.requests), now_s - ended.now_s
        for request in ended.requests[max(0, known - first) :]:
            times = request.arrived_s + later_s, request.started_s + later_s, request.ended_s + later_s
            self._kept.append(replace(request, arrived_s=times[0], started_s=times[1], ended_s=times[2]))
            self._num_ended += 1

    def after(self, number: int | None, now_s: float) -> EndedRequests:
        """Return the requests from `number` on that are still known; none without a number.

        A number that is not reached yet is that of an earlier queue: then all requests count.
        """
        if number is None:
            return EndedRequests((), self._num_ended, now_s)
        first = self._num_ended - len(self._kept)
        skipped = max(0, number - first) if number <= self._num_ended else 0
        return EndedRequests(tuple(islice(self._kept, skipped, None)), self._num_ended, now_s)


MAX_TENANT_LOADS: Final = 256


@dataclass(slots=True)
class _Counts:
    started: int = 0
    waited_s: float = 0.0
    refused: int = 0


class TenantCounts:
    """The counts of the last used pairs of model and tenant, `MAX_TENANT_LOADS` of them."""

    def __init__(self) -> None:
        self._counts: Recent[TenantKey, _Counts] = Recent(MAX_TENANT_LOADS)

    def note_start(self, demand: Demand, waited_s: float) -> None:
        """Count a request that starts."""
        counts = self._counts_of(demand)
        counts.started += 1
        counts.waited_s += max(0.0, waited_s)

    def note_refusal(self, demand: Demand) -> None:
        """Count a request that leaves unserved."""
        self._counts_of(demand).refused += 1

    def _counts_of(self, demand: Demand) -> _Counts:
        return self._counts.used((demand.pool, demand.model, demand.tenant), _Counts)

    def loads(self, waiting: Mapping[TenantKey, tuple[int, float]], now_s: float) -> tuple[TenantLoad, ...]:
        """Return the load of each tenant. `waiting` has the number that wait, and the time when the oldest came."""
        found = []
        for key in {**self._counts, **waiting}:
            (number, first_s), known = waiting.get(key, (0, now_s)), self._counts.get(key) or _Counts()
            found.append(TenantLoad(*key, number, now_s - first_s, known.started, known.waited_s, known.refused))
        return _most_telling(found)


def counted_lines(lines: Iterable[tuple[int, Waiting, int]]) -> dict[TenantKey, tuple[int, float]]:
    """Return the number of waiting requests of each model and tenant, and the arrival of the oldest."""
    found: dict[TenantKey, tuple[int, float]] = {}
    for _, first, number in lines:
        key = first.demand.pool, first.demand.model, first.demand.tenant
        before, first_s = found.get(key, (0, math.inf))
        found[key] = before + number, min(first_s, first.arrived_s)
    return found


def joined_loads(loads: Iterable[TenantLoad]) -> tuple[TenantLoad, ...]:
    """Return the loads of several queues as of one."""
    found: dict[TenantKey, TenantLoad] = {}
    for one in loads:
        known = found.get(one.key)
        found[one.key] = one if known is None else _added_loads(known, one)
    return _most_telling(found.values())


def _added_loads(one: TenantLoad, other: TenantLoad) -> TenantLoad:
    return replace(
        one,
        waiting=one.waiting + other.waiting,
        oldest_age_s=max(one.oldest_age_s, other.oldest_age_s),
        started=one.started + other.started,
        waited_s=one.waited_s + other.waited_s,
        refused=one.refused + other.refused,
    )


def _most_telling(loads: Iterable[TenantLoad]) -> tuple[TenantLoad, ...]:
    """Return the loads with the most waiting requests, then the most refusals: at most `MAX_TENANT_LOADS`."""
    ordered = sorted(loads, key=lambda one: (-one.waiting, -one.refused, -one.started, one.key))
    return tuple(ordered[:MAX_TENANT_LOADS])
