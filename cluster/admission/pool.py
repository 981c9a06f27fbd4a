"""The requests for one deployment: their order of service, and forecasts of which will be in time. Pure.

The more urgent priority goes first. Inside a priority, tenants take turns by start-time fair queueing (Goyal, Vin and
Cheng, SIGCOMM 1996): each has a clock that its work moves on, the faster the less weight it has, and the one that is
behind goes next. Inside a tenant, requests are served in the order of their arrival.

The oldest request of all goes next once `max_overtakes` others went before it although they came later, whatever its
priority. Requests that come back from a replica that died go before all others.

Priorities order the starts, and the tenant's own requests that leave a full queue. How much of a full queue a
tenant has, its weight says: urgency displaces no other tenant's requests.

A forecast counts the work that waits, and what others send meanwhile as far as it goes first. It reserves nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from cluster.admission.lazy_heap import LazyHeap
from cluster.admission.records import Demand, Reason, Refusal, Waiting
from cluster.admission.replica_slots import ReplicaSlots
from cluster.admission.service_times import ArrivalRate, ModelTimes, ServiceTimes
from cluster.admission.shares import Crowd
from cluster.admission.tenant_turns import MAX_CLOCKS, OpenModels, TenantTurns, newest
from cluster.records.load_failures import LoadFailures
from configs.admission import AdmissionConfig
from weights.residency.recent import Recent

_MARGIN: Final = 1.1  # waits are predicted this much longer than the mean: half of all requests wait longer than that
_ENOUGH: Final = 3  # measurements
_FADES_IN_S: Final = 3.0  # a kind of request that no longer comes stops bounding waits
_LEAST_SHARE: Final = 0.1
_DRAINED: Final = 0.5  # of a full queue: those who are refused together come back to room for many of them


class ModelLine:
    """The requests that wait for one model: how many each tenant has, and the deadlines."""

    def __init__(self, config: AdmissionConfig) -> None:
        self.crowd = Crowd(config)
        self._deadlines_s: dict[int, float] = {}  # by ticket, of those that have one
        self._next = LazyHeap[int](self)

    def key_of(self, ticket: int) -> float | None:
        """Return the deadline of a request that waits."""
        return self._deadlines_s.get(ticket)

    def add(self, waiting: Waiting) -> None:
        """Count a request."""
        self.crowd.add(waiting.demand.tenant)
        if waiting.demand.deadline_s < math.inf:
            self._deadlines_s[waiting.ticket] = waiting.demand.deadline_s
            self._next.push(waiting.ticket)

    def remove(self, waiting: Waiting) -> None:
        """Count a request no more."""
        self.crowd.remove(waiting.demand.tenant)
        self._deadlines_s.pop(waiting.ticket, None)

    def first_deadline_s(self) -> float | None:
        """Return the earliest deadline; None without one."""
        return None if (ticket := self._next.first()) is None else self._deadlines_s[ticket]


class Lanes:
    """The waiting requests of one pool of replicas, and `cost_s`, the replica seconds of all of them.

    `maybe_open` are the models that may have room, or none waiting.
    """

    def __init__(self, config: AdmissionConfig) -> None:
        self.config = config
        self._waiting: dict[int, Waiting] = {}
        self._returned: OrderedDict[int, Waiting] = OrderedDict()
        self._ages: OrderedDict[int, Waiting] = OrderedDict()  # by arrival
        self.cost_s = 0.0
        self._num_overtakes = 0
        self._classes: dict[int, TenantTurns] = {}
        self._stalled: Collection[str] = frozenset()  # models without a replica
        self._crowd = Crowd(config)
        self.models: dict[str, ModelLine] = {}  # that requests wait for
        self.maybe_open: set[str] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._waiting

    @property
    def most_urgent(self) -> float:
        """The most urgent waiting priority: 0 for a request whose replica died, infinity for none."""
        busy = [priority for priority, turns in self._classes.items() if turns.waiting]
        return 0 if self._returned else min(busy, default=math.inf)

    def lines(self) -> Iterator[tuple[int, Waiting, int]]:
        """Yield the priority, the first and the number of the requests of each priority, tenant and model."""
        for waiting in self._returned.values():
            yield 0, waiting, 1
        for priority, turns in self._classes.items():
            for lane in turns.waiting.values():
                for line in lane.models.values():
                    yield priority, next(iter(line.values())), len(line)

    def add(self, waiting: Waiting) -> None:
        """Add a request behind all earlier ones."""
        self.turns(waiting.demand.priority).add(waiting)
        self._ages[waiting.ticket] = waiting
        self._count(waiting)

    def add_returned(self, waiting: Waiting) -> None:
        """Add a request whose replica died, before all others."""
        self._returned[waiting.ticket] = waiting
        self._count(waiting)

    def _count(self, waiting: Waiting) -> None:
        model = waiting.demand.model
        self._waiting[waiting.ticket] = waiting
        self.cost_s += waiting.cost_s
        self._crowd.add(waiting.demand.tenant)
        if model not in self.models:
            self.models[model] = ModelLine(self.config)
        self.models[model].add(waiting)
        self.maybe_open.add(model)

    def remove(self, ticket: int) -> Waiting:
        """Take a request out."""
        waiting = self._waiting.pop(ticket)
        self.cost_s = max(0.0, self.cost_s - waiting.cost_s) if self._waiting else 0.0  # without a rest by rounding
        demand = waiting.demand
        self._crowd.remove(demand.tenant)
        self.models[demand.model].remove(waiting)
        if not self.models[demand.model].crowd:
            del self.models[demand.model]
        if self._returned.pop(ticket, None) is None:
            if next(iter(self._ages)) == ticket:
                self._num_overtakes = 0
            del self._ages[ticket]
            self._classes[demand.priority].remove(waiting)
        return waiting

    def next_up(self, open_models: OpenModels) -> Waiting | None:
        """Return the request to start next, of the models that may start."""
        for waiting in self._returned.values():
            if waiting.demand.model in open_models.names:
                return waiting
        if self._num_overtakes >= self.config.max_overtakes and self._ages:
            oldest = next(iter(self._ages.values()))
            if oldest.demand.model in open_models.names:
                return oldest
        for priority in sorted(self._classes):
            if (found := self._classes[priority].first(open_models)) is not None:
                return found
        return None

    def beside(self, waiting: Waiting, models: Iterable[str]) -> Waiting | None:
        """Return the first request of the same tenant and priority for one of the models; None where it must not pass.

        It must not pass one that came back from a replica that died, nor the oldest of all after `max_overtakes`.
        """
        is_oldest = next(iter(self._ages), None) == waiting.ticket
        if waiting.ticket in self._returned or (is_oldest and self._num_overtakes >= self.config.max_overtakes):
            return None
        lines = self.turns(waiting.demand.priority).lane(waiting.demand.tenant).models
        fronts = [next(iter(lines[model].values())) for model in models if model in lines]
        return min(fronts, key=lambda front: front.number, default=None)

    def start_request(self, ticket: int, cost_s: float) -> Waiting:
        """Take out a request that starts, and charge its tenant with `cost_s`, its estimated cost."""
        overtakes = ticket not in self._returned and next(iter(self._ages)) != ticket
        waiting = self.remove(ticket)
        self._num_overtakes += overtakes
        turns, tenant = self.turns(waiting.demand.priority), waiting.demand.tenant
        turns.floor_s = max(turns.floor_s, turns.lane(tenant).clock_s)
        turns.charge(tenant, cost_s)
        waiting.cost_s = cost_s
        return waiting

    def settle(self, started: Waiting, cost_s: float) -> None:
        """Charge a request's real cost instead of the estimate."""
        self.turns(started.demand.priority).charge(started.demand.tenant, cost_s - started.cost_s)

    def displaced_by(self, demand: Demand, model: str | None) -> tuple[bool, float, Waiting] | None:
        """Return the request that leaves a full queue in favour of `demand`; None when `demand` itself has to go.

        It is one of the tenant with the most waiting requests by weight, if that is more than the tenant of `demand`
        would have, or else a less urgent one of its own: the newest of the least urgent. Returned with it: whether it
        is another tenant's, and that tenant's length. `model` is the one at its bound, None for the bound of all.
        """
        crowd = self._crowd if model is None else self.models[model].crowd if model in self.models else None
        richer = crowd.richer_than(demand.tenant) if crowd else None
        if richer and (found := self._least_urgent(richer[1], model, 0)) is not None:
            return True, richer[0], found
        found = self._least_urgent(demand.tenant, model, demand.priority)
        return (False, float(found.demand.priority), found) if found else None

    def ahead_s(self, demand: Demand, now_s: float) -> float:
        """Return the replica seconds of work that would be done before a new request which is to start by its deadline.

        That is some of the work that waits, and of what others send until then.
        """
        most_s, ahead_s = demand.deadline_s - now_s, 0.0
        if demand.model not in self._stalled:
            if not self._returned and not any(turns.cost_s for turns in self._classes.values()):
                return 0.0  # it starts before all that come
            urgent = [turns for priority, turns in self._classes.items() if priority < demand.priority]
            ahead_s = sum([waiting.cost_s for waiting in self._returned.values()])
            ahead_s += sum([turns.cost_s + most_s * turns.offered.steady_per_s(now_s) for turns in urgent])
        return ahead_s + self.turns(demand.priority).ahead_s(demand.tenant, demand.model, now_s, most_s)

    def walk(self, cost_of: Callable[[Demand], float]) -> Iterator[tuple[Waiting, float]]:
        """Yield every request with the replica seconds of its own tenant's work before it, costs estimated anew.

        If the caller removes a request before the next one, it does not count for those behind it.
        """
        for waiting in self._waiting.values():
            waiting.cost_s = cost_of(waiting.demand)
        self.cost_s = sum([waiting.cost_s for waiting in self._waiting.values()])
        for waiting in list(self._returned.values()):
            yield waiting, 0.0
        for turns in self._classes.values():
            turns.count_again()
            yield from turns.walk()

    def set_stalled(self, models: Collection[str]) -> None:
        """Count on replicas for all models but these."""
        self._stalled = frozenset(models)
        for turns in self._classes.values():
            turns.set_stalled(self._stalled)

    def retune(self, config: AdmissionConfig) -> None:
        """Use other bounds and weights from now on."""
        self.config = config
        for turns in self._classes.values():
            turns.reweigh(config)
        for crowd in (self._crowd, *[line.crowd for line in self.models.values()]):
            crowd.reweigh(config)

    def _least_urgent(self, tenant: str, model: str | None, priority: int) -> Waiting | None:
        """Return the newest of a tenant's least urgent requests, if it is less urgent than `priority`."""
        for each in sorted(self._classes, reverse=True):
            if each > priority and (lane := self._classes[each].waiting.get(tenant)) is not None:
                line = lane.waiting if model is None else lane.models.get(model)
                if line and (found := newest(line)) is not None:
                    return found
        return None

    def turns(self, priority: int) -> TenantTurns:
        """Return the turns at a priority."""
        turns = self._classes.get(priority)
        if turns is None:
            turns = self._classes[priority] = TenantTurns(self.config, self._stalled)
        return turns


