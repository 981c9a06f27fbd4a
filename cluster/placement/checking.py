"""The check of the observed state: any input becomes a state that can be planned with. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any, Final

from cluster.placement.state import (
    LOST_S,
    NOTHING,
    STANDARD,
    ClusterState,
    Components,
    ModelState,
    SloClass,
    WorkerState,
)

MAX_IGNORED: Final = 100  # lines of explanation for one state; the rest is counted
_HUGE: Final = 1e15  # no time or rate of a cluster is above it
_INF: Final = float("inf")
_NO_STATE: Final = ClusterState()


def usable_state(
    models: Collection[ModelState],
    workers: Collection[WorkerState],
    held: Mapping[str, Collection[str]] | None = None,
    is_frozen: bool = False,
    before: ClusterState = _NO_STATE,
) -> ClusterState:
    """Return a state that can be planned with. Never raises, whatever the records contain.

    Records that are identical objects in the state `before` are not checked again.

    An impossible figure (NaN, negative, infinite, of a wrong type) becomes its default. A model without an id
    or components, and a worker without an id or a budget, are left out, as are workers that are silent for `LOST_S`.
    A worker is believed to have a model ready only if it has the model's components.
    """
    notes = _Notes()
    checked_models: dict[str, ModelState] = {}
    same_models = {id(model) for model in before.models.values()}
    same_workers = {id(worker) for worker in before.workers.values()}
    has_changed = False  # what models are made of
    for model in models:
        if id(model) in same_models and model.id not in checked_models:
            checked_models[model.id] = model
            continue
        kept = model if _is_sound_model(model, checked_models) else _mended_model(model, checked_models, notes)
        if kept is not None:
            checked_models[kept.id] = kept
            known = before.models.get(kept.id)
            has_changed |= known is None or known.components is not kept.components
    has_changed |= len(checked_models) != len(before.models)
    checked_workers: dict[str, WorkerState] = {}
    for worker in workers:
        is_same = id(worker) in same_workers and worker.id not in checked_workers
        if is_same and (not has_changed or _is_consistent(worker, checked_models)):
            checked_workers[worker.id] = worker
            continue
        usable = _checked_worker(worker, checked_workers, checked_models, notes)
        if usable is not None:
            checked_workers[usable.id] = usable
    nodes: dict[str, Collection[str]] = {}
    for node, keys in _items(held):
        if isinstance(keys, frozenset | set | dict | tuple | list) and isinstance(node, str):
            nodes[node] = keys
        else:
            notes.add(f"node {node!r}: its components are {type(keys).__name__}; it is taken to hold nothing")
    return ClusterState(checked_models, checked_workers, nodes, is_frozen is True, notes.lines())


def _is_sound_model(model: ModelState, others: Mapping[str, ModelState]) -> bool:
    """Return whether nothing needs mending, as in nearly all models: one expression, since there are many."""
    try:
        return (
            0.0 <= model.oldest_age_s < _HUGE
            and 0.0 <= model.rate_short < _HUGE
            and 0.0 <= model.rate_long < _HUGE
            and 1e-9 < model.service_s < _HUGE
            and 0.0 <= model.latency_s < _HUGE
            and 0.0 <= model.retry_in_s < _HUGE
            and 0.0 <= model.unstarted_s < _HUGE
            and model.slack_s > -_HUGE
            and type(model.waiting) is int
            and 0 <= model.waiting < _HUGE
            and type(model.components) is Components
            and type(model.slo) is SloClass
            and 0.0 < model.slo.weight < _HUGE
            and 0.0 < model.slo.target_s < _HUGE
            and type(model.id) is str
            and model.id not in others
        )
    except Exception:  # whatever a broken record does when it is looked at
        return False


def _checked_worker(
    worker: WorkerState, others: Mapping[str, WorkerState], models: Mapping[str, ModelState], notes: _Notes
) -> WorkerState | None:
    try:
        is_sound = (
            0.0 <= worker.age_s <= LOST_S
            and type(worker.budget_bytes) is int
            and worker.budget_bytes >= 0
            and type(worker.resident) is Components
            and type(worker.slots) is int
            and 0 < worker.slots < _HUGE
            and 0.0 <= worker.ready_in_s < _HUGE
            and 0.0 <= worker.idle_s < _HUGE
            and 0.0 <= worker.fixed_switch_s < _HUGE
            and 1.0 <= worker.attach_bytes_per_s < _HUGE
            and 1.0 <= worker.load_bytes_per_s < _HUGE
            and type(worker.models) is tuple
            and type(worker.running) is dict
            and type(worker.leased) is frozenset
            and type(worker.pinned) is frozenset
            and type(worker.unable) is frozenset
            and type(worker.node) is str
            and type(worker.id) is str
            and worker.id not in others
            and _is_consistent(worker, models)
        )
    except Exception:  # whatever a broken record does when it is looked at
        is_sound = False
    return worker if is_sound else _mended_worker(worker, others, models, notes)


def _is_consistent(worker: WorkerState, models: Mapping[str, ModelState]) -> bool:
    """Return whether the worker names only known models, and has all components of its ready ones."""
    resident = worker.resident.sizes.keys()
    for id_ in worker.models:
        if id_ not in models or not models[id_].components.sizes.keys() <= resident:
            return False
    for id_, count in worker.running.items():
        if type(count) is not int or count < 0 or id_ not in models:
            return False
    return (worker.switching_to is None or worker.switching_to in models) and (
        worker.reserved_for is None or worker.reserved_for in models
    )


class _Notes:
    """Sentences about ignored figures, of which the first `MAX_IGNORED` are kept."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._num_more = 0

    def add(self, line: str) -> None:
        if len(self._lines) < MAX_IGNORED:
            self._lines.append(line)
        else:
            self._num_more += 1

    def lines(self) -> tuple[str, ...]:
        more = (f"and {self._num_more} more",) if self._num_more else ()
        return (*self._lines, *more)


