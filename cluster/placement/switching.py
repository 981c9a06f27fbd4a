"""The policy of switching: which worker loads which model, when, and which models it evicts. Pure.

`plan_switches` runs several times a second and has no memory; the state carries it (a worker
that drains for a model has it in `WorkerState.reserved_for`). Each choice is the same question: of all that a worker
could do next (go on, wait, switch to a model), what ends the most waiting per second of its time?

    to go on     1 / (time to the next request + its service); the former is 0 while one waits there
    to switch    the model's requests / (the switch + their service + the switch back to the evicted models)

both weighted by class of service. Without further arrivals that is Smith's rule (1956) for batches with setups:
the loaded model is served until its queue is empty, unless another queue outweighs it by more than the switches.

1.  *Need.* A model lacks a worker when requests wait and no worker has it, or when more wait than its workers have
    slots for, and longer than a switch of one more. A worker whose load failed is passed over for a while. Getting
    ready counts: a thousand requests are one load. A model that switches about as fast as it serves needs no order
    (`on_demand.py`). What ends the most waiting per second comes first.
2.  *Where.* On the worker with the least harm and wait together: the wait is the end of what must end first, and a
    switch that moves only what the worker (and its node) lacks, so the model that differs least is the cheapest.
    Harm is in request-seconds: what the requests of the models that go wait longer until those could be back.
3.  *What goes.* Free bytes first; then the models with the least harm together that suffice, of few candidates the
    best choice there is. Components that a remaining model shares stay. What runs, is leased or pinned by hand never
    goes, nor what has got ready and whose requests have not begun yet.
4.  *Whether.* A worker whose models' requests wait goes on with them, unless to switch ends more waiting per second.
    What it runs ends in either case: until then only the slots are lost that are empty before the others. Of one that
    nobody waits for the next request comes by the rate over minutes, and no sooner than in twice the time that none has
    come. It waits for that no longer than until those that wait have waited, together, as long as those that come
    meanwhile would wait if it switched. For a worker that loses nothing, those that come until it is ready count as
    well. `throughput-first` also wants work for several times the switch's duration,
    for as long as an idle worker would take for several switches.
5.  *Bounded wait.* A model *starves* without a start of any request for `MAX_WAIT_TARGETS` times its class's target,
    and for a whole round: a turn of each model that waits, with its switch. It then goes before all that do not, and
    before a queue that lasts for longer than a few switches. So does one whose deadline is near, where those
    that it pushes aside can wait for it. At most a quarter of the workers are on their way at a time because of that.
6.  *How.* If a model to evict still runs requests, the worker *drains*: it starts no more of them, its node prefetches
    the missing bytes, and a later plan orders the switch, unless others have come meanwhile that it had better go on
    with. Otherwise it switches now.
7.  *Ahead.* A worker without work gets ready for the most wanted model that no worker has, if that is wanted twice as
    much as the evicted ones: so nothing swings back and forth, and nothing moves while all wanted models fit.

Every order carries its reason. Stale, leaving and manually frozen workers get no orders. Models that only leaving
workers have count as without a worker, so they are handed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import islice
from operator import attrgetter
from typing import Final

from cluster.placement.on_demand import LEAST_RATE, on_demand_switches
from cluster.placement.outlook import FEW, MAX_CANDIDATES, Candidates, Option, Outlook, outlook_of
from cluster.placement.state import MAX_WAIT_TARGETS, ClusterState, Decision, ModelState, SwitchPlan, WorkerState

MAX_NEEDS: Final = 128  # the most urgent models, which one plan looks at; the next plan is a moment away
MAX_CHOICES: Final = 256  # choices of evictions tried for one worker: all there are, of up to eight models
WANTED_TWICE: Final = 2.0
TURN_SWITCHES: Final = 4.0  # times its switch: the least turn of a model in a round, if it has the work
SILENCES: Final = 2.0  # the next request comes no sooner than in this many times the time that none has come
EMPTY_MARGIN: Final = 0.25  # of the policy's margin, for a worker that loses nothing by a switch
MAX_DUE_SHARE: Final = 0.25  # of the workers are on their way to a model at once because it is due
PUSH_SWITCHES: Final = 2.0  # a queue that lasts no longer than this many switches there and back is not interrupted
_USUAL, _DUE, _STARVING = range(3)  # the order in which needs are looked at


@dataclass(frozen=True, slots=True)
class SwitchingPolicy:
    """The weights of the policy.

    `margin` is the share by which a gain must exceed its cost. `amortization` is the work that a switch must
    bring, in times of its duration.
    """

    mode: str = "latency-first"
    margin: float = 0.25
    amortization: float = 0.0


LATENCY_FIRST: Final = SwitchingPolicy()
THROUGHPUT_FIRST: Final = SwitchingPolicy("throughput-first", margin=1.0, amortization=2.0)


def plan_switches(state: ClusterState, policy: SwitchingPolicy = LATENCY_FIRST) -> SwitchPlan:
    """Return the orders of this moment. The figures of `state` are sound (checking.py), so this does not raise."""
    outlook = outlook_of(state)
    evictions: tuple[Decision, ...] = ()
    if not state.is_frozen:
        outlook = _follow_reservations(outlook, policy)
        outlook = _follow_pins(outlook)
        outlook = _serve_needs(outlook, policy)
        outlook = _prepare_ahead(outlook)
        evictions = _relieve_overfull(outlook)
    able = (each for each in outlook.open if each.id not in outlook.taken and each.reserved_for is None)
    longest_s = outlook.longest_on_demand_s
    starts = on_demand_switches(state, longest_s, outlook.on_demand, outlook.all_serving(), list(islice(able, FEW)))
    planned = outlook.planned() | {id_: tuple(found) for id_, found in starts.items()}
    return SwitchPlan((*outlook.decisions, *evictions), planned, outlook.notes, starts, longest_s)


def _follow_reservations(outlook: Outlook, policy: SwitchingPolicy) -> Outlook:
    """Order the switches whose workers have drained; give up those that are no longer worth it (rule 6)."""
    needs: dict[str, _Need] | None = None
    for worker in outlook.open:
        if worker.reserved_for is None or worker.reserved_for in worker.models:
            continue
        model = outlook.state.models[worker.reserved_for]
        option = _option_for(outlook, model, worker)
        if option is not None and model.waiting and not model.retry_in_s:
            if not option.must_drain:
                needs = {need.model.id: need for need in _find_needs(outlook)} if needs is None else needs
                need = needs.get(model.id)
                if need and not _is_worth_it(outlook, policy, need, option, is_begun=True):
                    continue
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
            if (option := _option_for(outlook, model, worker)) is None:
                outlook = outlook.with_notes(
                    f"{id_} is pinned to {worker.id} and does not fit beside the models that must stay there"
                )
            else:
                outlook = outlook.after(model, option, "pinned to this worker by hand")
    return outlook


@dataclass(frozen=True, slots=True)
class _Need:
    """A model that lacks a worker. `rank` and `urgency` order needs; `wait_s` is what its last request waits if nothing
    changes, or has waited where no worker has the model; where it starves, how long it does. `coming_s` is the work
    that comes to each of its workers until one more could be ready.
    """

    rank: int
    urgency: float
    model: ModelState
    wait_s: float
    coming_s: float = 0.0

    @property
    def is_due(self) -> bool:
        return self.rank >= _DUE


def _find_needs(outlook: Outlook) -> list[_Need]:
    """Return the most urgent needs (rule 1). The costly checks come last, for urgent enough ones only."""
    state, serving, busy_s = outlook.state, outlook.all_serving(), outlook.all_busy_s()
    found = []
    waiting = [model for model in state.models.values() if model.waiting and model.id not in outlook.on_demand]
    round_s = _round_s(outlook, waiting)
    for model in waiting:
        if model.retry_in_s > 0:
            continue
        switch_s = outlook.usual.seconds(model)
        urgency = _ended_per_s(model, _num_for_one(outlook, model), switch_s)
        if workers := serving.get(model.id):
            wait_s = min([busy_s[worker] for worker in workers]) - model.service_s
            coming_s = model.rate_long * switch_s * model.service_s / len(workers)
            if wait_s + coming_s > switch_s:
                found.append(_Need(_USUAL, urgency, model, wait_s, coming_s))
        elif (over_s := model.unstarted_s - max(MAX_WAIT_TARGETS * model.slo.target_s, round_s)) >= 0:
            found.append(_Need(_STARVING, model.unstarted_s / model.slo.target_s, model, over_s))
        else:
            is_near = 0 < model.slack_s < 1.5 * switch_s + model.service_s
            found.append(_Need(_DUE if is_near else _USUAL, urgency, model, model.oldest_age_s))
    found.sort(key=attrgetter("rank", "urgency"), reverse=True)  # equals keep their order
    lacking = (
        need
        for need in found
        if not (workers := serving.get(need.model.id))
        or need.model.waiting > state.num_free_slots(need.model.id, workers)
    )
    return list(islice(lacking, MAX_NEEDS))


def _ended_per_s(model: ModelState, num: float, switch_s: float) -> float:
    """Return the weighted requests that a worker ends per second by a switch for `num` of the model's."""
    return model.slo.weight * num / max(switch_s + num * model.service_s, 1e-9)


