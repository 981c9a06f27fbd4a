"""The policy of switching: which worker gets ready for which model, when, and what goes for it. Pure.

`plan_switches` is asked several times a second and has no memory; what it must remember is in the state (a worker
that drains for a model says so, `WorkerState.reserved_for`). It looks at each model that lacks a worker, the most
urgent first, and decides in request-seconds, the time that requests wait, added up and weighted by class of service:

    gain   the waiting of the model's requests that ends earlier: requests x (wait now - time until ready there)
    harm   the waiting that others pay: requests of the models that go x the time until they could be back

1.  *Need.* A model lacks a worker when requests wait and no worker has it, or when more wait than its workers have
    slots for, and longer than a switch of one more. A load that failed is backed off. Getting ready counts: a thousand
    requests are one load. A model that switches about as fast as it serves needs no order (`free_starts.py`).
2.  *Where.* On the worker with the least harm and wait together: the wait is the end of what must end first, and a
    switch that moves only what the worker (and its node) lacks, so the model that differs least is the cheapest.
3.  *What goes.* Free bytes first; then the models with the least harm, until the bytes suffice. Components that a
    remaining model shares stay. What runs, is leased or pinned by hand never goes, nor what has got ready and whose
    requests have not begun yet. The last worker of a model whose requests wait is not taken: a queue is served before
    its worker switches away.
4.  *Whether.* If the gain exceeds the harm by a margin: a model waits until its requests together weigh more than
    what they would push aside. `throughput-first` also wants work for several times the switch's duration; of an idle
    worker not, once the model is due.
5.  *Bounded wait.* A model without a worker whose oldest request has waited for its patience, some switch times or
    what its class of service and deadline leave, is *due*: the margin and rule 3's last sentence do not hold
    against it. The longest overdue comes first. At most a quarter of the workers are on their way at a time because a
    model is due, and patience grows with all that waits without a worker: where every model is due, to go by age alone
    would take workers from long batches for a few requests each, until all requests are late.
6.  *How.* If what must go still runs requests, the worker *drains*: it starts nothing of that, its node prefetches
    what is missing, and a later plan orders the switch. Otherwise it switches now.
7.  *Ahead.* A worker without work gets ready for the most wanted model that no worker has, if that is wanted twice as
    much as what goes: so nothing swings back and forth, and nothing moves while all that is wanted fits.

Every order carries its reason. Workers that are stale, frozen by hand or leaving get no orders. What only leaving
workers have counts as without a worker, so it is handed over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from typing import Final

from cluster.control.candidates import FEW, MAX_CANDIDATES, Candidates
from cluster.control.free_starts import LEAST_RATE, free_models, free_starts_of, longest_free_s
from cluster.control.plans import Decision, FreeStart, SwitchPlan
from cluster.control.state import STALE_S, ClusterState, ModelState, WorkerState

MAX_NEEDS: Final = 128  # models that one plan looks at, the most urgent; the next plan is a moment away
WANTED_TWICE: Final = 2.0


@dataclass(frozen=True, slots=True)
class SwitchingPolicy:
    """The weights of the policy.

    `max_wait_switches` is the patience of a model without a worker, in times of its switch; it is no less than
    `max_wait_queues` times what all workers need for all that waits without one. `margin` is the share by which a
    gain must exceed what is paid for it. `amortization` is the work that a switch must bring, in times of its
    duration. `max_due_share` of the workers at most are on their way to a model at once because it is due.
    """

    mode: str = "latency-first"
    max_wait_switches: float = 3.0
    max_wait_queues: float = 4.5
    margin: float = 0.25
    amortization: float = 0.0
    max_due_share: float = 0.25


LATENCY_FIRST: Final = SwitchingPolicy()
THROUGHPUT_FIRST: Final = SwitchingPolicy("throughput-first", margin=1.0, amortization=2.0)


def plan_switches(state: ClusterState, policy: SwitchingPolicy = LATENCY_FIRST) -> SwitchPlan:
    """Return the orders of this moment. `state` comes from `usable_state` (checking.py), so this does not raise."""
    planning = _Planning(state, policy)
    if not state.is_frozen:
        planning.go_on_with_reservations()
        planning.follow_pins()
        planning.serve_needs()
        planning.prepare_ahead()
        planning.free_overfull_workers()
    free = planning.free_starts()
    planned = planning.planned() | {id_: tuple(starts) for id_, starts in free.items() if starts}
    return SwitchPlan(tuple(planning.decisions), planned, tuple(planning.notes), free, planning.longest_free_s)


@dataclass(slots=True)
class _Need:
    """A model that lacks a worker. `wait_s` is what its last request waits if nothing changes."""

    model: ModelState
    patience_s: float
    wait_s: float
    is_due: bool


@dataclass(slots=True)
class _Option:
    """A worker for a model. `ready_s` is until ready, plus what a request takes longer than on the fastest worker."""

    worker: WorkerState
    evict: tuple[str, ...]
    must_drain: bool
    switch_s: float
    ready_s: float
    harm: float


class _Planning:
    """The working copy of a state in which each decision of a plan sees the ones before it."""

    def __init__(self, state: ClusterState, policy: SwitchingPolicy) -> None:
        self.decisions: list[Decision] = []
        self.notes: list[str] = []
        self._state = state
        self._policy = policy
        self._models = state.models
        self._serving: dict[str, list[str]] = {}  # workers that have a model or get ready for it
        self._leaving: dict[str, list[str]] = {}  # workers that have it and are about to go
        self._busy_s: dict[str, float] = {}  # work that waits for each worker
        self._claims: dict[str, float] = {}  # requests, waiting and expected, that count on each worker
        self._open: list[WorkerState] = []  # those that can take an order, least claimed first
        self._taken: set[str] = set()
        self._num_on_the_way = 0
        self._note_workers()
        self._note_work()
        self._open.sort(key=lambda worker: self._claims[worker.id])
        attach = sorted([worker.attach_bytes_per_s for worker in self._open])
        self._top_speed = max([worker.speed for worker in self._open], default=1.0)
        self._usual_attach = attach[len(attach) // 2] if attach else 10e9
        self._usual_fixed_s = max([worker.fixed_switch_s for worker in self._open], default=0.0)
        self.longest_free_s = longest_free_s(state)
        usual = self.longest_free_s, self._usual_fixed_s, self._usual_attach
        self._free = free_models(state, *usual, self._serving, self._open[:FEW])

    def _note_workers(self) -> None:
        serving, models, busy, claims = self._serving, self._models, self._busy_s, self._claims
        for id_, worker in self._state.workers.items():
            busy_s = worker.ready_in_s
            for each, count in worker.running.items():
                busy_s += 0.5 * count * models[each].service_s / worker.speed
            busy[id_], claims[id_] = busy_s, 0.0
            for each in worker.models:
                of_model = self._leaving if worker.is_draining else serving
                of_model.setdefault(each, []).append(id_)
            coming = worker.switching_to
            if coming is not None:
                self._num_on_the_way += 1
                if coming not in worker.models and not worker.is_draining:
                    serving.setdefault(coming, []).append(id_)
            elif not (worker.is_draining or worker.is_frozen or worker.age_s > STALE_S):
                self._open.append(worker)

    def _note_work(self) -> None:
        busy, claims, models = self._busy_s, self._claims, self._models
        for id_, workers in self._serving.items():
            model = models[id_]
            waiting, rate, long = model.waiting, model.rate_short, model.rate_long
            num_wanted = waiting + 10.0 * (rate if rate > long else long)
            if num_wanted:
                work_s = waiting * model.service_s / len(workers)
                claim = num_wanted * model.slo.weight / len(workers)
                for worker in workers:
                    busy[worker] += work_s
                    claims[worker] += claim

    def go_on_with_reservations(self) -> None:
        """Order the switches whose workers have drained; give up those that nobody waits for any more."""
        for worker in self._open:
            if worker.reserved_for is None or worker.reserved_for in worker.models:
                continue
            model = self._models[worker.reserved_for]
            option = self._option(model, worker, is_due=True)
            if option is not None and model.waiting and not model.retry_in_s:
                elsewhere_s = min((self._busy_s[other] for other in self._serving.get(model.id, ())), default=math.inf)
                if option.ready_s < elsewhere_s:
                    self._order(model, option, f"drained for {model.waiting} waiting requests of {model.id}")

    def follow_pins(self) -> None:
        """Bring models to the workers that they are pinned to by hand."""
        for worker in self._open:
            for id_ in worker.pinned.difference(worker.models) if worker.pinned else ():
                model = self._models.get(id_)
                if model is None or worker.id in self._taken or model.retry_in_s > 0:
                    continue
                if (option := self._option(model, worker, is_due=True)) is None:
                    self.notes.append(f"{id_} is pinned to {worker.id} and does not fit beside what must stay there")
                else:
                    self._order(model, option, "pinned to this worker by hand")

    def serve_needs(self) -> None:
        """Find a worker for each model that lacks one, the most urgent first."""
        needs = self._needs()
        candidates = Candidates(self._open, self._taken, [need.model for need in needs])
        max_due = max(1.0, self._policy.max_due_share * len(self._state.workers))
        for need in needs:
            model, best, least, weight = need.model, None, (math.inf, 0), need.model.slo.weight * need.model.waiting
            may_push = need.is_due and self._num_on_the_way < max_due
            for worker in candidates.workers_for(model):
                if not (may_push or self._is_work_for(need, worker)):
                    continue
                option = self._option(model, worker, may_push)
                if option is not None and (cost := (weight * option.ready_s + option.harm, len(option.evict))) < least:
                    best, least = option, cost
            if best is None:
                if all(model.components.total_bytes > worker.budget_bytes for worker in self._state.workers.values()):
                    self.notes.append(f"{model.id}: {model.components.total_bytes} bytes fit into no worker's budget")
                continue
            if may_push or self._is_worth_it(need, best):
                self._order(model, best, self._reason(need, best))

    def _needs(self) -> list[_Need]:
        """Return the most urgent needs. What takes time is looked at last, of those that are urgent enough."""
        ranked: list[tuple[bool, float, int, float, float, ModelState]] = []
        busy_s, serving, least, number = self._busy_s, self._serving, 1 + self._policy.margin, 0
        lacking = (model for id_, model in self._models.items() if not serving.get(id_) and model.waiting)
        queue_s = self._state.queue_s(lacking)
        for model in self._models.values():
            if not model.waiting or model.id in self._free:
                continue
            if model.retry_in_s > 0:
                self.notes.append(f"{model.id}: its load failed; tried again in {model.retry_in_s:.1f} s")
                continue
            switch_s, age_s, number = self._usual_s(model), model.oldest_age_s, number - 1  # the first of equals first
            if workers := serving.get(model.id):
                wait_s = min([busy_s[worker] for worker in workers]) - model.service_s / len(workers)
                if wait_s > least * switch_s:
                    ranked.append((False, model.slo.weight * model.waiting * age_s, number, math.inf, wait_s, model))
                continue
            patience_s = self._policy.max_wait_switches * max(switch_s, model.service_s)
            patience_s = min(patience_s, max(model.slo.target_s - switch_s, switch_s))
            patience_s = max(patience_s, self._policy.max_wait_queues * queue_s)
            is_due = age_s >= patience_s or 0 < model.slack_s < 1.5 * switch_s + model.service_s
            urgency = model.slo.weight * age_s * (1 / patience_s if is_due else model.waiting)
            ranked.append((is_due, urgency, number, patience_s, max(patience_s, age_s), model))
        ranked.sort(reverse=True)
        needs = (
            _Need(model, patience_s, wait_s, is_due)
            for is_due, _, _, patience_s, wait_s, model in ranked
            if not (found := serving.get(model.id)) or model.waiting > self._state.num_free_slots(model.id, found)
        )
        return list(islice(needs, MAX_NEEDS))

    def _usual_s(self, model: ModelState) -> float:
        return self._usual_fixed_s + model.components.total_bytes / self._usual_attach

    def _is_worth_it(self, need: _Need, option: _Option) -> bool:
        """Weigh what the model's requests gain against what others pay (rule 4)."""
        gain_s = need.wait_s - (1 + self._policy.margin) * option.ready_s
        gain = need.model.slo.weight * self._num_for_one(need.model) * gain_s
        return gain > option.harm and self._is_work_for(need, option.worker)

    def _is_work_for(self, need: _Need, worker: WorkerState) -> bool:
        """Return whether a switch of this worker would bring the work that it must (rule 4)."""
        amortization, model = self._policy.amortization, need.model
        if not amortization or (need.is_due and not self._busy_s[worker.id]):
            return True
        return self._num_for_one(model) * model.service_s >= amortization * self._state.switch_s(model, worker)

    def _num_for_one(self, model: ModelState) -> float:
        """Return how many of the waiting requests would be those of one worker more."""
        return model.waiting / (len(self._serving.get(model.id, ())) + 1)

    def _reason(self, need: _Need, option: _Option) -> str:
        model = need.model
        where = f"ready in {option.ready_s:.2f} s, costs others {option.harm:.1f} request-seconds"
        if need.is_due:
            return f"due: the oldest of {model.waiting} waited {model.oldest_age_s:.1f} s without a worker; {where}"
        if workers := self._serving.get(model.id):
            return f"{model.waiting} wait {need.wait_s:.1f} s for {len(workers)} busy workers; {where}"
        return f"{model.waiting} wait without a worker; {where}"

    def prepare_ahead(self) -> None:
        """Let idle workers get ready for models that are wanted and that no worker has (rule 7)."""
        idle = [worker for worker in self._open if worker.id not in self._taken and not self._busy_s[worker.id]]
        asked = [each for each in (self._models.values() if idle else ()) if each.rate_long > LEAST_RATE]
        absent = [one for one in asked if not (self._serving.get(one.id) or one.id in self._free or one.retry_in_s)]
        wanted = nlargest(
            2 * MAX_CANDIDATES, absent, lambda one: one.rate_long * one.slo.weight * one.components.total_bytes
        )
        for model in wanted:
            best, best_value = None, math.inf
            for worker in idle[:FEW]:
                option = None if worker.id in self._taken else self._option(model, worker, is_due=False)
                if option is None or option.must_drain or worker.idle_s < option.switch_s:
                    continue
                value = sum(self._value(self._models[each], worker) for each in option.evict)
                if value < best_value:
                    best, best_value = option, value
            # Both from the node's memory: if what comes counted with its reading too, two cold models would swing.
            if best is not None and self._value(model, best.worker) > WANTED_TWICE * best_value:
                reason = f"idle, and {model.rate_long:.3f} requests/s come for a model without a worker"
                self._order(model, best, reason)

    def _value(self, model: ModelState, worker: WorkerState) -> float:
        """Return the seconds of waiting per second that the model saves by being on the worker."""
        others = len(self._serving.get(model.id, ())) - 1
        if others > 0 and model.rate_long * model.service_s < 0.8 * others:
            return 0.0
        switch_s = worker.fixed_switch_s + model.components.total_bytes / worker.attach_bytes_per_s
        return model.rate_long * model.slo.weight * switch_s

    def free_overfull_workers(self) -> None:
        """Let the least valued unused model go where more is resident than the budget allows."""
        for worker in self._open:
            if worker.resident.total_bytes > worker.budget_bytes and worker.id not in self._taken:
                stay = worker.pinned.union(id_ for id_, count in worker.running.items() if count)
                idle = [id_ for id_ in worker.models if id_ not in stay and not self._models[id_].waiting]
                if idle:
                    least = min(idle, key=lambda id_: self._value(self._models[id_], worker))
                    self.decisions.append(Decision("evict", worker.id, least, "over the budget", (least,)))

    def _option(self, model: ModelState, worker: WorkerState, is_due: bool) -> _Option | None:
        """Return what it takes to get the worker ready for the model; None if it has it, or cannot (rule 3)."""
        if model.id in worker.models or model.components.total_bytes > worker.budget_bytes:
            return None
        switch_s = self._state.switch_s(model, worker)
        evict: list[str] = []
        harm = 0.0
        if self._state.bytes_together(worker, (*worker.models, model.id)) > worker.budget_bytes:
            away_s = 2 * switch_s + model.waiting * model.service_s / worker.speed
            movable = [self._models[id_] for id_ in worker.models if id_ not in worker.pinned]
            prices = {each.id: self._harm(each, worker, away_s, is_due) for each in movable}
            stay = list(worker.models)
            for id_ in sorted(prices, key=prices.__getitem__):
                if prices[id_] == math.inf:
                    return None
                stay.remove(id_)
                evict.append(id_)
                if self._state.bytes_together(worker, (*stay, model.id)) <= worker.budget_bytes:
                    break
            else:
                return None
            for id_ in reversed(evict[:-1]):  # its components are shared with what stays: nothing is won by its going
                if self._state.bytes_together(worker, (*stay, id_, model.id)) <= worker.budget_bytes:
                    stay.append(id_)
                    evict.remove(id_)
            harm = sum(prices[id_] for id_ in evict)
        drain_s = sum(worker.running.get(id_, 0) * self._models[id_].service_s for id_ in evict) / worker.speed
        slower_s = model.service_s * (1 / worker.speed - 1 / self._top_speed)
        return _Option(worker, tuple(evict), drain_s > 0, switch_s, drain_s + switch_s + slower_s, harm)

    def _harm(self, model: ModelState, worker: WorkerState, away_s: float, is_due: bool) -> float:
        """Return the request-seconds that the model's requests wait longer if it is off the worker for `away_s`."""
        others = [other for other in self._serving.get(model.id, ()) if other != worker.id]
        coming = model.rate * away_s
        affected = model.slo.weight * (model.waiting + 0.5 * coming)
        if model.waiting and not worker.running.get(model.id) and worker.reserved_for is None:
            return math.inf  # it has got ready, and its requests start in this moment
        if model.waiting and not is_due and not any(model.id in self._state.workers[each].models for each in others):
            return math.inf
        if not others:
            return affected * away_s
        work_s = (model.waiting + coming) * model.service_s
        return affected * (work_s / len(others) - work_s / (len(others) + 1))

    def _order(self, model: ModelState, option: _Option, reason: str) -> None:
        """Write down the order, and let what follows see it."""
        worker = option.worker
        decided = worker.id, model.id, reason, option.evict, option.switch_s
        self.decisions.append(Decision("drain" if option.must_drain else "switch", *decided))
        held = self._state.held.get(worker.node, ())
        cold = [key for key in model.components.sizes if key not in held and key not in worker.resident.sizes]
        if cold and option.must_drain:
            reason = f"{len(cold)} components are read while {worker.id} drains"
            self.decisions.append(Decision("prefetch", worker.id, model.id, reason))
        self._taken.add(worker.id)
        self._num_on_the_way += 1
        for id_ in option.evict:
            if worker.id in (serving := self._serving.get(id_, [])):
                serving.remove(worker.id)
        self._serving.setdefault(model.id, []).append(worker.id)
        self._busy_s[worker.id] = option.ready_s

    def free_starts(self) -> dict[str, dict[str, FreeStart]]:
        """Return the workers of the models that need no order."""
        able = (each for each in self._open if each.id not in self._taken and each.reserved_for is None)
        return free_starts_of(self._state, self.longest_free_s, self._free, self._serving, list(islice(able, FEW)))

    def planned(self) -> dict[str, tuple[str, ...]]:
        """Return the workers of each model; one that is about to leave serves on what no other has ready yet."""
        planned = {id_: tuple(workers) for id_, workers in self._serving.items() if workers}
        for id_, leaving in self._leaving.items():
            workers = planned.get(id_, ())
            if not any(id_ in self._state.workers[worker].models for worker in workers):
                planned[id_] = (*workers, *leaving)
        return planned