# The least and greatest value of a figure; a value outside becomes the field's default.
_MODEL_BOUNDS: Final = {
    "waiting": (0, _HUGE),
    "oldest_age_s": (0.0, _HUGE),
    "slack_s": (-_HUGE, _INF),
    "rate_short": (0.0, _HUGE),
    "rate_long": (0.0, _HUGE),
    "service_s": (1e-8, _HUGE),
    "latency_s": (0.0, _HUGE),
    "retry_in_s": (0.0, _HUGE),
    "unstarted_s": (0.0, _HUGE),
}
_WORKER_BOUNDS: Final = {
    "slots": (1, _HUGE),
    "ready_in_s": (0.0, _HUGE),
    "idle_s": (0.0, _HUGE),
    "fixed_switch_s": (0.0, _HUGE),
    "attach_bytes_per_s": (1.0, _HUGE),
    "load_bytes_per_s": (1.0, _HUGE),
}
_WHOLE: Final = {"waiting", "slots"}


def _mended_model(model: object, others: Mapping[str, ModelState], notes: _Notes) -> ModelState | None:
    if not isinstance(model, ModelState) or not isinstance(model.id, str):
        notes.add(f"a model record is {_brief(model)}; it is left out")
        return None
    if model.id in others:
        notes.add(f"model {model.id}: reported twice; the first report counts")
        return None
    components: object = model.components
    if not isinstance(components, Components):
        notes.add(f"model {model.id}: its components are {_brief(model.components)}; the model is left out")
        return None
    changes = _mended_figures(f"model {model.id}", model, _MODEL_BOUNDS, notes)
    slo: object = model.slo
    if not (isinstance(slo, SloClass) and _is_within(slo.weight, 1e-9, _HUGE) and _is_within(slo.target_s, 0, _HUGE)):
        notes.add(f"model {model.id}: its service class is {_brief(slo)}; taken as {STANDARD.name}")
        changes["slo"] = STANDARD
    return replace(model, **changes)


