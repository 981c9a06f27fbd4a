"""Observation: reports become the state that is planned with. Pure: the time is a parameter, of one clock.

Requests are counted by the queues, memory by the workers. What a model needs on a worker is asked of a worker once per
version, those that requests wait for first. A worker that the queues no longer list is gone, whatever it said last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Final

from cluster.admission.outcomes import joined_loads
from cluster.admission.records import AdmissionSnapshot, ModelLoad, ReplicaLoad
from cluster.placement.checking import usable_state
from cluster.placement.on_demand import ON_DEMAND_REQUESTS
from cluster.placement.reports import LoadFailure, ModelNeed, WorkerReport
from cluster.placement.state import (
    LOST_S,
    NOTHING,
    ClusterState,
    Components,
    ModelState,
    SloClass,
    WorkerState,
)
from cluster.records.load_failures import LONGEST_RETRY_S, NODE_LETTERS, joined_errors, retry_after_s
from cluster.records.overrides import Overrides

QUEUE_LOST_S: Final = 1.5  # a queue that is silent for so long is that of an ingress that is gone
MAX_DESCRIBED: Final = 256  # models whose needs are known although nobody has asked for them
USUAL_BYTES: Final = 10e9  # of a model: by its switch the slowest worker is told
WORKERS: Final = "worker"  # the pool of workers, until one has said it
WARM_UP_S: Final = 3.0  # of a new controller, until it decides without workers that have not reported yet


@dataclass(frozen=True, slots=True)
class Backoff:
    """A model whose load failed: why, and the seconds until it is tried again."""

    retry_in_s: float
    error: str


@dataclass(frozen=True, slots=True)
class Observed:
    """The state, and what is not in it: all models of the workers' kinds, and which of them are not known yet.

    `waits` are models that requests wait for although their needs are not known. `backoffs` are models that no worker
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
    """A model of the registry that can be asked: its kind, and the version that is served.

    `is_unloaded`: an operator took it out of memory, and only a request brings it back.
    """

    kind: str
    version: str
    is_unloaded: bool = False


class DescribedModels:
    """The needs of models, and which of them a worker has ready: looked up by one component that few others need."""

    def __init__(self) -> None:
        self.needs: dict[str, ModelNeed] = {}
        self._by_part: dict[str, dict[str, None]] = {}  # models
        self._part_of: dict[str, str] = {}
        self._revision = 0
        self._ready: dict[str, tuple[Mapping[str, int], int, tuple[str, ...]]] = {}  # by worker, as of a revision

    def note_need(self, model: str, need: ModelNeed) -> None:
        """Take in what a version of a model needs."""
        self.forget(model)
        self.needs[model] = need
        self._revision += 1
        if need.sizes:
            part = min(need.sizes, key=lambda key: len(self._by_part.get(key, ())))
            self._part_of[model] = part
            self._by_part.setdefault(part, {})[model] = None

    def forget(self, model: str) -> None:
        """Know nothing of a model."""
        self.needs.pop(model, None)
        if (part := self._part_of.pop(model, None)) is not None:
            del self._by_part[part][model]
            if not self._by_part[part]:
                del self._by_part[part]

    def forget_worker(self, name: str) -> None:
        """Know nothing of a worker."""
        self._ready.pop(name, None)

    def ready_models(self, name: str, ready: Mapping[str, int]) -> tuple[str, ...]:
        """Return the models all of whose components are ready on a worker. Found anew only when something changed."""
        last = self._ready.get(name)
        if last is None or last[1] != self._revision or (last[0] is not ready and last[0].keys() != ready.keys()):
            found = [model for part in ready for model in self._by_part.get(part, ())]
            models = tuple(sorted(model for model in found if self.needs[model].sizes.keys() <= ready.keys()))
            last = self._ready[name] = ready, self._revision, models
        return last[2]


