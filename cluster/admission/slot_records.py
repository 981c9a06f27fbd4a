"""Slots of one ingress among several: what it has and wants, and what it may have. Pure.

All amounts are shares of a replica: the slots of one that requests take add up to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReplicaUse:
    """One ingress's slots of a replica: `used` by what runs, and `limit`, its own. `running` are requests by model.

    `load_s` are the replica seconds that they may take. `is_listed`: the ingress would start more there.
    """

    used: float
    limit: float
    running: Mapping[str, int]
    load_s: float
    is_listed: bool


@dataclass(frozen=True, slots=True)
class SlotClaim:
    """Requests of one priority and tenant that run or wait: the shares that they take in all.

    `replicas` are those where they run or may start, None for any. `oldest_age_s` is how long the first of those that
    wait has waited, and `next_share` what it takes.
    """

    priority: int
    tenant: str
    weight: float
    share: float
    replicas: tuple[str, ...] | None = None
    oldest_age_s: float = 0.0
    next_share: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolClaims:
    """One ingress in one pool. `least_share` is the least that a request took, 1 before the first.

    `share_per_s` came of late, refused requests as well. `num_started` counts requests since the ingress began.
    """

    replicas: Mapping[str, ReplicaUse] = field(default_factory=dict)
    running: tuple[SlotClaim, ...] = ()
    waiting: tuple[SlotClaim, ...] = ()
    least_share: float = 1.0
    share_per_s: float = 0.0
    num_started: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaPart:
    """One ingress's part of a replica, and what the others do there: `others` are their running requests by model."""

    limit: float
    others: Mapping[str, int] = field(default_factory=dict)
    others_used: float = 0.0
    others_load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolPart:
    """One ingress's part of a pool. `capacity` is how many replicas it can count on: parts go back and forth by whole
    slots. `is_wanted`: others wait for slots.
    """

    replicas: Mapping[str, ReplicaPart]
    capacity: float
    is_wanted: bool = False