def _mended_worker(
    worker: object, others: Mapping[str, WorkerState], models: Mapping[str, ModelState], notes: _Notes
) -> WorkerState | None:
    if not isinstance(worker, WorkerState) or not isinstance(worker.id, str) or not isinstance(worker.node, str):
        notes.add(f"a worker record is {_brief(worker)}; it is left out")
        return None
    name = f"worker {worker.id}"
    if worker.id in others:
        notes.add(f"{name}: reported twice; the first report counts")
        return None
    if type(worker.budget_bytes) is not int or worker.budget_bytes < 0:
        notes.add(f"{name}: its budget is {_brief(worker.budget_bytes)} bytes; the worker is left out")
        return None
    if not _is_within(worker.age_s, 0.0, LOST_S):
        notes.add(f"{name}: its last heartbeat is {_brief(worker.age_s)} s old; it is counted as gone")
        return None
    changes = _mended_figures(name, worker, _WORKER_BOUNDS, notes)
    resident: Any = worker.resident
    if not isinstance(resident, Components):
        notes.add(f"{name}: what is resident is {_brief(resident)}; taken as nothing")
        resident = changes["resident"] = NOTHING
    changes["models"] = _believed_ready(name, worker, resident, models, notes)
    changes["running"] = _believed_running(name, worker, models, notes)
    for key in ("leased", "pinned", "unable"):
        value = getattr(worker, key)
        names = value if isinstance(value, tuple | list | set | frozenset) else ()
        changes[key] = frozenset(each for each in names if isinstance(each, str))
    for key in ("switching_to", "reserved_for"):
        value = getattr(worker, key)
        if value is not None and not (isinstance(value, str) and value in models):
            notes.add(f"{name}: {key} is {_brief(value)}, which is no known model; ignored")
            changes[key] = None
    return replace(worker, **changes)


def _believed_ready(
    name: str, worker: WorkerState, resident: Components, models: Mapping[str, ModelState], notes: _Notes
) -> tuple[str, ...]:
    ready = []
    for id_ in worker.models if isinstance(worker.models, tuple | list | set | frozenset) else ():
        if not isinstance(id_, str) or id_ not in models:
            notes.add(f"{name}: it has {_brief(id_)}, which is no known model; ignored")
        elif models[id_].components.sizes.keys() <= resident.sizes.keys():
            ready.append(id_)
        else:
            notes.add(f"{name}: it calls {id_} ready but lacks components of it; not believed")
    return tuple(ready)


def _believed_running(
    name: str, worker: WorkerState, models: Mapping[str, ModelState], notes: _Notes
) -> dict[str, int]:
    running = {}
    for id_, count in _items(worker.running):
        if isinstance(id_, str) and id_ in models and type(count) is int and count >= 0:
            running[id_] = count
        else:
            notes.add(f"{name}: it runs {_brief(count)} requests of {_brief(id_)}; ignored")
    return running


def _mended_figures(
    name: str, record: ModelState | WorkerState, bounds: Mapping[str, tuple[float, float]], notes: _Notes
) -> dict[str, Any]:
    defaults = {each.name: each.default for each in fields(record)}
    changes = {}
    for key, (low, high) in bounds.items():
        value = getattr(record, key)
        if not _is_within(value, low, high) or (key in _WHOLE and type(value) is not int):
            notes.add(f"{name}: {key} is {_brief(value)}; taken as {defaults[key]}")
            changes[key] = defaults[key]
    return changes


def _is_within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _items(mapping: Any) -> list[tuple[Any, Any]]:
    return list(mapping.items()) if isinstance(mapping, Mapping) else []


def _brief(value: Any) -> str:
    """Return the value cut to fit a line, even if its `repr` fails."""
    try:
        return repr(value)[:60]
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"
