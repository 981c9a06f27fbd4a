"""Workers under a virtual clock: what runs shares its worker, what is loaded takes its bytes' time.

Each worker runs its requests like a step loop: models take turns, the requests of a model share its batch. Between
two events the progress of each request is linear, so only starts, ends, switches and faults are events.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from infra.simulator.scenario import Fault, Scenario, SimModel, SimRequest, SimWorker

_DONE = 1e-9  # of a request; what is left below it is rounding


@dataclass(slots=True)
class Run:
    """A request on a worker. `left` is the share of it that is still to be done."""

    request: SimRequest
    started_s: float
    left: float = 1.0


@dataclass(slots=True)
class WorkerInWorld:
    """A worker as it really is, whatever it reports."""

    spec: SimWorker
    models: dict[str, float] = field(default_factory=dict)  # ready, by the time of last use
    resident: dict[str, int] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    load: WorkerSpan | None = None
    idle_since_s: float = 0.0
    is_alive: bool = True
    version: int = 0  # of what runs: an event of an earlier one says nothing
    advanced_s: float = 0.0

    @property
    def loading(self) -> str | None:
        """The model that it switches to."""
        return self.load.model if self.load else None

    @property
    def free_slots(self) -> int:
        """Requests that it could start now."""
        return self.spec.slots - len(self.runs) if self.is_alive else 0

    def running(self) -> dict[str, int]:
        """Return the number of running requests by model."""
        found: dict[str, int] = {}
        for run in self.runs:
            found[run.request.model] = found.get(run.request.model, 0) + 1
        return found


@dataclass(frozen=True, slots=True)
class Served:
    """A request that was answered."""

    request: SimRequest
    worker: str
    started_s: float
    ended_s: float

    @property
    def latency_s(self) -> float:
        """Arrival to answer."""
        return self.ended_s - self.request.at_s


@dataclass(frozen=True, slots=True)
class WorkerSpan:
    """A stretch of a worker's time: it switched to a model, for which `moved_bytes` came, or had it ready."""

    worker: str
    model: str
    start_s: float
    end_s: float
    is_switch: bool
    moved_bytes: int = 0


class SimulatedDispatcher(Protocol):
    """The one who decides: notified of what happens, it starts requests and loads models."""

    def on_request(self, request: SimRequest) -> None:
        """Take in a request, a new one or one whose worker was lost."""

    def on_worker(self, worker: WorkerInWorld) -> None:
        """Hear that a worker has ended a request or a load, or is back."""

    def on_load_failed(self, worker: WorkerInWorld, model: str) -> None:
        """Hear that a load failed."""

    def on_fault(self, fault: Fault) -> None:
        """Hear what nobody would tell it: for faults of its own observation."""