class Observations:
    """The newest reports. `slo_of` gives the class of service of a model."""

    def __init__(self, slo_of: Callable[[str], SloClass], began_s: float) -> None:
        self._slo_of = slo_of
        self._began_s = began_s
        self._workers: dict[str, WorkerReport] = {}  # the last report of each
        self._reported_s: dict[str, float] = {}
        self._queues: dict[str, tuple[AdmissionSnapshot, float]] = {}
        self._seen_s: dict[str, float] = {}  # of workers and queues: the last sign of life
        self._busy_s: dict[str, float] = {}  # by worker: when it was last seen with work
        # By worker: the model that a request began to switch to, and when it is ready.
        self._begun: dict[str, tuple[str, float]] = {}
        self._components: dict[str, Components] = {}  # of models
        self._resident: dict[str, Components] = {}  # by worker
        self._described = DescribedModels()
        self.catalog: Mapping[str, CatalogEntry] = {}
        self.held: Mapping[str, Collection[str]] = {}

    def note_worker(self, name: str, report: WorkerReport, now_s: float) -> None:
        """Take in a worker's report. Raises ValueError for sizes that are no whole numbers of bytes."""
        needs = {model: Components(need.sizes) for model, need in report.needs.items()}
        resident = {**report.coming, **report.ready}
        if name not in self._resident or self._resident[name].sizes != resident:
            self._resident[name] = Components(resident)
        self._workers[name], self._reported_s[name] = report, now_s
        self._seen_s[name] = now_s
        for model, need in report.needs.items():
            if self._needs.get(model) != need:
                self._components[model] = needs[model]
                self._described.note_need(model, need)

    def note_queue(self, name: str, snapshot: AdmissionSnapshot, now_s: float) -> None:
        """Take in the snapshot of a queue."""
        self._queues[name] = snapshot, now_s
        self._seen_s[name] = now_s
        for loads in snapshot.replicas.values():
            for load in loads:
                if load.running or load.name not in self._busy_s:
                    self._busy_s[load.name] = now_s

    def note_sign(self, name: str, now_s: float) -> None:
        """Take in that a worker or a queue lives: what it has reported still holds."""
        if name in self._seen_s:
            self._seen_s[name] = now_s

    @property
    def is_at_rest(self) -> bool:
        """Return whether nothing waits, runs or gets ready anywhere."""
        return all(report.is_at_rest for report in self._workers.values()) and all(
            snapshot.is_at_rest for snapshot, _ in self._queues.values()
        )

    def forget_silent(self, now_s: float) -> None:
        """Forget those that count as gone."""
        for name in list(self._workers):
            if now_s - self._seen_s[name] > LOST_S:
                del self._workers[name], self._reported_s[name], self._resident[name]
                self._described.forget_worker(name)
                self._begun.pop(name, None)
        for name in list(self._queues):
            if now_s - self._seen_s[name] > QUEUE_LOST_S:
                del self._queues[name]
        self._seen_s = {
            name: at_s for name, at_s in self._seen_s.items() if name in self._workers or name in self._queues
        }
        listed = {load.name for loads in self._loads_of_replicas() for load in loads}
        self._busy_s = {name: at_s for name, at_s in self._busy_s.items() if name in listed}
        if len(self._needs) > 2 * len(self.catalog) + MAX_DESCRIBED:
            for model in self._needs.keys() - self.catalog.keys():
                self._described.forget(model)
                del self._components[model]

    @property
    def workers(self) -> Mapping[str, WorkerReport]:
        """The last report of each worker."""
        return self._workers

    @property
    def _needs(self) -> Mapping[str, ModelNeed]:
        return self._described.needs

    @property
    def queues(self) -> Set[str]:
        """The names of the queues."""
        return self._queues.keys()

    def joined_queues(self) -> AdmissionSnapshot:
        """Return the state of all queues as if they were one."""
        snapshots = [snapshot for snapshot, _ in self._queues.values()]
        pools = {load.pool for snapshot in snapshots for load in snapshot.models}
        tenants: Counter[str] = Counter()
        replicas: dict[str, dict[str, ReplicaLoad]] = {}
        for snapshot in snapshots:
            tenants.update(snapshot.tenants)
            for pool, loads in snapshot.replicas.items():
                found = replicas.setdefault(pool, {})
                for load in loads:
                    found[load.name] = _both_loads(found[load.name], load) if load.name in found else load
        models = [load for pool in sorted(pools) for load in self._loads(pool).values()]
        return AdmissionSnapshot(
            tuple(models),
            {pool: tuple(found.values()) for pool, found in replicas.items()},
            dict(tenants),
            joined_loads(load for snapshot in snapshots for load in snapshot.shares),
        )

    def wanted_extents(self) -> dict[str, tuple[str, ...]]:
        """Return the extents of each component of the models that somebody has asked for."""
        found: dict[str, tuple[str, ...]] = {}
        for model in self._loads(self._pool()):
            if model in self._needs:
                found.update(self._needs[model].extents)
        return found

    def observe(
        self, now_s: float, overrides: Overrides, unconfirmed: Mapping[str, tuple[str, float]]
    ) -> Observed | None:
        """Return the state; None as long as too few have reported to decide on.

        `unconfirmed` are workers with an order that no report confirms: the model, and the seconds of its switch.
        """
        pool = self._pool()
        listed = self._listed(pool)
        if not self._queues or not self._workers:
            return None
        if now_s - self._began_s < WARM_UP_S and not listed <= self._workers.keys():
            return None
        kinds = frozenset().union(*(report.kinds for report in self._workers.values()))
        names = [model for model, entry in self.catalog.items() if entry.kind in kinds]
        loads, running = self._loads(pool), self._running(pool)
        pinned = {model for models in overrides.pins.values() for model in models}
        asked = {model for model, load in loads.items() if load.waiting or load.rate_long > 0} | pinned
        by_worker = {name: self._failed(name, now_s) for name in sorted(self._workers.keys() & listed)}
        failed = _failed_everywhere({name: by_worker[name] for name in by_worker if name not in overrides.draining})
        backoffs = {model: backoff for model, backoff in failed.items() if backoff.retry_in_s > 0}
        lacking = [model for model in names if not self._is_described(model)]
        unknown = [model for model in lacking if model not in backoffs]
        first = sorted((model for model in unknown if model in asked), key=lambda id_: -_waiting(loads, id_))
        rest = [model for model in unknown if model not in asked][: max(0, MAX_DESCRIBED - len(self._needs))]
        usual_s = _usual_service_s(loads.values())
        slowest = self._slowest_switch()
        models = [
            self._model(id_, loads.get(id_), failed.get(id_), usual_s, slowest) for id_ in names if id_ in self._needs
        ]
        known = frozenset(model.id for model in models)
        workers = [
            self._worker(name, now_s, known, running.get(name, {}), overrides, by_worker[name], unconfirmed.get(name))
            for name in self._workers
            if name in listed
        ]
        return Observed(
            usable_state(models, workers, self.held, overrides.is_frozen),
            pool,
            names,
            tuple((model, self.catalog[model].version) for model in (*first, *rest)),
            frozenset(model for model in lacking if _waiting(loads, model)),
            backoffs,
        )

    def demand(self) -> ClusterState | None:
        """Return what is asked for while there is no worker at all; None when there is one, or no queue."""
        if not self._queues or self._workers or self._listed(WORKERS):
            return None
        models = [
            ModelState(
                id_,
                self._components.get(id_, NOTHING),
                load.waiting,
                max(0.0, load.oldest_age_s),
                rate_short=load.rate_short,
                rate_long=load.rate_long,
                service_s=load.service_s or 1.0,
                slo=self._slo_of(id_),
            )
            for id_, load in self._loads(WORKERS).items()
        ]
        return usable_state(models, ())

    # models

    def _model(
        self,
        id_: str,
        load: ModelLoad | None,
        backoff: Backoff | None,
        usual_s: float | None,
        slowest: tuple[float, float],
    ) -> ModelState:
        # Of no model at all a request was measured: so short that no switch counts as cheap before one was.
        switch_s = slowest[0] + self._components[id_].total_bytes / slowest[1]
        usual_service_s = switch_s / ON_DEMAND_REQUESTS if usual_s is None else usual_s
        retry_in_s = max(0.0, backoff.retry_in_s) if backoff else 0.0
        if load is None:
            return ModelState(
                id_, self._components[id_], service_s=usual_service_s, retry_in_s=retry_in_s, slo=self._slo_of(id_)
            )
        # Nobody gets ready ahead for what failed or was unloaded: it takes a request that waits.
        is_expected = backoff is None and not self.catalog[id_].is_unloaded
        return ModelState(
            id_,
            self._components[id_],
            waiting=load.waiting,
            oldest_age_s=max(0.0, load.oldest_age_s),
            slack_s=math.inf if load.slack_s is None else load.slack_s,
            rate_short=load.rate_short if is_expected else 0.0,
            rate_long=load.rate_long if is_expected else 0.0,
            service_s=load.service_s or usual_service_s,
            latency_s=load.latency_s,
            retry_in_s=retry_in_s,
            slo=self._slo_of(id_),
            unstarted_s=max(0.0, load.unstarted_s),
        )

    def _slowest_switch(self) -> tuple[float, float]:
        """Return the fixed part of a switch and its bytes per second, of the worker that is slowest with usual ones."""
        found = [(each.fixed_switch_s, each.attach_bytes_per_s) for each in self._workers.values()]
        usable = [one for one in found if one[1] > 0]
        return max(usable, key=lambda one: one[0] + USUAL_BYTES / one[1], default=(0.0, math.inf))

    def _is_described(self, model: str) -> bool:
        need = self._needs.get(model)
        return need is not None and need.version == self.catalog[model].version

    def _failure(self, report: WorkerReport, model: str) -> LoadFailure | None:
        failure, entry = report.failures.get(model), self.catalog.get(model)
        return failure if failure and entry and failure.version == entry.version else None

    def _failed(self, name: str, now_s: float) -> dict[str, Backoff]:
        """Return the backoff of each model that a worker could not load, and has not got ready since."""
        report, at_s = self._workers[name], self._reported_s[name]
        found = {}
        for model in report.failures:
            if failure := self._failure(report, model):
                age_s = failure.age_s + max(0.0, now_s - at_s)
                if age_s <= 2 * LONGEST_RETRY_S:
                    error = f"worker {name} on node {report.node[:NODE_LETTERS]}: {failure.error}"
                    found[model] = Backoff(retry_after_s(failure.num) - age_s, error)
        return found

    # workers

    def _worker(
        self,
        name: str,
        now_s: float,
        known: Collection[str],
        running: Mapping[str, int],
        overrides: Overrides,
        failed: Mapping[str, Backoff],
        unconfirmed: tuple[str, float] | None,
    ) -> WorkerState:
        report, at_s = self._workers[name], self._reported_s[name]
        age_s = max(0.0, now_s - at_s)
        models = tuple(model for model in self._described.ready_models(name, report.ready) if model in known)
        switching_to, ready_in_s = report.switching_to, max(0.0, report.ready_in_s - age_s)
        if switching_to is None and unconfirmed is not None:
            switching_to, ready_in_s = unconfirmed
        if switching_to is None and (begun := self._begun_switch(name, running, known)) is not None:
            switching_to, ready_in_s = begun[0], max(0.0, begun[1] - now_s)
        ends_soon = {key for model in running if model in known for key in self._needs[model].sizes}
        kept = (model for model in models if not report.pinned.isdisjoint(self._needs[model].sizes))
        return WorkerState(
            name,
            report.node,
            report.budget_bytes,
            self._resident[name],
            models,
            {model: count for model, count in running.items() if model in known},
            report.slots,
            leased=report.leased - ends_soon,  # of what runs it is known when it ends
            switching_to=switching_to if switching_to in known else None,
            ready_in_s=ready_in_s if switching_to in known else 0.0,
            pinned=frozenset(model for model in overrides.pins.get(name, ()) if model in known).union(kept),
            unable=frozenset([model for model, one in failed.items() if one.retry_in_s > 0]),
            is_draining=name in overrides.draining,
            is_frozen=name in overrides.frozen,
            idle_s=max(0.0, now_s - self._busy_s.get(name, now_s)),
            age_s=max(0.0, now_s - self._seen_s[name]),
            fixed_switch_s=report.fixed_switch_s,
            attach_bytes_per_s=report.attach_bytes_per_s,
            load_bytes_per_s=report.load_bytes_per_s,
        )

    def _begun_switch(self, name: str, running: Mapping[str, int], known: Collection[str]) -> tuple[str, float] | None:
        """Return the model that a worker gets ready for because a request for it has a slot there, and when it is.

        No report says so: parts of the model are on their way, and the others are there.
        """
        report, at_s = self._workers[name], self._reported_s[name]
        for model in running if report.coming else ():
            sizes = self._needs[model].sizes if model in known else {}
            coming = sizes.keys() & report.coming.keys()
            if coming and sizes.keys() <= report.ready.keys() | report.coming.keys():
                if self._begun.get(name, ("", 0.0))[0] != model:
                    held = self.held.get(report.node, ())
                    nbytes, cold = (sum([sizes[key] for key in keys]) for keys in (coming, coming - set(held)))
                    took_s = report.fixed_switch_s + nbytes / report.attach_bytes_per_s + cold / report.load_bytes_per_s
                    self._begun[name] = model, at_s + took_s
                return self._begun[name]
        self._begun.pop(name, None)
        return None

    # queues

    def _pool(self) -> str:
        return next((report.pool for report in self._workers.values()), WORKERS)

    def _loads_of_replicas(self) -> Iterator[tuple[ReplicaLoad, ...]]:
        for snapshot, _ in self._queues.values():
            yield from snapshot.replicas.values()

    def _listed(self, pool: str) -> set[str]:
        return {
            load.name
            for snapshot, _ in self._queues.values()
            for load in snapshot.replicas.get(pool, ())
            if not load.is_gone
        }

    def _running(self, pool: str) -> dict[str, dict[str, int]]:
        running: dict[str, dict[str, int]] = {}
        for snapshot, _ in self._queues.values():
            for load in snapshot.replicas.get(pool, ()):
                found = running.setdefault(load.name, {})
                for model, count in load.running.items():
                    found[model] = found.get(model, 0) + count
        return running

    def _loads(self, pool: str) -> dict[str, ModelLoad]:
        """Return the loads of the pool's models, those of all queues together."""
        found: dict[str, ModelLoad] = {}
        for snapshot, _ in self._queues.values():
            for load in snapshot.models:
                if load.pool == pool:
                    found[load.model] = _together(found[load.model], load) if load.model in found else load
        return found


