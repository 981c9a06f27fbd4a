"""The policy of switching: which worker gets ready for which model, when, and what goes for it. Pure.

`plan_switches` is asked several times a second and has no memory; what it must remember is in the state (a worker
that drains for a model says so, `WorkerState.reserved_for`). It looks at each model that lacks a worker, the most
urgent first, and decides in request-seconds, the time that requests wait, added up and weighted by class of service:

    gain   the waiting of the model's requests that ends earlier: requests x (wait now - time until ready there)
    harm   the waiting that others pay: requests of the models that go x the time until they could be back

1.  *Need.* A model lacks a worker when requests wait and no worker has it, or when more wait than its workers have
    slots for, and longer than a switch of one more. A worker whose load failed is passed over for a while. Getting
    ready counts: a thousand requests are one load. A model that switches about as fast as it serves needs no order
    (`on_demand.py`).
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
    would take workers from long batches for a few requests each, until all requests are late. It ends where no request
    of a model has started for `MAX_WAIT_TARGETS` times its class's target: the model *starves*, and is due before all
    that do not, the one that waits longest for its target first. Of equal models none is without a start for longer
    than that and a turn of each other one: what runs there ends, and a switch.
6.  *How.* If what must go still runs requests, the worker *drains*: it starts nothing of that, its node prefetches
    what is missing, and a later plan orders the switch. Otherwise it switches now.
7.  *Ahead.* A worker without work gets ready for the most wanted model that no worker has, if that is wanted twice as
    much as what goes: so nothing swings back and forth, and nothing moves while all that is wanted fits.

Every order carries its reason. Workers that are stale, frozen by hand or leaving get no orders. What only leaving
workers have counts as without a worker, so it is handed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from operator import attrgetter
from typing import Final

from cluster.placement.on_demand import LEAST_RATE, on_demand_switches
from cluster.placement.outlook import FEW, MAX_CANDIDATES, Candidates, Option, Outlook, outlook_of
from cluster.placement.state import ClusterState, Decision, ModelState, SwitchPlan, WorkerState

MAX_NEEDS: Final = 128  # models that one plan looks at, the most urgent; the next plan is a moment away
WANTED_TWICE: Final = 2.0
_EXTRA, _DUE, _STARVING = range(3)  # the order in which needs are looked at


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
    outlook = outlook_of(state)
    evictions: tuple[Decision, ...] = ()
    if not state.is_frozen:
        outlook = _follow_reservations(outlook)
        outlook = _follow_pins(outlook)
        outlook = _serve_needs(outlook, policy)
        outlook = _prepare_ahead(outlook)
        evictions = _relieve_overfull(outlook)
    able = (each for each in outlook.open if each.id not in outlook.taken and each.reserved_for is None)
    longest_s = outlook.longest_on_demand_s
    starts = on_demand_switches(state, longest_s, outlook.on_demand, outlook.all_serving(), list(islice(able, FEW)))
    planned = outlook.planned() | {id_: tuple(found) for id_, found in starts.items() if found}
    return SwitchPlan((*outlook.decisions, *evictions), planned, outlook.notes, starts, longest_s)


def _follow_reservations(outlook: Outlook) -> Outlook:
    """Order the switches whose workers have drained; give up those that nobody waits for any more."""
    for worker in outlook.open:
        if worker.reserved_for is None or worker.reserved_for in worker.models:
            continue
        model = outlook.state.models[worker.reserved_for]
        option = _option_for(outlook, model, worker, may_push=True)
        if option is not None and model.waiting and not model.retry_in_s:
            elsewhere_s = min([outlook.busy_s(other) for other in outlook.serving(model.id)], default=math.inf)
            if option.ready_s < elsewhere_s:
                reason = f"drained for {model.waiting} waiting requests of {model.id}"
                outlook = outlook.after(model, option, reason)
    return outlook


def _follow_pins(outlook: Outlook) -> Outlook:
    """Bring models to the workers that they are pinned to by hand."""
    for worker in outlook.open:
        for id_ in worker.pinned.difference(worker.models) if worker.pinned else ():
            model = outlook.state.models.get(id_)
            if model is None or worker.id in outlook.taken or model.retry_in_s > 0:
                continue
            if (option := _option_for(outlook, model, worker, may_push=True)) is None:
                outlook = outlook.with_notes(
                    f"{id_} is pinned to {worker.id} and does not fit beside what must stay there"
                )
            else:
                outlook = outlook.after(model, option, "pinned to this worker by hand")
    return outlook


@dataclass(slots=True)
class _Need:
    """A model that lacks a worker. `rank` and `urgency` order needs; `wait_s` is what its last request waits if nothing
    changes.
    """

    rank: int
    urgency: float
    model: ModelState
    wait_s: float

    @property
    def is_due(self) -> bool:
        return self.rank >= _DUE


def _find_needs(outlook: Outlook, policy: SwitchingPolicy) -> list[_Need]:
    """Return the most urgent needs (rule 1). What takes time is looked at last, of those that are urgent enough."""
    state, serving, busy_s, least = outlook.state, outlook.all_serving(), outlook.all_busy_s(), 1 + policy.margin
    found = []
    queue_s = state.queue_s([model for id_, model in state.models.items() if model.waiting and not serving.get(id_)])
    for model in state.models.values():
        if not model.waiting or model.id in outlook.on_demand or model.retry_in_s > 0:
            continue
        switch_s = outlook.usual.seconds(model)
        if workers := serving.get(model.id):
            wait_s = min([busy_s[worker] for worker in workers]) - model.service_s / len(workers)
            if wait_s > least * switch_s:
                urgency = model.slo.weight * model.waiting * model.oldest_age_s
                found.append(_Need(_EXTRA, urgency, model, wait_s))
        else:
            found.append(_bound_wait(model, switch_s, queue_s, policy))
    found.sort(key=attrgetter("rank", "urgency"), reverse=True)  # of equals the first stays first
    lacking = (
        need
        for need in found
        if not (workers := serving.get(need.model.id))
        or need.model.waiting > state.num_free_slots(need.model.id, workers)
    )
    return list(islice(lacking, MAX_NEEDS))


def _serve_needs(outlook: Outlook, policy: SwitchingPolicy) -> Outlook:
    """Find a worker for each model that lacks one, the most urgent first."""
    notes = [
        f"{model.id}: its load failed; tried again in {model.retry_in_s:.1f} s"
        for model in outlook.state.models.values()
        if model.retry_in_s > 0 and model.waiting and model.id not in outlook.on_demand
    ]
    notes += [
        f"{id_}: worker {worker.id} could not load it a moment ago; others may"
        for worker in outlook.open
        for id_ in sorted(worker.unable)
        if id_ in outlook.state.models and not outlook.state.models[id_].retry_in_s
    ]
    outlook = outlook.with_notes(*notes)
    needs = _find_needs(outlook, policy)
    candidates = Candidates(outlook.open, [need.model for need in needs])
    max_due = max(1.0, policy.max_due_share * len(outlook.state.workers))
    for need in needs:
        may_push = need.is_due and outlook.num_on_the_way < max_due
        workers = candidates.workers_for(need.model, outlook.taken)
        best = _find_worker(outlook, policy, need, workers, may_push)
        if best is None:
            nbytes = need.model.components.total_bytes
            if all(nbytes > worker.budget_bytes for worker in outlook.state.workers.values()):
                outlook = outlook.with_notes(f"{need.model.id}: {nbytes} bytes fit into no worker's budget")
        elif may_push or _is_worth_it(outlook, policy, need, best):
            outlook = outlook.after(need.model, best, _reason(outlook, need, best))
    return outlook


def _reason(outlook: Outlook, need: _Need, option: Option) -> str:
    model = need.model
    where = f"ready in {option.ready_s:.2f} s, costs others {option.harm:.1f} request-seconds"
    if model.is_starving and need.is_due:
        return f"due: none of {model.waiting} has started for {model.unstarted_s:.1f} s; {where}"
    if need.is_due:
        return f"due: the oldest of {model.waiting} waited {model.oldest_age_s:.1f} s without a worker; {where}"
    if workers := outlook.serving(model.id):
        return f"{model.waiting} wait {need.wait_s:.1f} s for {len(workers)} busy workers; {where}"
    return f"{model.waiting} wait without a worker; {where}"


def _find_worker(
    outlook: Outlook, policy: SwitchingPolicy, need: _Need, workers: Iterable[WorkerState], may_push: bool
) -> Option | None:
    """Return the worker with the least harm and wait together (rule 2)."""
    weight = need.model.slo.weight * need.model.waiting
    found = [
        option
        for worker in workers
        if may_push or _brings_work(outlook, policy, need, worker)
        if (option := _option_for(outlook, need.model, worker, may_push)) is not None
    ]
    return min(found, key=lambda option: (weight * option.ready_s + option.harm, len(option.evict)), default=None)


def _option_for(outlook: Outlook, model: ModelState, worker: WorkerState, may_push: bool) -> Option | None:
    """Return what it takes to get the worker ready for the model; None if it has it, or cannot."""
    if model.id in worker.models or model.id in worker.unable:
        return None
    if model.components.total_bytes > worker.budget_bytes:
        return None
    state, switch_s = outlook.state, outlook.state.switch_s(model, worker)
    if (going := _what_goes(outlook, model, worker, switch_s, may_push)) is None:
        return None
    drain_s = sum([worker.running.get(id_, 0) * state.models[id_].service_s for id_ in going]) / worker.speed
    slower_s = model.service_s * (1 / worker.speed - 1 / outlook.usual.top_speed)
    ready_s = drain_s + switch_s + slower_s
    return Option(worker, tuple(going), drain_s > 0, switch_s, ready_s, sum(going.values()))


def _what_goes(
    outlook: Outlook, model: ModelState, worker: WorkerState, switch_s: float, may_push: bool
) -> dict[str, float] | None:
    """Return the models that go for a model, with the harm of each; None if too little may go (rule 3)."""
    state = outlook.state
    if state.bytes_together(worker, (*worker.models, model.id)) <= worker.budget_bytes:
        return {}
    away_s = 2 * switch_s + model.waiting * model.service_s / worker.speed
    movable = [state.models[id_] for id_ in worker.models if id_ not in worker.pinned]
    harms = {each.id: _harm_of(outlook, each, worker, away_s, may_push) for each in movable}
    going, stay = [], list(worker.models)
    for id_ in sorted(harms, key=harms.__getitem__):
        if harms[id_] == math.inf:
            return None
        stay.remove(id_)
        going.append(id_)
        if state.bytes_together(worker, (*stay, model.id)) <= worker.budget_bytes:
            break
    else:
        return None
    for id_ in reversed(going[:-1]):  # its components are shared with what stays: nothing is won by its going
        if state.bytes_together(worker, (*stay, id_, model.id)) <= worker.budget_bytes:
            stay.append(id_)
            going.remove(id_)
    return {id_: harms[id_] for id_ in going}


def _harm_of(outlook: Outlook, model: ModelState, worker: WorkerState, away_s: float, may_push: bool) -> float:
    """Return the request-seconds that the model's requests wait longer if it is off the worker for `away_s`."""
    others = [other for other in outlook.serving(model.id) if other != worker.id]
    coming = model.rate * away_s
    affected = model.slo.weight * (model.waiting + 0.5 * coming)
    if model.waiting and not worker.running.get(model.id) and worker.reserved_for is None:
        return math.inf  # it has got ready, and its requests start in this moment
    if model.waiting and not may_push and not any(model.id in outlook.state.workers[each].models for each in others):
        return math.inf
    if not others:
        return affected * away_s
    work_s = (model.waiting + coming) * model.service_s
    return affected * (work_s / len(others) - work_s / (len(others) + 1))


