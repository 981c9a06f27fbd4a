"""Outcomes of requests: the recently ended ones, which `atelier trace` records, and loads of models and tenants.

Pure: times are those of the queue's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from cluster.admission.records import TenantKey, TenantLoad
from cluster.admission.replica_slots import Ended
from weights.residency.recent import Recent

MAX_KEPT: Final = 10_000
MAX_TENANT_LOADS: Final = 256


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


def note_load(loads: Recent[TenantKey, TenantLoad], load: TenantLoad) -> None:
    """Add a load to the others."""
    known = loads.get(load.key)
    loads.note(load.key, known + load if known else load)


def added_loads(loads: Iterable[TenantLoad]) -> dict[TenantKey, TenantLoad]:
    """Return the sums of loads of the same model and tenant."""
    found: dict[TenantKey, TenantLoad] = {}
    for one in loads:
        found[one.key] = found[one.key] + one if one.key in found else one
    return found


def joined_loads(loads: Iterable[TenantLoad]) -> tuple[TenantLoad, ...]:
    """Return the loads of several queues as of one."""
    return _most_telling(added_loads(loads).values())


def _most_telling(loads: Iterable[TenantLoad]) -> tuple[TenantLoad, ...]:
    """Return the loads with the most waiting requests, then the most refusals: at most `MAX_TENANT_LOADS`."""
    ordered = sorted(loads, key=lambda one: (-one.waiting, -one.refused, -one.started, one.key))
    return tuple(ordered[:MAX_TENANT_LOADS])
