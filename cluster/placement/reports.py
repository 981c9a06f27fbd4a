"""The messages between the controller and its reporters: workers and admission queues. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.admission.outcomes import EndedRequests
from cluster.admission.records import Placement, PoolClaims, PoolPart
from cluster.process.processes import ProcessMark
from configs.admission import AdmissionConfig


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """The components of a model's version on a worker, by key: bytes of the budget, and the extents of each."""

    version: str
    sizes: Mapping[str, int]
    extents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A version of a model that a worker failed to load, `num` times in a row, the last time `age_s` ago."""

    version: str
    num: int
    age_s: float
    error: str


@dataclass(frozen=True, slots=True)
class OrderOutcome:
    """The end of an order: its id, seconds from start to end, and the reason of a failure, "" for success."""

    order: str
    took_s: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker at one moment. Component keys are those of `ModelNeed`.

    `ready` and `coming` components occupy the budget, in bytes; `leased` ones are in use, `pinned` ones stay by hand.
    `taken` are the ids of the last begun orders, `outcomes` the ends of some. `needs` answers the last
    question. `budget_bytes` is the limit of the sum of its components, each counted whole. `up_s` is the age
    of the worker.
    """

    pool: str
    node: str
    kinds: frozenset[str]
    budget_bytes: int
    ready: Mapping[str, int] = field(default_factory=dict)
    coming: Mapping[str, int] = field(default_factory=dict)
    leased: frozenset[str] = frozenset()
    pinned: frozenset[str] = frozenset()
    slots: int = 1
    switching_to: str | None = None
    ready_in_s: float = 0.0
    fixed_switch_s: float = 0.0
    attach_bytes_per_s: float = 10e9
    load_bytes_per_s: float = 2e9
    taken: tuple[str, ...] = ()
    outcomes: tuple[OrderOutcome, ...] = ()
    failures: Mapping[str, LoadFailure] = field(default_factory=dict)
    needs: Mapping[str, ModelNeed] = field(default_factory=dict)
    up_s: float = 0.0

    @property
    def is_at_rest(self) -> bool:
        """Return whether nothing runs or gets ready there."""
        return not (self.leased or self.coming or self.switching_to)

    @property
    def lasting(self) -> WorkerReport:
        """The report without the fields that change with time alone."""
        failures = {model: replace(failure, age_s=0.0) for model, failure in self.failures.items()}
        return replace(self, up_s=0.0, failures=failures)


@dataclass(frozen=True, slots=True)
class Order:
    """An order to a worker, as in `Decision`. An order with a known id changes nothing."""

    id: str
    action: Literal["switch", "prefetch", "evict"]
    model: str
    evict: tuple[str, ...] = ()
    switch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders to one worker, and the models (id, version) whose needs it should report.

    Running images of the models to `migrate` can go on in another worker at once.
    """

    orders: tuple[Order, ...] = ()
    describe: tuple[tuple[str, str], ...] = ()
    migrate: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """The latest for one reporter: a worker's orders, a queue's placement, None before anything was decided.

    Its reports should be at most `tick_s` apart.
    """

    revision: str
    content: Orders | Placement | None
    tick_s: float


@dataclass(frozen=True, slots=True)
class SlotReport:
    """An ingress at one moment, its `number`th report. `revision` is the last split that it has applied of `session`.

    `requests_per_s` is the recent rate. `settings` is the revision of its settings. `ended` are requests that
    have ended, from the number that the last answer asked for.
    """

    number: int
    session: str
    revision: int
    process: ProcessMark
    pools: Mapping[str, PoolClaims]
    requests_per_s: float = 0.0
    max_overtakes: int = 0
    settings: str = ""
    ended: EndedRequests | None = None

    @property
    def is_at_rest(self) -> bool:
        """Return whether nothing waits or runs, and nothing has ended since the last report."""
        return self.ended is None and not any(claims.running or claims.waiting for claims in self.pools.values())

    @property
    def lasting(self) -> SlotReport:
        """The report without the fields that change with time alone: rates, which decay."""
        pools = {name: replace(claims, share_per_s=0.0) for name, claims in self.pools.items()}
        return replace(self, number=0, pools=pools, requests_per_s=0.0)


@dataclass(frozen=True, slots=True)
class SlotAnswer:
    """The answer to a report: the ingress's session. In another one than before it has no slots, unless it `keeps`
    them: then its controller is new, and learns of them by the next report.

    `next_ended` is the number of the next ended request that the controller lacks.
    """

    session: str
    keeps: bool = False
    next_ended: int | None = None


@dataclass(frozen=True, slots=True)
class SlotSplit:
    """The slots of one ingress by pool, none where not named. `bound_part` is its part of the bounds."""

    session: str
    revision: int
    pools: Mapping[str, PoolPart]
    bound_part: float


@dataclass(frozen=True, slots=True)
class SlotUpdate:
    """The latest for one ingress. `config` has the settings where the ingress does not know the revision `settings`."""

    split: SlotSplit | None
    settings: str
    config: AdmissionConfig | None = None
