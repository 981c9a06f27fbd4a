"""The records of a simulation: models, workers, requests and faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from cluster.control.state import STANDARD, Components, SloClass

FAULTS: Final = ("worker_lost", "worker_back", "worker_silent", "worker_lies", "clock_jump")


@dataclass(frozen=True, slots=True)
class SimModel:
    """A model. A request alone takes `service_s` on a worker of speed 1; each further one of its batch adds
    `batch_growth` of that to the time of all (1: batching gains nothing). The first `num_failing_loads` loads fail.
    """

    id: str
    components: Components
    service_s: float = 1.0
    batch_growth: float = 1.0
    slo: SloClass = STANDARD
    num_failing_loads: int = 0

    def batch_service_s(self, batch_size: int) -> float:
        """Return the worker-seconds per request at a batch size."""
        return self.service_s * (1 + self.batch_growth * (batch_size - 1)) / batch_size


@dataclass(frozen=True, slots=True)
class SimWorker:
    """A worker: how many bytes it holds, how many requests it runs at once, how fast it and its tiers are."""

    id: str
    node: str
    budget_bytes: int
    slots: int = 4
    speed: float = 1.0
    fixed_switch_s: float = 0.0
    attach_bytes_per_s: float = 10e9
    load_bytes_per_s: float = 2e9


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request of a trace; `at_s` counts from its start."""

    at_s: float
    model: str
    priority: int = 1


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong, or right again, at a moment.

    A *silent* worker works on, but its heartbeats stop. One that *lies* reports models that it does not have and
    figures that are no numbers. At a *clock jump* all ages of one observation are `amount_s` off.
    """

    at_s: float
    kind: Literal["worker_lost", "worker_back", "worker_silent", "worker_lies", "clock_jump"]
    worker: str = ""
    amount_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster and what is asked of it. Nodes hold the components in `held_at_start` of every model, or none."""

    models: tuple[SimModel, ...]
    workers: tuple[SimWorker, ...]
    requests: tuple[SimRequest, ...]
    faults: tuple[Fault, ...] = ()
    nodes_hold_all: bool = True

    @property
    def duration_s(self) -> float:
        """The time from the start to the last request."""
        return max((request.at_s for request in self.requests), default=0.0)
