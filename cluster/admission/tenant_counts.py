"""Requests that started and were refused, by model and tenant: as many of both as somebody reads. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from cluster.admission.records import Demand, TenantKey, TenantLoad, Waiting
from weights.residency.recent import Recent

MAX_TENANT_LOADS: Final = 256


@dataclass(slots=True)
class _Counts:
    started: int = 0
    waited_s: float = 0.0
    refused: int = 0


def _key_of(demand: Demand) -> TenantKey:
    """Return where a request is counted."""
    return demand.pool, demand.model, demand.tenant


class TenantCounts:
    """The counts of the pairs that were asked for last, `MAX_TENANT_LOADS` of them."""

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
        return self._counts.used(_key_of(demand), _Counts)

    def loads(self, waiting: Iterable[Waiting], now_s: float) -> tuple[TenantLoad, ...]:
        """Return what is known, beside how many of the `waiting` are whose, and since when the first of them."""
        counts: Counter[TenantKey] = Counter()
        oldest_s: dict[TenantKey, float] = {}
        for one in waiting:
            key = _key_of(one.demand)
            counts[key] += 1
            oldest_s[key] = min(one.arrived_s, oldest_s.get(key, one.arrived_s))
        found = []
        for key in {**self._counts, **counts}:
            known = self._counts.get(key) or _Counts()
            age_s = now_s - oldest_s.get(key, now_s)
            found.append(TenantLoad(*key, counts[key], age_s, known.started, known.waited_s, known.refused))
        return _most_telling(found)


def joined_loads(loads: Iterable[TenantLoad]) -> tuple[TenantLoad, ...]:
    """Return the loads of several queues as of one."""
    found: dict[TenantKey, TenantLoad] = {}
    for one in loads:
        known = found.get(one.key)
        found[one.key] = one if known is None else _both(known, one)
    return _most_telling(found.values())


def _both(one: TenantLoad, other: TenantLoad) -> TenantLoad:
    return replace(
        one,
        waiting=one.waiting + other.waiting,
        oldest_age_s=max(one.oldest_age_s, other.oldest_age_s),
        started=one.started + other.started,
        waited_s=one.waited_s + other.waited_s,
        refused=one.refused + other.refused,
    )


def _most_telling(loads: Iterable[TenantLoad]) -> tuple[TenantLoad, ...]:
    """Return those with most that wait, then most refusals; no more than `MAX_TENANT_LOADS`."""
    ordered = sorted(loads, key=lambda one: (-one.waiting, -one.refused, -one.started, one.key))
    return tuple(ordered[:MAX_TENANT_LOADS])