def _round_s(outlook: Outlook, waiting: Iterable[ModelState]) -> float:
    """Return the seconds that the workers take for one round through all waiting models."""
    turns_s = 0.0
    for model in waiting:
        switch_s = outlook.usual.seconds(model)
        turns_s += switch_s + min(model.waiting * model.service_s, TURN_SWITCHES * switch_s)
    return turns_s / max(len(outlook.state.workers), 1)


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
    needs = _find_needs(outlook)
    candidates = Candidates(outlook.open, [need.model for need in needs])
    max_due = max(1.0, MAX_DUE_SHARE * len(outlook.state.workers))
    for need in needs:
        if need.is_due and outlook.num_on_the_way >= max_due:
            need = replace(need, rank=_USUAL)
        best = _find_worker(outlook, policy, need, candidates.workers_for(need.model, outlook.taken))
        if best is None:
            nbytes = need.model.components.total_bytes
            if all(nbytes > worker.budget_bytes for worker in outlook.state.workers.values()):
                outlook = outlook.with_notes(f"{need.model.id}: {nbytes} bytes fit into no worker's budget")
        elif _is_worth_it(outlook, policy, need, best):
            outlook = outlook.after(need.model, best, _reason(outlook, need, best))
    return outlook


def _reason(outlook: Outlook, need: _Need, option: Option) -> str:
    model = need.model
    where = f"ready in {option.ready_s:.2f} s, costs others {option.harm:.1f} request-seconds"
    if need.rank == _STARVING:
        return f"due: none of {model.waiting} has started for {model.unstarted_s:.1f} s; {where}"
    if need.is_due:
        return f"due: the deadline of one of {model.waiting} is in {model.slack_s:.1f} s; {where}"
    if workers := outlook.serving(model.id):
        return f"{model.waiting} wait {need.wait_s:.1f} s for {len(workers)} busy workers; {where}"
    return f"{model.waiting} wait without a worker; {where}"


