"""The number of workers, and the models that starting workers take over. Pure.

The target is the workers that the arriving work keeps busy at `target_utilization`, plus those that drain within
`drain_s` the requests still waiting when they come, at most one worker per request. Work arrives at the mean rate over
some times a request's duration; a shorter window is noise. Up when the workers would be busier than halfway from
`target_utilization` to 1; down only after the target was lower for `downscale_delay_s`, to the highest
target of that time. To zero only after `to_zero_delay_s` without any request, and from zero as soon as one waits.

`Scaling` is the way there. More workers are asked for at once. Fewer are asked for when those that Serve stops next may
go: until then they drain, so that requests end and models that only they have get ready elsewhere. If demand comes
back meanwhile, they stay.

Spare workers have done their imports and get no work. One works as soon as more are wanted or a worker is gone, and
Serve is asked for another spare. A drained worker is a spare before a younger one; surplus spares are stopped.

Serve stops the newest worker of the node with the fewest (2.60, deployment_scheduler.py). Callers cannot name another
one. With several nodes it also looks at their other replicas: then it may stop a worker that has not drained,
whose requests end all the same, and whose models are switched to again.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from cluster.admission.service_times import LONG_S, SHORT_S
from cluster.placement.state import ClusterState, Decision, ModelState, WorkerState
from configs.admission import ScalingConfig

MAX_PRELOADS: Final = 128  # named by one plan; the next plan is a moment away
JUST_ASKED_RATE: Final = 0.15  # `rate_short` with one request within the last seconds
_WINDOW_REQUESTS: Final = 8.0
NEEDED_RATE: Final = 1e-3  # requests per second; above it a model must not lose its last worker
LONGEST_START_S: Final = 120.0  # that is believed: a longer start perhaps lacked room
STOP_S: Final = 20.0  # a released worker that is still there then was not the one that Serve stopped
LONGEST_DRAIN_S: Final = 60.0  # then a worker leaves even with models that only it has


@dataclass(frozen=True, slots=True)
class ScalingMemory:
    """The past of the target: since when it is below the workers, its highest value since, and since when all is idle.

    `offered` is the mean number of workers that long requests keep busy, as of `seen_s`. `start_s` is the time from
    the request for a worker to its first report, 0 before any. Times are on the clock that `now_s` of the next call is
    on. Fits into Serve's `policy_state`.
    """

    below_since_s: float | None = None
    highest_since: int = 0
    idle_since_s: float | None = None
    offered: float = 0.0
    seen_s: float | None = None
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """The number of workers, its reason, and the models that new workers should come up with, the most wanted first."""

    target: int
    reason: str
    memory: ScalingMemory
    preloads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Load:
    """The load: the workers that arriving work and switches keep busy, the seconds of waiting work, and its requests by
    the slots of a worker.
    """

    arriving: float
    waiting_s: float
    waiting: float
    switching: float
    is_used: bool

    @property
    def reason(self) -> str:
        return (
            f"{self.arriving:.2f} workers' work arrives, {self.waiting_s:.1f} s of work waits, "
            f"{self.switching:.2f} go into switches"
        )


def target_replicas(
    state: ClusterState, policy: ScalingConfig, memory: ScalingMemory, current: int, now_s: float
) -> ScalePlan:
    """Return the wanted number of workers. `current` counts those that run or start.

    `now_s` is of a clock that never goes back.
    """
    memory = _with_offered(state, memory, now_s)
    load = _load_of(state, memory.offered)
    idle_since_s = None if load.is_used else now_s if memory.idle_since_s is None else memory.idle_since_s
    is_silent = idle_since_s is not None and now_s - idle_since_s >= policy.to_zero_delay_s
    wanted, why_wanted = (0, "") if is_silent else _apply_load(state, load, policy, current, memory.start_s)
    bounded = min(max(wanted, policy.min_workers), policy.max_workers)
    if not (load.is_used or is_silent) and bounded < 1 <= current:
        bounded = min(1, policy.max_workers)
        why_wanted += "; the last worker stays for a while"
    memory = replace(memory, idle_since_s=idle_since_s)
    target, memory, why_delayed = _apply_delay(bounded, policy, memory, current, now_s)
    target = min(max(target, policy.min_workers), policy.max_workers)
    preloads = _preloads(state, target - current) if target > current else ()
    return ScalePlan(target, load.reason + why_wanted + why_delayed, memory, preloads)


def _window_s(model: ModelState) -> float:
    """Return the window over which the model's arrivals tell its load, in seconds."""
    return _WINDOW_REQUESTS * model.service_s


