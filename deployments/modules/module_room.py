"""Room for the modules of a replica, counted in tensors: what two of them share is there once. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weights.residency import Resident, keep_values

TensorBytes = Mapping[str, int]  # bytes by hash


@dataclass(frozen=True, slots=True)
class Holding:
    """A module that is there, and the tensors that it uses."""

    resident: Resident
    tensors: TensorBytes

    @property
    def stays(self) -> bool:
        return self.resident.leases > 0 or self.resident.pinned


@dataclass(frozen=True, slots=True)
class RoomPlan:
    """`evict` in order; with `missing_bytes` > 0 there is no room even then, and nothing goes."""

    evict: tuple[str, ...]
    missing_bytes: int = 0


def plan_room(holdings: Sequence[Holding], wanted: TensorBytes, budget_bytes: int) -> RoomPlan:
    """Free room for `wanted` under `budget_bytes`, the least valuable module first, ties by least recent use.

    As `weights.residency.plan_eviction`, but evicting a module only frees what no other one uses, `wanted` included.
    Nothing goes that could stay.
    """
    needed_bytes = distinct_bytes(wanted, *(holding.tensors for holding in holdings if holding.stays))
    if needed_bytes > budget_bytes:
        return RoomPlan((), needed_bytes - budget_bytes)
    everything = (wanted, *(holding.tensors for holding in holdings))
    total_bytes = distinct_bytes(*everything)
    if total_bytes <= budget_bytes:
        return RoomPlan(())
    uses = _uses_of_shared(everything)
    values = keep_values([holding.resident for holding in holdings])
    victims: list[Holding] = []
    for holding in sorted(
        (holding for holding in holdings if not holding.stays),
        key=lambda holding: (values[holding.resident.key], holding.resident.last_used),
    ):
        if total_bytes <= budget_bytes:
            break
        uses.subtract(holding.tensors.keys() & uses.keys())
        total_bytes -= _unused_bytes(holding.tensors, uses)
        victims.append(holding)
    evict: list[str] = []
    for victim in reversed(victims):
        returning_bytes = _unused_bytes(victim.tensors, uses)
        if total_bytes + returning_bytes <= budget_bytes:
            total_bytes += returning_bytes
            uses.update(victim.tensors.keys() & uses.keys())
        else:
            evict.append(victim.resident.key)
    return RoomPlan(tuple(reversed(evict)))


def distinct_bytes(*tensors: TensorBytes) -> int:
    return sum(merged(tensors).values())


def merged(tensors: Iterable[TensorBytes]) -> dict[str, int]:
    found: dict[str, int] = {}
    for some in tensors:
        found |= some
    return found


def _uses_of_shared(everything: Sequence[TensorBytes]) -> Counter[str]:
    """How many have it, of the hashes that more than one has: few, of thousands."""
    seen: set[str] = set()
    shared: set[str] = set()
    for tensors in everything:
        shared |= tensors.keys() & seen
        seen |= tensors.keys()
    return Counter(hash_ for tensors in everything for hash_ in tensors.keys() & shared)


def _unused_bytes(tensors: TensorBytes, uses: Counter[str]) -> int:
    """What goes with them. `uses` counts the others' uses, of what is shared."""
    return sum(tensors.values()) - sum(tensors[hash_] for hash_ in tensors.keys() & uses.keys() if uses[hash_])
