"""Records of admission: requests, what `pump` returns, a controller's view and its orders, and slots. Pure.

Each of several ingresses has its own slots. Amounts of slots are shares of a replica: the shares that requests take
of one replica add up to at most 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.admission.service_times import WORK_BOUNDS

TenantKey = tuple[str, str, str]  # pool, model, tenant
Reason = Literal["model_full", "queue_full", "late", "crowded", "hopeless", "expired", "unservable", "unread"]


@dataclass(frozen=True, slots=True)
class Demand:
    """A request as admission sees it.

    `work` is in a unit of its `model` (pixels x steps, tokens). `share` is the part of a replica that it takes while
    it runs, above 0 and at most 1. `deadline_s` is a time of the queue's clock. `is_inner`: it is a part of a request
    that was admitted before, and no bound may refuse it. Raises ValueError for work or a share that no statistic can
    count. `version` is the model's: failed loads are remembered for that version.
    """

    pool: str
    model: str
    work: float
    share: float
    priority: int
    tenant: str
    deadline_s: float
    is_inner: bool = False
    version: str = ""

    def __post_init__(self) -> None:
        if not WORK_BOUNDS[0] <= self.work <= WORK_BOUNDS[1]:
            raise ValueError(f"work is {self.work!r}; expected a number from {WORK_BOUNDS[0]:g} to {WORK_BOUNDS[1]:g}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share!r}; expected a number above 0, at most 1")


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits since `arrived_s`, the `number`th to arrive. `cost_s`: its estimated replica seconds."""

    ticket: int
    demand: Demand
    number: int
    arrived_s: float
    cost_s: float


@dataclass(frozen=True, slots=True)
class ReplicaUse:
    """One ingress's slots of a replica: `used` by requests, and `limit`, its own. `running` counts requests by model.

    `load_s` are their estimated replica seconds. `is_listed`: the ingress would start more there.
    """

    used: float
    limit: float
    running: Mapping[str, int]
    load_s: float
    is_listed: bool


@dataclass(frozen=True, slots=True)
class SlotClaim:
    """The running or waiting requests of one priority and tenant: the sum of their shares.

    `replicas` are those where they run or may start, None for any. `oldest_age_s` is the wait of the oldest
    waiting one, and `next_share` its share.
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
    """One ingress in one pool. `least_share` is the least share of a request so far, 1 before the first.

    `share_per_s` is the recent rate of arrivals, refused ones included. `num_started` counts from the ingress's start.
    """

    replicas: Mapping[str, ReplicaUse] = field(default_factory=dict)
    running: tuple[SlotClaim, ...] = ()
    waiting: tuple[SlotClaim, ...] = ()
    least_share: float = 1.0
    share_per_s: float = 0.0
    num_started: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaPart:
    """One ingress's part of a replica. `others` are the other ingresses' running requests there, by model."""

    limit: float
    others: Mapping[str, int] = field(default_factory=dict)
    others_used: float = 0.0
    others_load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolPart:
    """One ingress's part of a pool. `capacity` is the number of replicas that it can count on: parts move by whole
    slots. `is_wanted`: other ingresses wait for slots.
    """

    replicas: Mapping[str, ReplicaPart]
    capacity: float
    is_wanted: bool = False


@dataclass(frozen=True, slots=True)
class OnDemandSwitch:
    """A worker where a model may start without an order: the worker switches by itself, in `switch_s`.

    `is_beside`: the model fits beside all models ready there, so none is evicted, and no request has to end first.
    """

    switch_s: float
    is_beside: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica: its used part, running requests by model, and the models believed to be at hand."""

    name: str
    used: float
    running: dict[str, int]
    recent: tuple[str, ...]
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """One tenant's requests for one model. `waited_s` is the sum of the waits of those that started."""

    pool: str
    model: str
    tenant: str
    waiting: int = 0
    oldest_age_s: float = 0.0
    started: int = 0
    waited_s: float = 0.0
    refused: int = 0

    @property
    def key(self) -> TenantKey:
        """Pool, model and tenant."""
        return self.pool, self.model, self.tenant

    def __add__(self, other: TenantLoad) -> TenantLoad:
        return replace(
            self,
            waiting=self.waiting + other.waiting,
            oldest_age_s=max(self.oldest_age_s, other.oldest_age_s),
            started=self.started + other.started,
            waited_s=self.waited_s + other.waited_s,
            refused=self.refused + other.refused,
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that leaves unserved. `limit` is the bound that was reached, `needs_s` its predicted time.

    `retry_after_s` is the time until it could be served, None if a wait is in vain. "crowded": it would be in time, but
    if all of its kind were let in, longer requests would never be. "hopeless": it takes longer than its
    time even alone; "expired": its time is over; "unservable": a controller says in `text` why no replica serves it.
    "unread": it would spend most of its time waiting to be read.
    """

    reason: Reason
    retry_after_s: float | None = None
    limit: int = 0
    needs_s: float = 0.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """A request that may go to its replica now."""

    ticket: int
    replica: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that will not be served."""

    ticket: int
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Placement:
    """A controller's orders: the replicas on which a model may start, by pool and model; () makes it wait.

    Models that are not named may start anywhere; requests for those in `unservable` leave with that refusal. Models in
    `on_demand` may start where they are not ready; `chances` are the shares of all arrivals that models have. `ready`
    has the models of each replica. Nothing of it holds after `until_s`, so a dead controller blocks no request.
    """

    replicas: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    until_s: float = math.inf
    unservable: Mapping[tuple[str, str], Refusal] = field(default_factory=dict)
    on_demand: Mapping[tuple[str, str], Mapping[str, OnDemandSwitch]] = field(default_factory=dict)
    chances: Mapping[str, float] = field(default_factory=dict)
    ready: Mapping[str, Collection[str]] = field(default_factory=dict)

    def unplaced(self, pool: str) -> list[str]:
        """Return the models that may start nowhere yet."""
        return [model for (name, model), replicas in self.replicas.items() if name == pool and not replicas]


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """One model's requests. Rates are arrivals per second over a short and a long window.

    `service_s` are replica seconds and `latency_s` the time in a replica of a mean request; 0 when none was measured.
    `slack_s` is the time until the earliest deadline of a waiting one, None without one. `unstarted_s` is how long
    requests have waited since the last start.
    """

    pool: str
    model: str
    waiting: int
    oldest_age_s: float
    running: int
    rate_short: float
    rate_long: float
    service_s: float
    latency_s: float
    switch_s: float
    started: int
    refused: int
    slack_s: float | None = None
    unstarted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AdmissionSnapshot:
    """The queue at one moment. `tenants` are waiting requests by tenant, `shares` those of a tenant for a model."""

    models: tuple[ModelLoad, ...] = ()
    replicas: Mapping[str, tuple[ReplicaLoad, ...]] = field(default_factory=dict)
    tenants: Mapping[str, int] = field(default_factory=dict)
    shares: tuple[TenantLoad, ...] = ()

    @property
    def is_at_rest(self) -> bool:
        """Return whether nothing waits or runs."""
        return not any(load.waiting or load.running for load in self.models)

    @property
    def lasting(self) -> AdmissionSnapshot:
        """The snapshot without the fields that change with time alone: rates, which decay."""
        return replace(self, models=tuple(replace(load, rate_short=0.0, rate_long=0.0) for load in self.models))
