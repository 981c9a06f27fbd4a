"""Overload of replicas that merge, counted as `infra.bench door` counts it, on a virtual clock."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from unit.cluster.admission.merging_replicas import Call, Kind, MergingCluster, run_closed, run_open

from infra.bench.door_figures import draw_arrivals_s, overload_figures, requests_per_s, work_rate

DEADLINE_S = 3.0
LOAD_S = 16.0
CALLERS = 64
# Bounds hold in the mean: of one seed in twenty, some figure is beyond its bound, by the luck of a few arrivals.
SEEDS = range(4)
# About the demo's models: a chat, and two of images; a chat may end long before its limit.
KINDS = (
    Kind("chat", 0.002, 0.0006, 0.004, 1 / 16, (4, 8, 32), (0.4, 1.0)),
    Kind("flux", 0.008, 0.0035, 0.03, 1 / 16, (4, 12, 24)),
    Kind("sdxl", 0.010, 0.005, 0.03, 1 / 16, (4, 12, 24)),
)

# Slower ones: as many as the replica takes together would all be late.
SLOW_KINDS = (
    Kind("chat", 0.004, 0.0008, 0.01, 1 / 64, (16,), (0.3, 0.5)),
    Kind("flux", 0.015, 0.0075, 0.15, 1 / 16, (16,)),
    Kind("sdxl", 0.020, 0.012, 0.15, 1 / 16, (16,)),
)


class _Measured:
    """A cluster whose capacity is known: what a request of each kind costs, and the most that is done together."""

    def __init__(self, seed: int, kinds: Sequence[Kind] = KINDS) -> None:
        self.cluster = MergingCluster(seed)
        self.costs_s: dict[str, float] = {}
        self._kinds = kinds
        for kind in kinds:
            rate = requests_per_s(run_closed(self.cluster, [self.cluster.draw(kind) for _ in range(48)], CALLERS))
            self.costs_s |= {
                f"{kind.model} {steps}": steps / statistics.mean(kind.steps) / rate for steps in kind.steps
            }
        begin_s = self.cluster.now_s
        outcomes = run_closed(self.cluster, self.mix(600), CALLERS)
        end_s = max(one.done_s for one in outcomes)
        self.per_s = len(outcomes) / (end_s - begin_s)
        self.peak = work_rate(outcomes, self.costs_s, begin_s, end_s)

    def mix(self, number: int, timeout_s: float = float("inf")) -> list[Call]:
        kinds = [self._kinds[n % len(self._kinds)] for n in range(number)]
        self.cluster.rng.shuffle(kinds)
        calls = [self.cluster.draw(kind) for kind in kinds]
        for call in calls:
            call.timeout_s = timeout_s
        return calls


@cache
def measured(seed: int) -> _Measured:
    return _Measured(seed)


@pytest.mark.drawn
@pytest.mark.parametrize("overload", [1.5, 3.0, 10.0])
def test_an_overload_costs_no_goodput_and_what_is_said_is_true(overload: float) -> None:
    found = [_overloaded(measured(seed), overload) for seed in SEEDS]
    assert statistics.mean(one["goodput_share"] for one in found) >= 0.9
    assert statistics.mean(one["in_time_share"] for one in found) >= 0.95
    probes = [probe for one in found for probe in one["retry_after"]["probes"]]
    assert sum(_is_true(told_s, true_s) for told_s, true_s in probes) >= 0.8 * len(probes)
    assert sum(one["without_retry_after"] for one in found) <= 0.01 * sum(one["num_requests"] for one in found)
    # Those that take long have their part, too.
    for one in found:
        images = sum(count for kind, count in one["good_by_kind"].items() if not kind.startswith("chat"))
        assert images >= 0.5 * one["num_good"]


def _overloaded(here: _Measured, overload: float) -> dict[str, Any]:
    here.cluster.run(here.cluster.now_s + 10.0)
    begin_s = here.cluster.now_s
    arrivals_s = draw_arrivals_s(overload * here.per_s, LOAD_S, here.cluster.rng)
    calls = list(zip(arrivals_s, here.mix(len(arrivals_s), DEADLINE_S), strict=True))
    outcomes = run_open(here.cluster, calls, probe_every=max(1, len(calls) // 24))
    return overload_figures(outcomes, here.costs_s, here.peak, begin_s + DEADLINE_S, begin_s + LOAD_S)


def _is_true(told_s: float, true_s: float) -> bool:
    """Return whether a `Retry-After` was right, within a quarter or the header's resolution of a second."""
    return abs(told_s - true_s) <= max(0.25 * true_s, 1.0)


@pytest.mark.drawn
@pytest.mark.parametrize("overload", [1.5, 3.0])
def test_no_more_are_let_in_together_than_are_in_time(overload: float) -> None:
    """There is room for 16 images, which would take longer than their deadline; fewer of them do not."""
    here = _Measured(3, SLOW_KINDS)
    here.cluster.run(here.cluster.now_s + 10.0)
    begin_s = here.cluster.now_s
    arrivals_s = draw_arrivals_s(overload * here.per_s, 9.0, here.cluster.rng)
    calls = list(zip(arrivals_s, here.mix(len(arrivals_s), DEADLINE_S), strict=True))
    outcomes = run_open(here.cluster, calls, probe_every=0)
    found = overload_figures(outcomes, here.costs_s, here.peak, begin_s + DEADLINE_S, begin_s + 9.0)
    assert found["goodput_share"] >= 0.6
    assert found["in_time_share"] >= 0.9


@pytest.mark.drawn
@pytest.mark.parametrize("number", [1000, 3000])
def test_of_a_burst_as_many_are_served_as_can_be_in_time(number: int) -> None:
    served_s = []
    for seed in SEEDS:
        here = measured(seed)
        here.cluster.run(here.cluster.now_s + 10.0)
        begin_s = here.cluster.now_s
        outcomes = run_open(here.cluster, [(0.0, call) for call in here.mix(number, 8.0)], probe_every=0)
        found = overload_figures(outcomes, here.costs_s, here.peak, begin_s)
        assert found["in_time_share"] >= 0.95
        assert found["goodput_share"] >= 0.75  # the last ones have the replica to themselves, and merge less
        served_s.append(max(one.done_s for one in outcomes if one.is_good) - begin_s)
    assert statistics.mean(served_s) >= 0.4 * 8.0


def test_those_who_come_back_when_told_are_served_then() -> None:
    """Ten seconds of three times the capacity; all who are refused come when they were told to, every second or so."""
    here = _Measured(7)
    here.cluster.run(here.cluster.now_s + 10.0)
    begin_s = here.cluster.now_s
    arrivals_s = draw_arrivals_s(3.0 * here.per_s, 10.0, here.cluster.rng)
    calls = list(zip(arrivals_s, here.mix(len(arrivals_s), DEADLINE_S), strict=True))
    outcomes = run_open(here.cluster, calls, probe_every=0, all_return=True)
    num_served = sum(one.is_good for one in outcomes)
    num_refused = sum(one.status == 429 for one in outcomes)
    assert num_served >= 0.9 * len(calls)  # of eight seeds 0.92 to 0.99
    assert num_refused <= 10 * len(calls)  # told to all alike, in whole seconds: several tries each
    work_s = sum(here.costs_s[one.kind] for one in outcomes if one.is_good)
    assert here.cluster.now_s - begin_s <= 1.35 * work_s / here.peak
