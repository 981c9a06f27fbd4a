"""The split of a pool's slots between ingresses, each of which has its own queue. Pure.

Replicas on which the same requests may start are split together. Running and waiting requests count, urgent priorities
first. At one priority tenants share by weight, and a tenant's part goes to the ingresses by its requests in each.
No ingress gets more than it can use while another gets less. Unused slots are split by recent arrivals.

If whole slots do not come out even, the longest waiting request has the next one, so every request gets there, even if
only one ingress has a slot at a time. A request that needs several slots has them reserved when it waits longest.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from cluster.admission.records import PoolClaims, SlotClaim
from cluster.admission.shares import fill

ARRIVALS_S: Final = 2.0  # of arrivals count as if they waited: refusing many earns as much as letting many wait
MAX_SLOTS: Final = 10_000  # of a replica
_ROUNDING: Final = 1e-6
_LEAST_RATE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class PoolSplit:
    """The share of each replica for each ingress, and the number of replicas that each can count on."""

    limits: Mapping[str, Mapping[str, float]]
    capacity: Mapping[str, float]


@dataclass(slots=True)
class _Want:
    """One ingress's use for a group of alike replicas, in slots. The smallest `first` of waiting ingresses is next.

    `claims` are slots by priority and tenant, with the tenant's weight. `size` is the need of the next request.
    """

    claims: dict[tuple[int, str], tuple[float, float]] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)  # by replica
    owned: dict[str, int] = field(default_factory=dict)
    total: float = 0.0
    size: int = 1
    first: tuple[int, float] | None = None


@dataclass(frozen=True, slots=True)
class _ClaimGroup:
    """Alike replicas, each of `num_slots`, and the claims of the ingresses that know them."""

    replicas: list[str]
    num_slots: int
    wants: dict[str, _Want]

    @property
    def capacity(self) -> int:
        return self.num_slots * len(self.replicas)


def split_pool(
    claims: Mapping[str, PoolClaims], waited_s: Mapping[str, float], overtaken: Collection[str] = ()
) -> PoolSplit:
    """Return the split of one pool. `claims` are by ingress, reported `waited_s` ago.

    The requests of ingresses that were `overtaken` too often go first, whatever their priority.
    """
    slot = max(min([each.least_share for each in claims.values()], default=1.0), 1 / MAX_SLOTS)
    num_slots = math.floor(1 / slot + _ROUNDING)
    limits: dict[str, dict[str, float]] = {name: {} for name in claims}
    capacity = dict.fromkeys(claims, 0.0)
    carry = dict.fromkeys(claims, 0.0)  # slots of earlier groups that an ingress lacks
    boosts = {name: _boost(each) for name, each in claims.items()}
    for replicas, names in _groups(claims):
        wants = {name: _want(claims[name], replicas, slot, waited_s[name], name in overtaken) for name in names}
        group = _ClaimGroup(replicas, num_slots, wants)
        rates = {name: claims[name].share_per_s + _LEAST_RATE for name in names}
        exact, idle = _exact_parts(group, boosts)
        for name, part in exact.items():
            idle_part = idle * rates[name] / sum(rates.values())
            is_away = not wants[name].claims
            capacity[name] += (group.capacity / len(names) if is_away else part + idle_part) / num_slots
        whole, reserved = _whole_parts(group, exact, carry, rates)
        if idle <= _ROUNDING:
            for name in names:
                carry[name] += exact[name] - whole[name]
        for name, placed in _placed(group, whole, reserved).items():
            limits[name] |= {replica: 1.0 if num >= num_slots else num * slot for replica, num in placed.items()}
    return PoolSplit(limits, capacity)


def _boost(claims: PoolClaims) -> float:
    """Return the factor of an ingress's claims: expected requests count beside the present ones."""
    total = sum([claim.share for claim in (*claims.running, *claims.waiting)])
    return 1 + ARRIVALS_S * claims.share_per_s / total if total > 0 else 1.0


def _groups(claims: Mapping[str, PoolClaims]) -> list[tuple[list[str], list[str]]]:
    """Return groups of replicas that the same ingresses know, and on which the same requests may start."""
    knows: dict[str, list[str]] = {}
    for name, each in claims.items():
        for replica, use in each.replicas.items():
            if use.is_listed:
                knows.setdefault(replica, []).append(name)
    sets = {claim.replicas for each in claims.values() for claim in each.waiting if claim.replicas is not None}
    member: dict[str, set[int]] = {replica: set() for replica in knows}
    for number, replicas in enumerate(sorted(sets)):
        for replica in replicas:
            if replica in member:
                member[replica].add(number)
    groups: dict[tuple[tuple[str, ...], frozenset[int]], list[str]] = {}
    for replica in sorted(knows):
        groups.setdefault((tuple(knows[replica]), frozenset(member[replica])), []).append(replica)
    return [(replicas, list(names)) for (names, _), replicas in groups.items()]


def _want(claims: PoolClaims, replicas: list[str], slot: float, waited_s: float, is_overtaken: bool) -> _Want:
    want = _Want()
    listed = {replica for replica, use in claims.replicas.items() if use.is_listed}
    num_listed, group = len(listed), set(replicas)
    for replica in replicas:
        use = claims.replicas[replica]
        want.used[replica] = math.ceil(use.used / slot - _ROUNDING)
        want.owned[replica] = math.floor(use.limit / slot + _ROUNDING)
    for claim in claims.running:
        if claim.replicas and claim.replicas[0] in group:
            _add_claim(want, claim, claim.share / slot)
    for claim in claims.waiting:
        if claim.replicas is not None and replicas[0] not in claim.replicas:
            continue
        among = num_listed if claim.replicas is None else len(listed.intersection(claim.replicas))
        _add_claim(want, claim, claim.share / slot * len(replicas) / among)
        first = 0 if is_overtaken else claim.priority, -claim.oldest_age_s - waited_s
        if want.first is None or first < want.first:
            want.first, want.size = first, max(1, math.ceil(claim.next_share / slot - _ROUNDING))
    want.size = min(want.size, math.floor(1 / slot + _ROUNDING))
    return want


