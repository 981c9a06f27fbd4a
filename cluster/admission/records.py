"""Records of admission: requests, what `pump` returns, a controller's view and its orders, and slots. Pure.

Of several ingresses, each has its slots: amounts of them are shares of a replica, and those of one that requests take
add up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.admission.service_times import WORK_BOUNDS

TenantKey = tuple[str, str, str]  # pool, model, tenant
Reason = Literal["model_full", "queue_full", "late", "crowded", "hopeless", "expired", "unservable", "unread"]


@dataclass(frozen=True, slots=True)
class Demand:
    """A request, as far as admission goes.

    `work` is in a unit of its `model` (pixels x steps, tokens). `share` is the part of a replica that it takes while
    it runs, above 0 and at most 1. `deadline_s` is a time of the queue's clock. `is_inner`: it is a part of a request
    that was admitted before, and no bound may refuse it. Raises ValueError for work or a share that no statistic can
    count. `version` is the model's: what is known of replicas that could not load it holds for that one.
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
    """A request that waits since `arrived_s`, the `number`th that came. `cost_s`: replica seconds that it may take."""

    ticket: int
    demand: Demand
    number: int
    arrived_s: float
    cost_s: float


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


@dataclass(frozen=True, slots=True)
class OnDemandSwitch:
    """A worker that a model may start on without an order: it switches by itself, in `switch_s`.

    `is_beside`: the model fits beside all that is ready there, so nothing goes for it, and nothing has to end first.
    """

    switch_s: float
    is_beside: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica: the part of it that is used, running requests by model, and the models believed to be at hand."""

    name: str
    used: float
    running: dict[str, int]
    recent: tuple[str, ...]
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """One tenant's requests for one model. `waited_s` is what those that started waited in all, a sum."""

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


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that leaves unserved. `limit` is the bound that was reached, `needs_s` what it is predicted to take.

    `retry_after_s` is when it could be served, None where nothing would change. "crowded": it would be in time, and if
    its like were let in, those that take longer would never be. "hopeless": it takes longer than its
    time even alone; "expired": its time is over; "unservable": a controller says in `text` why no replica serves it.
    "unread": it would spend most of its time on waiting to be read.
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
    """A controller's orders: the replicas on which a model may start, by pool and model. () lets it wait.

    Models that are not named may start anywhere; requests for those in `unservable` leave with that refusal. Models in
    `on_demand` may start where they are not ready; `chances` are the shares of all arrivals that models have. `ready`
    has the models of each replica. Nothing of it holds after `until_s`: a controller that is gone holds nobody up.
    """

    replicas: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    until_s: float = math.inf
    unservable: Mapping[tuple[str, str], Refusal] = field(default_factory=dict)
    on_demand: Mapping[tuple[str, str], Mapping[str, OnDemandSwitch]] = field(default_factory=dict)
    chances: Mapping[str, float] = field(default_factory=dict)
    ready: Mapping[str, Collection[str]] = field(default_factory=dict)

    def replicas_of(self, pool: str, model: str, now_s: float) -> tuple[str, ...] | None:
        """Return the replicas for a model; None for all."""
        return self.replicas.get((pool, model)) if now_s < self.until_s else None

    def unplaced(self, pool: str) -> list[str]:
        """Return the models that may start nowhere yet."""
        return [model for (name, model), replicas in self.replicas.items() if name == pool and not replicas]

    def models_of(self, pool: str, replica: str, models: Iterable[str], now_s: float) -> list[str]:
        """Return those of the models that may start on the replica."""
        allowed = [(model, self.replicas_of(pool, model, now_s)) for model in models]
        return [model for model, replicas in allowed if replicas is None or replica in replicas]

    def on_demand_of(self, pool: str, model: str, now_s: float) -> Mapping[str, OnDemandSwitch] | None:
        """Return the switches on demand to a model, by replica; None where it has none."""
        return self.on_demand.get((pool, model)) if now_s < self.until_s else None

    def refusal_of(self, pool: str, model: str, now_s: float) -> Refusal | None:
        """Return why requests for a model leave; None where they need not."""
        return self.unservable.get((pool, model)) if now_s < self.until_s else None


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """One model's requests. Rates are arrivals per second over a short and a long window.

    `service_s` are replica seconds and `latency_s` the time in a replica of a mean request; 0 when none was measured.
    `slack_s` is the time until the earliest deadline among those that wait, None without one. `unstarted_s` is how long
    requests have waited without one of them being started.
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
        """The snapshot without what time alone changes: rates, which fade."""
        return replace(self, models=tuple(replace(load, rate_short=0.0, rate_long=0.0) for load in self.models))
