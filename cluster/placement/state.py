"""The state of the cluster as the controller's decisions see it: plain records. Pure.

`Observations` makes one `ModelState` per model and one `WorkerState` per worker. Times are ages and remaining times in
seconds, never points in time, so a clock that jumps cannot reverse anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from cluster.admission.records import OnDemandSwitch

LOST_S: Final = 5.0  # a worker silent for this long counts as gone
MAX_WAIT_TARGETS: Final = 2.0  # of its class: the longest time without a start of a model, whatever else waits
STALE_S: Final = 2.0  # a worker silent for this long gets no orders
_INF: Final = float("inf")


@dataclass(frozen=True, slots=True)
class SloClass:
    """A class of service: the target latency of its requests, and the weight of one second of theirs."""

    name: str = "standard"
    target_s: float = 60.0
    weight: float = 1.0


INTERACTIVE: Final = SloClass("interactive", 15.0, 4.0)
STANDARD: Final = SloClass()
BATCH: Final = SloClass("batch", 600.0, 0.25)


@dataclass(frozen=True, slots=True)
class Components:
    """Bytes by component key (`Component.module_key`): two models that share a component name it alike.

    Checked once, when it is made, because the same few are used in every tick. Raises ValueError for sizes that are
    no whole numbers of bytes.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        for key, nbytes in self.sizes.items():
            if type(nbytes) is not int or nbytes < 0 or not isinstance(key, str):
                raise ValueError(f"component {key!r} has {nbytes!r} bytes; expected a whole number from 0 on")
        object.__setattr__(self, "total_bytes", sum(self.sizes.values()))


NOTHING: Final = Components()


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model: its components, its waiting requests, and their rate of arrival.

    `service_s` is the worker seconds of a request, at the batch size that the model runs at, `latency_s`
    the time that it spends there, 0 if not known. `slack_s` is the time until the earliest deadline among the
    waiting requests. `unstarted_s` is how long requests have waited since the last start.
    `retry_in_s` is above 0 while it is backed off because no worker could load it. Rates are requests per second over
    seconds (`short`) and over minutes (`long`).
    """

    id: str
    components: Components
    waiting: int = 0
    oldest_age_s: float = 0.0
    slack_s: float = _INF
    rate_short: float = 0.0
    rate_long: float = 0.0
    service_s: float = 1.0
    latency_s: float = 0.0
    retry_in_s: float = 0.0
    slo: SloClass = STANDARD
    unstarted_s: float = 0.0

    @property
    def rate(self) -> float:
        """The greater of both rates: a burst counts at once and decays slowly."""
        return self.rate_short if self.rate_short > self.rate_long else self.rate_long


@dataclass(frozen=True, slots=True)
class UsualSwitch:
    """The usual seconds of switches."""

    fixed_s: float
    attach_bytes_per_s: float

    def seconds(self, model: ModelState) -> float:
        """Return the seconds of a switch to the model from a node's memory."""
        return self.fixed_s + model.components.total_bytes / self.attach_bytes_per_s


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker as of its last heartbeat, `age_s` ago, 0 while that is fresh.

    `models` are attached and ready. `resident` has all components that occupy the budget, also of models not ready.
    `running` counts requests by model; running models are leased, as are `leased` components. `reserved_for`: the model
    that it drains for. `pinned` models were put here by hand, `unable` ones it could not load a moment ago. Costs are
    measured: `fixed_switch_s` of any switch, and bytes per second from the node's memory to the worker, and from
    storage or peers to the node.
    """

    id: str
    node: str
    budget_bytes: int
    resident: Components = NOTHING
    models: tuple[str, ...] = ()
    running: Mapping[str, int] = field(default_factory=dict)
    slots: int = 1
    leased: frozenset[str] = frozenset()
    switching_to: str | None = None
    ready_in_s: float = 0.0
    reserved_for: str | None = None
    pinned: frozenset[str] = frozenset()
    unable: frozenset[str] = frozenset()
    is_draining: bool = False
    is_frozen: bool = False
    idle_s: float = 0.0
    age_s: float = 0.0
    fixed_switch_s: float = 0.0
    attach_bytes_per_s: float = 10e9
    load_bytes_per_s: float = 2e9

    @property
    def is_stale(self) -> bool:
        """Return whether the worker's figures are too old to give it orders."""
        return self.age_s > STALE_S


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The whole input of the decisions. `held` has the component keys in the memory of each node."""

    models: Mapping[str, ModelState] = field(default_factory=dict)
    workers: Mapping[str, WorkerState] = field(default_factory=dict)
    held: Mapping[str, Collection[str]] = field(default_factory=dict)
    is_frozen: bool = False
    ignored: tuple[str, ...] = ()

    def switch_s(self, model: ModelState, worker: WorkerState) -> float:
        """Return the seconds for the worker to get the model ready, by the bytes that it lacks at each tier."""
        resident, held = worker.resident.sizes, self.held.get(worker.node, ())
        missing = cold = 0
        for key, nbytes in model.components.sizes.items():
            if key not in resident:
                missing += nbytes
                if key not in held:
                    cold += nbytes
        return worker.fixed_switch_s + missing / worker.attach_bytes_per_s + cold / worker.load_bytes_per_s

    def bytes_together(self, worker: WorkerState, models: Iterable[str]) -> int:
        """Return the bytes of the models and of leased components on the worker. Shared components count once."""
        sizes = {key: worker.resident.sizes.get(key, 0) for key in worker.leased}
        for id_ in models:
            sizes.update(self.models[id_].components.sizes)
        return sum(sizes.values())

    def num_free_slots(self, model: str, workers: Iterable[str]) -> int:
        """Return the number of requests for the model that could start at once on the workers with it ready."""
        ready = [worker for id_ in workers if model in (worker := self.workers[id_]).models]
        return sum([max(0, worker.slots - sum(worker.running.values())) for worker in ready])

    def queue_s(self) -> float:
        """Return the seconds that all workers together take for the waiting requests."""
        return sum([model.waiting * model.service_s for model in self.models.values()]) / max(len(self.workers), 1e-9)


@dataclass(frozen=True, slots=True)
class Decision:
    """An order to a worker, and why.

    *switch*: evict the models in `evict`, and load `model`. *drain*: start no more requests of the models in
    `evict`, because `model` comes next. *prefetch*: get the bytes that the node lacks into its memory. *evict*: evict
    `model`. All can be carried out twice. `switch_s` is the estimated duration.
    """

    action: Literal["switch", "drain", "prefetch", "evict"]
    worker: str
    model: str
    reason: str
    evict: tuple[str, ...] = ()
    switch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SwitchPlan:
    """Orders, and the workers that serve each model or get ready for it. `notes` tells the needs that were not met.

    Models in `on_demand` need no order: they may start on each of the workers named, because a switch takes
    `longest_on_demand_s` at most.
    """

    decisions: tuple[Decision, ...] = ()
    planned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    on_demand: Mapping[str, Mapping[str, OnDemandSwitch]] = field(default_factory=dict)
    longest_on_demand_s: float = 0.0
