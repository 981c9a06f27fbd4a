"""A simulation from scenario to figures; as a page shows it; with as many workers as it takes.

Beside the controller there are two plain ways to serve many models: each worker has a queue, and a request is put into
one when it comes. *static*: models are dealt out to workers once, by their true rates (longest processing time first,
Graham 1969), and stay there. *least-loaded*: the worker with the fewest requests takes it, whatever it has. A worker
serves its queue FIFO; the least recently used models that run nothing go for the next.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from cluster.placement.switching import LATENCY_FIRST, THROUGHPUT_FIRST
from infra.simulator.controlled import Controlled
from infra.simulator.scenario import Fault, Scenario, SimRequest
from infra.simulator.world import SimulatedDispatcher, WorkerInWorld, World

MAX_REQUESTS: Final = 100_000  # that a page draws
MAX_MODELS: Final = 2000
MAX_WORKERS: Final = 256
RETRY_S: Final = 1.0  # where no worker can take it
LOOK_S: Final = 5.0  # how often a run is looked at that may be given up

Policy = Callable[[World], SimulatedDispatcher]
POLICIES: Final[Mapping[str, Policy]] = {
    "latency-first": lambda world: Controlled(world, LATENCY_FIRST),
    "throughput-first": lambda world: Controlled(world, THROUGHPUT_FIRST),
    "no-controller": lambda world: Controlled(world, is_controller_up=False),
    "static": lambda world: _Queued(world, "static"),
    "least-loaded": lambda world: _Queued(world, "least-loaded"),
}


class _Queued:
    """Early binding, with one of two rules for the choice of the worker."""

    def __init__(self, world: World, rule: Literal["static", "least-loaded"]) -> None:
        self._world = world
        self._queues: dict[str, deque[SimRequest]] = {id_: deque() for id_ in world.workers}
        self._workers_of = _dealt_out(world) if rule == "static" else {}

    def on_request(self, request: SimRequest) -> None:
        """Put it into a worker's queue for good."""
        workers = self._world.workers
        able = self._workers_of.get(request.model) or [
            id_
            for id_, worker in workers.items()
            if self._world.models[request.model].components.total_bytes <= worker.spec.budget_bytes
        ]
        alive = [id_ for id_ in able if workers[id_].is_alive] or [id_ for id_ in workers if workers[id_].is_alive]
        if not alive:
            self._world.call_at(self._world.now_s + RETRY_S, lambda: self.on_request(request))
            return
        chosen = min(alive, key=lambda id_: len(self._queues[id_]) + len(workers[id_].runs))
        self._queues[chosen].append(request)
        self.on_worker(workers[chosen])

    def on_worker(self, worker: WorkerInWorld) -> None:
        """Start the head of the worker's queue, or get ready for it."""
        queue = self._queues[worker.spec.id]
        while queue and worker.free_slots > 0:
            if queue[0].model in worker.models:
                self._world.start_loaded(worker, queue.popleft())
                continue
            evict = self._world.evictable_for(worker, queue[0].model)
            if worker.loading is None and evict is not None:
                self._world.switch(worker, queue[0].model, evict)
            break

    def on_load_failed(self, worker: WorkerInWorld, model: str) -> None:
        """Try again after a while; what comes first waits for it."""
        self._world.call_at(self._world.now_s + RETRY_S, lambda: self.on_worker(worker))

    def on_fault(self, fault: Fault) -> None:
        """Hand the queue of a lost worker to the others."""
        if fault.kind == "worker_lost":
            queue, self._queues[fault.worker] = self._queues[fault.worker], deque()
            for request in queue:
                self.on_request(request)


def _dealt_out(world: World) -> dict[str, list[str]]:
    """Deal models to workers by their load; a model of more than a worker's worth gets several."""
    counts = Counter(request.model for request in world.scenario.requests)
    duration_s = max(world.scenario.duration_s, 1e-9)
    slots = {spec.id: spec.slots for spec in world.scenario.workers}
    load = dict.fromkeys(world.workers, 0.0)
    dealt: dict[str, list[str]] = {}
    most_slots = max(slots.values(), default=1)
    loads = {id_: counts[id_] / duration_s * model.batch_service_s(most_slots) for id_, model in world.models.items()}
    for id_, amount in sorted(loads.items(), key=lambda item: -item[1]):
        copies = min(max(1, round(amount)), len(load))
        chosen = sorted(load, key=lambda worker: load[worker] / world.workers[worker].spec.speed)[:copies]
        for worker in chosen:
            load[worker] += amount / copies
        dealt[id_] = chosen
    return dealt


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The outcome of a simulation. Latency is arrival to answer; requests without an answer count as never served.

    `goodput` is answers within their class's target, per second of the trace. `jain` is Jain's index over models of
    the share of their requests that were answered within the target. `coldest_wait_s` is the longest time from
    arrival to start of any request of the least asked-for tenth of the models.
    """

    policy: str
    requests: int
    served: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float
    goodput: float
    slo_attainment: float
    switches: int
    failed_loads: int
    moved_bytes: int
    read_bytes: int
    jain: float
    coldest_wait_s: float
    ended_s: float

    def as_record(self) -> dict[str, Any]:
        """Return the figures as JSON-able values; what is infinite is None."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


def simulate(
    scenario: Scenario, policy: str, policies: Mapping[str, Policy] = POLICIES, patience: float = 4.0
) -> tuple[RunFigures, World]:
    """Run a scenario under a policy until all is answered, or for `patience` times the trace's duration and 60 s."""
    world = World(scenario, policies[policy])
    world.run(until_s=patience * scenario.duration_s + 60.0)
    return _figures_of(world, policy), world


