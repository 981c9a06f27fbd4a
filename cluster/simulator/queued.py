"""Two plain ways to serve many models: each worker has a queue, and a request is put into one when it comes.

*static*: models are dealt out to workers once, by their true rates (longest processing time first, Graham 1969), and
stay there. *least-loaded*: the worker with the fewest requests takes it, whatever it has. A worker serves its queue
FIFO; the least recently used models that run nothing go for the next.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Final, Literal

from cluster.simulator.scenario import Fault, SimRequest
from cluster.simulator.world import WorkerInWorld, World

RETRY_S: Final = 1.0


class Queued:
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
            if self._world.start_request(worker, queue[0]):
                queue.popleft()
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