def _find_worker(
    outlook: Outlook, policy: SwitchingPolicy, need: _Need, workers: Iterable[WorkerState]
) -> Option | None:
    """Return the worker with the least harm and wait together (rule 2)."""
    weight = need.model.slo.weight * need.model.waiting
    found = [
        option
        for worker in workers
        if _brings_work(outlook, policy, need, worker)
        if (option := _option_for(outlook, need.model, worker)) is not None
    ]
    return min(found, key=lambda option: (weight * option.ready_s + option.harm, len(option.evict)), default=None)


def _option_for(outlook: Outlook, model: ModelState, worker: WorkerState) -> Option | None:
    """Return the option of getting the worker ready for the model; None if it has the model or cannot load it."""
    if model.id in worker.models or model.id in worker.unable:
        return None
    if model.components.total_bytes > worker.budget_bytes:
        return None
    state, switch_s = outlook.state, outlook.state.switch_s(model, worker)
    if (going := _what_goes(outlook, model, worker, switch_s)) is None:
        return None
    drain_s = sum([worker.running.get(id_, 0) * state.models[id_].service_s for id_ in going])
    ready_s = drain_s + switch_s
    lost_s = ready_s - drain_s * (1 + 1 / worker.slots) / 2  # half of the slots are empty until the last has ended
    return Option(worker, tuple(going), drain_s > 0, switch_s, ready_s, lost_s, sum(going.values()))


def _what_goes(outlook: Outlook, model: ModelState, worker: WorkerState, switch_s: float) -> dict[str, float] | None:
    """Return the models to evict for a model, with the harm of each; None if too little may be evicted (rule 3)."""
    state = outlook.state
    if state.bytes_together(worker, (*worker.models, model.id)) <= worker.budget_bytes:
        return {}
    away_s = 2 * switch_s + model.waiting * model.service_s
    movable = [state.models[id_] for id_ in worker.models if id_ not in worker.pinned]
    harms = {each.id: _harm_of(outlook, each, worker, away_s) for each in movable}
    stay = [id_ for id_ in worker.models if harms.get(id_, math.inf) == math.inf]
    going = least_harm(
        {id_: harm for id_, harm in harms.items() if harm < math.inf},
        {id_: state.models[id_].components.total_bytes for id_ in harms},
        lambda kept: state.bytes_together(worker, (*stay, *kept, model.id)) <= worker.budget_bytes,
    )
    return None if going is None else {id_: harms[id_] for id_ in going}


