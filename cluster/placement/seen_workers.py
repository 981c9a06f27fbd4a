"""The reports of the workers, and the state that decisions see of each. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from cluster.placement.checking import mended
from cluster.placement.reports import ModelNeed, WorkerReport
from cluster.placement.state import LOST_S, STALE_S, Components, WorkerState
from cluster.records.load_failures import LONGEST_RETRY_S, NODE_LETTERS, joined_errors, retry_after_s
from cluster.records.overrides import Overrides

USUAL_BYTES: Final = 10e9  # of a usual model: its switch defines the slowest worker
WORKERS: Final = "worker"  # the pool of workers, until one reports it
MAX_LEFT: Final = 256  # names beyond twice those in use whose values are kept

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backoff:
    """A model whose load failed: why, and the seconds until it is tried again."""

    retry_in_s: float
    error: str


class Remade(Generic[T]):
    """The last value of each name, made anew only when its inputs differ."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[tuple[Any, ...], T]] = {}

    def value(self, make: Callable[..., T], name: str, *inputs: Any) -> T:
        """Return `make(name, *inputs)`."""
        last = self._last.get(name)
        if last is None or last[0] != inputs:
            last = self._last[name] = inputs, make(name, *inputs)
        return last[1]

    def keep(self, names: Collection[str]) -> None:
        """Forget all other names, once there are many of them."""
        if len(self._last) > 2 * len(names) + MAX_LEFT:
            self._last = {name: self._last[name] for name in names if name in self._last}


class _Inputs(NamedTuple):
    """The inputs of a worker's state. `ready` are models, `unable` ones that it failed to load just now."""

    report: WorkerReport
    ready: tuple[str, ...]
    running: Mapping[str, int]
    known: frozenset[str]
    revision: int  # of the models' needs
    switching_to: str | None
    ready_in_s: float
    reserved_for: str | None
    unable: frozenset[str]
    pins: frozenset[str]
    is_draining: bool
    is_frozen: bool
    idle_s: float
    age_s: float


class DescribedModels:
    """The needs of models, and the models ready on a worker, looked up by the component that fewest others need."""

    def __init__(self) -> None:
        self.needs: dict[str, ModelNeed] = {}
        self.components: dict[str, Components] = {}
        self.revision = 0  # of the models' needs, forgotten ones included
        self._by_part: dict[str, dict[str, None]] = {}  # models
        self._part_of: dict[str, str] = {}
        self._ready = Remade[tuple[str, ...]]()  # by worker

    def note_need(self, model: str, need: ModelNeed, components: Components) -> None:
        """Note the needs of a version of a model."""
        if self.needs.get(model) == need:
            return
        self.forget(model)
        self.needs[model], self.components[model] = need, components
        self.revision += 1
        if need.sizes:
            part = min(need.sizes, key=lambda key: len(self._by_part.get(key, ())))
            self._part_of[model] = part
            self._by_part.setdefault(part, {})[model] = None

    def forget(self, model: str) -> None:
        """Forget the needs of a model."""
        if self.needs.pop(model, None) is None:
            return
        del self.components[model]
        self.revision += 1
        if (part := self._part_of.pop(model, None)) is not None:
            del self._by_part[part][model]
            if not self._by_part[part]:
                del self._by_part[part]

    def ready_models(self, name: str, ready: Mapping[str, int]) -> tuple[str, ...]:
        """Return the models all of whose components are ready on a worker."""
        return self._ready.value(self._found_ready, name, ready, self.revision)

    def keep_workers(self, names: Collection[str]) -> None:
        """Forget the models of other workers, once there are many of them."""
        self._ready.keep(names)

    def _found_ready(self, name: str, ready: Mapping[str, int], revision: int) -> tuple[str, ...]:
        found = [model for part in ready for model in self._by_part.get(part, ())]
        return tuple(sorted(model for model in found if self.needs[model].sizes.keys() <= ready.keys()))


