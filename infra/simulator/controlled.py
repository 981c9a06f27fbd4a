"""Our cluster in the simulator: the admission queue of the ingress, and what the controller decides with."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import replace
from typing import Any, Final

from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, ModelLoad, Placement, Started
from cluster.placement.deciding import Deciding, LoggedDecision
from cluster.placement.observing import WARM_UP_S, CatalogEntry, Observations
from cluster.placement.reports import LoadFailure, ModelNeed, Order, WorkerReport
from cluster.placement.switching import LATENCY_FIRST, SwitchingPolicy
from cluster.records.load_failures import FailedLoad
from cluster.records.overrides import Overrides
from configs.admission import AdmissionConfig
from infra.simulator.scenario import Fault, SimRequest
from infra.simulator.world import WorkerInWorld, World

TICK_S: Final = 0.25  # the oldest that a state may be
NEWS_S: Final = 0.02  # from what happens at the ingress to the decision that follows from it
GAP_S: Final = 0.01  # between two decisions
PLAN_HOLDS_S: Final = 3.0  # the queue waits for no plan that is older
POOL: Final = "worker"
_NO_BOUNDS: Final = AdmissionConfig(max_waiting=1_000_000, max_waiting_per_model=1_000_000)


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
        self._queue = AdmissionQueue(_NO_BOUNDS)
        # A request takes the same part of whichever replica it gets; of unlike workers, the smallest one counts.
        self._share = 1 / min((worker.slots for worker in world.scenario.workers), default=1)
        self._requests: dict[int, SimRequest] = {}  # by ticket, its `id`, from arrival to end
        self._num_ended = 0
        self._look_again_s = math.inf
        self._unready: dict[str, deque[SimRequest]] = {id_: deque() for id_ in world.workers}
        self._began_s: dict[int, float] = {}  # by ticket: since when a request has waited on its worker for a switch
        self._loading: set[str] = set()
        self._failures: dict[str, dict[str, FailedLoad]] = {}  # by model and worker
        self._silent: set[str] = set()
        self._lies: set[str] = set()
        self._clock_error_s = 0.0
        self._ticked_s = -math.inf
        self._tick_at_s = math.inf  # of the next one that news have asked for
        self._taken: dict[str, deque[str]] = {id_: deque(maxlen=_MAX_TAKEN) for id_ in world.workers}
        self._is_described = False
        self._observations = Observations(lambda id_: world.models[id_].slo, -WARM_UP_S)
        self._observations.catalog = {id_: CatalogEntry("simulated", _VERSION) for id_ in world.models}
        self._deciding = Deciding(policy, self._observations, map(str, itertools.count()))
        self._placement = Placement()
        self.is_controller_up = is_controller_up
        self.decisions: list[LoggedDecision] = []
        self.ignored: set[str] = set()
        self._list_replicas()
        world.call_at(0.0, self._tick)

    # -- what happens

    def on_request(self, request: SimRequest) -> None:
        """Let it into the queue; one whose worker was lost goes before all others."""
        ticket = id(request)
        if ticket in self._requests:
            self._began_s.pop(ticket, None)
            self._queue.give_back(ticket, self._world.now_s)
        else:
            self._requests[ticket] = request
            demand = Demand(POOL, request.model, request.work, self._share, request.priority, "default", math.inf)
            self._queue.submit(ticket, demand, self._world.now_s)
        self._pump()
        if not self._placement.replicas.get((POOL, request.model)):
            self._tick_soon(NEWS_S)

    def on_worker(self, worker: WorkerInWorld) -> None:
        """Free the slots of what has ended; see what it has loaded, or that it is back."""
        for served in itertools.islice(self._world.served, self._num_ended, None):
            ticket = id(served.request)
            del self._requests[ticket]
            switch_s = served.started_s - self._began_s.pop(ticket, served.started_s)
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
        before = failed.get(worker.spec.id)
        failed[worker.spec.id] = FailedLoad(before.num + 1 if before else 1, self._world.now_s, "")
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
            self._silent.add(fault.worker)
        elif fault.kind == "worker_lies":
            self._lies.add(fault.worker)
        elif fault.kind == "clock_jump":
            self._clock_error_s = fault.amount_s
        else:
            self._loading.discard(fault.worker)
            for failed in self._failures.values():
                failed.pop(fault.worker, None)
            self._silent.discard(fault.worker)
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
        seen_s, self._clock_error_s = now_s + self._clock_error_s, 0.0
        self._report(now_s)
        decided = self._deciding.decide(_BY_HAND, seen_s, now_s)
        if decided is None:
            return
        self.ignored.update(decided.observed.state.ignored)
        self.decisions += decided.new
        for name, orders in decided.orders.items():
            for order in orders.orders:
                if order.id not in self._taken[name]:
                    self._taken[name].append(order.id)
                    self._carry_out(self._world.workers[name], order)
        # Whom nobody could load, requests wait for here, so that a trace says when they are served in the end.
        self._placement = replace(decided.placement, unservable={}, until_s=now_s + PLAN_HOLDS_S)
        self._queue.set_placement(self._placement)
        self._pump()

    def _carry_out(self, worker: WorkerInWorld, order: Order) -> None:
        if order.action == "prefetch":
            self._world.prefetch(worker, order.model)
        elif order.action == "evict":
            self._world.evict(worker, order.model)
        elif self._world.switch(worker, order.model, order.evict):
            self._loading.add(worker.spec.id)

    def _report(self, now_s: float) -> None:
        """Let the queue and the workers report, those that are not silent."""
        snapshot = self._queue.snapshot(now_s)
        loads = tuple(replace(load, service_s=load.service_s or self._usual_s(load)) for load in snapshot.models)
        self._observations.held = self._world.held
        self._observations.queues.note("ingress", replace(snapshot, models=loads), now_s)
        for name, worker in self._world.workers.items():
            if worker.is_alive and name not in self._silent:
                report = self._report_of(worker, now_s)
                self._observations.workers.note(name, replace(report, **_LIES) if name in self._lies else report, now_s)

    def _usual_s(self, load: ModelLoad) -> float:
        """Return the cost of a request of a model that was measured before, but not here."""
        return self._world.models[load.model].batch_service_s(max(1, min(load.waiting, round(1 / self._share))))

    def _report_of(self, worker: WorkerInWorld, now_s: float) -> WorkerReport:
        spec, sizes_of = worker.spec, {id_: model.components.sizes for id_, model in self._world.models.items()}
        there = {key for id_ in worker.models for key in sizes_of[id_]}
        coming = sizes_of[worker.loading].keys() - there if worker.loading else ()
        running = {key for run in worker.runs for key in sizes_of[run.request.model]}
        failures = {
            id_: LoadFailure(_VERSION, failed[spec.id].num, now_s - failed[spec.id].at_s, "")
            for id_, failed in self._failures.items()
            if spec.id in failed
        }
        return WorkerReport(
            POOL,
            spec.node,
            _KINDS,
            spec.budget_bytes,
            {key: size for key, size in worker.resident.items() if key not in coming},
            {key: size for key, size in worker.resident.items() if key in coming},
            frozenset(running),
            slots=spec.slots,
            switching_to=worker.loading,
            ready_in_s=worker.load.end_s - now_s if worker.load else 0.0,
            fixed_switch_s=spec.fixed_switch_s,
            attach_bytes_per_s=spec.attach_bytes_per_s,
            load_bytes_per_s=spec.load_bytes_per_s,
            taken=tuple(self._taken[spec.id]),
            failures=failures,
            needs={} if self._is_described else self._needs(),
        )

    def _needs(self) -> dict[str, ModelNeed]:
        self._is_described = True
        return {id_: ModelNeed(_VERSION, model.components.sizes) for id_, model in self._world.models.items()}


_BY_HAND: Final = Overrides()
_VERSION: Final = "1"
_KINDS: Final = frozenset({"simulated"})
_MAX_TAKEN: Final = 8  # orders that a worker remembers
_LIES: Final[dict[str, Any]] = {"attach_bytes_per_s": -1.0, "slots": -3, "ready": {"no-such-part": 1}, "coming": {}}