def _is_worth_it(outlook: Outlook, policy: SwitchingPolicy, need: _Need, option: Option) -> bool:
    """Weigh what the model's requests gain against what others pay (rule 4)."""
    gain_s = need.wait_s - (1 + policy.margin) * option.ready_s
    gain = need.model.slo.weight * _num_for_one(outlook, need.model) * gain_s
    return gain > option.harm and _brings_work(outlook, policy, need, option.worker)


def _brings_work(outlook: Outlook, policy: SwitchingPolicy, need: _Need, worker: WorkerState) -> bool:
    """Return whether a switch of this worker would bring the work that it must (rule 4)."""
    if not policy.amortization or (need.is_due and not outlook.busy_s(worker.id)):
        return True
    work_s = _num_for_one(outlook, need.model) * need.model.service_s
    return work_s >= policy.amortization * outlook.state.switch_s(need.model, worker)


def _num_for_one(outlook: Outlook, model: ModelState) -> float:
    """Return how many of the waiting requests would be those of one worker more."""
    return model.waiting / (len(outlook.serving(model.id)) + 1)


def _bound_wait(model: ModelState, switch_s: float, queue_s: float, policy: SwitchingPolicy) -> _Need:
    """Return the need of a model without a worker: whether it is due, or starves, and how urgent it is (rule 5)."""
    age_s = model.oldest_age_s
    patience_s = policy.max_wait_switches * max(switch_s, model.service_s)
    patience_s = min(patience_s, max(model.slo.target_s - switch_s, switch_s))
    patience_s = max(patience_s, policy.max_wait_queues * queue_s)
    wait_s = max(patience_s, age_s)
    if model.is_starving:
        return _Need(_STARVING, model.unstarted_s / model.slo.target_s, model, wait_s)
    if age_s >= patience_s or 0 < model.slack_s < 1.5 * switch_s + model.service_s:
        return _Need(_DUE, model.slo.weight * age_s * (1 / patience_s), model, wait_s)
    return _Need(_EXTRA, model.slo.weight * age_s * model.waiting, model, wait_s)