class _FairWait:
    """The longest wait that still lets in requests of all the kinds that a tenant sends.

    In an overload, short requests would be let in until only they can still be in time. So no request may wait for a
    larger part of its time than the longest of the present kinds can. Kinds that could hardly wait at all do not count.
    """

    def __init__(self) -> None:
        self._shares: Recent[str, tuple[float, float]] = Recent(MAX_CLOCKS)  # by tenant, with the time of the entry

    def bound_s(self, tenant: str, budget_s: float, latency_s: float, now_s: float) -> float:
        """Return the longest wait of a new request with `budget_s` seconds, of which running takes `latency_s`."""
        own = 1 - latency_s / budget_s
        share, noted_s = self._shares.get(tenant) or (1.0, now_s)
        share += (1 - share) * -math.expm1(min(0.0, noted_s - now_s) / _FADES_IN_S)
        if own >= _LEAST_SHARE:
            share = min(share, own)
        self._shares.note(tenant, (share, now_s))
        return min(own, share) * budget_s


class Pool:
    """The waiting requests for one deployment, and its replicas, which other ingresses may share."""

    def __init__(self, config: AdmissionConfig, *, is_shared: bool = False) -> None:
        self.lanes = Lanes(config)
        self.slots = ReplicaSlots(is_shared=is_shared)
        self.offered = ArrivalRate()  # shares of replicas
        self.least_share = 1.0  # of a replica, taken by a request so far
        self.num_started = 0
        self.has_ended = False  # True if a request has ended since the last look at slots
        self.fair_wait = _FairWait()
        self.failures = LoadFailures()

    @property
    def each_s(self) -> float:
        """Replica seconds of a waiting request, in the mean; 0 without one."""
        return self.lanes.cost_s / len(self.lanes) if len(self.lanes) else 0.0

    def is_at_hand(self, model: str) -> bool:
        """Return whether a request for the model is here, so that its times will be known soon."""
        return model in self.lanes.models or self.slots.num_of(model) > 0

    def look_at_all(self) -> None:
        """Look for room for all waiting models at the next chance."""
        self.lanes.maybe_open = set(self.lanes.models)

    def note_room(self, models: Iterable[str]) -> None:
        """Look for room again for these models: a request has ended where they may start."""
        self.has_ended = True
        self.lanes.maybe_open.update(models)