class World:
    """Clock, workers and counts of a simulation."""

    def __init__(self, scenario: Scenario, dispatch: Callable[[World], SimulatedDispatcher]) -> None:
        self.now_s = 0.0
        self.scenario = scenario
        self.models: dict[str, SimModel] = {model.id: model for model in scenario.models}
        self.workers = {spec.id: WorkerInWorld(spec) for spec in scenario.workers}
        everything = {key for model in scenario.models for key in model.components.sizes}
        self.held: dict[str, set[str]] = {
            spec.node: set(everything) if scenario.nodes_hold_all else set() for spec in scenario.workers
        }
        self.served: list[Served] = []
        self.spans: list[WorkerSpan] = []
        self.num_switches = 0
        self.num_failed_loads = 0
        self.moved_bytes = 0
        self.read_bytes = 0
        self._failing = {model.id: model.num_failing_loads for model in scenario.models}
        self._reading: dict[tuple[str, str], float] = {}
        self._span_starts: dict[tuple[str, str], float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self.dispatcher = dispatch(self)
        for request in scenario.requests:
            self.call_at(request.at_s, lambda request=request: self.dispatcher.on_request(request))  # type: ignore[misc]
        for fault in scenario.faults:
            self.call_at(fault.at_s, lambda fault=fault: self._fail(fault))  # type: ignore[misc]

    def call_at(self, at_s: float, action: Callable[[], None]) -> None:
        """Call the action when the clock says so."""
        self._num_events += 1
        heapq.heappush(self._events, (max(at_s, self.now_s), self._num_events, action))

    def run(self, until_s: float) -> None:
        """Let time pass until every request is answered, or until the given time."""
        while self._events and self._events[0][0] <= until_s and len(self.served) < len(self.scenario.requests):
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        for worker in self.workers.values():
            for model in worker.models:
                self._end_span(worker, model)

    # -- requests

    def start_loaded(self, worker: WorkerInWorld, request: SimRequest) -> None:
        """Start a request whose model the worker had ready a moment ago."""
        self._advance(worker)
        worker.runs.append(Run(request, self.now_s))
        if request.model in worker.models:
            worker.models[request.model] = self.now_s
        self._await_next_end(worker)

    def _advance(self, worker: WorkerInWorld) -> None:
        passed_s, worker.advanced_s = self.now_s - worker.advanced_s, self.now_s
        if passed_s > 0:
            for run, rate in self._rates(worker):
                run.left -= passed_s * rate

    def _rates(self, worker: WorkerInWorld) -> list[tuple[Run, float]]:
        """Return the requests per second at which each running request progresses."""
        counts = worker.running()
        rates = {}
        for id_, count in counts.items():
            model = self.models[id_]
            rates[id_] = worker.spec.speed / (len(counts) * model.service_s * (1 + model.batch_growth * (count - 1)))
        return [(run, rates[run.request.model] / run.request.work) for run in worker.runs]

    def _await_next_end(self, worker: WorkerInWorld) -> None:
        worker.version += 1
        version = worker.version
        left_s = min((max(run.left, 0.0) / rate for run, rate in self._rates(worker)), default=math.inf)
        if left_s < math.inf:
            self.call_at(self.now_s + left_s, lambda: self._end_runs(worker, version))

    def _end_runs(self, worker: WorkerInWorld, version: int) -> None:
        if worker.version != version:
            return
        self._advance(worker)
        ended = [run for run in worker.runs if run.left <= _DONE]
        worker.runs = [run for run in worker.runs if run.left > _DONE]
        for run in ended:
            if run.request.model in worker.models:
                worker.models[run.request.model] = self.now_s
            self.served.append(Served(run.request, worker.spec.id, run.started_s, self.now_s))
        if not worker.runs:
            worker.idle_since_s = self.now_s
        self._await_next_end(worker)
        self.dispatcher.on_worker(worker)

    # -- models

    def switch(self, worker: WorkerInWorld, model_id: str, evict: Collection[str]) -> bool:
        """Let models go and load another; False where the worker is dead or loads already."""
        if not worker.is_alive or worker.load is not None:
            return False
        for each in evict:
            self.evict(worker, each)
        model = self.models[model_id]
        missing = {key: size for key, size in model.components.sizes.items() if key not in worker.resident}
        self._drop_orphans(worker, model, sum(missing.values()))
        cold = {key: size for key, size in missing.items() if key not in self.held[worker.spec.node]}
        spec = worker.spec
        # A read that is under way is waited for, not repeated.
        read_s = (
            sum(size for key, size in cold.items() if (spec.node, key) not in self._reading) / spec.load_bytes_per_s
        )
        awaited_s = max(
            (self._reading[spec.node, key] - self.now_s for key in cold if (spec.node, key) in self._reading),
            default=0.0,
        )
        took_s = spec.fixed_switch_s + sum(missing.values()) / spec.attach_bytes_per_s + max(read_s, awaited_s)
        self._read(spec.node, cold, spec.load_bytes_per_s)
        self.num_switches += 1
        self.moved_bytes += sum(missing.values())
        worker.resident.update(missing)
        moved, end_s = sum(missing.values()), self.now_s + took_s
        load = worker.load = WorkerSpan(spec.id, model_id, self.now_s, end_s, is_switch=True, moved_bytes=moved)
        self.call_at(end_s, lambda: self._end_load(worker, load))
        return True

    def evict(self, worker: WorkerInWorld, model_id: str) -> None:
        """Let a model go. Its components stay until their room is needed."""
        if model_id in worker.models:
            self._end_span(worker, model_id)
            del worker.models[model_id]

    def evictable_for(self, worker: WorkerInWorld, model_id: str) -> list[str] | None:
        """Return the least recently used models that make room for another; None while too much runs."""
        running = worker.running()
        idle = sorted((id_ for id_ in worker.models if id_ not in running), key=worker.models.__getitem__)
        for count in range(len(idle) + 1):
            stay = [id_ for id_ in (*worker.models, model_id) if id_ not in idle[:count]]
            keys = {key: size for id_ in stay for key, size in self.models[id_].components.sizes.items()}
            if sum(keys.values()) <= worker.spec.budget_bytes:
                return idle[:count]
        return None

    def prefetch(self, worker: WorkerInWorld, model_id: str) -> None:
        """Read the components of the model that the worker's node lacks."""
        node = worker.spec.node
        sizes = self.models[model_id].components.sizes
        self._read(
            node, {key: size for key, size in sizes.items() if key not in self.held[node]}, worker.spec.load_bytes_per_s
        )

    def _read(self, node: str, cold: dict[str, int], bytes_per_s: float) -> None:
        done_s = self.now_s
        for key, size in cold.items():
            if (node, key) not in self._reading:
                done_s += size / bytes_per_s
                self._reading[node, key] = done_s
                self.read_bytes += size
                self.call_at(done_s, lambda key=key: self._end_read(node, key))  # type: ignore[misc]

    def _end_read(self, node: str, key: str) -> None:
        self._reading.pop((node, key), None)
        self.held[node].add(key)

    def _drop_orphans(self, worker: WorkerInWorld, wanted: SimModel, missing: int) -> None:
        keep = set(wanted.components.sizes).union(*(self.models[id_].components.sizes for id_ in worker.models))
        room = worker.spec.budget_bytes - missing - sum(worker.resident.values())
        for key in [key for key in worker.resident if key not in keep]:
            if room >= 0:
                break
            room += worker.resident.pop(key)

    def _end_load(self, worker: WorkerInWorld, load: WorkerSpan) -> None:
        if worker.load is not load:  # of an earlier life of the worker
            return
        worker.load, model_id = None, load.model
        self.spans.append(load)
        if self._failing[model_id] > 0:
            self._failing[model_id] -= 1
            self.num_failed_loads += 1
            keep = {key for id_ in worker.models for key in self.models[id_].components.sizes}
            worker.resident = {key: size for key, size in worker.resident.items() if key in keep}
            self.dispatcher.on_load_failed(worker, model_id)
            return
        worker.models[model_id] = self.now_s
        self._span_starts[worker.spec.id, model_id] = self.now_s
        worker.idle_since_s = self.now_s
        self.dispatcher.on_worker(worker)

    def _end_span(self, worker: WorkerInWorld, model_id: str) -> None:
        start_s = self._span_starts.pop((worker.spec.id, model_id), self.now_s)
        self.spans.append(WorkerSpan(worker.spec.id, model_id, start_s, self.now_s, is_switch=False))

    # -- faults

    def _fail(self, fault: Fault) -> None:
        worker = self.workers.get(fault.worker)
        if fault.kind == "worker_lost" and worker is not None and worker.is_alive:
            self._advance(worker)
            for model in list(worker.models):
                self.evict(worker, model)
            lost, worker.runs = worker.runs, []
            worker.resident, worker.load, worker.is_alive = {}, None, False
            worker.version += 1
            self.dispatcher.on_fault(fault)
            for run in lost:
                self.dispatcher.on_request(run.request)
        elif fault.kind == "worker_back" and worker is not None and not worker.is_alive:
            worker.is_alive, worker.idle_since_s = True, self.now_s
            self.dispatcher.on_fault(fault)
            self.dispatcher.on_worker(worker)
        else:
            self.dispatcher.on_fault(fault)
