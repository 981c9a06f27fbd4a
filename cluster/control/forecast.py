"""Forecasts of the admission queue: who will be in time, and when those may come back who will not. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from cluster.control.admission_records import Reason, Refusal
from cluster.control.lanes import Ask, Lanes, Waiting
from cluster.control.places import Places
from cluster.control.service_times import ServiceTimes
from cluster.control.turning_away import FairWait, ReturnRate, ToldTimes
from configs.admission import AdmissionConfig

_MARGIN: Final = 1.1  # waits are predicted this much longer than the mean: half of all requests wait longer than that
_ENOUGH: Final = 3  # measurements


class Pool:
    """The requests for one deployment: those that wait, its replicas, and those who were told to come back."""

    def __init__(self, config: AdmissionConfig, returns: ReturnRate) -> None:
        self.lanes = Lanes(config.weight_of, config.max_overtakes)
        self.places = Places()
        self.num_by_model: Counter[str] = Counter()  # waiting
        self.told = ToldTimes(returns)
        self.fair_wait = FairWait()

    def is_at_hand(self, model: str) -> bool:
        """Return whether a request for the model is here, so that its times will be known soon."""
        return self.num_by_model[model] > 0 or self.places.num_of(model) > 0

    def forget_waiting(self, model: str) -> None:
        """Count one request for the model less that waits."""
        self.num_by_model[model] -= 1
        if not self.num_by_model[model]:
            del self.num_by_model[model]


class Forecast:
    """Predictions for the requests of a pool, by the measured `times` of models."""

    def __init__(self, times: ServiceTimes) -> None:
        self._times = times

    def cost_s(self, ask: Ask) -> float:
        """Return the replica seconds that a request may take; before any was measured, as many as its share."""
        times = self._times.times(ask.model)
        return times.cost_s(ask.work, ask.share) if times else ask.share

    def why_untimely(self, pool: Pool, ask: Ask, now_s: float) -> Refusal | None:
        """Return why a request that comes now cannot be done in time; None if it can, or if nobody knows."""
        budget_s = ask.deadline_s - now_s
        if budget_s <= 0:
            return Refusal("expired")
        times = self._times.times(ask.model)
        if times is None or budget_s == math.inf:
            return None
        is_idle = not len(pool.lanes) and not pool.places.num_running
        if times.is_stale(now_s) and not pool.is_at_hand(ask.model):
            return None  # one at a time tells whether the model is as slow as it was
        if times.num_measured >= _ENOUGH and times.fastest_s * ask.work > budget_s:
            return Refusal("hopeless", needs_s=times.fastest_s * ask.work)
        ahead_s = pool.lanes.ahead_s(ask)
        late_s = times.late_s(ask.work, pool.places.num_sharing(ask.share, ahead_s))
        longest_s = pool.fair_wait.bound_s(budget_s, late_s, now_s)
        wait_s = pool.places.start_in_s(ask.share, ahead_s, now_s) * _MARGIN
        before_s = pool.told.before_s(ask.tenant, now_s) if wait_s else 0.0
        if pool.told.is_due(ask.mark, now_s):  # a promise: the queue is as full as it may be, for those who have none
            wait_s, before_s, longest_s = wait_s / _MARGIN, 0.0, budget_s - late_s
        if is_idle or wait_s + before_s <= longest_s or wait_s == math.inf:
            return None
        needs_s = wait_s + before_s + late_s
        reason: Reason = "late" if needs_s > budget_s else "crowded"
        return self.with_time(pool, ask, now_s, Refusal(reason, (wait_s - longest_s) / _MARGIN, needs_s=needs_s))

    def with_time(self, pool: Pool, ask: Ask, now_s: float, refusal: Refusal) -> Refusal:
        """Return the refusal with the time to come back: behind those of the tenant's who were told to and will."""
        cost_s = self.cost_s(ask) / max(1, pool.places.num_replicas)
        soonest_s = refusal.retry_after_s
        if soonest_s is None:
            start_s = pool.places.start_in_s(ask.share, 0.0, now_s)
            soonest_s = cost_s + (start_s if start_s < math.inf else 0.0)
        after_s = pool.told.tell(ask.mark, ask.tenant, soonest_s, cost_s, now_s)
        return replace(refusal, retry_after_s=after_s)

    def late_ones(self, pool: Pool, now_s: float) -> Iterator[tuple[Waiting, Refusal]]:
        """Yield those that wait and cannot be done in time any more, each to be taken out before the next one."""
        late_s: dict[tuple[str, float, float], float] = {}  # of those that wait, many are alike
        for waiting, ahead_s in pool.lanes.walk(self.cost_s):
            ask = waiting.ask
            budget_s = ask.deadline_s - now_s
            if budget_s <= 0:
                yield waiting, Refusal("expired")
            elif budget_s < math.inf and (times := self._times.times(ask.model)):
                kind = ask.model, ask.work, pool.places.num_sharing(ask.share, ahead_s)
                if kind not in late_s:
                    late_s[kind] = times.late_s(*kind[1:])
                needs_s = pool.places.start_in_s(ask.share, ahead_s, now_s) + late_s[kind]
                is_known = not times.is_stale(now_s) or pool.places.num_of(ask.model)
                if budget_s < needs_s < math.inf and is_known:
                    refusal = Refusal("late", needs_s - budget_s, needs_s=needs_s)
                    yield waiting, self.with_time(pool, ask, now_s, refusal)
