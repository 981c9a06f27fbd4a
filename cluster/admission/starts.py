"""The starts of one moment: which requests of a pool go to which replica. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from cluster.admission.places import LEAST_SHARE, Places
from cluster.admission.pool import Pool
from cluster.admission.records import Refusal, Waiting
from cluster.admission.replica_choice import Assignment, Options, best_replica
from cluster.admission.tenant_turns import OpenModels


class Starts:
    """The starts of a pool. `held_until_s` is when the first request held back in spite of room elsewhere goes on."""

    def __init__(self, name: str, pool: Pool, places: Places, now_s: float) -> None:
        maybe_open = pool.lanes.maybe_open.intersection(pool.lanes.models)
        pool.lanes.maybe_open = {model for model in maybe_open if not places.is_full(name, model)}
        self._name, self._pool, self._places, self._now_s = name, pool, places, now_s
        self._models = OpenModels(set(pool.lanes.maybe_open))
        self._full: set[str] = set()  # replicas that an earlier request waits for
        self.held_until_s = math.inf

    def __iter__(self) -> Iterator[tuple[Waiting, Assignment | Refusal]]:
        """Yield requests and where they start, or why they never do. The caller takes each out before the next one."""
        lanes, replicas = self._pool.lanes, self._pool.slots.replicas
        while self._models.names and (waiting := lanes.next_up(self._models)) is not None:
            if (refusal := self._places.why_never(waiting.demand, self._now_s)) is not None:
                yield waiting, refusal
                continue
            options = self._places.options(waiting, self._full, self._now_s)
            where = best_replica(replicas, waiting.demand, options, self._now_s)
            if where is not None:
                yield self._prefer_loaded_model(waiting, where, options), where
                if not replicas.has_room(LEAST_SHARE, (where.replica,)):
                    self._close_full((where.replica,))
            elif options.among is None:
                return  # no request slips past: a large one would wait for ever
            else:
                self._skip_model(waiting.demand.model, options.among, options.held_until_s)

    def _prefer_loaded_model(self, waiting: Waiting, where: Assignment, options: Options) -> Waiting:
        """Return the tenant's request for a model that the replica has, not one that would switch it too soon."""
        at_hand = self._pool.slots.replicas[where.replica].recent
        if self._now_s >= options.held_until_s or waiting.demand.model in at_hand:
            return waiting
        rivals = self._places.rivals(self._name, where.replica)
        return self._pool.lanes.beside(waiting, [model for model in rivals if model in self._models.names]) or waiting

    def _skip_model(self, model: str, among: Collection[str], until_s: float) -> None:
        """Skip the model from now on. Where it may start nothing else does, unless the request itself is held back."""
        self._models.close(model)
        if self._now_s < until_s:
            self.held_until_s = min(self.held_until_s, until_s)
        else:
            self._full.update(among)
            self._close_full(among)

    def _close_full(self, replicas: Iterable[str]) -> None:
        """Try no more requests of models that the last room of these replicas was for."""
        for replica in replicas:
            for model in self._places.models_on(self._name, replica):
                if model in self._models.names and self._places.is_full(self._name, model, self._full):
                    self._models.close(model)
