"""Scaling over drawn days, beside a schedule that knows when each request comes."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field

import pytest

from cluster.admission.service_times import ArrivalRate
from cluster.placement.autoscaling import Scaling, ScalingMemory, target_replicas
from cluster.placement.state import ClusterState, Components, ModelState, WorkerState
from configs.admission import ScalingConfig

PARTS, START_S, TICK_S = Components({"m": 10}), 30.0, 1.0


@pytest.mark.parametrize("service_s", [1.0, 5.0, 10.0, 30.0, 120.0, 300.0])
def test_one_running_request_of_however_slow_a_model_wants_no_other_worker(service_s: float) -> None:
    model = ModelState("m", PARTS, rate_short=1 / 5, rate_long=1 / 60, service_s=service_s)
    state = ClusterState({"m": model}, {"w0": WorkerState("w0", "n", 100, PARTS, ("m",), {"m": 1})})
    policy = ScalingConfig(min_workers=1, max_workers=100)
    assert target_replicas(state, policy, ScalingMemory(), 1, 0.0).target == 1


@dataclass
class _Day:
    """Workers of one slot each, which come `START_S` after they were asked for. Serve stops the newest that is idle."""

    arrivals_s: list[float]
    service_s: float
    scaling: Scaling
    workers: dict[str, float] = field(default_factory=lambda: {"w0": -1e6})
    ends_s: dict[str, float] = field(default_factory=dict)
    coming_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    num_started: int = 0
    num_changes: int = 0
    worker_s: float = 0.0

    def run(self) -> None:
        rate, now_s, place = ArrivalRate(), 0.0, 0
        waiting: list[float] = []
        while place < len(self.arrivals_s) or waiting or self.ends_s:
            now_s += TICK_S
            while place < len(self.arrivals_s) and self.arrivals_s[place] <= now_s:
                waiting.append(self.arrivals_s[place])
                rate.note_arrival(self.arrivals_s[place])
                place += 1
            self.ends_s = {name: end_s for name, end_s in self.ends_s.items() if end_s > now_s}
            self._follow_serve(now_s)
            for name in [name for name in self.workers if name not in self.ends_s]:
                if waiting and name not in self.scaling.draining:
                    self.waits_s.append(now_s - waiting.pop(0))
                    self.ends_s[name] = now_s + self.service_s
            self._scale(len(waiting), rate.per_s(now_s), now_s)
            self.worker_s += TICK_S * (len(self.workers) + len(self.coming_s))

    def _follow_serve(self, now_s: float) -> None:
        while len(self.workers) + len(self.coming_s) < self.scaling.target:
            self.coming_s.append(now_s + START_S)
            self.num_started += 1
        while len(self.workers) + len(self.coming_s) > self.scaling.target:
            if self.coming_s:
                self.coming_s.pop()
            else:
                newest = max(self.workers, key=self.workers.__getitem__)
                del self.workers[newest]
                self.ends_s.pop(newest, None)
        for at_s in [at_s for at_s in self.coming_s if at_s <= now_s]:
            self.coming_s.remove(at_s)
            self.workers[f"w{now_s:.0f}-{len(self.workers)}"] = now_s

    def _scale(self, num_waiting: int, rates: tuple[float, float], now_s: float) -> None:
        before = self.scaling.target
        model = ModelState("m", PARTS, num_waiting, 0.0, math.inf, *rates, self.service_s)
        drains = self.scaling.draining
        workers = {
            name: WorkerState(
                name, "n", 100, PARTS, ("m",), {"m": 1} if name in self.ends_s else {}, is_draining=name in drains
            )
            for name in self.workers
        }
        self.scaling.assign(sorted(workers, key=self.workers.__getitem__))
        self.scaling.follow(
            ClusterState({"m": model}, workers), {name: now_s - at_s for name, at_s in self.workers.items()}, now_s
        )
        self.num_changes += self.scaling.target != before


def _arrivals_s(kind: str, service_s: float, load: float, end_s: float, rng: random.Random) -> list[float]:
    """Return drawn arrivals that keep `load` workers busy in the mean."""
    found, now_s, most = [], 0.0, 3.0

    def part(at_s: float) -> float:
        if kind == "waves":
            return 1 + 0.9 * math.sin(2 * math.pi * at_s / (end_s / 3))
        return 3.0 if kind == "spikes" and at_s % (end_s / 4) < end_s / 40 else 0.7 if kind == "spikes" else 1.0

    while now_s < end_s:
        now_s += rng.expovariate(most * load / service_s)
        if rng.random() * most < part(now_s):
            found.append(now_s)
    return found


def _clairvoyant(arrivals_s: list[float], service_s: float, spare_s: float) -> tuple[float, int]:
    """Return the worker seconds and the changes of a schedule that starts each request as it comes.

    It knows when a worker is wanted next, and keeps it where that is sooner than `spare_s`; one stays always.
    """
    idle: list[float] = []  # since when, the last one on top
    busy: list[float] = []
    worker_s, changes, num = 0.0, 0, 1
    idle.append(0.0)
    for at_s in arrivals_s:
        while busy and busy[0] <= at_s:
            idle.append(heapq.heappop(busy))
        if idle:
            since_s = idle.pop()
            if at_s - since_s > spare_s and num > 1:
                changes += 2
                worker_s += START_S
            else:
                worker_s += at_s - since_s
        else:
            num, changes = num + 1, changes + 1
            worker_s += START_S
        worker_s += service_s
        heapq.heappush(busy, at_s + service_s)
    return worker_s, changes


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("kind", "service_s", "load"),
    [("steady", 2.0, 6.0), ("waves", 2.0, 6.0), ("spikes", 2.0, 4.0), ("steady", 120.0, 0.3), ("steady", 20.0, 3.0)],
)
@pytest.mark.parametrize("seed", range(2))
def test_a_day_costs_little_more_than_for_one_who_knows_it(kind: str, service_s: float, load: float, seed: int) -> None:
    end_s = 6 * 3600.0 if service_s > 100 else 3600.0
    arrivals_s = _arrivals_s(kind, service_s, load, end_s, random.Random(seed))
    policy = ScalingConfig(min_workers=1, max_workers=40, spare_workers=0)
    day = _Day(arrivals_s, service_s, Scaling(policy, 1))
    day.run()
    best_s, changes = _clairvoyant(arrivals_s, service_s, 60.0)
    assert day.worker_s <= 1.2 * max(best_s, end_s)
    assert sum(wait_s > 60.0 for wait_s in day.waits_s) <= 0.02 * len(arrivals_s)
    assert day.num_changes <= 2 * changes
    assert day.num_started <= max(changes, 2)
