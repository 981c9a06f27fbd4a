"""The routing and eviction of `serve.multiplexed`, as Ray Serve 2.60.0's sources say.

Routing: `PowerOfTwoChoicesRequestRouter` with `MultiplexMixin.apply_multiplex_routing` (request_router.py): for 1 to
2 s (drawn at each look) the workers that have or load the model; when none has it, or those were tried and are full,
the workers with the fewest models; after that time the workers with the fewest models once, then all. Two of them are
drawn, and the one with the shorter queue takes the request if it has a slot. Retries back off by 0, 25, 50, ... 500 ms.
At most twice as many requests as there are workers are being routed at once, and a worker that is found goes to the
first pending request of that model.

Loading: `_ModelMultiplexWrapper.load_model` (multiplex.py): one load at a time per worker; at the limit, the least
recently used model goes first, even if it runs requests. What a worker has and loads is known 0.1 s later.

What runs needs its model's bytes: where they leave no room, a load waits for it to end, as in a real worker
(`infra/bench/multiplexed_worker.py`). A kindness: the bytes that two models share are not loaded again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from infra.simulator.running import POLICIES, Policy
from infra.simulator.scenario import Fault, SimRequest
from infra.simulator.world import WorkerInWorld, World

MATCHING_TIMEOUT_S: Final = 1.0
PUSH_S: Final = 0.1
FIRST_BACKOFF_S: Final = 0.025
LONGEST_BACKOFF_S: Final = 0.5


@dataclass(slots=True)
class _Pending:
    request: SimRequest
    matching_since_s: float | None = None
    tried_first: bool = False
    tried_fewest: bool = False
    is_done: bool = False
    num_tries: int = 0


class _Multiplexed:
    """Serve's router and multiplex wrapper. `max_models` is the number that a worker may hold, whatever their size."""

    def __init__(self, world: World, max_models: int, seed: int = 0) -> None:
        self._world = world
        self._max_models = max_models
        self._chance = random.Random(seed)
        self._pending: deque[_Pending] = deque()
        self._by_model: dict[str, deque[_Pending]] = {}
        self._num_tasks = 0
        self._known: dict[str, frozenset[str]] = {id_: frozenset() for id_ in world.workers}
        self._fallback: set[str] = set()
        # Requests that hold a slot of a worker while their model is loaded, in the order of the wrapper's lock.
        self._loading: dict[str, deque[SimRequest]] = {id_: deque() for id_ in world.workers}

    def on_request(self, request: SimRequest) -> None:
        """Put it into the router's queue."""
        pending = _Pending(request)
        self._pending.append(pending)
        self._by_model.setdefault(request.model, deque()).append(pending)
        self._start_tasks()

    def on_worker(self, worker: WorkerInWorld) -> None:
        """Give the lock to the next load."""
        id_ = worker.spec.id
        waiting = self._loading[id_]
        ready = [request for request in waiting if request.model in worker.models]
        for request in ready:
            waiting.remove(request)
            self._world.start_loaded(worker, request)
        self._load_next(worker)

    def on_load_failed(self, worker: WorkerInWorld, model: str) -> None:
        """Fail as Serve does: the caller gets the error. Here the caller tries again."""
        waiting = self._loading[worker.spec.id]
        for request in [request for request in waiting if request.model == model]:
            waiting.remove(request)
            self.on_request(request)
        self._load_next(worker)

    def on_fault(self, fault: Fault) -> None:
        """Forget a lost worker; its requests are made again."""
        if fault.kind == "worker_lost":
            self._known[fault.worker] = frozenset()
            waiting, self._loading[fault.worker] = self._loading[fault.worker], deque()
            for request in waiting:
                self.on_request(request)

    # -- the router

    def _start_tasks(self) -> None:
        while self._num_tasks < 2 * len(self._world.workers) and self._pending:
            pending = self._pending.popleft()
            if not pending.is_done:
                self._num_tasks += 1
                self._route(pending)

    def _route(self, pending: _Pending) -> None:
        if pending.is_done:
            self._end_task()
            return
        worker = self._choose(pending)
        if worker is not None:
            queue = self._by_model[pending.request.model]
            while queue[0].is_done:
                queue.popleft()
            first = queue.popleft()
            first.is_done = True
            self._send(worker, first.request)
            if first is not pending and not pending.is_done:
                self._route(pending)
                return
            self._end_task()
            return
        # 0, 25, 50, ... ms: the first retry comes at once (request_router.py, `_backoff`).
        tries, pending.num_tries = pending.num_tries, pending.num_tries + 1
        pause_s = 0.0 if tries == 0 else min(FIRST_BACKOFF_S * 2.0 ** min(tries - 1, 10), LONGEST_BACKOFF_S)
        self._world.call_at(self._world.now_s + pause_s, lambda: self._route(pending))

    def _end_task(self) -> None:
        self._num_tasks -= 1
        self._start_tasks()

    def _choose(self, pending: _Pending) -> WorkerInWorld | None:
        candidates = sorted(id_ for id_ in self._candidates(pending) if self._world.workers[id_].is_alive)
        drawn = self._chance.sample(candidates, min(2, len(candidates)))
        free = [id_ for id_ in drawn if self._queue_length(id_) < self._world.workers[id_].spec.slots]
        return self._world.workers[min(free, key=self._queue_length)] if free else None

    def _queue_length(self, id_: str) -> int:
        return len(self._world.workers[id_].runs) + len(self._loading[id_])

    def _candidates(self, pending: _Pending) -> set[str]:
        """Port of `apply_multiplex_routing`."""
        now_s, model = self._world.now_s, pending.request.model
        if pending.matching_since_s is None:
            pending.matching_since_s = now_s
        if now_s - pending.matching_since_s < self._chance.uniform(MATCHING_TIMEOUT_S, 2 * MATCHING_TIMEOUT_S):
            candidates = {id_ for id_, models in self._known.items() if model in models}
            if (not candidates and model not in self._fallback) or pending.tried_first:
                candidates = self._with_fewest_models()
                self._fallback.add(model)
            elif candidates:
                self._fallback.discard(model)
            pending.tried_first = True
            return candidates
        if not pending.tried_fewest:
            pending.tried_fewest = True
            return self._with_fewest_models()
        return {id_ for id_, worker in self._world.workers.items() if worker.is_alive}

    def _with_fewest_models(self) -> set[str]:
        alive = [id_ for id_, worker in self._world.workers.items() if worker.is_alive]
        fewest = min((len(self._known[id_]) for id_ in alive), default=0)
        return {id_ for id_ in alive if len(self._known[id_]) == fewest}

    # -- the wrapper on the worker

    def _send(self, worker: WorkerInWorld, request: SimRequest) -> None:
        if request.model in worker.models:
            self._world.start_loaded(worker, request)
            return
        self._loading[worker.spec.id].append(request)
        self._push_models(worker)
        self._load_next(worker)

    def _load_next(self, worker: WorkerInWorld) -> None:
        waiting = self._loading[worker.spec.id]
        if waiting and worker.loading is None and worker.is_alive:
            models = sorted(worker.models, key=worker.models.__getitem__)
            for model in models[: max(0, len(models) + 1 - self._max_models)]:
                self._world.evict(worker, model)
            if self._has_room(worker, waiting[0].model):
                self._world.switch(worker, waiting[0].model, ())
            self._push_models(worker)

    def _has_room(self, worker: WorkerInWorld, model: str) -> bool:
        used = {model, *worker.models, *worker.running()}
        sizes = {key: size for id_ in used for key, size in self._world.models[id_].components.sizes.items()}
        return sum(sizes.values()) <= worker.spec.budget_bytes or not worker.runs

    def _push_models(self, worker: WorkerInWorld) -> None:
        id_ = worker.spec.id
        models = frozenset(worker.models).union(request.model for request in self._loading[id_])

        def tell() -> None:
            self._known[id_] = models

        self._world.call_at(self._world.now_s + PUSH_S, tell)


def policies_and_multiplexed(seed: int = 0) -> Mapping[str, Policy]:
    """Return the simulator's policies, and `serve.multiplexed` beside them with draws of that seed."""

    def multiplexed(world: World) -> _Multiplexed:
        # The number of models that fit whichever they are: Serve counts models, not bytes.
        largest = max((model.components.total_bytes for model in world.scenario.models), default=1)
        least = min((worker.budget_bytes for worker in world.scenario.workers), default=1)
        return _Multiplexed(world, max(1, least // max(largest, 1)), seed)

    return {**POLICIES, "serve.multiplexed": multiplexed}
