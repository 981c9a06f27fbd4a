"""The outlook: the cluster after the orders of a plan, a value that each step of planning hands on. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from cluster.placement.on_demand import longest_on_demand_s, on_demand_switches, quickly_switched
from cluster.placement.state import STALE_S, ClusterState, Decision, ModelState, UsualSwitch, WorkerState

FEW: Final = 64  # so few workers are all weighed for a model; of more, the best of each kind
MAX_CANDIDATES: Final = 6  # workers of a kind: sharing one component with the model, or having the least work


@dataclass(frozen=True, slots=True)
class Option:
    """A worker for a model, and the models evicted for it.

    `ready_s` is the time until ready, plus a request's extra time over the fastest worker; the worker loses `lost_s` of
    it, because its running requests end in either case. `harm` is in request-seconds.
    """

    worker: WorkerState
    evict: tuple[str, ...]
    must_drain: bool
    switch_s: float
    ready_s: float
    lost_s: float
    harm: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """The cluster as it will be once the decisions so far are carried out.

    The workers in `open` can take an order unless they are `taken`; those with the fewest claims come first.
    Models in `on_demand` need none, because a switch to them takes `longest_on_demand_s` at most.
    """

    state: ClusterState
    open: tuple[WorkerState, ...]
    num_on_the_way: int
    usual: UsualSwitch
    on_demand: frozenset[str]
    longest_on_demand_s: float
    leaving: Mapping[str, Sequence[str]]  # leaving workers that have a model
    serving_before: Mapping[str, Sequence[str]]  # without any order
    busy_before_s: Mapping[str, float]
    taken: Mapping[str, Option] = field(default_factory=dict)  # by worker
    changed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # models whose workers differ from before
    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()

    def serving(self, model: str) -> Sequence[str]:
        """Return the workers that have the model or get ready for it."""
        found = self.changed.get(model)
        return self.serving_before.get(model, ()) if found is None else found

    def all_serving(self) -> Mapping[str, Sequence[str]]:
        """Return the workers of every model."""
        return {**self.serving_before, **self.changed}

    def all_busy_s(self) -> Mapping[str, float]:
        """Return the waiting work of every worker in seconds."""
        return {**self.busy_before_s, **{worker: option.ready_s for worker, option in self.taken.items()}}

    def busy_s(self, worker: str) -> float:
        """Return the waiting work of the worker in seconds."""
        option = self.taken.get(worker)
        return self.busy_before_s[worker] if option is None else option.ready_s

    def with_notes(self, *notes: str) -> Outlook:
        """Return the outlook with more notes."""
        return replace(self, notes=self.notes + notes)

    def after(self, model: ModelState, option: Option, reason: str) -> Outlook:
        """Return the outlook after the option's worker is ordered to get the model ready (rule 6)."""
        worker = option.worker
        gone = {id_: tuple([each for each in self.serving(id_) if each != worker.id]) for id_ in option.evict}
        return replace(
            self,
            num_on_the_way=self.num_on_the_way + 1,
            taken={**self.taken, worker.id: option},
            changed={**self.changed, **gone, model.id: (*self.serving(model.id), worker.id)},
            decisions=(*self.decisions, *_orders(self.state, model, option, reason)),
        )

    def planned(self) -> dict[str, tuple[str, ...]]:
        """Return the workers of each model; a leaving one goes on with models that no other has ready yet."""
        planned = {id_: tuple(workers) for id_, workers in self.all_serving().items() if workers}
        for id_, leaving in self.leaving.items():
            workers = planned.get(id_, ())
            if not any(id_ in self.state.workers[worker].models for worker in workers):
                planned[id_] = (*workers, *leaving)
        return planned


def _orders(state: ClusterState, model: ModelState, option: Option, reason: str) -> list[Decision]:
    """Return the orders to a worker: a switch, or a drain with a prefetch of the bytes that its node lacks (rule 6)."""
    worker = option.worker
    decided = worker.id, model.id, reason, option.evict, option.switch_s
    if not option.must_drain:
        return [Decision("switch", *decided)]
    held = state.held.get(worker.node, ())
    cold = [key for key in model.components.sizes if key not in held and key not in worker.resident.sizes]
    reason = f"{len(cold)} components are read while {worker.id} drains"
    return [Decision("drain", *decided), *([Decision("prefetch", worker.id, model.id, reason)] if cold else [])]


