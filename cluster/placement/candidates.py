"""Candidates: the workers that a plan weighs for a model; of many, the best of each kind only. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Final

from cluster.placement.state import ModelState, WorkerState

FEW: Final = 64  # workers that are all weighed for a model; of more, the best of each kind
MAX_CANDIDATES: Final = 6  # workers of a kind: those with one component of the model, and those with least to do


class Candidates:
    """The workers that can take an order, those with least to do first. `wanted` are the models to be asked about."""

    def __init__(self, workers: Sequence[WorkerState], wanted: Collection[ModelState]) -> None:
        self._workers = workers
        self._first = 0  # of those that are not taken
        self._most = FEW if len(workers) <= FEW else MAX_CANDIDATES
        self._holders: dict[str, list[WorkerState]] = {}  # by component
        keys = {key for model in wanted for key in model.components.sizes} if len(workers) > FEW else ()
        for worker in workers if keys else ():
            for key in filter(keys.__contains__, worker.resident.sizes):
                self._holders.setdefault(key, []).append(worker)

    def workers_for(self, model: ModelState, taken: Collection[str]) -> Iterator[WorkerState]:
        """Yield all of a few workers; of many some that share a component with the model, and the least claimed.

        What is taken is passed over, and stays so.
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
