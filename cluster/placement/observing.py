"""Observation: reports become the state for planning. Pure: the time is a parameter, of one clock.

The queues count requests, the workers count memory. A worker is asked for the needs of a model once per
version, models with waiting requests first. A worker that the queues no longer list is gone, whatever it last reported.

Records of models and workers are made anew only after a change: a decision costs in proportion to the changes, plus a
look at each record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

from cluster.admission.records import ModelLoad
from cluster.placement.checking import mended
from cluster.placement.on_demand import ON_DEMAND_REQUESTS
from cluster.placement.seen_queues import SeenQueues
from cluster.placement.seen_workers import WORKERS, Backoff, Remade, SeenWorkers, failed_everywhere
from cluster.placement.state import NOTHING, ClusterState, Components, ModelState, SloClass
from cluster.records.overrides import Overrides

MAX_DESCRIBED: Final = 256  # models without requests whose needs are remembered
MAX_IGNORED: Final = 100  # sentences about impossible figures of one state
WARM_UP_S: Final = 3.0  # of a new controller, until it decides without the workers that have not reported yet
_NOTHING: Final[Mapping[str, Any]] = {}
_NO_LOAD: Final = ModelLoad(WORKERS, "", 0, 0.0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class Observed:
    """The state, with the names of all models of the workers' kinds, the unknown ones included.

    `waits` are models with waiting requests whose needs are not known yet. `backoffs` are models that no worker
    could load.
    """

    state: ClusterState
    pool: str
    names: Collection[str]
    unknown: tuple[tuple[str, str], ...]
    waits: frozenset[str]
    backoffs: Mapping[str, Backoff]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model of the registry that can be requested: its kind, and the served version.

    `is_unloaded`: an operator took it out of memory, and only a request brings it back.
    """

    kind: str
    version: str
    is_unloaded: bool = False


