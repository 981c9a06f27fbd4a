"""Messages between the controller and those that report to it: workers and admission queues. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cluster.control.admission_records import Placement


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """The components of a model's version on a worker, by key: bytes of the budget, and extents that hold each."""

    version: str
    sizes: Mapping[str, int]
    extents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A version of a model that a worker could not get ready: `num` times in a row, the last time `age_s` ago."""

    version: str
    num: int
    age_s: float
    error: str


@dataclass(frozen=True, slots=True)
class OrderOutcome:
    """The end of an order: its id, seconds from start to end, and why it failed, "" where it did not."""

    order: str
    took_s: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker at one moment. Component keys are those of `ModelNeed`.

    `ready` and `coming` components occupy the budget, in bytes; `leased` ones are in use, `pinned` ones stay by hand.
    `taken` are ids of the last orders that it has begun, `outcomes` the ends of some. `needs` answers the last
    question. `budget_bytes` is what the bytes of its components, each counted whole, may add up to. `up_s` is how long
    it has been there.
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


@dataclass(frozen=True, slots=True)
class Order:
    """An order to a worker, as `Decision` has it; one with an id that the worker knows changes nothing."""

    id: str
    action: Literal["switch", "prefetch", "evict"]
    model: str
    evict: tuple[str, ...] = ()
    switch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders to one worker, and the models (id, version) whose needs it should tell.

    Running images of the models to `hand_over` can go on in another worker at once.
    """

    orders: tuple[Order, ...] = ()
    describe: tuple[tuple[str, str], ...] = ()
    hand_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class News:
    """The latest for one reporter: a worker's orders, a queue's placement, None before anything was decided."""

    revision: str
    content: Orders | Placement | None = None