def _with_offered(state: ClusterState, memory: ScalingMemory, now_s: float) -> ScalingMemory:
    """Return the memory with the mean work of requests that are long compared with the windows of their rates."""
    slow = [model for model in state.models.values() if model.rate_long > 0 and _window_s(model) > LONG_S]
    offered = sum([model.rate_long * model.service_s for model in slow])
    window_s = (
        sum([model.rate_long * model.service_s * _window_s(model) for model in slow]) / offered if offered else 0.0
    )
    passed_s = 0.0 if memory.seen_s is None else now_s - memory.seen_s
    part = -math.expm1(-passed_s / max(window_s - LONG_S, LONG_S))
    return replace(memory, offered=memory.offered + part * (offered - memory.offered), seen_s=now_s)


def _load_of(state: ClusterState, offered: float) -> _Load:
    models = state.models.values()
    waiting = [model for model in models if model.waiting]
    waiting_s = sum([model.waiting * model.service_s for model in waiting])
    quick = [model for model in models if _window_s(model) <= LONG_S]
    slots = max([worker.slots for worker in state.workers.values()], default=1)
    return _Load(
        offered + sum([(m.rate if _window_s(m) <= SHORT_S else m.rate_long) * m.service_s for m in quick]),
        waiting_s,
        sum([model.waiting for model in waiting]) / slots,
        _switching_load(state),
        waiting_s > 0
        or any(any(worker.running.values()) for worker in state.workers.values())
        or any(model.rate_short > JUST_ASKED_RATE for model in models),
    )


def _apply_load(
    state: ClusterState, load: _Load, policy: ScalingConfig, current: int, start_s: float
) -> tuple[int, str]:
    """Return the workers that the load keeps busy at the policy's utilization, with other reasons for workers."""
    still_s = max(0.0, load.waiting_s - start_s * len(state.workers))  # when the workers asked for now come
    draining = min(still_s / policy.drain_s, load.waiting)
    arriving = load.arriving / policy.target_utilization
    if load.arriving <= current * (1 + policy.target_utilization) / 2:
        arriving = min(arriving, current)
    # Old arrivals decay in the rates, and never vanish quite.
    wanted = max(math.ceil(min(arriving + draining + load.switching, 1e9) - 1e-9), 1 if load.is_used else 0)
    if load.is_used and wanted < current and (least_models := _workers_by_bytes(state)) > wanted:
        return min(current, least_models), f"; models in use fill {least_models}"  # models in use stay resident
    return wanted, ""


def _apply_delay(
    wanted: int, policy: ScalingConfig, memory: ScalingMemory, current: int, now_s: float
) -> tuple[int, ScalingMemory, str]:
    """Return the target and the new memory: up at once, down to the highest target during the delay."""
    settled = replace(memory, below_since_s=None, highest_since=0)
    if wanted >= current:
        return wanted, settled, ""
    since_s = now_s if memory.below_since_s is None else memory.below_since_s
    highest = max(wanted, memory.highest_since if memory.below_since_s is not None else 0)
    if now_s - since_s >= policy.downscale_delay_s:
        return min(highest, current), settled, ""
    why = f"; {wanted} would do, seen for {now_s - since_s:.0f} s of {policy.downscale_delay_s:.0f}"
    return current, replace(memory, below_since_s=since_s, highest_since=highest), why


def _can_leave(state: ClusterState, worker: WorkerState) -> bool:
    """Return whether a draining worker may end: nothing runs, and no wanted model is ready only there.

    If no other worker stays, none could take a model over.
    """
    if any(worker.running.values()) or worker.leased:
        return False
    staying = [other for other in state.workers.values() if not other.is_draining and other.id != worker.id]
    sole = set(worker.models).difference(*(other.models for other in staying))
    return not (staying and any(_is_wanted(state.models[id_]) for id_ in sole))


def _switching_load(state: ClusterState) -> float:
    """Return the workers kept busy by switches to wanted models without a worker, there and back."""
    held: set[str | None] = {worker.switching_to for worker in state.workers.values()}
    held.update([id_ for worker in state.workers.values() for id_ in worker.models])
    attach = max([worker.attach_bytes_per_s for worker in state.workers.values()], default=0.0)
    if not attach:
        return 0.0
    absent = [model for id_, model in state.models.items() if id_ not in held and model.rate_long > 0]
    return min(sum(2 * model.rate_long * model.components.total_bytes / attach for model in absent), len(held) + 1.0)