def _add_claim(want: _Want, claim: SlotClaim, num: float) -> None:
    if num <= 0:
        return
    key = claim.priority, claim.tenant
    want.claims[key] = claim.weight, want.claims.get(key, (0.0, 0.0))[1] + num
    want.total += num


def _exact_parts(group: _ClaimGroup, boosts: Mapping[str, float]) -> tuple[dict[str, float], float]:
    """Return each ingress's slots, not rounded, and the unclaimed rest."""
    parts, left = dict.fromkeys(group.wants, 0.0), float(group.capacity)
    for priority in sorted({key[0] for want in group.wants.values() for key in want.claims}):
        own: dict[str, dict[str, tuple[float, float]]] = {}  # by tenant and ingress
        weights: dict[str, float] = {}
        for name, want in group.wants.items():
            for (level, tenant), (weight, num) in want.claims.items():
                if level == priority:
                    own.setdefault(tenant, {})[name] = num * boosts[name], num
                    weights[tenant] = weight
        tenants = {tenant: (weights[tenant], sum([num for _, num in each.values()])) for tenant, each in own.items()}
        for tenant, amount in fill(left, tenants).items():
            left -= amount
            for name, part in fill(amount, own[tenant]).items():
                parts[name] += part
    return parts, max(0.0, left)


def _whole_parts(
    group: _ClaimGroup, exact: Mapping[str, float], carry: Mapping[str, float], rates: Mapping[str, float]
) -> tuple[dict[str, int], str | None]:
    """Return the whole slots of each ingress, and the one whose next request has its slots on one replica reserved."""
    left, whole = group.capacity, dict[str, int]()
    for name, want in group.wants.items():
        num = min(left, math.floor(max(0.0, exact[name] + carry[name]) + _ROUNDING))
        used = sum(want.used.values())
        if want.first is not None and num > used:  # only slots for whole requests are of use
            num = used + (num - used) // want.size * want.size
        whole[name] = num
        left -= num
    order = [name for _, name in sorted((want.first, name) for name, want in group.wants.items() if want.first)]
    has_given = True
    while left and has_given:
        has_given = False
        for name in order:
            want = group.wants[name]
            lacking = sum(want.used.values()) + want.size - whole[name]
            step = min(max(1, lacking), want.size)
            if want.total > whole[name] + _ROUNDING and step <= left:
                whole[name], left, has_given = whole[name] + step, left - step, True
    reserved = _reserve(group, whole, order)
    left = group.capacity - sum(whole.values())
    if left > 0:
        total = sum(rates.values())
        parts = {name: left * rate / total for name, rate in rates.items()}
        rounded = {name: math.floor(part) for name, part in parts.items()}
        rest = left - sum(rounded.values())
        for name in sorted(parts, key=lambda name: (rounded[name] - parts[name], name)):
            whole[name] += rounded[name] + (rest > 0)
            rest -= 1
    return whole, reserved


def _reserve(group: _ClaimGroup, whole: dict[str, int], order: list[str]) -> str | None:
    """Reserve other ingresses' slots for the longest waiting request, if it needs several or was overtaken."""
    if not order:
        return None
    name, want = order[0], group.wants[order[0]]
    first = want.first
    if want.size == 1 and first is not None and first[0] > 0:
        return None
    lacking = sum(want.used.values()) + want.size - whole[name]
    while lacking > 0:
        richest = max((other for other in whole if other != name), key=lambda other: whole[other], default=None)
        if richest is None or not whole[richest]:
            break
        taken = min(lacking, whole[richest])
        whole[richest], whole[name], lacking = whole[richest] - taken, whole[name] + taken, lacking - taken
    return name


def _placed(group: _ClaimGroup, whole: Mapping[str, int], reserved: str | None) -> dict[str, dict[str, int]]:
    """Return the slots of each ingress by replica: where it runs requests, then where it had slots, then evenly."""
    free = dict.fromkeys(group.replicas, group.num_slots)
    left = dict(whole)
    placed: dict[str, dict[str, int]] = {name: dict.fromkeys(group.replicas, 0) for name in whole}

    def put(name: str, replica: str, num: int) -> None:
        num = max(0, min(num, left[name], free[replica]))
        placed[name][replica] += num
        left[name] -= num
        free[replica] -= num

    if reserved is not None:
        want = group.wants[reserved]
        busy = {r: sum([other.used[r] for other in group.wants.values()]) for r in group.replicas}
        fitting = [r for r in group.replicas if want.used[r] + want.size <= group.num_slots] or group.replicas
        best = min(fitting, key=lambda r: (busy[r] + want.size > group.num_slots, want.owned[r] == 0, busy[r], r))
        put(reserved, best, want.used[best] + want.size)
    for name, want in group.wants.items():
        for replica in sorted(group.replicas, key=lambda r: (-want.used[r], r)):
            put(name, replica, want.used[replica] - placed[name][replica])
    for name, want in group.wants.items():
        for replica in sorted(group.replicas, key=lambda r: (-want.owned[r], r)):
            put(name, replica, want.owned[replica] - placed[name][replica])
    for name in group.wants:
        room, lacking = sum(free.values()), left[name]
        for replica, num in list(free.items()):
            put(name, replica, lacking * num // max(1, room))
        for replica in sorted(free, key=lambda r: (-free[r], r)):
            put(name, replica, left[name])
    return placed