def least_harm(
    harms: Mapping[str, float], sizes: Mapping[str, int], fits: Callable[[Collection[str]], bool]
) -> list[str] | None:
    """Return the models to evict so that the rest fits, with the least harm; None if evicting all is not enough.

    The least harm per byte goes first, and a model that need not go after all comes back. From there every other choice
    is tried that could be better, `MAX_CHOICES` of them.
    """
    order = sorted(harms, key=lambda id_: (harms[id_] / max(sizes[id_], 1), id_))
    if not fits(()):
        return None
    going: list[str] = []
    while not fits([id_ for id_ in order if id_ not in going]):
        going.append(order[len(going)])
    for id_ in sorted(going, key=harms.__getitem__, reverse=True):
        if fits([each for each in order if each not in going or each == id_]):
            going.remove(id_)
    best, best_harm, num_tried = going, sum([harms[id_] for id_ in going]), 0
    tried: list[tuple[int, float, list[str]]] = [(0, 0.0, [])]
    while tried and num_tried < MAX_CHOICES:
        place, harm, gone = tried.pop()
        for next_ in range(len(order) - 1, place - 1, -1):
            more = harm + harms[order[next_]]
            if more >= best_harm:
                continue
            num_tried += 1
            chosen = [*gone, order[next_]]
            if fits([id_ for id_ in order if id_ not in chosen]):
                best, best_harm = chosen, more
            else:
                tried.append((next_ + 1, more, chosen))
    return best


def _harm_of(outlook: Outlook, model: ModelState, worker: WorkerState, away_s: float) -> float:
    """Return the request-seconds that the model's requests wait longer if it is off the worker for `away_s`."""
    if model.waiting and not worker.running.get(model.id) and worker.reserved_for is None:
        return math.inf  # it has just got ready, and its requests are about to start
    others = [other for other in outlook.serving(model.id) if other != worker.id]
    if not others:
        coming_s = max(0.0, away_s - outlook.usual.seconds(model))  # it comes back only for a request
        coming = model.slo.weight * model.rate * coming_s
        return model.slo.weight * model.waiting * away_s + 0.5 * coming * coming_s
    coming = model.rate * away_s
    work_s = (model.waiting + coming) * model.service_s
    affected = model.slo.weight * (model.waiting + 0.5 * coming)
    return affected * (work_s / len(others) - work_s / (len(others) + 1))


def _is_worth_it(
    outlook: Outlook, policy: SwitchingPolicy, need: _Need, option: Option, is_begun: bool = False
) -> bool:
    """Return whether the worker ends more waiting by the switch than without it (rules 4 and 5).

    What `is_begun`, because the worker has drained for it, goes on unless it is worse by the margin.
    """
    model, worker, least = need.model, option.worker, 1 / (1 + policy.margin) if is_begun else 1 + policy.margin
    num, pushed = _num_for_one(outlook, model), _pushed(outlook, option)
    if need.is_due and (is_begun or not pushed):
        return True
    if not pushed and outlook.serving(model.id):
        others_s = model.slo.weight * num * (need.wait_s - least * option.ready_s)
        return (
            others_s > option.harm
            if option.evict
            else need.wait_s + need.coming_s > (1 + EMPTY_MARGIN * policy.margin) * option.ready_s
        )
    others = pushed or _expected(outlook, option)
    back_s = max([_way_back_s(model, each, worker) for each in others], default=0.0)
    away_s = option.lost_s + num * model.service_s + back_s
    by_switch = model.slo.weight * num / max(away_s, 1e-9)
    if not pushed:
        goes_on = _coming_per_s(others, worker)
        waited = model.slo.weight * model.waiting * model.oldest_age_s
        return by_switch > goes_on or waited >= 0.5 * goes_on * away_s * away_s
    if need.rank == _STARVING:
        return outlook.busy_s(worker.id) + need.wait_s > PUSH_SWITCHES * (option.switch_s + back_s)
    if need.rank == _DUE:
        late_s = away_s + option.ready_s - option.lost_s
        return all(each.slack_s > late_s + each.service_s for each in pushed)
    return by_switch > least * max([each.slo.weight / each.service_s for each in pushed])