def _keeps_promise(
    scenario: Scenario, policy: str, least_share: float, policies: Mapping[str, Policy] = POLICIES
) -> bool:
    """Return whether this share of the requests is answered within their classes' targets.

    The run ends as soon as too many are late: a cluster that is much too small takes no longer than one that suffices.
    """
    world = World(scenario, policies[policy])
    targets_s = {id_: model.slo.target_s for id_, model in world.models.items()}
    due_s = sorted(request.at_s + targets_s[request.model] for request in scenario.requests)
    most_late = (1 - least_share) * len(due_s) + 1e-9

    def num_late(now_s: float) -> int:
        """Return how many were answered too late, or are due and not answered."""
        num_late = sum(one.latency_s > targets_s[one.request.model] for one in world.served)
        num_due = sum(one.request.at_s + targets_s[one.request.model] <= now_s for one in world.served)
        return num_late + bisect_right(due_s, now_s) - num_due

    until_s = 0.0
    while due_s and until_s < due_s[-1] and len(world.served) < len(due_s) and num_late(until_s) <= most_late:
        until_s = min(until_s + LOOK_S, due_s[-1])
        world.run(until_s)
    return num_late(math.inf) <= most_late


def _figures_of(world: World, policy: str) -> RunFigures:
    """Return the figures of a run that has ended."""
    scenario = world.scenario
    latencies = sorted(served.latency_s for served in world.served)
    num_lost = len(scenario.requests) - len(latencies)
    offered: dict[str, int] = defaultdict(int)
    kept: dict[str, int] = defaultdict(int)
    waits: dict[str, float] = defaultdict(float)
    for request in scenario.requests:
        offered[request.model] += 1
    for served in world.served:
        model = served.request.model
        kept[model] += served.latency_s <= world.models[model].slo.target_s
        waits[model] = max(waits[model], served.started_s - served.request.at_s)
    shares = [kept[model] / count for model, count in offered.items()]
    coldest = sorted(offered, key=lambda model: (offered[model], model))[: max(1, len(offered) // 10)]
    full = [*latencies, *[math.inf] * num_lost]
    return RunFigures(
        policy=policy,
        requests=len(scenario.requests),
        served=len(latencies),
        mean_s=sum(latencies) / len(latencies) if latencies and not num_lost else math.inf if full else 0.0,
        p50_s=_percentile(full, 0.5),
        p95_s=_percentile(full, 0.95),
        p99_s=_percentile(full, 0.99),
        max_s=full[-1] if full else 0.0,
        goodput=sum(kept.values()) / max(scenario.duration_s, 1e-9),
        slo_attainment=sum(kept.values()) / max(len(full), 1),
        switches=world.num_switches,
        failed_loads=world.num_failed_loads,
        moved_bytes=world.moved_bytes,
        read_bytes=world.read_bytes,
        jain=sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares)) if any(shares) else 0.0,
        coldest_wait_s=max((waits[model] for model in coldest), default=0.0) if not num_lost else math.inf,
        ended_s=world.now_s,
    )


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0


def why_not_recorded(scenario: Scenario) -> str:
    """Return in a sentence why a run of it would be too large for a page; "" where it would not."""
    sizes = {name: len(getattr(scenario, name)) for name in ("requests", "models", "workers")}
    bounds = {"requests": MAX_REQUESTS, "models": MAX_MODELS, "workers": MAX_WORKERS}
    return next(
        (f"{sizes[name]} {name}; a page shows at most {most}" for name, most in bounds.items() if sizes[name] > most),
        "",
    )


def recording_of(world: World, figures: RunFigures) -> dict[str, Any]:
    """Return a run that has ended. Times are seconds from its start, lists in the order of their times.

    Requests are [model, worker, arrived, started, ended]; the last two are None where it was never served.
    """
    served: list[list[Any]] = [
        [one.request.model, one.worker, one.request.at_s, one.started_s, one.ended_s] for one in world.served
    ]
    answered = {id(one.request) for one in world.served}
    others: list[list[Any]] = [
        [one.model, "", one.at_s, None, None] for one in world.scenario.requests if id(one) not in answered
    ]
    spans = sorted(world.spans, key=lambda span: span.start_s)
    return {
        "title": figures.policy,
        "figures": figures.as_record(),
        "end_s": _rounded(world.now_s),
        "models": {model.id: dict(model.components.sizes) for model in world.scenario.models},
        "workers": [[spec.id, spec.node, spec.budget_bytes] for spec in world.scenario.workers],
        "requests": [_rounded_all(one) for one in sorted(served + others, key=lambda one: one[2])],
        "switches": [
            _rounded_all([s.worker, s.model, s.start_s, s.end_s, s.moved_bytes]) for s in spans if s.is_switch
        ],
        "spans": [_rounded_all([s.worker, s.model, s.start_s, s.end_s]) for s in spans if not s.is_switch],
    }


def _rounded_all(values: list[Any]) -> list[Any]:
    return [_rounded(value) if isinstance(value, float) else value for value in values]


def _rounded(time_s: float) -> float:
    return round(time_s, 4)


def least_workers(
    scenario_of: Callable[[int], Scenario],
    policy: str,
    least_share: float,
    max_workers: int,
    policies: Mapping[str, Policy] = POLICIES,
) -> int | None:
    """Return the least number of workers with which this share of the requests is answered within their targets.

    `scenario_of` makes the cluster with a number of workers. The number is doubled until it suffices, then halved in;
    None: `max_workers` do not suffice either. More workers are taken to be no worse.
    """

    def suffices(num_workers: int) -> bool:
        return _keeps_promise(scenario_of(num_workers), policy, least_share, policies)

    low, high = 1, 1
    while not suffices(high):
        if high >= max_workers:
            return None
        low, high = high + 1, min(2 * high, max_workers)
    return bisect_left(range(high), True, low, key=suffices)
