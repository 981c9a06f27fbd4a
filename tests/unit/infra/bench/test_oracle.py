"""The oracle against every schedule there is, and every policy against the oracle."""

from __future__ import annotations

import itertools
import random

import pytest
from kit.drawing import seeds
from unit.infra.simulator.random_scenarios import GB

from cluster.placement.state import Components
from infra.bench.oracle import MAX_REQUESTS, known_only_latencies, oracle_mean_latency_s
from infra.simulator.multiplexed import policies_and_multiplexed
from infra.simulator.running import simulate
from infra.simulator.scenario import Scenario, SimModel, SimRequest, SimWorker


def small(seed: int, num_requests: int, num_workers: int = 2) -> Scenario:
    chance = random.Random(seed)
    models = tuple(SimModel(f"m{n}", Components({f"c{n}": 3 * GB}), chance.uniform(0.5, 2)) for n in range(3))
    workers = tuple(SimWorker(f"w{n}", "n", 3 * GB, 1, attach_bytes_per_s=1e9) for n in range(num_workers))
    times = sorted(chance.uniform(0, 12) for _ in range(num_requests))
    return Scenario(models, workers, tuple(SimRequest(at_s, f"m{chance.randrange(3)}") for at_s in times))


def every_schedule(scenario: Scenario, ahead: bool) -> float:
    """Try each order of the requests with each choice of workers."""
    best = float("inf")
    for order in itertools.permutations(scenario.requests):
        for places in itertools.product(range(len(scenario.workers)), repeat=len(order)):
            free, attached, total = [0.0] * len(scenario.workers), [None] * len(scenario.workers), 0.0
            for request, place in zip(order, places, strict=True):
                service_s = next(model.service_s for model in scenario.models if model.id == request.model)
                switch_s = 0.0 if attached[place] == request.model else 3.0
                if ahead:
                    start_s = max(request.at_s, free[place] + switch_s)
                else:
                    start_s = max(request.at_s, free[place]) + switch_s
                free[place], attached[place] = start_s + service_s, request.model
                total += free[place] - request.at_s
            best = min(best, total)
    return best / len(scenario.requests)


@pytest.mark.parametrize("ahead", [True, False])
@seeds(50)
def test_the_oracle_finds_the_best_of_all_schedules(seed: int, ahead: bool) -> None:
    scenario = small(seed, 5)
    assert oracle_mean_latency_s(scenario, ahead) == pytest.approx(every_schedule(scenario, ahead))


def replanned(scenario: Scenario) -> list[float]:
    """Try, at each moment, every order and choice of workers for those that have come; begin as the best begins."""
    service_s = {model.id: model.service_s for model in scenario.models}
    workers: list[tuple[str, float]] = [("", 0.0)] * len(scenario.workers)
    left, latencies, now_s = list(scenario.requests), [], 0.0
    while left:
        waiting = [one for one in left if one.at_s <= now_s]
        best, begun = float("inf"), {}
        for order in itertools.permutations(waiting):
            for places in itertools.product(range(len(workers)), repeat=len(order)):
                free, total, firsts = [(at, max(free_s, now_s)) for at, free_s in workers], 0.0, {}
                for request, place in zip(order, places, strict=True):
                    attached, free_s = free[place]
                    end_s = free_s + (0.0 if attached == request.model else 3.0) + service_s[request.model]
                    free[place], total = (request.model, end_s), total + end_s
                    firsts.setdefault(place, (request.model, end_s))
                if total < best - 1e-9:
                    best, begun = total, firsts
        for place, (model, end_s) in begun.items():
            if workers[place][1] <= now_s:
                request = min((one for one in waiting if one.model == model), key=lambda one: one.at_s)
                waiting.remove(request)
                left.remove(request)
                workers[place] = model, end_s
                latencies.append(end_s - request.at_s)
        later = [one.at_s for one in left] + [free_s for _, free_s in workers]
        now_s = min((at_s for at_s in later if at_s > now_s), default=now_s)
    return latencies


@pytest.mark.parametrize("num_workers", [1, 2])
@seeds(50)
def test_who_plans_only_those_that_have_come_begins_as_their_best_plan_begins(seed: int, num_workers: int) -> None:
    scenario = small(seed, 6 if num_workers == 1 else 5, num_workers)
    found = [latency_s for _, latency_s in known_only_latencies(scenario)]
    if num_workers == 1:  # of two idle workers either may go, at the same cost for those that wait
        assert sum(found) == pytest.approx(sum(replanned(scenario)))
    assert sum(found) / len(found) >= oracle_mean_latency_s(scenario, ahead=False) - 1e-9


@pytest.mark.parametrize("num_workers", [1, 2])
def test_who_plans_those_that_have_come_is_best_where_all_come_at_once(num_workers: int) -> None:
    drawn = small(3, 7, num_workers)
    scenario = Scenario(drawn.models, drawn.workers, tuple(SimRequest(0.0, one.model) for one in drawn.requests))
    found = [latency_s for _, latency_s in known_only_latencies(scenario)]
    assert sum(found) / len(found) == pytest.approx(oracle_mean_latency_s(scenario, ahead=False))


@pytest.mark.drawn
@pytest.mark.parametrize("policy", policies_and_multiplexed())
def test_nobody_beats_the_oracle(policy) -> None:
    for seed in range(8):
        scenario = small(seed, 9)
        figures, _ = simulate(scenario, policy, policies_and_multiplexed(seed))
        assert figures.mean_s >= oracle_mean_latency_s(scenario, ahead=True) - 1e-9
        if policy in ("latency-first", "static"):
            assert figures.mean_s >= oracle_mean_latency_s(scenario, ahead=True)


def test_latency_first_is_near_the_oracle() -> None:
    ratios = []
    for seed in range(10):
        scenario = small(seed, 9)
        ratios.append(simulate(scenario, "latency-first")[0].mean_s / oracle_mean_latency_s(scenario, ahead=False))
    assert sum(ratios) / len(ratios) <= 1.3


def test_cases_that_it_cannot_solve_are_refused() -> None:
    with pytest.raises(ValueError, match=f"1 to {MAX_REQUESTS} requests"):
        oracle_mean_latency_s(small(0, MAX_REQUESTS + 1), ahead=True)
    roomy = Scenario(small(0, 3).models, (SimWorker("w", "n", 9 * GB, 1),), small(0, 3).requests)
    with pytest.raises(ValueError, match="room for one model"):
        oracle_mean_latency_s(roomy, ahead=True)