class Forecast:
    """Predictions for the requests of a pool, by the measured `times` of models."""

    def __init__(self, times: ServiceTimes) -> None:
        self._times = times

    def cost_s(self, demand: Demand) -> float:
        """Return the estimated replica seconds of a request; before any measurement its share, in seconds."""
        times = self._times.times(demand.model)
        return times.cost_s(demand.work, demand.share) if times else demand.share

    def why_untimely(self, pool: Pool, demand: Demand, now_s: float) -> Refusal | None:
        """Return why a new request cannot be done in time; None if it can, or if that is not known."""
        budget_s = demand.deadline_s - now_s
        if budget_s <= 0:
            return Refusal("expired")
        times = self._times.times(demand.model)
        if times is None or budget_s == math.inf:
            return None
        if times.is_stale(now_s) and not pool.is_at_hand(demand.model):
            return None  # one at a time is let in to measure whether the model is still as slow
        ahead_s = pool.lanes.ahead_s(demand, now_s)
        wait_s = pool.slots.start_in_s(demand.share, ahead_s, pool.each_s, now_s)
        refusal = self._why_late(pool, times, demand, ahead_s, wait_s, now_s)
        return None if refusal and not wait_s and times.lets_try(demand.work, now_s) else refusal

    def _why_late(
        self, pool: Pool, times: ModelTimes, demand: Demand, ahead_s: float, wait_s: float, now_s: float
    ) -> Refusal | None:
        budget_s = demand.deadline_s - now_s
        least_s = times.least_s(demand.work)
        if times.num_measured >= _ENOUGH and least_s > budget_s:
            return Refusal("hopeless", needs_s=least_s)
        num_sharing = pool.slots.num_sharing(demand.share, ahead_s)
        usual_s, late_s = times.expected_s(demand.work, num_sharing), times.late_s(demand.work, num_sharing)
        if not times.is_known(demand.work):
            usual_s, late_s = min(usual_s, least_s), min(late_s, least_s)
        longest_s = min((budget_s - late_s) / _MARGIN, pool.fair_wait.bound_s(demand.tenant, budget_s, usual_s, now_s))
        is_idle = not len(pool.lanes) and not pool.slots.num_running
        if is_idle or wait_s <= longest_s or wait_s == math.inf:
            return None
        needs_s = _MARGIN * wait_s + late_s
        reason: Reason = "late" if needs_s > budget_s else "crowded"
        return Refusal(reason, max(0.0, wait_s - longest_s), needs_s=needs_s)

    def room_in_s(self, pool: Pool, demand: Demand, now_s: float) -> float:
        """Return the seconds until a full queue has room again for a good part of the refused clients."""
        start_s = pool.slots.start_in_s(demand.share, _DRAINED * pool.lanes.cost_s, pool.each_s, now_s)
        return start_s if start_s < math.inf else self.cost_s(demand)

    def late_ones(self, pool: Pool, now_s: float) -> Iterator[tuple[Waiting, Refusal]]:
        """Yield waiting requests that cannot end in time any more. Take each out before the next one.

        They would be late even if nothing but their tenants' earlier requests were done from now on. A likelier
        forecast would refuse some that are in time after all, and who waits takes no place from others.
        """
        latencies_s: dict[tuple[str, float, float], float] = {}  # many waiting requests are alike
        capacity = pool.slots.capacity or math.inf
        for waiting, own_s in pool.lanes.walk(self.cost_s):
            demand = waiting.demand
            budget_s = demand.deadline_s - now_s
            if budget_s <= 0:
                yield waiting, Refusal("expired")
            elif budget_s < math.inf and waiting.arrived_s < now_s and (times := self._times.times(demand.model)):
                kind = demand.model, demand.work, demand.share
                if kind not in latencies_s:
                    is_fresh = not times.is_stale(now_s) or pool.slots.num_of(demand.model) > 0
                    latency_s = times.expected_s(demand.work, pool.slots.num_sharing(demand.share, 0.0))
                    latencies_s[kind] = latency_s if is_fresh and times.is_known(demand.work) else -math.inf
                if (needs_s := own_s / capacity + latencies_s[kind]) > budget_s:
                    yield waiting, Refusal("late", self.room_in_s(pool, demand, now_s), needs_s=needs_s)