def outlook_of(state: ClusterState) -> Outlook:
    """Return the outlook of the cluster without any order."""
    serving: dict[str, list[str]] = {}
    leaving: dict[str, list[str]] = {}
    busy_s: dict[str, float] = {}
    open_: list[WorkerState] = []
    num_on_the_way = 0
    for id_, worker in state.workers.items():
        work_s = worker.ready_in_s
        for each, count in worker.running.items():
            work_s += 0.5 * count * state.models[each].service_s
        busy_s[id_] = work_s
        for each in worker.models:
            (leaving if worker.is_draining else serving).setdefault(each, []).append(id_)
        if (coming := worker.switching_to) is not None:
            num_on_the_way += 1
            if coming not in worker.models and not worker.is_draining:
                serving.setdefault(coming, []).append(id_)
        elif not (worker.is_draining or worker.is_frozen or worker.age_s > STALE_S):
            open_.append(worker)
    claims = _share_work(state, serving, busy_s)
    open_.sort(key=lambda worker: claims[worker.id])
    usual, longest_s = _usual_switch(open_), longest_on_demand_s(state)
    on_demand = quickly_switched(state, longest_s, usual)
    return Outlook(
        state,
        tuple(open_),
        num_on_the_way,
        usual,
        frozenset(on_demand_switches(state, longest_s, on_demand, serving, open_[:FEW])),
        longest_s,
        leaving,
        serving,
        busy_s,
    )


def _share_work(state: ClusterState, serving: Mapping[str, list[str]], busy_s: dict[str, float]) -> dict[str, float]:
    """Add the waiting work of each model to its workers; return the number of requests that count on each worker."""
    claims = dict.fromkeys(busy_s, 0.0)
    for id_, workers in serving.items():
        model = state.models[id_]
        waiting, rate, long = model.waiting, model.rate_short, model.rate_long
        num_wanted = waiting + 10.0 * (rate if rate > long else long)
        if num_wanted:
            work_s = waiting * model.service_s / len(workers)
            claim = num_wanted * model.slo.weight / len(workers)
            for worker in workers:
                busy_s[worker] += work_s
                claims[worker] += claim
    return claims


def _usual_switch(workers: list[WorkerState]) -> UsualSwitch:
    attach = sorted([worker.attach_bytes_per_s for worker in workers])
    return UsualSwitch(
        max([worker.fixed_switch_s for worker in workers], default=0.0),
        attach[len(attach) // 2] if attach else 10e9,
    )


class Candidates:
    """The workers that can take an order, the least busy first. `wanted` are the models to be asked about."""

    def __init__(self, workers: Sequence[WorkerState], wanted: Collection[ModelState]) -> None:
        self._workers = workers
        self._first = 0  # the first worker that is not taken
        self._most = FEW if len(workers) <= FEW else MAX_CANDIDATES
        self._holders: dict[str, list[WorkerState]] = {}  # by component
        keys = {key for model in wanted for key in model.components.sizes} if len(workers) > FEW else ()
        for worker in workers if keys else ():
            for key in filter(keys.__contains__, worker.resident.sizes):
                self._holders.setdefault(key, []).append(worker)

    def workers_for(self, model: ModelState, taken: Collection[str]) -> Iterator[WorkerState]:
        """Yield all workers of few; of many, some that share a component with the model, and the least claimed.

        Taken workers are skipped, and stay so.
        """
        workers = self._workers
        while self._first < len(workers) and workers[self._first].id in taken:
            self._first += 1
        seen = set(taken)
        sharing = [self._holders.get(key, ()) for key in model.components.sizes]
        for group in (*sharing, workers[self._first : self._first + FEW]):
            for worker in islice((worker for worker in group if worker.id not in seen), self._most):
                seen.add(worker.id)
                yield worker
