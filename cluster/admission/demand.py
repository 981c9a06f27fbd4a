"""A request as far as admission goes: what it asks for, and that it waits. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.admission.service_times import WORK_BOUNDS


@dataclass(frozen=True, slots=True)
class Demand:
    """A request, as far as admission goes.

    `work` is in a unit of its `model` (pixels x steps, tokens). `share` is the part of a replica that it takes while
    it runs, above 0 and at most 1. `deadline_s` is a time of the queue's clock. `is_inner`: it is a part of a request
    that was admitted before, and no bound may refuse it. Raises ValueError for work or a share that no statistic can
    count. `version` is the model's: what is known of replicas that could not load it holds for that one.
    """

    pool: str
    model: str
    work: float
    share: float
    priority: int
    tenant: str
    deadline_s: float
    is_inner: bool = False
    version: str = ""

    def __post_init__(self) -> None:
        if not WORK_BOUNDS[0] <= self.work <= WORK_BOUNDS[1]:
            raise ValueError(f"work is {self.work!r}; expected a number from {WORK_BOUNDS[0]:g} to {WORK_BOUNDS[1]:g}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share!r}; expected a number above 0, at most 1")


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits since `arrived_s`, the `number`th that came. `cost_s`: replica seconds that it may take."""

    ticket: int
    demand: Demand
    number: int
    arrived_s: float
    cost_s: float