def _way_back_s(model: ModelState, gone: ModelState, worker: WorkerState) -> float:
    """Return the seconds of the worker's switch from the model back to one that went: what both share stays."""
    here = model.components.sizes
    missing = sum([nbytes for key, nbytes in gone.components.sizes.items() if key not in here])
    return worker.fixed_switch_s + missing / worker.attach_bytes_per_s


def _expected(outlook: Outlook, option: Option) -> list[ModelState]:
    """Return the evicted models that other workers could not serve along with theirs."""
    models = [outlook.state.models[id_] for id_ in option.evict]
    return [each for each in models if each.rate_long and not _has_enough(each, len(outlook.serving(each.id)) - 1)]


def _has_enough(model: ModelState, num_workers: int) -> bool:
    """Return whether this many workers have time for all arriving requests for the model."""
    return num_workers > 0 and model.rate_long * model.service_s < 0.8 * num_workers


def _coming_per_s(models: Iterable[ModelState], worker: WorkerState) -> float:
    """Return the weighted requests per second that the worker ends if it waits for those for the models."""
    per_s = busy = 0.0
    for model in models:
        rate = min(model.rate_long, 1 / max(SILENCES * worker.idle_s, 1e-9))
        per_s += model.slo.weight * rate
        busy += rate * model.service_s
    return per_s / (1 + busy)


def _pushed(outlook: Outlook, option: Option) -> list[ModelState]:
    """Return the evicted models whose requests wait and that no other worker has."""
    state = outlook.state
    return [
        state.models[id_]
        for id_ in option.evict
        if state.models[id_].waiting
        and not any(id_ in state.workers[other].models for other in outlook.serving(id_) if other != option.worker.id)
    ]


def _brings_work(outlook: Outlook, policy: SwitchingPolicy, need: _Need, worker: WorkerState) -> bool:
    """Return whether a switch of this worker brings enough work (rule 4)."""
    if not policy.amortization or need.is_due:
        return True
    least_s = policy.amortization * outlook.state.switch_s(need.model, worker)
    if not outlook.busy_s(worker.id) and need.model.oldest_age_s >= least_s:
        return True
    return _num_for_one(outlook, need.model) * need.model.service_s >= least_s


def _num_for_one(outlook: Outlook, model: ModelState) -> float:
    """Return the share of the waiting requests that one more worker would get."""
    return model.waiting / (len(outlook.serving(model.id)) + 1)


def _prepare_ahead(outlook: Outlook) -> Outlook:
    """Let idle workers load wanted models that no worker has (rule 7)."""
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
            option = None if worker.id in outlook.taken else _option_for(outlook, model, worker)
            if option is None or option.must_drain or _pushed(outlook, option) or worker.idle_s < option.switch_s:
                continue
            value = sum([_value_of(outlook, outlook.state.models[each], worker) for each in option.evict])
            if value < best_value:
                best, best_value = option, value
        # Both from the node's memory: if reading counted for the coming model, two cold models would swing.
        if best is not None and _value_of(outlook, model, best.worker) > WANTED_TWICE * best_value:
            reason = f"idle, and {model.rate_long:.3f} requests/s come for a model without a worker"
            outlook = outlook.after(model, best, reason)
    return outlook


def _value_of(outlook: Outlook, model: ModelState, worker: WorkerState) -> float:
    """Return the seconds of waiting per second that the model saves by being on the worker."""
    if _has_enough(model, len(outlook.serving(model.id)) - 1):
        return 0.0
    switch_s = worker.fixed_switch_s + model.components.total_bytes / worker.attach_bytes_per_s
    return model.rate_long * model.slo.weight * switch_s


def _relieve_overfull(outlook: Outlook) -> tuple[Decision, ...]:
    """Evict the least valued unused model if more is resident than the budget allows."""
    decisions, models = [], outlook.state.models
    for worker in outlook.open:
        if worker.resident.total_bytes > worker.budget_bytes and worker.id not in outlook.taken:
            stay = worker.pinned.union(id_ for id_, count in worker.running.items() if count)
            idle = [id_ for id_ in worker.models if id_ not in stay and not models[id_].waiting]
            if idle:
                least = min(idle, key=lambda id_: _value_of(outlook, models[id_], worker))
                decisions.append(Decision("evict", worker.id, least, "over the budget", (least,)))
    return tuple(decisions)