def _workers_by_bytes(state: ClusterState) -> int:
    """Return the number of workers that the models in use fill. Shared components count once."""
    used = {id_ for worker in state.workers.values() for id_, count in worker.running.items() if count}
    used.update(model.id for model in state.models.values() if model.waiting)
    sizes: dict[str, int] = {}
    for id_ in used:
        sizes.update(state.models[id_].components.sizes)
    budget = max((worker.budget_bytes for worker in state.workers.values()), default=0)
    return math.ceil(sum(sizes.values()) / budget) if budget else 0


def _preloads(state: ClusterState, num_new: int) -> tuple[str, ...]:
    """Return the models with the most work for each worker that has them, each as often as it could use a worker."""
    holders = Counter([id_ for worker in state.workers.values() if not worker.is_draining for id_ in worker.models])
    for worker in state.workers.values():
        if worker.switching_to is not None and worker.switching_to not in worker.models:
            holders[worker.switching_to] += 1
    found = [
        (-(model.waiting + 10.0 * model.rate) * model.service_s * model.slo.weight / (0.5 + holders.get(id_, 0)), id_)
        for id_, model in state.models.items()
        if (model.waiting or model.rate) and not model.retry_in_s
    ]
    num_chosen = min(num_new, MAX_PRELOADS)
    wanted = heapq.nsmallest(num_chosen, found)  # ascending, so a heap
    chosen: list[str] = []
    while wanted and len(chosen) < num_chosen:
        least, id_ = wanted[0]
        chosen.append(id_)
        holders[id_] += 1
        heapq.heapreplace(wanted, (least * (holders[id_] - 0.5) / (0.5 + holders[id_]), id_))
    return tuple(chosen)


def _is_wanted(model: ModelState) -> bool:
    return model.waiting > 0 or model.rate_long > NEEDED_RATE


