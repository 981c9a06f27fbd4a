"""Plans over lists of values: what the keeper's and the modules' books use until they stand on `entries.Book`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Resident:
    """One thing in memory. `last_used` grows with use; what is leased (`leases` > 0) or pinned is never evicted.

    `reload_s` is what it takes to get it back; None: per byte as long as the others take on average. Where nobody
    says either, eviction is least-recently-used.
    """

    key: str
    nbytes: int
    last_used: float
    leases: int = 0
    reload_s: float | None = None
    popularity: float = 1.0
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """`evict` in order. `missing_bytes` > 0: it does not fit even then, and `held` says what stands in the way."""

    evict: tuple[str, ...]
    missing_bytes: int = 0
    held: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """`take` is what has room, in the order asked for, once `evict` is gone."""

    take: tuple[str, ...]
    evict: tuple[str, ...]


def plan_eviction(residents: Iterable[Resident], needed_bytes: int, budget_bytes: int) -> EvictionPlan:
    """Free room for `needed_bytes` more under `budget_bytes`, the least valuable first, ties by least recent use.

    Nothing goes that could stay: without any one of the victims the room would be too small. Nothing is evicted
    when the room cannot be made: a plan with `missing_bytes` has an empty `evict`.
    """
    residents = list(residents)
    free_bytes = budget_bytes - needed_bytes - sum(resident.nbytes for resident in residents)
    victims: list[Resident] = []
    for resident in _by_value(residents, keep_values(residents)):
        if free_bytes >= 0:
            break
        victims.append(resident)
        free_bytes += resident.nbytes
    if free_bytes < 0:
        return EvictionPlan((), -free_bytes, tuple(resident.key for resident in residents if _stays(resident)))
    return EvictionPlan(spare_the_valuable(victims, free_bytes))


def plan_prefetch(residents: Iterable[Resident], newcomers: Sequence[Resident], budget_bytes: int) -> PrefetchPlan:
    """Take the newcomers, in their order, that fit beside everything that is worth as much or more.

    One that does not fit is left out; smaller ones after it may still come in.
    """
    residents = list(residents)
    values = keep_values([*residents, *newcomers])
    candidates = _by_value(residents, values)
    free_bytes = budget_bytes - sum(resident.nbytes for resident in residents)
    take: list[str] = []
    victims: list[Resident] = []
    for newcomer in newcomers:
        room_bytes, num_victims = free_bytes, 0
        for resident in candidates:
            if room_bytes >= newcomer.nbytes or values[resident.key] >= values[newcomer.key]:
                break
            room_bytes += resident.nbytes
            num_victims += 1
        if room_bytes >= newcomer.nbytes:
            take.append(newcomer.key)
            victims += candidates[:num_victims]
            candidates = candidates[num_victims:]
            free_bytes = room_bytes - newcomer.nbytes
    return PrefetchPlan(tuple(take), spare_the_valuable(victims, free_bytes) if take else ())


def keep_values(residents: Sequence[Resident]) -> dict[str, float]:
    """Seconds that a byte of each saves, weighted by its popularity, by key."""
    known = [resident for resident in residents if resident.reload_s is not None and resident.nbytes]
    known_bytes = sum(resident.nbytes for resident in known)
    usual_s = sum(resident.reload_s or 0.0 for resident in known) / known_bytes if known_bytes else 1.0
    return {
        resident.key: resident.popularity
        * (usual_s if resident.reload_s is None else resident.reload_s / max(resident.nbytes, 1))
        for resident in residents
    }


def _stays(resident: Resident) -> bool:
    return resident.leases > 0 or resident.pinned


def _by_value(residents: Iterable[Resident], values: Mapping[str, float]) -> list[Resident]:
    """What may go, the first to go first."""
    may_go = [resident for resident in residents if not _stays(resident)]
    return sorted(may_go, key=lambda resident: (values[resident.key], resident.last_used))


class Victim(Protocol):
    @property
    def key(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


def spare_the_valuable(victims: Sequence[Victim], free_bytes: int) -> tuple[str, ...]:
    """Keys of `victims`, which come in order of value, without the most valuable ones that need not go.

    `free_bytes` is what is left over when all of them go.
    """
    needed: list[str] = []
    for victim in reversed(victims):
        if victim.nbytes <= free_bytes:
            free_bytes -= victim.nbytes
        else:
            needed.append(victim.key)
    return tuple(reversed(needed))
