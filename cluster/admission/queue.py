"""The admission queue: it decides which requests wait, which start where and when, and which leave. Pure.

Requests wait here until a replica can start them. A new request is refused
- because the queue of its model or of all is full (`Lanes` chooses who goes when tenants or priorities differ),
- because it would miss its deadline, by the measured service times (`pool.py`, `service_times.py`).
Waiting requests leave as soon as they can no longer be done in time. A refusal says when the queue would
have room for the request if no others came.

`pump` returns the starts and refusals; times are parameters. By a `Placement` a controller steers the queue, and by
an `AdmissionSnapshot` it reads the queue. `parts` are the queue's own parts of replicas that several ingresses share.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from cluster.admission.outcomes import MAX_TENANT_LOADS, EndedLog, added_loads, joined_loads, note_load
from cluster.admission.places import Places
from cluster.admission.pool import Forecast, Pool
from cluster.admission.records import (
    AdmissionSnapshot,
    Demand,
    ModelLoad,
    Placement,
    Refusal,
    Refused,
    Started,
    TenantKey,
    TenantLoad,
    Waiting,
)
from cluster.admission.replica_choice import Assignment
from cluster.admission.replica_slots import Ended
from cluster.admission.service_times import (
    MAX_MODELS,
    ArrivalRate,
    BatchLatency,
    ModelTimes,
    RequestCounts,
    ServiceTimes,
)
from cluster.admission.slot_parts import SlotParts
from cluster.admission.starts import Starts
from configs.admission import AdmissionConfig
from weights.residency.recent import Recent

__all__ = ["REVIEW_S", "SWITCHED_S", "AdmissionQueue"]

REVIEW_S: Final = 0.25  # between two forecasts for the waiting requests
REVIEWED: Final = 1024  # requests at a time; if more wait, forecasts are rarer in proportion
SWITCHED_S: Final = 0.02  # a switch that took longer shows that the model was not at hand
_MOSTLY: Final = 0.2  # of its time: a request that spent more of its time in a switch says little about the next one

logger = logging.getLogger("atelier.admission")


class AdmissionQueue:
    """The queue of one ingress. `config` can be changed at any time with `retune`.

    Of several ingresses, `num_sharing`, each starts requests only within its own slots (`parts`), and none before
    it was given some. The bounds are divided between them.
    """

    def __init__(self, config: AdmissionConfig, num_sharing: int = 1) -> None:
        self.config = config
        self.arrivals = ArrivalRate()
        self._pools: dict[str, Pool] = {}
        self._times = ServiceTimes()
        self._forecast = Forecast(self._times)
        self.places = Places(self._pools, self._times)
        self.parts = SlotParts(self._pools, self.places, num_sharing)
        self._pool_of: dict[int, str] = {}  # by ticket, waiting or running
        self._counts: Recent[str, RequestCounts] = Recent(MAX_MODELS)
        self._tenant_loads: Recent[TenantKey, TenantLoad] = Recent(MAX_TENANT_LOADS)  # without waiting requests
        self._refused: list[Refused] = []
        self.ended = EndedLog()
        self._num_arrived = 0
        self._reviewed_s = -math.inf
        self._has_failed_to_learn = False
        self._held_until_s = math.inf  # for the first request that waits for its model in spite of room elsewhere

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests over all pools."""
        return sum(len(pool.lanes) for pool in self._pools.values())

    @property
    def num_running(self) -> int:
        return sum(pool.slots.num_running for pool in self._pools.values())

    def submit(self, ticket: int, demand: Demand, now_s: float) -> None:
        """Let a request in, or refuse it: then `pump` returns it. `ticket` is a number that no present request has."""
        if ticket in self._pool_of:
            raise ValueError(f"ticket {ticket} is in the queue already")
        pool = self._pool(demand.pool)
        self._counts_of(demand).arrivals.note_arrival(now_s)
        self.arrivals.note_arrival(now_s)
        pool.offered.note_arrival(now_s, demand.share)
        pool.least_share = min(pool.least_share, demand.share)
        self._num_arrived += 1
        waiting = Waiting(ticket, demand, self._num_arrived, now_s, self._forecast.cost_s(demand))
        pool.lanes.turns(demand.priority).note_offer(demand.tenant, waiting.cost_s, now_s)
        refusal = self._forecast.why_untimely(pool, demand, now_s) or self._make_room(pool, waiting, now_s)
        if refusal is not None:
            self._refuse(pool, waiting, refusal)
            return
        pool.lanes.add(waiting)
        self._pool_of[ticket] = demand.pool

    def give_back(self, ticket: int, now_s: float) -> tuple[str, str]:
        """Let a running request wait again, before all others: its replica died, or could not load its model.

        Returns the pool and the replica.
        """
        pool = self._pools[self._pool_of[ticket]]
        ended = pool.slots.end(ticket, now_s)
        pool.slots.replicas.forget_model(ended.replica, ended.waiting.demand.model)
        pool.lanes.settle(ended.waiting, ended.busy_s)
        pool.lanes.add_returned(ended.waiting)
        pool.note_room(self.places.models_on(ended.waiting.demand.pool, ended.replica))
        return ended.waiting.demand.pool, ended.replica

    def note_unable(self, ticket: int, now_s: float) -> bool:
        """Start no more requests of that model for a while where this one runs: the replica could not load it.

        Return whether there is another replica, which has not failed with it.
        """
        pool = self._pools[self._pool_of[ticket]]
        if not (found := pool.slots.run_of(ticket)) or not found[1]:  # without a name it is whichever Serve chooses
            return False
        demand, replica = found
        pool.failures.note_failure(demand.model, demand.version, replica, now_s)
        return not pool.failures.unable(demand.model, demand.version, now_s).issuperset(pool.slots.replicas.names())

    def leave(self, ticket: int, now_s: float, *, is_answered: bool = False, switch_s: float = 0.0) -> None:
        """Remove a request: cancel a waiting one, complete (`is_answered`) or cancel a running one.

        `switch_s` is what its replica needed to switch to the model. A ticket that has left already does nothing.
        """
        name = self._pool_of.pop(ticket, None)
        if name is None:
            return
        pool = self._pools[name]
        if ticket in pool.lanes:
            pool.lanes.remove(ticket)
            return
        ended = pool.slots.end(ticket, now_s)
        pool.lanes.settle(ended.waiting, ended.busy_s)
        pool.note_room(self.places.models_on(ended.waiting.demand.pool, ended.replica))
        if is_answered:
            pool.failures.note_load(ended.waiting.demand.model, ended.waiting.demand.version, ended.replica)
        try:
            self.ended.note_end(ended, now_s, switch_s, is_answered)
            self._learn(pool, ended, now_s, is_answered, switch_s)
        except Exception:  # any error: the slot is free, and waiting requests need no statistics
            if not self._has_failed_to_learn:
                logger.exception(
                    "requests are not measured; the last figures of model %r holds", ended.waiting.demand.model
                )
            self._has_failed_to_learn = True

    def _learn(self, pool: Pool, ended: Ended, now_s: float, is_answered: bool, switch_s: float) -> None:
        """Learn from a request that has left its replica. Arguments are those of `leave`."""
        demand = ended.waiting.demand
        if switch_s > SWITCHED_S:
            self._times.note_switch(demand.model, switch_s)
        times = self._times.times(demand.model)
        is_first = times is None
        # A request given up took at least its time so far. In an overload the longest ones are
        # given up at their deadlines, and would never be measured otherwise.
        is_telling = is_answered or (times is not None and times.is_longer(demand.work, ended.busy_s, ended.latency_s))
        if is_telling and (is_first or switch_s < _MOSTLY * ended.latency_s):
            served_s = max(ended.latency_s - switch_s, 0.0) if is_first else ended.latency_s
            busy_s = ended.busy_s * served_s / ended.latency_s if ended.latency_s else ended.busy_s
            num_left = pool.slots.num_of(demand.model)
            self._times.note_served(demand.model, now_s, demand.work, busy_s, served_s, num_left)

    def set_replicas(self, pool: str, names: Collection[str], now_s: float) -> None:
        """Say which replicas there are."""
        found = self._pool(pool)
        found.slots.set_replicas(names, now_s)
        found.failures.keep_replicas(found.slots.uses().keys() | set(names))
        self.parts.set_part(pool, now_s)

    def set_placement(self, placement: Placement) -> None:
        """Start requests only where `placement` lets them."""
        self.places.set_placement(placement)

    def retune(self, config: AdmissionConfig) -> None:
        """Use other bounds and weights from now on. Waiting requests stay."""
        self.config = config
        for pool in self._pools.values():
            pool.lanes.retune(config)

    def pump(self, now_s: float) -> list[Started | Refused]:
        """Return the requests that start or are refused now. Call it after every change, and at `look_again_s`."""
        happened: list[Started | Refused] = []
        self._held_until_s = math.inf
        self.parts.keep_or_let_go(now_s)
        if self.num_waiting and now_s >= self._review_at_s():
            self._reviewed_s = now_s
            for pool in self._pools.values():
                for waiting, refusal in self._forecast.late_ones(pool, now_s):
                    self._refuse(pool, waiting, refusal)
        self.places.drop_what_is_over(now_s)
        for name, pool in self._pools.items():
            starts = Starts(name, pool, self.places, now_s)
            for waiting, where in starts:
                if isinstance(where, Refusal):
                    self._refuse(pool, waiting, where)
                else:
                    happened.append(self._start(pool, waiting, where, now_s))
            self._held_until_s = min(self._held_until_s, starts.held_until_s)
        happened += self._refused
        self._refused = []
        return happened

    def look_again_s(self) -> float:
        """Return the time when `pump` is due if nothing changes before."""
        return min(self._review_at_s(), self._held_until_s) if self.num_waiting else math.inf

    def _review_at_s(self) -> float:
        """Return the time of the next forecast for waiting requests. The more wait, the rarer: its cost is bounded."""
        return self._reviewed_s + REVIEW_S * max(1.0, self.num_waiting / REVIEWED)

    def snapshot(self, now_s: float) -> AdmissionSnapshot:
        """Return the state of the queue."""
        slacks_s: dict[str, float] = {}
        waiting: Counter[str] = Counter()
        ages_s: dict[str, float] = defaultdict(float)
        running: Counter[str] = Counter()
        tenants: Counter[str] = Counter()
        known = dict(self._counts)
        loads = added_loads(
            TenantLoad(name, front.demand.model, front.demand.tenant, number, now_s - front.arrived_s)
            for name, pool in self._pools.items()
            for _, front, number in pool.lanes.lines()
        )
        for load in loads.values():
            tenants[load.tenant] += load.waiting
            waiting[load.model] += load.waiting
            ages_s[load.model] = max(load.oldest_age_s, ages_s[load.model])
        for name, pool in self._pools.items():
            running += pool.slots.running()
            for model in {*pool.lanes.models, *pool.slots.running()} - known.keys():
                known[model] = RequestCounts(name)
            for model, line in pool.lanes.models.items():
                if (first_s := line.first_deadline_s()) is not None:
                    slacks_s[model] = min(first_s - now_s, slacks_s.get(model, math.inf))
        models = []
        for model, counts in known.items():
            times = self._times.times(model) or ModelTimes()
            models.append(
                ModelLoad(
                    counts.pool,
                    model,
                    waiting[model],
                    ages_s[model],
                    running[model],
                    *counts.arrivals.per_s(now_s),
                    times.busy.mean(),
                    times.usual_s,
                    self._times.switch_s(model),
                    counts.started,
                    counts.refused,
                    slacks_s.get(model),
                    min(ages_s[model], now_s - counts.started_s),
                )
            )
        shares = joined_loads([*self._tenant_loads.values(), *loads.values()])
        replicas = {name: pool.slots.load() for name, pool in self._pools.items()}
        return AdmissionSnapshot(tuple(models), replicas, dict(tenants), shares)

    def _make_room(self, pool: Pool, waiting: Waiting, now_s: float) -> Refusal | None:
        """Return why the queue has no room for the request; None if it has, maybe by displacing another one."""
        demand = waiting.demand
        if demand.is_inner:
            return None
        if not len(pool.lanes) and pool.slots.replicas.has_room(demand.share):
            return None
        config = self.config
        line = pool.lanes.models.get(demand.model)
        if line and len(line.crowd) >= self.parts.own_part(config.max_waiting_per_model):
            refusal, model, crowd = Refusal("model_full", limit=config.max_waiting_per_model), demand.model, [pool]
        elif self.num_waiting >= self.parts.own_part(config.max_waiting):
            refusal, model, crowd = Refusal("queue_full", limit=config.max_waiting), None, [*self._pools.values()]
        else:
            return None
        leaving = [(*found, other) for other in crowd if (found := other.lanes.displaced_by(demand, model))]
        if not leaving:
            return replace(refusal, retry_after_s=self._forecast.room_in_s(pool, demand, now_s))
        _, _, displaced, other = max(leaving, key=lambda found: found[:2])
        after_s = self._forecast.room_in_s(other, displaced.demand, now_s)
        self._refuse(other, displaced, replace(refusal, retry_after_s=after_s))
        return None

    def _start(self, pool: Pool, waiting: Waiting, where: Assignment, now_s: float) -> Started:
        demand = waiting.demand
        pool.lanes.start_request(waiting.ticket, self._forecast.cost_s(demand))
        times = self._times.times(demand.model)
        pool.slots.start_request(waiting, where, now_s, times.latency_s(demand.work) if times else BatchLatency())
        counts = self._counts_of(demand)
        counts.started, counts.started_s = counts.started + 1, now_s
        waited_s = max(0.0, now_s - waiting.arrived_s)
        load = TenantLoad(demand.pool, demand.model, demand.tenant, started=1, waited_s=waited_s)
        note_load(self._tenant_loads, load)
        pool.num_started += 1
        return Started(waiting.ticket, where.replica)

    def _refuse(self, pool: Pool, waiting: Waiting, refusal: Refusal) -> None:
        """Refuse a request, which waits or is new."""
        if waiting.ticket in pool.lanes:
            pool.lanes.remove(waiting.ticket)
            del self._pool_of[waiting.ticket]
        demand = waiting.demand
        self._counts_of(demand).refused += 1
        note_load(self._tenant_loads, TenantLoad(demand.pool, demand.model, demand.tenant, refused=1))
        self._refused.append(Refused(waiting.ticket, refusal))

    def _counts_of(self, demand: Demand) -> RequestCounts:
        return self._counts.used(demand.model, lambda: RequestCounts(demand.pool))

    def _pool(self, name: str) -> Pool:
        if name not in self._pools:
            self._pools[name] = Pool(self.config, is_shared=self.parts.are_shared)
            self._pools[name].lanes.set_stalled(self.places.stalled(name))
        return self._pools[name]
