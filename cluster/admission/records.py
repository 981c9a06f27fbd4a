"""Records of the admission queue: what `pump` returns, what a controller reads, and how it orders the queue."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cluster.admission.replica_slots import OnDemandSwitch, ReplicaLoad
from cluster.admission.tenant_counts import TenantLoad

Reason = Literal["model_full", "queue_full", "late", "crowded", "hopeless", "expired", "unservable", "unread"]


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
