"""The admission queue: which requests may wait, which one starts where and when, and which ones leave. Pure.

Requests wait here until a replica can start them. One is refused when it comes
- because the queue is full, of its model or of all (`Lanes` says who goes when tenants or priorities differ),
- because it would not be done by its deadline, by what requests took so far (`pool.py`, `service_times.py`).
Requests that wait already leave as soon as they cannot be done in time any more. A refusal says when the queue would
have room for the request, if no others came.

`pump` returns what has to happen; times are parameters. `Placement` is how a controller orders the queue, and
`AdmissionSnapshot` what it reads.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from cluster.admission.outcomes import EndedLog, TenantCounts
from cluster.admission.pool import Forecast, Pool
from cluster.admission.records import (
    AdmissionSnapshot,
    Demand,
    ModelLoad,
    Placement,
    PoolClaims,
    PoolPart,
    Refusal,
    Refused,
    ReplicaUse,
    SlotClaim,
    Started,
    Waiting,
)
from cluster.admission.replica_slots import NO_PART, Assignment, Ended, Options, held_until_s
from cluster.admission.service_times import ArrivalRate, BatchLatency, ModelCounts, ModelTimes, ServiceTimes
from cluster.admission.tenant_turns import OpenModels
from configs.admission import AdmissionConfig

__all__ = ["REVIEW_S", "SWITCHED_S", "AdmissionQueue"]

REVIEW_S: Final = 0.25  # how often those that wait are predicted anew
REVIEWED: Final = 1024  # requests at a time; where more wait, it is as much less often
SWITCHED_S: Final = 0.02  # a switch that took longer shows that the model was not at hand
_MOSTLY: Final = 0.2  # of its time: a request that spent more of it switching says little about the next one
_LEAST_SHARE: Final = 1e-6  # no request takes less of a replica
_NO_PART: Final = PoolPart({}, 0.0)

logger = logging.getLogger("atelier.admission")


@dataclass(frozen=True, slots=True, eq=False)
class _Starting:
    """The starts of a pool at one moment: models that may, and replicas that an earlier request waits for."""

    name: str
    pool: Pool
    models: OpenModels
    now_s: float
    full: set[str] = field(default_factory=set)


class AdmissionQueue:
    """The queue of one ingress. `config` can be changed at any time with `retune`.

    Of several ingresses, `num_sharing`, each starts requests only within its own slots (`set_parts`), and none before
    it was given some. The bounds are divided between them.
    """

    def __init__(self, config: AdmissionConfig, num_sharing: int = 1) -> None:
        self._config = config
        self._is_shared = num_sharing > 1
        self._bound_part = 1 / num_sharing
        self._parts: Mapping[str, PoolPart] = {}
        self._is_suspended = False
        self._arrivals = ArrivalRate()
        self._last_urgency: dict[str, float] = {}  # by pool: the most urgent that waited when it was last looked
        self._has_slot_news = False
        self._pools: dict[str, Pool] = {}
        self._times = ServiceTimes()
        self._forecast = Forecast(self._times)
        self._pool_of: dict[int, str] = {}  # of every ticket, waiting or running
        self._counts = ModelCounts()
        self._tenant_counts = TenantCounts()
        self._placement = Placement()
        self._holds = True  # the placement, as far as was looked
        self._allowed: dict[tuple[str, str], list[str]] = {}  # by pool and replica: the models that it lets start there
        self._refused: list[Refused] = []
        self.ended = EndedLog()
        self._num_arrived = 0
        self._reviewed_s = -math.inf
        self._has_failed_to_learn = False
        self._held_until_s = math.inf  # the first that waits for its model in spite of room elsewhere

    @property
    def config(self) -> AdmissionConfig:
        """Bounds and weights in force."""
        return self._config

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait, over all pools."""
        return sum(len(pool.lanes) for pool in self._pools.values())

    @property
    def num_running(self) -> int:
        return sum(pool.slots.num_running for pool in self._pools.values())

    def submit(self, ticket: int, demand: Demand, now_s: float) -> None:
        """Let a request in, or refuse it: `pump` returns it then. `ticket` is a number that none has that is here."""
        if ticket in self._pool_of:
            raise ValueError(f"ticket {ticket} is in the queue already")
        pool = self._pool(demand.pool)
        counts = self._counts.counts_of(demand.model, demand.pool)
        counts.arrivals.note_arrival(now_s)
        self._arrivals.note_arrival(now_s)
        pool.offered.note_arrival(now_s, demand.share)
        pool.least_share = min(pool.least_share, demand.share)
        self._num_arrived += 1
        waiting = Waiting(ticket, demand, self._num_arrived, now_s, self._forecast.cost_s(demand))
        refusal = self._forecast.why_untimely(pool, demand, now_s) or self._make_room(pool, waiting, now_s)
        if refusal is not None:
            counts.refused += 1
            self._tenant_counts.note_refusal(demand)
            self._refused.append(Refused(ticket, refusal))
            return
        pool.lanes.add(waiting)
        pool.note_waiting(demand.model)
        self._pool_of[ticket] = demand.pool
        self._counts.hold(demand.model, demand.pool)

    def give_back(self, ticket: int, now_s: float) -> tuple[str, str]:
        """Let a running request wait again, before all others: its replica died, or could not load its model.

        Returns the pool and the replica.
        """
        pool = self._pools[self._pool_of[ticket]]
        ended = pool.slots.end(ticket, now_s)
        pool.slots.forget_model(ended.replica, ended.waiting.demand.model)
        pool.lanes.settle(ended.waiting, ended.busy_s)
        pool.lanes.add_returned(ended.waiting)
        pool.note_waiting(ended.waiting.demand.model)
        self._note_room(pool, ended)
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
        return not pool.failures.unable(demand.model, demand.version, now_s).issuperset(pool.slots.names())

    def leave(self, ticket: int, now_s: float, *, is_answered: bool = False, switch_s: float = 0.0) -> None:
        """Remove a request: cancel a waiting one, complete (`is_answered`) or cancel a running one.

        `switch_s` is what its replica needed to switch to the model. A ticket that has left already does nothing.
        """
        name = self._pool_of.pop(ticket, None)
        if name is None:
            return
        pool = self._pools[name]
        if ticket in pool.lanes:
            model = pool.lanes.remove(ticket).demand.model
            pool.forget_waiting(model)
            self._counts.release(model)
            return
        ended = pool.slots.end(ticket, now_s)
        self._counts.release(ended.waiting.demand.model)
        pool.lanes.settle(ended.waiting, ended.busy_s)
        self._note_room(pool, ended)
        if is_answered:
            pool.failures.note_load(ended.waiting.demand.model, ended.waiting.demand.version, ended.replica)
        try:
            self.ended.note_end(ended, now_s, switch_s, is_answered)
            self._learn(pool, ended, now_s, is_answered, switch_s)
        except Exception:  # whatever it is: the slot is free, and those who wait need no statistics
            if not self._has_failed_to_learn:
                logger.exception(
                    "requests are not measured; what was known of model %r holds", ended.waiting.demand.model
                )
            self._has_failed_to_learn = True

    def _learn(self, pool: Pool, ended: Ended, now_s: float, is_answered: bool, switch_s: float) -> None:
        """Learn from a request that has left its replica. Arguments are those of `leave`."""
        demand = ended.waiting.demand
        if switch_s > SWITCHED_S:
            self._times.note_switch(demand.model, switch_s)
        times = self._times.times(demand.model)
        is_first = times is None
        # One that was given up says how long it takes at the least: in an overload, those that take the longest are
        # given up at their deadlines, and would never be measured.
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
        self._set_part(pool, found, now_s)

    def set_parts(self, parts: Mapping[str, PoolPart], bound_part: float, now_s: float) -> None:
        """Own these slots from now on, by pool, and no others, and this part of the bounds."""
        self._parts, self._bound_part = parts, bound_part
        for name, pool in self._pools.items():
            self._set_part(name, pool, now_s)

    def drop_parts(self, now_s: float) -> None:
        """Own nothing until `set_parts`. The part of the bounds stays."""
        self.set_parts({}, self._bound_part, now_s)

    def suspend_slots(self) -> None:
        """Start nothing on replicas that others share until `resume_slots`."""
        self._is_suspended = True
        for pool in self._pools.values():
            pool.slots.suspend()

    def resume_slots(self, now_s: float) -> None:
        """Own again what was owned before `suspend_slots`."""
        self._is_suspended = False
        self.set_parts(self._parts, self._bound_part, now_s)

    def _set_part(self, name: str, pool: Pool, now_s: float) -> None:
        if self._is_shared and not self._is_suspended:
            part = self._parts.get(name, _NO_PART)
            pool.slots.set_parts(part.replicas, part.capacity, now_s)
        pool.look_at_all()

    def claims(self, now_s: float) -> dict[str, PoolClaims]:
        """Return what this queue has and wants of the replicas that others share, by pool."""
        found = {}
        for name, pool in self._pools.items():
            owned = self._parts.get(name, _NO_PART).replicas
            uses = {id_: ReplicaUse(0.0, 0.0, {}, 0.0, is_listed=False) for id_ in owned} | pool.slots.uses()
            if uses:
                found[name] = PoolClaims(
                    {id_: replace(use, limit=owned.get(id_, NO_PART).limit) for id_, use in uses.items()},
                    tuple(
                        SlotClaim(priority, tenant, self._config.weight_of(tenant), share, (replica,))
                        for (replica, priority, tenant), share in pool.slots.running_shares().items()
                    ),
                    self._waiting_claims(name, pool, now_s),
                    pool.least_share,
                    pool.offered.per_s(now_s)[0],
                    pool.num_started,
                )
        return found

    def requests_per_s(self, now_s: float) -> float:
        """Return how many requests came of late."""
        return self._arrivals.per_s(now_s)[0]

    def take_slot_news(self) -> bool:
        """Return whether something has changed since the last look that the split of slots should follow at once."""
        for name, pool in self._pools.items() if self._is_shared else ():
            urgency = pool.lanes.most_urgent
            self._has_slot_news |= urgency < self._last_urgency.get(name, math.inf) or pool.slots.has_overdrawn
            self._last_urgency[name], pool.slots.has_overdrawn = urgency, False
            if pool.has_ended and self._parts.get(name, _NO_PART).is_wanted:
                self._has_slot_news |= pool.slots.has_room(pool.least_share)
            pool.has_ended = False
        found, self._has_slot_news = self._has_slot_news, False
        return found

    def _waiting_claims(self, name: str, pool: Pool, now_s: float) -> tuple[SlotClaim, ...]:
        """Return claims of the requests that wait, those together that may start on the same replicas.

        Those of one tenant, priority and model count as if they were all like the first: thousands may wait.
        """
        found: dict[tuple[tuple[str, ...] | None, int, str], SlotClaim] = {}
        for priority, front, number in pool.lanes.lines():
            demand = front.demand
            options = self._options(front, (), now_s)
            names = pool.slots.may_take(demand.model, options, now_s) if options.among is not None else None
            if names == ():
                continue
            key, age_s = (names, priority, demand.tenant), now_s - front.arrived_s
            before = found.get(key)
            share = number * demand.share + (before.share if before else 0.0)
            if before and before.oldest_age_s > age_s:
                found[key] = replace(before, share=share)
            else:
                weight = self._config.weight_of(demand.tenant)
                found[key] = SlotClaim(priority, demand.tenant, weight, share, names, age_s, demand.share)
        return tuple(found.values())

    def num_replicas(self, pool: str) -> int:
        """Return the number of replicas that can be given work."""
        return self._pool(pool).slots.num_replicas

    def set_resident(self, pool: str, resident: Mapping[str, Iterable[str]]) -> None:
        """Say which models are at hand, by replica."""
        self._pool(pool).slots.set_resident(resident)

    def set_placement(self, placement: Placement) -> None:
        """Start requests only where `placement` lets them."""
        self._placement, self._holds = placement, True
        self._allowed = {}
        for (pool_name, model), replicas in placement.replicas.items():
            for replica in replicas:
                self._allowed.setdefault((pool_name, replica), []).append(model)
        for name, pool in self._pools.items():
            pool.slots.set_resident(placement.ready)
            pool.lanes.set_stalled(placement.unplaced(name))
            pool.look_at_all()

    def is_unplaced(self, demand: Demand, now_s: float) -> bool:
        """Return whether the placement has no replica for such a request: it waits for the controller."""
        return self._placement.replicas_of(demand.pool, demand.model, now_s) == ()

    def retune(self, config: AdmissionConfig) -> None:
        """Use other bounds and weights from now on. Who waits already stays."""
        self._config = config
        for pool in self._pools.values():
            pool.lanes.weight_of = config.weight_of
            pool.lanes.max_overtakes = config.max_overtakes
            pool.lanes.reweigh()

    def pump(self, now_s: float) -> list[Started | Refused]:
        """Return what happens now. Call it after every change, and again at `look_again_s`."""
        happened: list[Started | Refused] = []
        self._held_until_s = math.inf
        if self.num_waiting and now_s >= self._review_at_s():
            self._reviewed_s = now_s
            for pool in self._pools.values():
                for waiting, refusal in self._forecast.late_ones(pool, now_s):
                    self._refuse(pool, waiting, refusal)
        if self._holds and now_s >= self._placement.until_s:
            self._holds = False
            for pool in self._pools.values():
                pool.lanes.set_stalled(())
                pool.look_at_all()
        for name, pool in self._pools.items():
            happened += self._start_all(name, pool, now_s)
        happened += self._refused
        self._refused = []
        return happened

    def look_again_s(self) -> float:
        """Return when `pump` is due if nothing changes before."""
        return min(self._review_at_s(), self._held_until_s) if self.num_waiting else math.inf

    def _review_at_s(self) -> float:
        """Return when those that wait are predicted anew: many not as often, so that no more are looked at a second."""
        return self._reviewed_s + REVIEW_S * max(1.0, self.num_waiting / REVIEWED)

    def snapshot(self, now_s: float) -> AdmissionSnapshot:
        """Return the state of the queue."""
        oldest: dict[str, float] = {}
        earliest: dict[str, float] = {}
        waiting: Counter[str] = Counter()
        running: Counter[str] = Counter()
        tenants: Counter[str] = Counter()
        for pool in self._pools.values():
            running += pool.slots.running()
            waiting += pool.num_by_model
            for one in pool.lanes:
                tenants[one.demand.tenant] += 1
                oldest[one.demand.model] = min(one.arrived_s, oldest.get(one.demand.model, math.inf))
                if one.demand.deadline_s < math.inf:
                    earliest[one.demand.model] = min(one.demand.deadline_s, earliest.get(one.demand.model, math.inf))
        loads = []
        for model, counts in self._counts:
            times = self._times.times(model) or ModelTimes()
            loads.append(
                ModelLoad(
                    counts.pool,
                    model,
                    waiting[model],
                    now_s - oldest.get(model, now_s),
                    running[model],
                    *counts.arrivals.per_s(now_s),
                    times.busy.mean(),
                    times.usual_s,
                    self._times.switch_s(model),
                    counts.started,
                    counts.refused,
                    earliest[model] - now_s if model in earliest else None,
                    now_s - max(oldest.get(model, now_s), counts.started_s),
                )
            )
        shares = self._tenant_counts.loads((one for pool in self._pools.values() for one in pool.lanes), now_s)
        replicas = {name: pool.slots.load() for name, pool in self._pools.items()}
        return AdmissionSnapshot(tuple(loads), replicas, dict(tenants), shares)

    def _make_room(self, pool: Pool, waiting: Waiting, now_s: float) -> Refusal | None:
        """Return why the queue has no room for the request; None if it has, perhaps that of another one."""
        demand = waiting.demand
        if demand.is_inner:
            return None
        if not len(pool.lanes) and pool.slots.has_room(demand.share):
            return None
        config = self._config
        if pool.num_by_model[demand.model] >= self._own_part(config.max_waiting_per_model):
            refusal, model, crowd = Refusal("model_full", limit=config.max_waiting_per_model), demand.model, [pool]
        elif self.num_waiting >= self._own_part(config.max_waiting):
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

    def _own_part(self, bound: int) -> int:
        return max(1, math.floor(bound * self._bound_part)) if self._is_shared else bound

    def _start_all(self, name: str, pool: Pool, now_s: float) -> Iterable[Started]:
        pool.maybe_open = {model for model in pool.maybe_open if not self._is_full(name, pool, model, now_s)}
        starting = _Starting(name, pool, OpenModels(set(pool.maybe_open)), now_s)
        while starting.models.names and (waiting := pool.lanes.next_up(starting.models)) is not None:
            if (refusal := self._why_never(waiting.demand, now_s)) is not None:
                self._refuse(pool, waiting, refusal)
                continue
            options = self._options(waiting, starting.full, now_s)
            where = pool.slots.best(waiting.demand, options, now_s)
            if where is not None:
                waiting = self._or_rival(starting, waiting, where, options)
                yield self._start(starting, waiting, where)
            elif options.among is None:
                return  # nobody slips past: a large request would wait for ever
            else:
                self._let_wait(starting, waiting.demand.model, options.among, options.held_until_s)

    def _why_never(self, demand: Demand, now_s: float) -> Refusal | None:
        """Return why a request that waits will not start at all; None where it may."""
        if demand.deadline_s <= now_s:
            return Refusal("expired")
        return self._placement.refusal_of(demand.pool, demand.model, now_s)

    def _options(self, waiting: Waiting, full: Collection[str], now_s: float) -> Options:
        """Return where the placement lets the request start, and what is known of its model."""
        demand, placement = waiting.demand, self._placement
        among = self._able(demand, placement.replicas_of(demand.pool, demand.model, now_s), now_s)
        times = self._times.times(demand.model)
        on_demand = placement.on_demand_of(demand.pool, demand.model, now_s) or {}
        return Options(
            among and [each for each in among if each not in full],
            self._times.switch_s(demand.model),
            times.joining_s(demand.work) if times else demand.share,
            on_demand,
            placement.chances,
            held_until_s(on_demand, waiting, times.usual_latency_s(demand.work) if times else 0.0, now_s),
        )

    def _able(self, demand: Demand, among: Collection[str] | None, now_s: float) -> Collection[str] | None:
        """Return those of the replicas that have not just failed with the model; all where every one has."""
        pool = self._pools[demand.pool]
        if not (unable := pool.failures.unable(demand.model, demand.version, now_s)):
            return among
        able = [name for name in pool.slots.names() if name not in unable]
        return [name for name in able if among is None or name in among] if able else among

    def _let_wait(self, starting: _Starting, model: str, among: Collection[str], until_s: float) -> None:
        """Try no more of the model. Where it may start nothing else does, unless the request is held back itself."""
        starting.models.close(model)
        if starting.now_s < until_s:
            self._held_until_s = min(self._held_until_s, until_s)
        else:
            starting.full.update(among)
            self._close_full(starting, among)

    def _or_rival(self, starting: _Starting, waiting: Waiting, where: Assignment, options: Options) -> Waiting:
        """Return the tenant's request for what the replica has, instead of one that would switch it too soon."""
        pool = starting.pool
        at_hand = pool.slots.models_at_hand(where.replica)
        if starting.now_s >= options.held_until_s or waiting.demand.model in at_hand:
            return waiting
        rivals = self._placement.models_of(starting.name, where.replica, at_hand, starting.now_s)
        return pool.lanes.beside(waiting, [model for model in rivals if model in starting.models.names]) or waiting

    def _start(self, starting: _Starting, waiting: Waiting, where: Assignment) -> Started:
        pool, demand, now_s = starting.pool, waiting.demand, starting.now_s
        times = self._times.times(demand.model)
        pool.lanes.start_request(waiting.ticket, self._forecast.cost_s(demand))
        pool.forget_waiting(demand.model)
        pool.slots.start_request(waiting, where, now_s, times.latency_s(demand.work) if times else BatchLatency())
        if not pool.slots.has_room(_LEAST_SHARE, (where.replica,)):
            self._close_full(starting, (where.replica,))
        counts = self._counts.counts_of(demand.model, demand.pool)
        counts.started, counts.started_s = counts.started + 1, now_s
        self._tenant_counts.note_start(demand, now_s - waiting.arrived_s)
        pool.num_started += 1
        return Started(waiting.ticket, where.replica)

    def _note_room(self, pool: Pool, ended: Ended) -> None:
        """Look for room again for the models that may start where a request has ended."""
        pool.has_ended = True
        models = self._allowed.get((ended.waiting.demand.pool, ended.replica), ())
        pool.maybe_open.update([model for model in models if model in pool.num_by_model])

    def _close_full(self, starting: _Starting, replicas: Iterable[str]) -> None:
        """Try no more requests of models that the last room of these replicas was for."""
        models, full = starting.models, starting.full
        for replica in replicas:
            for model in self._allowed.get((starting.name, replica), ()):
                if model in models.names and self._is_full(starting.name, starting.pool, model, starting.now_s, full):
                    models.close(model)

    def _is_full(self, name: str, pool: Pool, model: str, now_s: float, full: Collection[str] = ()) -> bool:
        """Return whether the placement leaves no room for any request of the model: none of them need be tried."""
        among = self._placement.replicas_of(name, model, now_s)
        if among is None or self._placement.refusal_of(name, model, now_s) is not None:
            return False
        return not pool.slots.has_room(_LEAST_SHARE, [each for each in among if each not in full] if full else among)

    def _refuse(self, pool: Pool, waiting: Waiting, refusal: Refusal) -> None:
        pool.lanes.remove(waiting.ticket)
        pool.forget_waiting(waiting.demand.model)
        del self._pool_of[waiting.ticket]
        self._counts.release(waiting.demand.model)
        self._counts.counts_of(waiting.demand.model, waiting.demand.pool).refused += 1
        self._tenant_counts.note_refusal(waiting.demand)
        self._refused.append(Refused(waiting.ticket, refusal))

    def _pool(self, name: str) -> Pool:
        if name not in self._pools:
            self._pools[name] = Pool(self._config, is_shared=self._is_shared)
            self._pools[name].lanes.set_stalled(self._placement.unplaced(name) if self._holds else ())
        return self._pools[name]