class Observations:
    """The newest reports. `slo_of` gives the class of service of a model."""

    def __init__(self, slo_of: Callable[[str], SloClass], began_s: float) -> None:
        self._slo_of = slo_of
        self._began_s = began_s
        self.workers = SeenWorkers()
        self.queues = SeenQueues()
        self.catalog: Mapping[str, CatalogEntry] = {}
        self.held: Mapping[str, Collection[str]] = {}
        self._models = Remade[ModelState]()
        self._odd: dict[str, tuple[str, ...]] = {}  # by model: sentences about impossible figures of its requests
        self._known: frozenset[str] = frozenset()

    def note_sign(self, name: str, now_s: float) -> None:
        """Note a sign of life of a worker or a queue: its last report still holds."""
        self.workers.note_sign(name, now_s)
        self.queues.note_sign(name, now_s)

    @property
    def is_at_rest(self) -> bool:
        """Return whether nothing waits, runs or gets ready anywhere."""
        return self.workers.is_at_rest and self.queues.is_at_rest

    def forget_silent(self, now_s: float) -> None:
        """Forget the workers and queues that count as gone."""
        self.workers.forget_silent(now_s)
        self.queues.forget_silent(now_s)
        described = self.workers.described
        if len(described.needs) > 2 * len(self.catalog) + MAX_DESCRIBED:
            for model in described.needs.keys() - self.catalog.keys():
                described.forget(model)

    def wanted_extents(self) -> dict[str, tuple[str, ...]]:
        """Return the extents of each component of the requested models."""
        needs = self.workers.described.needs
        found: dict[str, tuple[str, ...]] = {}
        for model in self.queues.loads(self.workers.pool):
            if model in needs:
                found.update(needs[model].extents)
        return found

    def observe(
        self,
        now_s: float,
        overrides: Overrides,
        unconfirmed: Mapping[str, tuple[str, float]] = _NOTHING,
        reserved: Mapping[str, str] = _NOTHING,
    ) -> Observed | None:
        """Return the state; None while too few reports are there to decide on.

        `unconfirmed` are the unconfirmed orders by worker: the model, and the seconds of its switch. `reserved` are the
        models that workers drain for.
        """
        pool, reports, catalog = self.workers.pool, self.workers.reports, self.catalog
        listed = self.queues.listed(pool)
        if not self.queues.names or not reports:
            return None
        if now_s - self._began_s < WARM_UP_S and not listed <= reports.keys():
            return None
        kinds = self.workers.kinds
        names = [model for model, entry in catalog.items() if entry.kind in kinds]
        loads, running = self.queues.loads(pool), self.queues.running(pool)
        by_worker = self.workers.failed(now_s, lambda model: catalog[model].version if model in catalog else None)
        there = reports.keys() & listed
        failed = failed_everywhere(there - overrides.draining if overrides.draining else there, by_worker)
        backoffs = {model: backoff for model, backoff in failed.items() if backoff.retry_in_s > 0}
        needs, components = self.workers.described.needs, self.workers.described.components
        lacking = [
            model for model in names if (need := needs.get(model)) is None or need.version != catalog[model].version
        ]
        unknown = [model for model in lacking if model not in backoffs]
        usual_s, (fixed_s, bytes_per_s) = _usual_service_s(loads.values()), self.workers.slowest_switch()
        models = {}
        for id_ in names:
            if (sizes := components.get(id_)) is not None:
                # Before any measurement, requests count as so short that no switch is cheap.
                switch_s = fixed_s + sizes.total_bytes / bytes_per_s
                service_s = switch_s / ON_DEMAND_REQUESTS if usual_s is None else usual_s
                backoff = failed.get(id_)
                # No worker prepares for a failed or unloaded model: only a waiting request brings it back.
                is_expected = backoff is None and not catalog[id_].is_unloaded
                retry_in_s = max(0.0, backoff.retry_in_s) if backoff else 0.0
                models[id_] = self._models.value(
                    self._model, id_, sizes, loads.get(id_), service_s, self._slo_of(id_), retry_in_s, is_expected
                )
        self._models.keep(models)
        if self._known != models.keys():
            self._known = frozenset(models)
            self._odd = {id_: notes for id_, notes in self._odd.items() if id_ in models}
        busy_s, state_of = self.queues.busy_s, self.workers.state_of
        workers = {
            name: state_of(
                name,
                now_s,
                self._known,
                running.get(name, _NOTHING),
                busy_s.get(name, now_s),
                overrides,
                by_worker.get(name, _NOTHING),
                self.held,
                unconfirmed.get(name),
                reserved.get(name),
            )
            for name in reports
            if name in there
        }
        ignored = islice(chain(*self._odd.values(), *self.workers.odd.values()), MAX_IGNORED)
        return Observed(
            ClusterState(models, workers, self.held, overrides.is_frozen, tuple(ignored)),
            pool,
            names,
            self._to_describe(unknown, loads, overrides),
            frozenset(model for model in lacking if _waiting(loads, model)),
            backoffs,
        )

    def _to_describe(
        self, unknown: Collection[str], loads: Mapping[str, ModelLoad], overrides: Overrides
    ) -> tuple[tuple[str, str], ...]:
        """Return the models and versions that workers are asked about, requested ones first."""
        pinned = {model for models in overrides.pins.values() for model in models}
        asked = {model for model in unknown if model in loads and (loads[model].waiting or loads[model].rate_long > 0)}
        asked.update(pinned.intersection(unknown))
        first = sorted((model for model in unknown if model in asked), key=lambda id_: -_waiting(loads, id_))
        room = max(0, MAX_DESCRIBED - len(self.workers.described.needs))
        rest = [model for model in unknown if model not in asked][:room]
        return tuple((model, self.catalog[model].version) for model in (*first, *rest))

    def demand(self) -> ClusterState | None:
        """Return the queued demand as a cluster without workers; None when there is a worker, or no queue."""
        if not self.queues.names or self.workers.reports or self.queues.listed(WORKERS):
            return None
        components = self.workers.described.components
        loads = self.queues.loads(WORKERS)
        return ClusterState(
            {
                id_: self._model(id_, components.get(id_, NOTHING), load, 1.0, self._slo_of(id_))
                for id_, load in loads.items()
            }
        )

    def _model(
        self,
        id_: str,
        components: Components,
        load: ModelLoad | None,
        service_s: float,
        slo: SloClass,
        retry_in_s: float = 0.0,
        is_expected: bool = True,
    ) -> ModelState:
        """Return the state of a model; `service_s` is assumed until it is measured."""
        load = load or _NO_LOAD
        state = ModelState(
            id_,
            components,
            waiting=load.waiting,
            oldest_age_s=max(0.0, load.oldest_age_s),
            slack_s=math.inf if load.slack_s is None else load.slack_s,
            rate_short=load.rate_short if is_expected else 0.0,
            rate_long=load.rate_long if is_expected else 0.0,
            service_s=load.service_s or service_s,
            latency_s=load.latency_s,
            retry_in_s=retry_in_s,
            slo=slo,
            unstarted_s=max(0.0, load.unstarted_s),
        )
        return mended(id_, state, self._odd)


def _waiting(loads: Mapping[str, ModelLoad], model: str) -> int:
    return loads[model].waiting if model in loads else 0


def _usual_service_s(loads: Collection[ModelLoad]) -> float | None:
    """Return the assumed service time of unmeasured models: the mean of the measured ones; None without any."""
    measured = [load.service_s for load in loads if load.service_s > 0]
    return sum(measured) / len(measured) if measured else None
