"""Forecasts of the admission queue: which requests will be in time, and when a refused one could be. Pure.

A forecast is that of a model, not of a client: it says when there would be room if nobody else came, and keeps none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

from cluster.admission.demand import Demand, Waiting
from cluster.admission.lanes import Lanes
from cluster.admission.records import Reason, Refusal
from cluster.admission.replica_slots import ReplicaSlots
from cluster.admission.service_times import ArrivalRate, ServiceTimes
from cluster.load_failures import LoadFailures
from configs.admission import AdmissionConfig

_MARGIN: Final = 1.1  # waits are predicted this much longer than the mean: half of all requests wait longer than that
_ENOUGH: Final = 3  # measurements
_FADES_IN_S: Final = 3.0  # a kind of request that no longer comes bounds nobody's wait
_LEAST_SHARE: Final = 0.1
_DRAINED: Final = 0.5  # of a full queue: those who are refused together come back to room for many of them


class _FairWait:
    """The longest wait that lets requests of all kinds in.

    In an overload, short requests would be let in until only they can still be in time. So no request may wait for a
    larger part of its time than the longest requests that come can. Those that could hardly wait at all do not count.
    """

    def __init__(self) -> None:
        self._share = 1.0
        self._noted_s = -math.inf

    def bound_s(self, budget_s: float, latency_s: float, now_s: float) -> float:
        """Return how long a request that comes now may wait that has `budget_s` and takes `latency_s` of them."""
        own = 1 - latency_s / budget_s
        self._share += (1 - self._share) * -math.expm1(min(0.0, self._noted_s - now_s) / _FADES_IN_S)
        self._noted_s = now_s
        if own >= _LEAST_SHARE:
            self._share = min(self._share, own)
        return min(own, self._share) * budget_s


class Pool:
    """The requests for one deployment: those that wait, and its replicas, which other ingresses may share."""

    def __init__(self, config: AdmissionConfig, *, is_shared: bool = False) -> None:
        self.lanes = Lanes(config.weight_of, config.max_overtakes)
        self.slots = ReplicaSlots(is_shared=is_shared)
        self.offered = ArrivalRate()  # shares of replicas
        self.least_share = 1.0  # that a request took
        self.num_started = 0
        self.has_ended = False  # a request, since slots were looked at
        self.num_by_model: Counter[str] = Counter()  # waiting
        self.maybe_open: set[str] = set()  # of these, the models that were not found to have no room since
        self.fair_wait = _FairWait()
        self.failures = LoadFailures()

    def is_at_hand(self, model: str) -> bool:
        """Return whether a request for the model is here, so that its times will be known soon."""
        return self.num_by_model[model] > 0 or self.slots.num_of(model) > 0

    def note_waiting(self, model: str) -> None:
        """Count one request for the model more that waits."""
        self.num_by_model[model] += 1
        self.maybe_open.add(model)

    def look_at_all(self) -> None:
        """Look for room for all that waits, at the next chance."""
        self.maybe_open = set(self.num_by_model)

    def forget_waiting(self, model: str) -> None:
        """Count one request for the model less that waits."""
        self.num_by_model[model] -= 1
        if not self.num_by_model[model]:
            del self.num_by_model[model]
            self.maybe_open.discard(model)


class Forecast:
    """Predictions for the requests of a pool, by the measured `times` of models."""

    def __init__(self, times: ServiceTimes) -> None:
        self._times = times

    def cost_s(self, demand: Demand) -> float:
        """Return the replica seconds that a request may take; before any was measured, as many as its share."""
        times = self._times.times(demand.model)
        return times.cost_s(demand.work, demand.share) if times else demand.share

    def why_untimely(self, pool: Pool, demand: Demand, now_s: float) -> Refusal | None:
        """Return why a request that comes now cannot be done in time; None if it can, or if nobody knows."""
        budget_s = demand.deadline_s - now_s
        if budget_s <= 0:
            return Refusal("expired")
        times = self._times.times(demand.model)
        if times is None or budget_s == math.inf:
            return None
        is_idle = not len(pool.lanes) and not pool.slots.num_running
        if times.is_stale(now_s) and not pool.is_at_hand(demand.model):
            return None  # one at a time tells whether the model is as slow as it was
        if times.num_measured >= _ENOUGH and times.fastest_s * demand.work > budget_s:
            return Refusal("hopeless", needs_s=times.fastest_s * demand.work)
        ahead_s = pool.lanes.ahead_s(demand)
        late_s = times.late_s(demand.work, pool.slots.num_sharing(demand.share, ahead_s))
        longest_s = pool.fair_wait.bound_s(budget_s, late_s, now_s)
        wait_s = pool.slots.start_in_s(demand.share, ahead_s, now_s) * _MARGIN
        if is_idle or wait_s <= longest_s or wait_s == math.inf:
            return None
        needs_s = wait_s + late_s
        reason: Reason = "late" if needs_s > budget_s else "crowded"
        return Refusal(reason, max(0.0, wait_s - longest_s) / _MARGIN, needs_s=needs_s)

    def room_in_s(self, pool: Pool, demand: Demand, now_s: float) -> float:
        """Return in how many seconds a full queue will have room again: a part of it for those who are refused."""
        start_s = pool.slots.start_in_s(demand.share, _DRAINED * pool.lanes.cost_s, now_s)
        return start_s if start_s < math.inf else self.cost_s(demand)

    def late_ones(self, pool: Pool, now_s: float) -> Iterator[tuple[Waiting, Refusal]]:
        """Yield those that wait and cannot be done in time any more, each to be taken out before the next one."""
        late_s: dict[tuple[str, float, float], float] = {}  # of those that wait, many are alike
        for waiting, ahead_s in pool.lanes.walk(self.cost_s):
            demand = waiting.demand
            budget_s = demand.deadline_s - now_s
            if budget_s <= 0:
                yield waiting, Refusal("expired")
            elif budget_s < math.inf and (times := self._times.times(demand.model)):
                kind = demand.model, demand.work, pool.slots.num_sharing(demand.share, ahead_s)
                if kind not in late_s:
                    late_s[kind] = times.late_s(*kind[1:])
                needs_s = pool.slots.start_in_s(demand.share, ahead_s, now_s) + late_s[kind]
                is_known = not times.is_stale(now_s) or pool.slots.num_of(demand.model)
                if budget_s < needs_s < math.inf and is_known:
                    yield waiting, Refusal("late", needs_s - budget_s, needs_s=needs_s)