class SeenWorkers:
    """The newest report of each worker. The state of a worker is made anew only after a change."""

    def __init__(self) -> None:
        self.reports: dict[str, WorkerReport] = {}
        self._reported_s: dict[str, float] = {}
        self._seen_s: dict[str, float] = {}  # the last sign of life
        self._begun: dict[str, tuple[str, float]] = {}  # the model that a request switches to, and when it is ready
        self._resident: dict[str, Components] = {}
        self._states = Remade[WorkerState]()
        self.described = DescribedModels()
        self.odd: dict[str, tuple[str, ...]] = {}  # by worker: sentences about impossible figures of its report

    def note(self, name: str, report: WorkerReport, now_s: float) -> None:
        """Take in a worker's report. Raises ValueError for sizes that are no whole numbers of bytes."""
        report = mended(name, report, self.odd)
        needs = {model: Components(need.sizes) for model, need in report.needs.items()}
        resident = {**report.coming, **report.ready}
        if name not in self._resident or self._resident[name].sizes != resident:
            self._resident[name] = Components(resident)
        self.reports[name], self._reported_s[name], self._seen_s[name] = report, now_s, now_s
        for model, need in report.needs.items():
            self.described.note_need(model, need, needs[model])

    def note_sign(self, name: str, now_s: float) -> None:
        """Note a sign of life of a worker: its last report still holds."""
        if name in self._seen_s:
            self._seen_s[name] = now_s

    def forget_silent(self, now_s: float) -> None:
        """Forget the workers that count as gone."""
        for name in [name for name, seen_s in self._seen_s.items() if now_s - seen_s > LOST_S]:
            del self.reports[name], self._reported_s[name], self._seen_s[name], self._resident[name]
            self._begun.pop(name, None)
            self.odd.pop(name, None)
        self.described.keep_workers(self.reports)
        self._states.keep(self.reports)

    @property
    def pool(self) -> str:
        """The pool of the workers."""
        return next((report.pool for report in self.reports.values()), WORKERS)

    @property
    def kinds(self) -> Set[str]:
        """The kinds of models that some worker serves."""
        return frozenset().union(*{report.kinds for report in self.reports.values()})

    @property
    def is_at_rest(self) -> bool:
        """Return whether nothing runs or gets ready on any."""
        return all(report.is_at_rest for report in self.reports.values())

    def slowest_switch(self) -> tuple[float, float]:
        """Return the fixed seconds of a switch and its bytes per second, of the slowest worker for a usual model."""
        found = {(one.fixed_switch_s, one.attach_bytes_per_s) for one in self.reports.values()}
        return max(found, key=lambda one: one[0] + USUAL_BYTES / one[1], default=(0.0, math.inf))

    def failed(self, now_s: float, version_of: Callable[[str], str | None]) -> dict[str, dict[str, Backoff]]:
        """Return by worker the backoff of each model that it failed to load and has not loaded since."""
        by_worker: dict[str, dict[str, Backoff]] = {}
        for name, report in self.reports.items():
            for model, failure in report.failures.items() if report.failures else ():
                age_s = failure.age_s + max(0.0, now_s - self._reported_s[name])
                if failure.version == version_of(model) and age_s <= 2 * LONGEST_RETRY_S:
                    error = f"worker {name} on node {report.node[:NODE_LETTERS]}: {failure.error}"
                    found = by_worker.setdefault(name, {})
                    found[model] = Backoff(retry_after_s(failure.num) - age_s, error)
        return by_worker

    def state_of(
        self,
        name: str,
        now_s: float,
        known: frozenset[str],
        running: Mapping[str, int],
        busy_s: float,
        overrides: Overrides,
        failed: Mapping[str, Backoff],
        held: Mapping[str, Collection[str]],
        unconfirmed: tuple[str, float] | None,
        reserved_for: str | None,
    ) -> WorkerState:
        """Return the state of a worker that decisions see.

        `known` are models whose needs are known, `busy_s` is the time when it last had work, and `unconfirmed` an
        order that no report confirms: the model, and the seconds of its switch. It drains for `reserved_for`.
        """
        report = self.reports[name]
        switching_to, ready_in_s = report.switching_to, report.ready_in_s
        if switching_to is not None:
            ready_in_s = max(0.0, ready_in_s - max(0.0, now_s - self._reported_s[name]))
        elif unconfirmed is not None:
            switching_to, ready_in_s = unconfirmed
        elif report.coming and (begun := self._begun_switch(name, running, known, held)) is not None:
            switching_to, ready_in_s = begun[0], max(0.0, begun[1] - now_s)
        if switching_to is None or switching_to not in known:
            switching_to, ready_in_s = None, 0.0
        if not report.coming and name in self._begun:
            del self._begun[name]
        age_s = now_s - self._seen_s[name]
        inputs = _Inputs(
            report=report,
            ready=self.described.ready_models(name, report.ready),
            running=running,
            known=known,
            revision=self.described.revision,
            switching_to=switching_to,
            ready_in_s=ready_in_s,
            reserved_for=reserved_for if reserved_for in known else None,
            unable=frozenset([model for model, one in failed.items() if one.retry_in_s > 0] if failed else ()),
            pins=overrides.pins.get(name, frozenset()),
            is_draining=name in overrides.draining,
            is_frozen=name in overrides.frozen,
            idle_s=0.0 if running or now_s <= busy_s else _coarse(now_s - busy_s),
            age_s=age_s if age_s > STALE_S else 0.0,
        )
        return self._states.value(self._state, name, inputs)

    def _state(self, name: str, inputs: _Inputs) -> WorkerState:
        report, known, needs = inputs.report, inputs.known, self.described.needs
        models = tuple(model for model in inputs.ready if model in known)
        ends_soon = {key for model in inputs.running if model in known for key in needs[model].sizes}
        kept = (model for model in models if not report.pinned.isdisjoint(needs[model].sizes))
        return WorkerState(
            name,
            report.node,
            report.budget_bytes,
            self._resident[name],
            models,
            {model: count for model, count in inputs.running.items() if model in known},
            report.slots,
            leased=report.leased - ends_soon,  # the end of running requests is known
            switching_to=inputs.switching_to,
            ready_in_s=inputs.ready_in_s,
            reserved_for=inputs.reserved_for,
            pinned=inputs.pins.intersection(known).union(kept),
            unable=inputs.unable,
            is_draining=inputs.is_draining,
            is_frozen=inputs.is_frozen,
            idle_s=inputs.idle_s,
            age_s=inputs.age_s,
            fixed_switch_s=report.fixed_switch_s,
            attach_bytes_per_s=report.attach_bytes_per_s,
            load_bytes_per_s=report.load_bytes_per_s,
        )

    def _begun_switch(
        self, name: str, running: Mapping[str, int], known: Collection[str], held: Mapping[str, Collection[str]]
    ) -> tuple[str, float] | None:
        """Return the model that a worker loads because a request for it has a slot there, and when it is ready.

        No report says so: parts of the model are on their way, and the others are there.
        """
        report, at_s = self.reports[name], self._reported_s[name]
        for model in running:
            sizes = self.described.needs[model].sizes if model in known else {}
            coming = sizes.keys() & report.coming.keys()
            if coming and sizes.keys() <= report.ready.keys() | report.coming.keys():
                if self._begun.get(name, ("", 0.0))[0] != model:
                    there = held.get(report.node, ())
                    nbytes, cold = (sum([sizes[key] for key in keys]) for keys in (coming, coming - set(there)))
                    took_s = report.fixed_switch_s + nbytes / report.attach_bytes_per_s + cold / report.load_bytes_per_s
                    self._begun[name] = model, at_s + took_s
                return self._begun[name]
        self._begun.pop(name, None)
        return None


def _coarse(seconds: float) -> float:
    """Return a time rounded down by at most a sixteenth, so that an old one changes rarely."""
    mantissa, exponent = math.frexp(seconds)
    return math.ldexp(math.floor(mantissa * 32), exponent - 5)


def failed_everywhere(names: Collection[str], failed: Mapping[str, Mapping[str, Backoff]]) -> dict[str, Backoff]:
    """Return the backoff of each model that all of these workers failed to load, by the first that may try again."""
    if not names or any(name not in failed for name in names):
        return {}
    first, *others = (failed[name] for name in sorted(names))
    found = {}
    for model in first:
        all_ = [first[model], *[one[model] for one in others if model in one]]
        if len(all_) == len(names):
            error = joined_errors([one.error for one in all_], "workers")
            found[model] = Backoff(min(one.retry_in_s for one in all_), error)
    return found