@dataclass(slots=True)
class Scaling:
    """The number of workers that Serve should run, its `target`, and the way there.

    `leaving` are the workers that drain before Serve is asked for fewer, the next to stop first; Serve is to stop those
    in `released`. Both say since when. `preloads` are for future workers. Of the target, `num_spares` are spares;
    `spares` names the present ones.
    """

    policy: ScalingConfig
    target: int
    reason: str = ""
    leaving: dict[str, float] = field(default_factory=dict)
    released: dict[str, float] = field(default_factory=dict)
    preloads: deque[str] = field(default_factory=deque)
    num_spares: int = field(init=False)
    spares: list[str] = field(default_factory=list)
    _memory: ScalingMemory = field(default_factory=ScalingMemory)
    _here: set[str] = field(default_factory=set)
    _seen: set[str] = field(default_factory=set)
    _came: set[str] = field(default_factory=set)
    _asked_s: float | None = None  # since when requested workers are missing

    def __post_init__(self) -> None:
        self.num_spares = min(self.policy.spare_workers, max(0, self.target - max(1, self.policy.min_workers)))

    @property
    def draining(self) -> frozenset[str]:
        """Workers that get no new work."""
        return frozenset({**self.leaving, **self.released}).union(self.spares)

    @property
    def _num_working(self) -> int:
        """Number of present or starting workers that should work."""
        return self.target - len(self.leaving) - self.num_spares

    def describe(self) -> dict[str, Any]:
        """Return the wanted number of workers, the leaving ones, the spares, and the reason."""
        leaving = sorted({**self.leaving, **self.released})
        return {"target": self.target, "leaving": leaving, "spares": sorted(self.spares), "reason": self.reason}

    def assign(self, here: Sequence[str]) -> None:
        """Choose which workers work and which are spares; the oldest of the new ones work first."""
        self.spares = [name for name in self.spares if name in here]
        working = {name for name in here if name in self._here} - self.draining
        for name in here:
            if name in self._here or name in self.draining:
                continue
            if len(working) >= self._num_working and len(self.spares) < self.num_spares:
                self.spares.append(name)
            else:
                working.add(name)
        self._here = set(here)
        num_missing = max(0, self._num_working - len(working))
        del self.spares[:num_missing]

    def follow(self, state: ClusterState, up_s: Mapping[str, float], now_s: float) -> None:
        """Move the target. `up_s` is the age of each worker."""
        here = state.workers
        self.leaving = {name: since_s for name, since_s in self.leaving.items() if name in here}
        self.released = {
            name: since_s for name, since_s in self.released.items() if name in here and now_s - since_s < STOP_S
        }
        self._measure_start(state, now_s)
        plan = target_replicas(state, self.policy, self._memory, self._num_working, now_s)
        self._memory, self.reason = plan.memory, plan.reason
        if plan.target > self._num_working:
            self._call_back(plan.target - self._num_working)
            if plan.target > self._num_working:
                self.preloads = deque(plan.preloads)
                self._put_to_work(plan.target - self._num_working)
        elif plan.target < self._num_working:
            num_coming = self._num_coming(state) - (self.num_spares - len(self.spares))  # Serve stops these first
            num_undone = min(max(0, num_coming), self._num_working - plan.target)
            self.target -= num_undone
            self._let_go(self._num_working - plan.target, state, up_s, now_s)
        for name, since_s in list(self.leaving.items()):
            if not _can_leave(state, state.workers[name]) and now_s - since_s < LONGEST_DRAIN_S:
                break  # Serve stops them in this order
            del self.leaving[name]
            self.spares.append(name)
            self.num_spares += 1
        self._set_spares(plan.target, state, up_s, now_s)

    def preload_orders(self, state: ClusterState, busy: Iterable[str]) -> list[Decision]:
        """Return orders to load their models, for empty workers that have begun to work since."""
        working = {name: worker for name, worker in state.workers.items() if not worker.is_draining}
        new = [worker for name, worker in working.items() if name not in self._seen and name not in set(busy)]
        self._seen = set(working)
        orders = []
        for worker in new:
            if self.preloads and not (worker.models or worker.switching_to):
                model = state.models.get(self.preloads.popleft())
                able = model is not None and model.id not in worker.unable
                if model is not None and able and model.components.total_bytes <= worker.budget_bytes:
                    reason = "new, and there for this model"
                    switch_s = state.switch_s(model, worker)
                    orders.append(Decision("switch", worker.id, model.id, reason, (), switch_s))
        return orders

    def _measure_start(self, state: ClusterState, now_s: float) -> None:
        """Learn the seconds from the request for a worker to its first report."""
        if self._asked_s is not None and not state.workers.keys() <= self._came:
            start_s = min(max(0.0, now_s - self._asked_s), LONGEST_START_S)
            self._memory = replace(self._memory, start_s=start_s)
        self._came = set(state.workers)
        since_s = now_s if self._asked_s is None else self._asked_s
        self._asked_s = since_s if self._num_coming(state) else None

    def _num_coming(self, state: ClusterState) -> int:
        return max(0, self.target - len(state.workers.keys() - self.released.keys()))

    def _put_to_work(self, count: int) -> None:
        """Let present or starting spares work, and ask for more workers if they are too few."""
        num_taken = min(count, self.num_spares)
        self.num_spares -= num_taken
        del self.spares[:num_taken]
        self.target += count - num_taken

    def _set_spares(self, num_working: int, state: ClusterState, up_s: Mapping[str, float], now_s: float) -> None:
        """Have Serve stop surplus spares, and ask for a missing one once all other workers are here."""
        num_wanted = min(self.policy.spare_workers, self.policy.max_workers - num_working) if num_working else 0
        while self.num_spares > max(num_wanted, len(self.spares)):  # not here yet
            self.num_spares -= 1
            self.target -= 1
        for name in _stop_order(state, up_s):
            worker = state.workers[name]
            if self.num_spares <= num_wanted or worker.pinned or worker.is_frozen:
                break
            if name in self.spares:
                self.spares.remove(name)
                self.released[name] = now_s
                self.num_spares -= 1
                self.target -= 1
        if self.num_spares + len(self.leaving) < num_wanted and not self._num_coming(state):
            self.num_spares += 1
            self.target += 1

    def _call_back(self, count: int) -> None:
        """Keep the last of the leaving workers."""
        for name in list(self.leaving)[::-1][:count]:
            del self.leaving[name]

    def _let_go(self, count: int, state: ClusterState, up_s: Mapping[str, float], now_s: float) -> None:
        """Begin to drain the workers that Serve stops next; none behind one that was pinned or frozen by hand."""
        for name in _stop_order(state, up_s):
            if name in self.draining:
                continue
            worker = state.workers[name]
            if not count or worker.pinned or worker.is_frozen:
                return
            self.leaving[name] = now_s
            count -= 1


def _stop_order(state: ClusterState, up_s: Mapping[str, float]) -> list[str]:
    """Return the workers in the order in which Serve stops them: of nodes with few workers, and new ones, first."""
    on_node = Counter(worker.node for worker in state.workers.values())
    return sorted(state.workers, key=lambda name: (on_node[state.workers[name].node], up_s.get(name, 0.0), name))
