"""Observation: reports become the state for planning. Pure: the time is a parameter, of one clock.

The queues count requests, the workers count memory. A worker is asked for the needs of a model once per
version, models with waiting requests first. A worker that the queues no longer list is gone, whatever it last reported.

Records of models and workers are made anew only after a change, and checked once: a decision costs in proportion
to the changes, plus a look at each record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from cluster.admission.records import AdmissionSnapshot, ModelLoad
from cluster.placement.checking import usable_state
from cluster.placement.on_demand import ON_DEMAND_REQUESTS
from cluster.placement.reports import WorkerReport
from cluster.placement.seen_queues import SeenQueues
from cluster.placement.seen_workers import WORKERS, Backoff, SeenWorkers, failed_everywhere
from cluster.placement.state import NOTHING, ClusterState, Components, ModelState, SloClass
from cluster.records.overrides import Overrides

MAX_DESCRIBED: Final = 256  # models without requests whose needs are remembered
WARM_UP_S: Final = 3.0  # of a new controller, until it decides without the workers that have not reported yet
_NOTHING: Final[Mapping[str, Any]] = {}


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
        self._workers = SeenWorkers()
        self._queues = SeenQueues()
        self._models: dict[str, tuple[_SeenModel, ModelState]] = {}  # the last state, and its inputs
        self._known: frozenset[str] = frozenset()
        self._state = ClusterState()
        self.catalog: Mapping[str, CatalogEntry] = {}
        self.held: Mapping[str, Collection[str]] = {}

    def note_worker(self, name: str, report: WorkerReport, now_s: float) -> None:
        """Take in a worker's report. Raises ValueError for sizes that are no whole numbers of bytes."""
        self._workers.note(name, report, now_s)

    def note_queue(self, name: str, snapshot: AdmissionSnapshot, now_s: float) -> None:
        """Take in the snapshot of a queue."""
        self._queues.note(name, snapshot, now_s)

    def note_sign(self, name: str, now_s: float) -> None:
        """Note a sign of life of a worker or a queue: its last report still holds."""
        self._workers.note_sign(name, now_s)
        self._queues.note_sign(name, now_s)

    @property
    def is_at_rest(self) -> bool:
        """Return whether nothing waits, runs or gets ready anywhere."""
        return self._workers.is_at_rest and self._queues.is_at_rest

    def forget_silent(self, now_s: float) -> None:
        """Forget the workers and queues that count as gone."""
        self._workers.forget_silent(now_s)
        self._queues.forget_silent(now_s)
        described = self._workers.described
        if len(described.needs) > 2 * len(self.catalog) + MAX_DESCRIBED:
            for model in described.needs.keys() - self.catalog.keys():
                described.forget(model)

    @property
    def workers(self) -> Mapping[str, WorkerReport]:
        """The last report of each worker."""
        return self._workers.reports

    @property
    def queues(self) -> Set[str]:
        """The names of the queues."""
        return self._queues.names

    def joined_queues(self) -> AdmissionSnapshot:
        """Return the state of all queues as if they were one."""
        return self._queues.joined()

    def wanted_extents(self) -> dict[str, tuple[str, ...]]:
        """Return the extents of each component of the requested models."""
        needs = self._workers.described.needs
        found: dict[str, tuple[str, ...]] = {}
        for model in self._queues.loads(self._workers.pool):
            if model in needs:
                found.update(needs[model].extents)
        return found

    def observe(
        self, now_s: float, overrides: Overrides, unconfirmed: Mapping[str, tuple[str, float]]
    ) -> Observed | None:
        """Return the state; None while too few reports are there to decide on.

        `unconfirmed` are the unconfirmed orders by worker: the model, and the seconds of its switch.
        """
        pool, reports, catalog = self._workers.pool, self._workers.reports, self.catalog
        listed = self._queues.listed(pool)
        if not self._queues.names or not reports:
            return None
        if now_s - self._began_s < WARM_UP_S and not listed <= reports.keys():
            return None
        kinds = self._workers.kinds
        names = [model for model, entry in catalog.items() if entry.kind in kinds]
        loads, running = self._queues.loads(pool), self._queues.running(pool)
        by_worker = self._workers.failed(now_s, lambda model: catalog[model].version if model in catalog else None)
        there = reports.keys() & listed
        failed = failed_everywhere(there - overrides.draining if overrides.draining else there, by_worker)
        backoffs = {model: backoff for model, backoff in failed.items() if backoff.retry_in_s > 0}
        needs, components = self._workers.described.needs, self._workers.described.components
        lacking = [
            model for model in names if (need := needs.get(model)) is None or need.version != catalog[model].version
        ]
        unknown = [model for model in lacking if model not in backoffs]
        usual_s, (fixed_s, bytes_per_s) = _usual_service_s(loads.values()), self._workers.slowest_switch()
        models = []
        for id_ in names:
            if (sizes := components.get(id_)) is not None:
                # Before any measurement, requests count as so short that no switch is cheap.
                switch_s = fixed_s + sizes.total_bytes / bytes_per_s
                service_s = switch_s / ON_DEMAND_REQUESTS if usual_s is None else usual_s
                models.append(self._model(id_, sizes, loads.get(id_), failed.get(id_), service_s))
        if len(self._models) > 2 * len(models) + MAX_DESCRIBED:
            self._models = {model.id: self._models[model.id] for model in models}
        if len(self._known) != len(models) or any(model.id not in self._known for model in models):
            self._known = frozenset(model.id for model in models)
        busy_s, state_of = self._queues.busy_s, self._workers.state_of
        workers = [
            state_of(
                name,
                now_s,
                self._known,
                running.get(name, _NOTHING),
                busy_s.get(name, now_s),
                overrides,
                by_worker.get(name, _NOTHING),
                self.held,
                unconfirmed.get(name),
            )
            for name in reports
            if name in there
        ]
        self._state = usable_state(models, workers, self.held, overrides.is_frozen, self._state)
        return Observed(
            self._state,
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
        room = max(0, MAX_DESCRIBED - len(self._workers.described.needs))
        rest = [model for model in unknown if model not in asked][:room]
        return tuple((model, self.catalog[model].version) for model in (*first, *rest))

    def demand(self) -> ClusterState | None:
        """Return the queued demand as a cluster without workers; None when there is a worker, or no queue."""
        if not self._queues.names or self._workers.reports or self._queues.listed(WORKERS):
            return None
        components = self._workers.described.components
        seen = {
            id_: _SeenModel(components.get(id_, NOTHING), load, 0.0, True, load.service_s or 1.0, self._slo_of(id_))
            for id_, load in self._queues.loads(WORKERS).items()
        }
        return usable_state([_state_of(id_, one) for id_, one in seen.items()], ())

    def _model(
        self, id_: str, components: Components, load: ModelLoad | None, backoff: Backoff | None, service_s: float
    ) -> ModelState:
        retry_in_s = max(0.0, backoff.retry_in_s) if backoff else 0.0
        # No worker prepares for a failed or unloaded model: only a waiting request brings it back.
        is_expected = backoff is None and not self.catalog[id_].is_unloaded
        if load is not None and load.service_s:
            service_s = load.service_s
        seen = _SeenModel(components, load, retry_in_s, is_expected, service_s, self._slo_of(id_))
        last = self._models.get(id_)
        if last is None or last[0] != seen:
            last = self._models[id_] = seen, _state_of(id_, seen)
        return last[1]


class _SeenModel(NamedTuple):
    """The inputs of a model's state."""

    components: Components
    load: ModelLoad | None
    retry_in_s: float
    is_expected: bool
    service_s: float
    slo: SloClass


def _state_of(id_: str, seen: _SeenModel) -> ModelState:
    components, load, retry_in_s, is_expected, service_s, slo = seen
    if load is None:
        return ModelState(id_, components, service_s=service_s, retry_in_s=retry_in_s, slo=slo)
    return ModelState(
        id_,
        components,
        waiting=load.waiting,
        oldest_age_s=max(0.0, load.oldest_age_s),
        slack_s=math.inf if load.slack_s is None else load.slack_s,
        rate_short=load.rate_short if is_expected else 0.0,
        rate_long=load.rate_long if is_expected else 0.0,
        service_s=service_s,
        latency_s=load.latency_s,
        retry_in_s=retry_in_s,
        slo=slo,
        unstarted_s=max(0.0, load.unstarted_s),
    )


def _waiting(loads: Mapping[str, ModelLoad], model: str) -> int:
    return loads[model].waiting if model in loads else 0


def _usual_service_s(loads: Collection[ModelLoad]) -> float | None:
    """Return the assumed service time of unmeasured models: the mean of the measured ones; None without any."""
    measured = [load.service_s for load in loads if load.service_s > 0]
    return sum(measured) / len(measured) if measured else None
