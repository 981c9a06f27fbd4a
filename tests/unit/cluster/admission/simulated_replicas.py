"""Replicas on a virtual clock: what runs on one shares its speed, as rows of a batch do."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, Refusal, Refused, Started

POOL = "worker"


def ask(tenant: str = "default", priority: int = 2, **fields: Any) -> Demand:
    """Return a request for a whole replica, without a deadline but for what `fields` say."""
    values: dict[str, Any] = {"pool": POOL, "model": "m", "work": 1.0, "share": 1.0, "deadline_s": math.inf}
    return Demand(**(values | {"tenant": tenant, "priority": priority} | fields))


@dataclass
class Served:
    """A request that was answered."""

    ask: Demand
    arrived_s: float
    started_s: float
    ended_s: float


@dataclass
class _Running:
    ask: Demand
    started_s: float
    left_s: float  # replica seconds
    done_s: float = 0.0


@dataclass
class Simulation:
    """`seconds_of` is what a request really takes of a whole replica, which the queue has to find out."""

    queue: AdmissionQueue
    num_replicas: int
    seconds_of: Callable[[Demand], float]
    now_s: float = 0.0
    served: list[Served] = field(default_factory=list)
    refused: list[tuple[Demand, float, Refusal]] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=dict)  # by tenant
    on_refused: Callable[[Demand, Refusal], None] | None = None

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._arrivals: list[tuple[float, int, Callable[[float], Demand]]] = []
        self._asks: dict[int, tuple[Demand, float]] = {}
        self._replicas: dict[str, dict[int, _Running]] = {f"r{n}": {} for n in range(self.num_replicas)}
        self.queue.set_replicas(POOL, list(self._replicas), 0.0)

    def at(self, when_s: float, make: Callable[[float], Demand]) -> None:
        """Let a request come at a time; `make` gets that time."""
        heapq.heappush(self._arrivals, (when_s, next(self._numbers), make))

    def run_until(self, end_s: float = math.inf) -> None:
        """Run until nothing is left to do, or `end_s`."""
        while True:
            next_s = min(
                self._arrivals[0][0] if self._arrivals else math.inf, self._next_end_s(), self.queue.look_again_s()
            )
            idle = not self._arrivals and not any(self._replicas.values()) and not self.queue.num_waiting
            if next_s > end_s or idle:
                self._advance(min(end_s, self.now_s if idle else end_s))
                return
            self._advance(max(next_s, self.now_s))
            self._end_done()
            while self._arrivals and self._arrivals[0][0] <= self.now_s:
                _, number, make = heapq.heappop(self._arrivals)
                ask = make(self.now_s)
                self._asks[number] = ask, self.now_s
                self.queue.submit(number, ask, self.now_s)
            for event in self.queue.pump(self.now_s):
                self._happen(event)

    def _happen(self, event: Started | Refused) -> None:
        ask, _ = self._asks[event.ticket]
        if isinstance(event, Refused):
            self.refused.append((ask, self.now_s, event.refusal))
            if self.on_refused:
                self.on_refused(ask, event.refusal)
        else:
            self._replicas[event.replica][event.ticket] = _Running(ask, self.now_s, self.seconds_of(ask))

    def _next_end_s(self) -> float:
        ends = []
        for running in self._replicas.values():
            used = sum(run.ask.share for run in running.values())
            ends += [self.now_s + run.left_s * used / run.ask.share for run in running.values()]
        return min(ends, default=math.inf)

    def _advance(self, until_s: float) -> None:
        for running in self._replicas.values():
            used = sum(run.ask.share for run in running.values())
            for run in running.values():
                had_s = (until_s - self.now_s) * run.ask.share / used
                run.left_s -= had_s
                self.busy_s[run.ask.tenant] = self.busy_s.get(run.ask.tenant, 0.0) + had_s
        self.now_s = until_s

    def _end_done(self) -> None:
        for running in self._replicas.values():
            for ticket, run in list(running.items()):
                if run.left_s <= 1e-9:
                    del running[ticket]
                    ask, arrived_s = self._asks[ticket]
                    self.served.append(Served(ask, arrived_s, run.started_s, self.now_s))
                    self.queue.leave(ticket, self.now_s, is_answered=True)
