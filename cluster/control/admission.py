"""The admission queue: which requests may wait, which one starts where and when, and which ones leave. Pure.

Requests wait here until a replica can start them. One is refused when it comes
- because the queue is full, of its model or of all (`lanes.py` says who goes when tenants or priorities differ),
- because it would not be done by its deadline, by what requests took so far (`forecast.py`, `service_times.py`).
Requests that wait already leave as soon as they cannot be done in time any more. A refusal says when the request could
have been served: the place in time of one that is told to come back is kept free from the next ones that are told.

`pump` returns what has to happen; times are parameters. `Placement` is how a controller orders the queue, and
`AdmissionSnapshot` what it reads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from cluster.control.admission_records import (
    AdmissionSnapshot,
    ModelLoad,
    Placement,
    Refusal,
    Refused,
    Started,
)
from cluster.control.ended_requests import EndedLog
from cluster.control.forecast import Forecast, Pool
from cluster.control.free_starts import held_until_s
from cluster.control.lanes import Ask, Waiting
from cluster.control.service_times import ModelCounts, ModelTimes, ServiceTimes, SharedSeconds
from cluster.control.turning_away import ReturnRate
from configs.admission import AdmissionConfig

__all__ = ["REVIEW_S", "SWITCHED_S", "AdmissionQueue"]

REVIEW_S: Final = 0.25  # how often those that wait are predicted anew
SWITCHED_S: Final = 0.02  # a switch that took longer shows that the model was not at hand
_MOSTLY: Final = 0.2  # of its time: a request that spent more of it switching says little about the next one
_LEAST_SHARE: Final = 1e-6  # no request takes less of a replica


class AdmissionQueue:
    """The queue of the whole cluster. `config` can be changed at any time with `retune`."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._pools: dict[str, Pool] = {}
        self._times = ServiceTimes()
        self._forecast = Forecast(self._times)
        self._returns = ReturnRate()
        self._pool_of: dict[int, str] = {}  # of every ticket, waiting or running
        self._counts = ModelCounts()
        self._placement = Placement()
        self._refused: list[Refused] = []
        self.ended = EndedLog()
        self._num_arrived = 0
        self._reviewed_s = -math.inf
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
        return sum(pool.places.num_running for pool in self._pools.values())

    def submit(self, ticket: int, ask: Ask, now_s: float) -> None:
        """Let a request in, or refuse it: `pump` tells. `ticket` is a number that none has that is here."""
        if ticket in self._pool_of:
            raise ValueError(f"ticket {ticket} is in the queue already")
        pool = self._pool(ask.pool)
        counts = self._counts.counts_of(ask.model, ask.pool)
        counts.arrivals.note_arrival(now_s)
        pool.told.note_arrival(ask.mark, now_s)
        self._num_arrived += 1
        waiting = Waiting(ticket, ask, self._num_arrived, now_s, self._forecast.cost_s(ask))
        refusal = self._forecast.why_untimely(pool, ask, now_s) or self._make_room(pool, waiting, now_s)
        if refusal is not None:
            counts.refused += 1
            self._refused.append(Refused(ticket, refusal))
            return
        pool.lanes.add(waiting)
        pool.num_by_model[ask.model] += 1
        self._pool_of[ticket] = ask.pool

    def refuse_unread(self, ask: Ask, now_s: float) -> Refusal | None:
        """Return why a request cannot be in time that is like `ask`, as far as is known before it is read.

        It counts as refused then. None: it may come.
        """
        pool = self._pool(ask.pool)
        pool.told.note_arrival(ask.mark, now_s)
        refusal = self._forecast.why_untimely(pool, ask, now_s)
        if refusal is not None:
            counts = self._counts.counts_of(ask.model, ask.pool)
            counts.arrivals.note_arrival(now_s)
            counts.refused += 1
        return refusal

    def restore(self, ticket: int, ask: Ask, arrived_s: float, now_s: float, replica: str | None) -> None:
        """Take over a request that was let in before, with its place on `replica`; None when it waits.

        No bound refuses it, and it keeps its place although there may be no room: nothing else starts there until then.
        """
        pool = self._pool(ask.pool)
        self._counts.counts_of(ask.model, ask.pool)
        self._num_arrived += 1
        waiting = Waiting(ticket, ask, self._num_arrived, arrived_s, self._forecast.cost_s(ask))
        pool.lanes.add(waiting)
        self._pool_of[ticket] = ask.pool
        if replica is None:
            pool.num_by_model[ask.model] += 1
            return
        pool.lanes.start_request(ticket, waiting.cost_s)
        pool.places.restore(waiting, replica, now_s)

    def give_back(self, ticket: int, now_s: float) -> tuple[str, str]:
        """Let a running request wait again, before all others: its replica died. Returns the pool and the replica."""
        pool = self._pools[self._pool_of[ticket]]
        ended = pool.places.end(ticket, now_s)
        pool.places.forget_model(ended.replica, ended.waiting.ask.model)
        pool.lanes.settle(ended.waiting, ended.busy_s)
        pool.lanes.add_returned(ended.waiting)
        pool.num_by_model[ended.waiting.ask.model] += 1
        return ended.waiting.ask.pool, ended.replica

    def leave(self, ticket: int, now_s: float, *, is_answered: bool = False, switch_s: float = 0.0) -> None:
        """End a request: one that waits is given up, one that runs has `is_answered` or was given up.

        `switch_s` is what its replica needed to switch to the model. A ticket that has left already does nothing.
        """
        name = self._pool_of.pop(ticket, None)
        if name is None:
            return
        pool = self._pools[name]
        if ticket in pool.lanes:
            pool.forget_waiting(pool.lanes.remove(ticket).ask.model)
            return
        ended = pool.places.end(ticket, now_s)
        ask = ended.waiting.ask
        self.ended.note_end(ended, now_s, switch_s, is_answered)
        pool.lanes.settle(ended.waiting, ended.busy_s)
        if switch_s > SWITCHED_S:
            self._times.note_switch(ask.model, switch_s)
        times = self._times.times(ask.model)
        is_first = times is None
        # One that was given up says how long it takes at the least: in an overload, those that take the longest are
        # given up at their deadlines, and would never be heard of.
        is_telling = is_answered or (times is not None and times.is_longer(ask.work, ended.busy_s, ended.latency_s))
        if is_telling and (is_first or switch_s < _MOSTLY * ended.latency_s):
            served_s = max(ended.latency_s - switch_s, 0.0) if is_first else ended.latency_s
            busy_s = ended.busy_s * served_s / ended.latency_s if ended.latency_s else ended.busy_s
            num_left = pool.places.num_of(ask.model)
            self._times.note_served(ask.model, now_s, ask.work, busy_s, served_s, num_left)

    def set_replicas(self, pool: str, names: Collection[str], now_s: float) -> None:
        """Say which replicas there are."""
        self._pool(pool).places.set_replicas(names, now_s)

    def num_replicas(self, pool: str) -> int:
        """Return the number of replicas that can be given work."""
        return self._pool(pool).places.num_replicas

    def set_resident(self, pool: str, resident: Mapping[str, Iterable[str]]) -> None:
        """Say which models are at hand, by replica."""
        self._pool(pool).places.set_resident(resident)

    def set_placement(self, placement: Placement) -> None:
        """Start requests only where `placement` lets them."""
        self._placement = placement
        for pool in self._pools.values():
            pool.places.set_resident(placement.ready)

    def is_unplaced(self, ask: Ask, now_s: float) -> bool:
        """Return whether the placement has no replica for such a request: it waits for the controller."""
        return self._placement.replicas_of(ask.pool, ask.model, now_s) == ()

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
        if self.num_waiting and now_s >= self._reviewed_s + REVIEW_S:
            self._reviewed_s = now_s
            for pool in self._pools.values():
                for waiting, refusal in self._forecast.late_ones(pool, now_s):
                    self._refuse(pool, waiting, refusal)
        for name, pool in self._pools.items():
            happened += self._start_all(name, pool, now_s)
        happened += self._refused
        self._refused = []
        return happened

    def look_again_s(self) -> float:
        """Return when `pump` is due if nothing changes before."""
        return min(self._reviewed_s + REVIEW_S, self._held_until_s) if self.num_waiting else math.inf

    def snapshot(self, now_s: float) -> AdmissionSnapshot:
        """Return the state of the queue."""
        oldest: dict[str, float] = {}
        earliest: dict[str, float] = {}
        waiting: Counter[str] = Counter()
        running: Counter[str] = Counter()
        tenants: Counter[str] = Counter()
        for pool in self._pools.values():
            running += pool.places.running()
            waiting += pool.num_by_model
            for one in pool.lanes:
                tenants[one.ask.tenant] += 1
                oldest[one.ask.model] = min(one.arrived_s, oldest.get(one.ask.model, math.inf))
                if one.ask.deadline_s < math.inf:
                    earliest[one.ask.model] = min(one.ask.deadline_s, earliest.get(one.ask.model, math.inf))
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
                )
            )
        return AdmissionSnapshot(
            tuple(loads), {name: pool.places.load() for name, pool in self._pools.items()}, dict(tenants)
        )

    def _make_room(self, pool: Pool, waiting: Waiting, now_s: float) -> Refusal | None:
        """Return why the request has no place in the queue; None if it has one, perhaps that of another one."""
        ask = waiting.ask
        if ask.is_inner:
            return None
        if not len(pool.lanes) and pool.places.has_room(ask.share):
            if not pool.places.num_running:
                pool.told.free_places()
            return None
        config = self._config
        if pool.num_by_model[ask.model] >= config.max_waiting_per_model:
            refusal, model, crowd = Refusal("model_full", limit=config.max_waiting_per_model), ask.model, [pool]
        elif self.num_waiting >= config.max_waiting:
            refusal, model, crowd = Refusal("queue_full", limit=config.max_waiting), None, [*self._pools.values()]
        else:
            return None
        leaving = [(found, other) for other in crowd if (found := other.lanes.displaced_by(ask, model))]
        if not leaving:
            return self._forecast.with_time(pool, ask, now_s, refusal)
        displaced, other = max(leaving, key=lambda pair: (pair[0].ask.priority, pair[0].number))
        self._refuse(other, displaced, self._forecast.with_time(other, displaced.ask, now_s, refusal))
        return None

    def _start_all(self, name: str, pool: Pool, now_s: float) -> Iterable[Started]:
        held = {model for model in pool.num_by_model if self._is_full(name, pool, model, now_s)}
        full: set[str] = set()  # replicas that a request waits for which came before
        while len(pool.lanes) and (waiting := pool.lanes.next_up(held)) is not None:
            ask = waiting.ask
            times = self._times.times(ask.model)
            if ask.deadline_s <= now_s:
                self._refuse(pool, waiting, Refusal("expired"))
                continue
            if (refusal := self._placement.refusal_of(ask.pool, ask.model, now_s)) is not None:
                self._refuse(pool, waiting, refusal)
                continue
            among = self._placement.replicas_of(ask.pool, ask.model, now_s)
            open_ = None if among is None else [name for name in among if name not in full]
            free = self._placement.free_of(ask.pool, ask.model, now_s)
            until_s = held_until_s(free, waiting, times.usual_latency_s(ask.work) if times else 0.0, now_s)
            is_held, switch_s, chances = now_s < until_s, self._times.switch_s(ask.model), self._placement.chances
            joining_s = times.joining_s(ask.work) if times else ask.share
            replica = pool.places.choose(
                ask.share, ask.model, switch_s, joining_s, now_s, open_, free, chances, is_held
            )
            if replica is None:
                if among is None:
                    return  # nobody slips past: a large request would wait for ever
                held.add(ask.model)
                if is_held:
                    self._held_until_s = min(self._held_until_s, until_s)
                else:
                    full.update(among)  # nor where it may start
                continue
            if is_held and ask.model not in (at_hand := pool.places.models_at_hand(replica)):
                rivals = self._placement.models_of(name, replica, at_hand, now_s)
                waiting = pool.lanes.beside(waiting, [model for model in rivals if model not in held]) or waiting
                ask, times = waiting.ask, self._times.times(waiting.ask.model)
            pool.lanes.start_request(waiting.ticket, self._forecast.cost_s(ask))
            pool.num_by_model[ask.model] -= 1
            latency, start = times.latency_s(ask.work) if times else SharedSeconds(), (free or {}).get(replica)
            switch_s, is_alone = (start.switch_s, not start.is_beside) if start else (switch_s, False)
            pool.places.start_request(waiting, replica, now_s, latency, switch_s, is_alone)
            self._counts.counts_of(ask.model, ask.pool).started += 1
            yield Started(waiting.ticket, replica)

    def _is_full(self, name: str, pool: Pool, model: str, now_s: float) -> bool:
        """Return whether the placement leaves no room for any request of the model: none of them need be tried."""
        among = self._placement.replicas_of(name, model, now_s)
        if among is None or self._placement.refusal_of(name, model, now_s) is not None:
            return False
        return not pool.places.has_room(_LEAST_SHARE, among)

    def _refuse(self, pool: Pool, waiting: Waiting, refusal: Refusal) -> None:
        pool.lanes.remove(waiting.ticket)
        pool.forget_waiting(waiting.ask.model)
        del self._pool_of[waiting.ticket]
        self._counts.counts_of(waiting.ask.model, waiting.ask.pool).refused += 1
        self._refused.append(Refused(waiting.ticket, refusal))

    def _pool(self, name: str) -> Pool:
        if name not in self._pools:
            self._pools[name] = Pool(self._config, self._returns)
        return self._pools[name]
