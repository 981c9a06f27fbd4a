"""Our cluster in the simulator: the admission queue of the ingress, and what the controller decides with."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Final

from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, ModelLoad, Placement, Started
from cluster.placement.checking import usable_state
from cluster.placement.on_demand import chances_of, waits_there
from cluster.placement.state import ClusterState, Components, Decision, ModelState, SwitchPlan, WorkerState
from cluster.placement.switching import LATENCY_FIRST, SwitchingPolicy, plan_switches
from cluster.records.load_failures import retry_after_s
from configs.admission import AdmissionConfig
from infra.simulator.scenario import Fault, SimRequest
from infra.simulator.world import WorkerInWorld, World

TICK_S: Final = 0.25  # the oldest that a state may be
NEWS_S: Final = 0.02  # from what happens at the ingress to the decision that follows from it
GAP_S: Final = 0.01  # between two decisions
PLAN_HOLDS_S: Final = 3.0  # the queue waits for no plan that is older
POOL: Final = "worker"
_NO_BOUNDS: Final = AdmissionConfig(max_waiting=1_000_000, max_waiting_per_model=1_000_000)


@dataclass(frozen=True, slots=True)
class TimedDecision:
    """A decision, and when it was made."""

    at_s: float
    decision: Decision


class Controlled:
    """Late binding under the controller's plans. While `is_controller_up` is False the last plan grows stale.

    What no plan rules starts where the queue thinks best, and its worker then switches by itself.
    """

    def __init__(
        self,
        world: World,
        policy: SwitchingPolicy = LATENCY_FIRST,
        is_controller_up: bool = True,
    ) -> None:
        self._world = world
        self._policy = policy
        self._queue = AdmissionQueue(_NO_BOUNDS)
        # A request takes the same part of whichever replica it gets; of unlike workers, the smallest one counts.
        self._share = 1 / min((worker.slots for worker in world.scenario.workers), default=1)
        self._numbers = itertools.count()
        self._requests: dict[int, SimRequest] = {}  # by ticket, from arrival to end
        self._tickets: dict[int, int] = {}  # by `id` of the request
        self._num_ended = 0
        self._look_again_s = math.inf
        self._unready: dict[str, deque[SimRequest]] = {id_: deque() for id_ in world.workers}
        self._switch_s: dict[int, float] = {}  # of what waited for it on a worker, by ticket
        self._began_s: dict[int, float] = {}
        self._evicting: dict[str, tuple[str, tuple[str, ...]]] = {}  # worker -> the model it drains for, and what goes
        self._loading: set[str] = set()
        self._failures: dict[str, dict[str, tuple[int, float]]] = {}  # by model and worker: how many, until when
        self._silent_since: dict[str, float] = {}
        self._lies: set[str] = set()
        self._clock_error_s = 0.0
        self._ticked_s = -math.inf
        self._tick_at_s = math.inf  # of the next one that news have asked for
        self._resident: dict[str, Components] = {}
        self.plan = SwitchPlan()
        self._placement = Placement()
        self.is_controller_up = is_controller_up
        self.decisions: list[TimedDecision] = []
        self.ignored: set[str] = set()
        self.state = ClusterState()
        self._list_replicas()
        world.call_at(0.0, self._tick)

    # -- what happens

    def on_request(self, request: SimRequest) -> None:
        """Let it into the queue; one whose worker was lost goes before all others."""
        ticket = self._tickets.get(id(request))
        if ticket is not None:
            self._queue.give_back(ticket, self._world.now_s)
        else:
            ticket = self._tickets[id(request)] = next(self._numbers)
            self._requests[ticket] = request
            demand = Demand(POOL, request.model, request.work, self._share, request.priority, "default", math.inf)
            self._queue.submit(ticket, demand, self._world.now_s)
        self._pump()
        if not self._placement.replicas_of(POOL, request.model, self._world.now_s):
            self._tick_soon(NEWS_S)

    def on_worker(self, worker: WorkerInWorld) -> None:
        """Free the slots of what has ended; see what it has loaded, or that it is back."""
        for served in itertools.islice(self._world.served, self._num_ended, None):
            ticket = self._tickets.pop(id(served.request))
            del self._requests[ticket]
            switch_s = self._switch_s.pop(ticket, 0.0)
            self._began_s.pop(ticket, None)
            self._queue.leave(ticket, self._world.now_s, is_answered=True, switch_s=switch_s)
        self._num_ended = len(self._world.served)
        self._serve_unready(worker)
        if worker.loading is None and worker.spec.id in self._loading:
            self._loading.discard(worker.spec.id)
            for model in worker.models:
                self._failures.get(model, {}).pop(worker.spec.id, None)
            self._tick_soon(0.0)
        elif not worker.runs and self._queue.num_waiting:
            self._tick_soon(NEWS_S)
        self._pump()

    def on_load_failed(self, worker: WorkerInWorld, model: str) -> None:
        """Back the model off there; what waits for it goes back into the queue, where the controller can hold it."""
        self._loading.discard(worker.spec.id)
        failed = self._failures.setdefault(model, {})
        num_failures = failed.get(worker.spec.id, (0, 0.0))[0] + 1
        failed[worker.spec.id] = (num_failures, self._world.now_s + retry_after_s(num_failures))
        waiting = self._unready[worker.spec.id]
        self._unready[worker.spec.id] = deque(request for request in waiting if request.model != model)
        self._decide()
        for request in waiting:
            if request.model == model:
                self.on_request(request)
        self._serve_unready(worker)

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
            self._loading.discard(fault.worker)
            for failed in self._failures.values():
                failed.pop(fault.worker, None)
            self._silent_since.pop(fault.worker, None)
            self._lies.discard(fault.worker)
            self._list_replicas()
            lost, self._unready[fault.worker] = self._unready[fault.worker], deque()
            for request in lost:
                self.on_request(request)

    # -- the ingress and the workers

    def _pump(self) -> None:
        for event in self._queue.pump(self._world.now_s):
            if isinstance(event, Started):
                worker, request = self._world.workers[event.replica], self._requests[event.ticket]
                if request.model in worker.models:
                    self._world.start_loaded(worker, request)
                else:
                    self._began_s[event.ticket] = self._world.now_s
                    self._unready[event.replica].append(request)
                    self._serve_unready(worker)
        again_s = self._queue.look_again_s()
        if self._world.now_s < again_s < self._look_again_s or self._look_again_s <= self._world.now_s < again_s:
            self._look_again_s = again_s
            if again_s < math.inf:
                self._world.call_at(again_s, self._pump)

    def _serve_unready(self, worker: WorkerInWorld) -> None:
        """Start what its worker has got ready for by now, and let it switch to what comes next."""
        waiting = self._unready[worker.spec.id]
        for request in [request for request in waiting if request.model in worker.models]:
            waiting.remove(request)
            ticket = self._tickets[id(request)]
            self._switch_s[ticket] = self._world.now_s - self._began_s[ticket]
            self._world.start_loaded(worker, request)
        if waiting and worker.loading is None:
            evict = self._world.evictable_for(worker, waiting[0].model)
            if evict is not None:
                self._world.switch(worker, waiting[0].model, evict)

    def _list_replicas(self) -> None:
        alive = [id_ for id_, worker in self._world.workers.items() if worker.is_alive]
        self._queue.set_replicas(POOL, alive, self._world.now_s)

    # -- observe, plan, act

    def _tick(self) -> None:
        self._decide()
        self._world.call_at(self._world.now_s + TICK_S, self._tick)

    def _tick_soon(self, delay_s: float) -> None:
        at_s = max(self._world.now_s + delay_s, self._ticked_s + GAP_S)
        if at_s < self._tick_at_s:
            self._tick_at_s = at_s
            self._world.call_at(at_s, self._decide)

    def _decide(self) -> None:
        if not self.is_controller_up:
            return
        now_s = self._ticked_s = self._world.now_s
        if now_s >= self._tick_at_s:
            self._tick_at_s = math.inf
        self.state = self.observe()
        self.ignored.update(self.state.ignored)
        self.plan = plan_switches(self.state, self._policy)
        self._evicting = {}
        for decision in self.plan.decisions:
            self.decisions.append(TimedDecision(now_s, decision))
            worker = self._world.workers[decision.worker]
            if decision.action == "drain":
                self._evicting[worker.spec.id] = (decision.model, decision.evict)
            elif decision.action == "prefetch":
                self._world.prefetch(worker, decision.model)
            elif decision.action == "evict":
                self._world.evict(worker, decision.model)
            elif self._world.switch(worker, decision.model, decision.evict):
                self._loading.add(worker.spec.id)
        self._placement = _placement_of(self.state, self.plan, now_s + PLAN_HOLDS_S)
        self._queue.set_placement(self._placement)
        self._pump()

    def observe(self) -> ClusterState:
        """Return the state as heartbeats and the queue report it."""
        now_s, error_s = self._world.now_s, self._clock_error_s
        self._clock_error_s = 0.0
        loads = {load.model: load for load in self._queue.snapshot(now_s).models}
        models = [self._observed_model(id_, loads.get(id_), now_s, error_s) for id_ in self._world.models]
        workers = [
            self._observed_worker(worker, now_s, error_s) for worker in self._world.workers.values() if worker.is_alive
        ]
        return usable_state(models, workers, self._world.held)

    def _observed_model(self, id_: str, load: ModelLoad | None, now_s: float, error_s: float) -> ModelState:
        model = self._world.models[id_]
        if load is None:
            return ModelState(id_, model.components, slo=model.slo)
        return ModelState(
            id_,
            model.components,
            waiting=load.waiting,
            oldest_age_s=load.oldest_age_s + error_s if load.waiting else 0.0,
            rate_short=load.rate_short,
            rate_long=load.rate_long,
            service_s=load.service_s or model.batch_service_s(max(1, min(load.waiting, round(1 / self._share)))),
            latency_s=load.latency_s,
            retry_in_s=self._retry_in_s(id_, now_s),
            slo=model.slo,
            unstarted_s=load.unstarted_s + error_s if load.waiting else 0.0,
        )

    def _retry_in_s(self, id_: str, now_s: float) -> float:
        """Return in how many seconds the first worker tries the model again, where all have failed with it."""
        alive = [name for name, worker in self._world.workers.items() if worker.is_alive]
        failed = self._failures.get(id_, {})
        return min([max(0.0, failed[name][1] - now_s) if name in failed else 0.0 for name in alive], default=0.0)

    def _observed_worker(self, worker: WorkerInWorld, now_s: float, error_s: float) -> WorkerState:
        spec = worker.spec
        resident = self._resident.get(spec.id)
        if resident is None or resident.sizes != worker.resident:
            resident = self._resident[spec.id] = Components(dict(worker.resident))
        running = worker.running()
        for request in self._unready[spec.id]:  # they have their slots
            running[request.model] = running.get(request.model, 0) + 1
        seen = WorkerState(
            spec.id,
            spec.node,
            spec.budget_bytes,
            resident,
            tuple(worker.models),
            running,
            spec.slots,
            switching_to=worker.loading,
            ready_in_s=max(0.0, worker.ready_at_s - now_s),
            reserved_for=self._evicting[spec.id][0] if spec.id in self._evicting else None,
            unable=frozenset(
                [id_ for id_, failed in self._failures.items() if failed.get(spec.id, (0, 0.0))[1] > now_s]
            ),
            idle_s=0.0 if running else now_s - worker.idle_since_s,
            age_s=now_s - self._silent_since.get(spec.id, now_s) + error_s,
            speed=spec.speed,
            fixed_switch_s=spec.fixed_switch_s,
            attach_bytes_per_s=spec.attach_bytes_per_s,
            load_bytes_per_s=spec.load_bytes_per_s,
        )
        return replace(seen, **_LIES) if spec.id in self._lies else seen


def _placement_of(state: ClusterState, plan: SwitchPlan, until_s: float) -> Placement:
    """Return where requests may start: on planned workers that have the model, or will in a moment. The others wait."""
    workers = state.workers

    def has_it(id_: str, worker: WorkerState) -> bool:
        return (id_ in worker.models or worker.switching_to == id_) and not worker.is_stale

    replicas = {
        (POOL, id_): tuple(
            waits_there(state, id_, [name for name in plan.planned.get(id_, ()) if has_it(id_, workers[name])])
        )
        for id_ in state.models
    }
    replicas |= {(POOL, id_): tuple(starts) for id_, starts in plan.on_demand.items() if starts}
    return Placement(
        replicas,
        until_s,
        on_demand={(POOL, id_): starts for id_, starts in plan.on_demand.items() if starts},
        chances=chances_of(state),
        ready={id_: worker.models for id_, worker in workers.items()},
    )


_LIES: Final[dict[str, Any]] = {
    "models": ("no-such-model",),
    "running": {"no-such-model": -3},
    "speed": math.nan,
    "attach_bytes_per_s": -1.0,
    "idle_s": math.inf,
}
