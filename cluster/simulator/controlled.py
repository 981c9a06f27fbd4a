"""The controller in the simulator: a queue at the ingress, and the same pure functions that decide in a cluster."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, Final

from cluster.control.checking import usable_state
from cluster.control.plans import Decision, SwitchPlan
from cluster.control.routing import WaitingRequest, WorkerLoad, choose_worker, start_order
from cluster.control.state import ClusterState, Components, ModelState, WorkerState, retry_after_s
from cluster.control.switching import LATENCY_FIRST, SwitchingPolicy, plan_switches
from cluster.simulator.scenario import Fault, SimRequest
from cluster.simulator.world import WorkerInWorld, World
from weights.residency.policy import Popularity

TICK_S: Final = 0.25  # the oldest that a state may be
SHORT_S: Final = 5.0  # half-lives of the two rates
LONG_S: Final = 120.0
_LN2: Final = math.log(2)


@dataclass(frozen=True, slots=True)
class TimedDecision:
    """A decision, and when it was made."""

    at_s: float
    decision: Decision


class Controlled:
    """Late binding under the controller's plans. `is_controller_up` False leaves the last plan to grow stale."""

    def __init__(self, world: World, policy: SwitchingPolicy = LATENCY_FIRST, tick_s: float = TICK_S) -> None:
        self._world = world
        self._policy = policy
        self._tick_s = tick_s
        self._queues: dict[str, list[tuple[int, float, int, SimRequest]]] = {model: [] for model in world.models}
        self._order = itertools.count()
        self._short = {model: Popularity(SHORT_S) for model in world.models}
        self._long = {model: Popularity(LONG_S) for model in world.models}
        self._evicting: dict[str, tuple[str, tuple[str, ...]]] = {}  # worker -> the model it drains for, and what goes
        self._failures: dict[str, tuple[int, float]] = {}
        self._silent_since: dict[str, float] = {}
        self._lies: set[str] = set()
        self._clock_error_s = 0.0
        self._resident: dict[str, Components] = {}
        self.plan = SwitchPlan()
        self._planned_s = -math.inf
        self.is_controller_up = True
        self.decisions: list[TimedDecision] = []
        self.ignored: set[str] = set()
        self.state = ClusterState()
        world.call_at(0.0, self._tick)

    # -- what happens

    def on_request(self, request: SimRequest) -> None:
        """Count it, queue it, and start it if the router finds a worker."""
        now_s = self._world.now_s
        if now_s == request.at_s:  # not one that comes back from a lost worker
            self._short[request.model] = self._short[request.model].touch(now_s)
            self._long[request.model] = self._long[request.model].touch(now_s)
        heapq.heappush(self._queues[request.model], (request.priority, request.at_s, next(self._order), request))
        loads = {id_: self._load(self._world.workers[id_]) for id_ in self._workers_of(request.model)}
        choice = choose_worker(self._head(request.model), loads, self.plan.planned, now_s - self._planned_s)
        if choice.worker is not None:
            worker = self._world.workers[choice.worker]
            head = self._queues[request.model][0][-1]
            if choice.rank == "cost":
                idle = [id_ for id_ in worker.models if id_ not in worker.running()]
                self._world.switch(worker, request.model, idle)
            elif self._world.start(worker, head):
                heapq.heappop(self._queues[request.model])

    def on_worker(self, worker: WorkerInWorld) -> None:
        """Start what the worker can start."""
        is_current = self._world.now_s - self._planned_s <= 3.0
        going = self._evicting.get(worker.spec.id, ("", ()))[1]
        while worker.free_slots > 0:
            able = [
                model
                for model in worker.models
                if self._queues[model]
                and model not in going
                and (not is_current or worker.spec.id in self.plan.planned.get(model, ()))
            ]
            if not able:
                break
            model = min(able, key=lambda id_: start_order(self._head(id_)))
            if not self._world.start(worker, heapq.heappop(self._queues[model])[-1]):
                raise AssertionError(f"{worker.spec.id} had a free slot and {model} ready")
        if going and not any(model in worker.running() for model in going):
            self._tick_now()

    def on_load_failed(self, worker: WorkerInWorld, model: str) -> None:
        """Back the model off."""
        num_failures = self._failures.get(model, (0, 0.0))[0] + 1
        self._failures[model] = (num_failures, self._world.now_s + retry_after_s(num_failures))

    def on_fault(self, fault: Fault) -> None:
        """Let the observation suffer what the fault says."""
        if fault.kind == "worker_silent":
            self._silent_since[fault.worker] = self._world.now_s
        elif fault.kind == "worker_lies":
            self._lies.add(fault.worker)
        elif fault.kind == "clock_jump":
            self._clock_error_s = fault.amount_s
        else:
            self._evicting.pop(fault.worker, None)
            self._silent_since.pop(fault.worker, None)
            self._lies.discard(fault.worker)

    # -- observe, plan, act

    def _tick(self) -> None:
        self._tick_now()
        self._world.call_at(self._world.now_s + self._tick_s, self._tick)

    def _tick_now(self) -> None:
        if not self.is_controller_up:
            return
        self.state = self.observe()
        self.ignored.update(self.state.ignored)
        self.plan = plan_switches(self.state, self._policy)
        self._planned_s = self._world.now_s
        self._evicting = {}
        for decision in self.plan.decisions:
            self.decisions.append(TimedDecision(self._world.now_s, decision))
            worker = self._world.workers[decision.worker]
            if decision.action == "drain":
                self._evicting[worker.spec.id] = (decision.model, decision.evict)
            elif decision.action == "prefetch":
                self._world.prefetch(worker, decision.model)
            elif decision.action == "evict":
                self._world.evict(worker, decision.model)
            elif not any(model in worker.running() for model in decision.evict):
                self._world.switch(worker, decision.model, decision.evict)
        for worker in self._world.workers.values():
            if worker.is_alive and worker.free_slots > 0 and worker.models:
                self._start_waiting(worker)

    def _start_waiting(self, worker: WorkerInWorld) -> None:
        if any(self._queues[model] for model in worker.models) and worker.spec.id not in self._evicting:
            self.on_worker(worker)

    def observe(self) -> ClusterState:
        """Return the state as heartbeats and the queue report it."""
        now_s, error_s = self._world.now_s, self._clock_error_s
        self._clock_error_s = 0.0
        models = [self._observed_model(id_, now_s, error_s) for id_ in self._world.models]
        workers = [
            self._observed_worker(worker, now_s, error_s) for worker in self._world.workers.values() if worker.is_alive
        ]
        return usable_state(models, workers, self._world.held)

    def _observed_model(self, id_: str, now_s: float, error_s: float) -> ModelState:
        model, queue = self._world.models[id_], self._queues[id_]
        slots = min(len(queue), max((worker.spec.slots for worker in self._world.workers.values()), default=1))
        return ModelState(
            id_,
            model.components,
            waiting=len(queue),
            oldest_age_s=now_s - min(item[1] for item in queue) + error_s if queue else 0.0,
            rate_short=self._short[id_].value(now_s) * _LN2 / SHORT_S,
            rate_long=self._long[id_].value(now_s) * _LN2 / LONG_S,
            service_s=model.batch_service_s(max(slots, 1)),
            retry_in_s=max(0.0, self._failures.get(id_, (0, 0.0))[1] - now_s),
            slo=model.slo,
        )

    def _observed_worker(self, worker: WorkerInWorld, now_s: float, error_s: float) -> WorkerState:
        spec = worker.spec
        resident = self._resident.get(spec.id)
        if resident is None or resident.sizes != worker.resident:
            resident = self._resident[spec.id] = Components(dict(worker.resident))
        seen = WorkerState(
            spec.id,
            spec.node,
            spec.budget_bytes,
            resident,
            tuple(worker.models),
            worker.running(),
            spec.slots,
            switching_to=worker.loading,
            ready_in_s=max(0.0, worker.ready_at_s - now_s),
            reserved_for=self._evicting[spec.id][0] if spec.id in self._evicting else None,
            idle_s=0.0 if worker.runs else now_s - worker.idle_since_s,
            age_s=now_s - self._silent_since.get(spec.id, now_s) + error_s,
            speed=spec.speed,
            fixed_switch_s=spec.fixed_switch_s,
            attach_bytes_per_s=spec.attach_bytes_per_s,
            load_bytes_per_s=spec.load_bytes_per_s,
        )
        return replace(seen, **_LIES) if spec.id in self._lies else seen

    def _workers_of(self, model: str) -> set[str]:
        ready = {id_ for id_, worker in self._world.workers.items() if model in worker.models}
        if self._world.now_s - self._planned_s > 3.0:
            return set(self._world.workers)
        return ready.union(self.plan.planned.get(model, ()))

    def _load(self, worker: WorkerInWorld) -> WorkerLoad:
        is_silent = self._world.now_s - self._silent_since.get(worker.spec.id, self._world.now_s) > 1.0
        return WorkerLoad(
            worker.spec.id,
            worker.models,
            worker.free_slots,
            sum(run.left * self._world.models[run.request.model].service_s for run in worker.runs) / worker.spec.speed,
            worker.spec.speed,
            self._evicting.get(worker.spec.id, ("", ()))[1],
            is_usable=worker.is_alive and not is_silent,
        )

    def _head(self, model: str) -> WaitingRequest:
        priority, at_s, _, _ = self._queues[model][0]
        spec = self._world.models[model]
        slack_s = at_s + spec.slo.target_s - self._world.now_s
        return WaitingRequest(model, self._world.now_s - at_s, priority, slack_s, spec.service_s)


_LIES: Final[dict[str, Any]] = {
    "models": ("no-such-model",),
    "running": {"no-such-model": -3},
    "speed": math.nan,
    "attach_bytes_per_s": -1.0,
    "idle_s": math.inf,
}
