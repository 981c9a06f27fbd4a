"""What may stay and what must go, under a byte budget. Pure: values in, plan out, no clock and no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resident:
    """One thing in memory. `last_used` grows with use; a leased thing (`leases` > 0) is never evicted."""

    key: str
    nbytes: int
    last_used: int
    leases: int = 0


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """`evict` in order. `missing_bytes` > 0: it does not fit even then, and `held` says what stands in the way."""

    evict: tuple[str, ...]
    missing_bytes: int = 0
    held: tuple[str, ...] = ()


def plan_eviction(residents: Iterable[Resident], needed_bytes: int, budget_bytes: int) -> EvictionPlan:
    """Free room for `needed_bytes` more under `budget_bytes`, least recently used first.

    Nothing is evicted when the room cannot be made: a plan with `missing_bytes` has an empty `evict`.
    """
    residents = list(residents)
    excess = sum(resident.nbytes for resident in residents) + needed_bytes - budget_bytes
    evict: list[str] = []
    for resident in sorted(residents, key=lambda resident: resident.last_used):
        if excess <= 0:
            break
        if resident.leases == 0:
            evict.append(resident.key)
            excess -= resident.nbytes
    if excess <= 0:
        return EvictionPlan(tuple(evict))
    return EvictionPlan((), excess, tuple(resident.key for resident in residents if resident.leases))