def _failed_everywhere(by_worker: Mapping[str, Mapping[str, Backoff]]) -> dict[str, Backoff]:
    """Return the backoff of each model that all of the workers have failed with: one that may load it comes first."""
    first, *others = by_worker.values() or ({},)
    found = {}
    for model in first:
        all_ = [first[model], *[failed[model] for failed in others if model in failed]]
        if len(all_) == len(by_worker):
            error = joined_errors([one.error for one in all_], "workers")
            found[model] = Backoff(min(one.retry_in_s for one in all_), error)
    return found


def _together(one: ModelLoad, other: ModelLoad) -> ModelLoad:
    slacks = [load.slack_s for load in (one, other) if load.slack_s is not None]
    return ModelLoad(
        one.pool,
        one.model,
        one.waiting + other.waiting,
        max(one.oldest_age_s, other.oldest_age_s),
        one.running + other.running,
        one.rate_short + other.rate_short,
        one.rate_long + other.rate_long,
        max(one.service_s, other.service_s),
        max(one.latency_s, other.latency_s),
        max(one.switch_s, other.switch_s),
        one.started + other.started,
        one.refused + other.refused,
        min(slacks, default=None),
        max(one.unstarted_s, other.unstarted_s),
    )


def _both_loads(one: ReplicaLoad, other: ReplicaLoad) -> ReplicaLoad:
    running = Counter(one.running) + Counter(other.running)
    recent = tuple(dict.fromkeys((*one.recent, *other.recent)))
    return ReplicaLoad(one.name, one.used + other.used, dict(running), recent, one.is_gone and other.is_gone)


def _waiting(loads: Mapping[str, ModelLoad], model: str) -> int:
    return loads[model].waiting if model in loads else 0


def _usual_service_s(loads: Collection[ModelLoad]) -> float | None:
    """Return what a request costs of a model that none was measured of: as much as the mean of the others, if any."""
    measured = [load.service_s for load in loads if load.service_s > 0]
    return sum(measured) / len(measured) if measured else None