def _prepare_ahead(outlook: Outlook) -> Outlook:
    """Let idle workers get ready for models that are wanted and that no worker has (rule 7)."""
    idle = [worker for worker in outlook.open if worker.id not in outlook.taken and not outlook.busy_s(worker.id)]
    asked = [each for each in (outlook.state.models.values() if idle else ()) if each.rate_long > LEAST_RATE]
    absent = [
        each for each in asked if not (outlook.serving(each.id) or each.id in outlook.on_demand or each.retry_in_s)
    ]
    wanted = nlargest(
        2 * MAX_CANDIDATES, absent, lambda one: one.rate_long * one.slo.weight * one.components.total_bytes
    )
    for model in wanted:
        best, best_value = None, math.inf
        for worker in idle[:FEW]:
            option = None if worker.id in outlook.taken else _option_for(outlook, model, worker, may_push=False)
            if option is None or option.must_drain or worker.idle_s < option.switch_s:
                continue
            value = sum([_value_of(outlook, outlook.state.models[each], worker) for each in option.evict])
            if value < best_value:
                best, best_value = option, value
        # Both from the node's memory: if what comes counted with its reading too, two cold models would swing.
        if best is not None and _value_of(outlook, model, best.worker) > WANTED_TWICE * best_value:
            reason = f"idle, and {model.rate_long:.3f} requests/s come for a model without a worker"
            outlook = outlook.after(model, best, reason)
    return outlook


def _value_of(outlook: Outlook, model: ModelState, worker: WorkerState) -> float:
    """Return the seconds of waiting per second that the model saves by being on the worker."""
    others = len(outlook.serving(model.id)) - 1
    if others > 0 and model.rate_long * model.service_s < 0.8 * others:
        return 0.0
    switch_s = worker.fixed_switch_s + model.components.total_bytes / worker.attach_bytes_per_s
    return model.rate_long * model.slo.weight * switch_s


def _relieve_overfull(outlook: Outlook) -> tuple[Decision, ...]:
    """Let the least valued unused model go where more is resident than the budget allows."""
    decisions, models = [], outlook.state.models
    for worker in outlook.open:
        if worker.resident.total_bytes > worker.budget_bytes and worker.id not in outlook.taken:
            stay = worker.pinned.union(id_ for id_, count in worker.running.items() if count)
            idle = [id_ for id_ in worker.models if id_ not in stay and not models[id_].waiting]
            if idle:
                least = min(idle, key=lambda id_: _value_of(outlook, models[id_], worker))
                decisions.append(Decision("evict", worker.id, least, "over the budget", (least,)))
    return tuple(decisions)
