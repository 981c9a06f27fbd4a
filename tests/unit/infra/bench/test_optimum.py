"""Drawn cases beside the best schedule there is, and the best schedules beside every one there is."""

from __future__ import annotations

import itertools
import statistics

import pytest

from cluster.placement.state import Components, SloClass
from infra.bench.optimum import (
    KINDS,
    draw_case,
    draw_large,
    measure_case,
    measure_large,
    print_optimum_figures,
    summary_of,
    worst_of,
)
from infra.bench.oracle import batch_latencies_s, best_over_time, best_together, late_cost, latency_cost, least_mean_s
from infra.simulator.running import simulate
from infra.simulator.scenario import Scenario, SimModel, SimRequest, SimWorker

GIB = 2**30


def burst(counts: list[int], service_s: list[float], switch_s: float, slots: int = 1) -> Scenario:
    """Return requests of several models that come within a moment to one worker with room for one."""
    slo = SloClass("t", 60.0)
    models = tuple(SimModel(f"m{n}", Components({f"c{n}": 10 * GIB}), s, 1.0, slo) for n, s in enumerate(service_s))
    worker = SimWorker("w0", "n", 12 * GIB, slots, fixed_switch_s=switch_s, attach_bytes_per_s=1e15)
    names = [f"m{number}" for number, count in enumerate(counts) for _ in range(count)]
    return Scenario(models, (worker,), tuple(SimRequest(0.0001 * place, name) for place, name in enumerate(names)))


@pytest.mark.drawn
@pytest.mark.parametrize("slots", [1, 4, 8])
def test_a_burst_of_many_models_is_one_switch_for_each(slots: int) -> None:
    """It once was 44 switches and 956 s: each model was due before the round was over."""
    scenario = burst([5, 40, 40, 20], [1.0, 1.0, 0.5, 0.2], 20.0, slots)
    figures, world = simulate(scenario, "latency-first", patience=1e6)
    assert figures.switches == 4
    assert figures.ended_s <= 151.0
    assert all(one.latency_s <= 300.0 for one in world.served)
    assert figures.mean_s <= 1.25 * best_together(scenario, latency_cost)
    assert figures.mean_s <= simulate(scenario, "no-controller", patience=1e6)[0].mean_s


@pytest.mark.drawn
@pytest.mark.parametrize("slots", [1, 4])
def test_of_four_bursts_alike_all_are_answered_within_the_time_of_a_request(slots: int) -> None:
    _, world = simulate(burst([60] * 4, [0.5] * 4, 20.0, slots), "latency-first", patience=1e6)
    assert sum(one.latency_s <= 300.0 for one in world.served) == 240


def _one_slot(switch_s: float, times: dict[str, list[float]], **service_s: float) -> Scenario:
    slo = SloClass("t", 300.0)
    models = tuple(SimModel(id_, Components({id_: 10 * GIB}), s, 1.0, slo) for id_, s in service_s.items())
    worker = SimWorker("w0", "n", 12 * GIB, 1, fixed_switch_s=switch_s, attach_bytes_per_s=1e15)
    requests = sorted((at_s, id_) for id_, found in times.items() for at_s in found)
    return Scenario(models, (worker,), tuple(SimRequest(at_s, id_) for at_s, id_ in requests))


def test_what_runs_ends_in_either_case_so_the_short_one_is_next() -> None:
    """It once counted the long request that ran as the price of the switch, and went on with the next long one."""
    scenario = _one_slot(0.1, {"long": [0.0, 0.0, 0.0], "short": [1.0]}, long=5.0, short=1.0)
    _, world = simulate(scenario, "latency-first")
    assert [one.request.model for one in world.served] == ["long", "short", "long", "long"]


def test_a_single_request_waits_for_no_others_of_its_model_that_hardly_come() -> None:
    """It once waited for as long as those that were expected of the burst before would have waited: 4 s."""
    scenario = _one_slot(0.1, {"burst": [0.0, 0.1, 0.2, 0.3], "rare": [0.4]}, burst=0.2, rare=5.0)
    _, world = simulate(scenario, "latency-first")
    assert world.served[-1].request.model == "rare"
    assert world.served[-1].started_s <= 1.5


def test_together_the_best_is_the_best_of_all_orders_of_single_requests() -> None:
    scenario = burst([2, 1, 3], [1.0, 4.0, 0.3], 2.0)
    service_s = {model.id: model.service_s for model in scenario.models}
    for cost in (latency_cost, late_cost):
        model_of = {model.id: model for model in scenario.models}
        best = float("inf")
        for order in set(itertools.permutations([one.model for one in scenario.requests])):
            at_s, before, total = 0.0, "", 0.0
            for name in order:
                at_s += (0.0 if name == before else 2.0 + 10 * GIB / 1e15) + service_s[name]
                before, total = name, total + cost(model_of[name], at_s)
            best = min(best, total / len(order))
        assert best_together(scenario, cost) == pytest.approx(best)
        assert best_over_time(scenario, False, cost) == pytest.approx(best, abs=0.01)


def test_the_lower_bound_of_a_case_of_any_size_is_below_the_best_and_not_far() -> None:
    shares = []
    for seed in range(30):
        kind, scenario = draw_case(seed)
        exact = (
            best_together(scenario, latency_cost)
            if kind == "together"
            else best_over_time(scenario, False, latency_cost)
        )
        shares.append(least_mean_s(scenario) / exact)
    assert all(0.0 < share <= 1.0 + 1e-9 for share in shares)
    assert statistics.median(shares) >= 0.5


def test_a_larger_case_stands_beside_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert draw_large(14) == draw_large(14)
    one = measure_large(14)
    assert all(one.ratio(rival) >= 1.0 for rival in ("latency-first", "no-controller", "serve.multiplexed"))
    print_optimum_figures([measure_case(0), one], as_json=False)
    assert "1 larger cases from seed 14" in capsys.readouterr().out
    print_optimum_figures([measure_case(0), one], as_json=True)
    assert '"large"' in capsys.readouterr().out


def test_the_lower_bound_is_exact_where_one_model_is_there_for_one_worker() -> None:
    scenario = burst([7], [2.0], 3.0)
    scenario = Scenario(scenario.models, scenario.workers, tuple(SimRequest(0.0, "m0") for _ in range(7)))
    assert least_mean_s(scenario) == pytest.approx(statistics.mean(2.0 * place for place in range(1, 8)))
    with pytest.raises(ValueError, match="got 0"):
        least_mean_s(Scenario(scenario.models, scenario.workers, ()))


def test_a_batch_ends_as_the_simulator_says() -> None:
    model = SimModel("m0", Components({"c": 1}), 2.0, 0.4)
    worker = SimWorker("w0", "n", 10, 3, attach_bytes_per_s=1e15)
    scenario = Scenario((model,), (worker,), tuple(SimRequest(0.0, "m0") for _ in range(7)))
    _, world = simulate(scenario, "static")
    assert batch_latencies_s(model, 7, worker) == pytest.approx(sorted(one.latency_s for one in world.served))


@pytest.mark.parametrize("num_cases", [10, pytest.param(25, marks=pytest.mark.long)])
def test_drawn_cases_are_near_the_optimum_and_no_slower_than_without_a_controller(num_cases: int) -> None:
    outcomes = [measure_case(seed) for seed in range(num_cases)]
    assert {one.kind for one in outcomes} == set(KINDS)
    for one in outcomes:
        assert all(one.ratio(rival) >= 0.999 for rival in ("latency-first", "no-controller"))
    ours = summary_of(outcomes)["latency-first"]
    assert ours["median"] <= 1.1
    assert statistics.mean(one.ratio("latency-first") for one in outcomes) <= 1.2
    together = summary_of([one for one in outcomes if one.kind == "together"])["latency-first"]
    assert together["median"] <= 1.05
    assert together["worst"] <= 1.25
    assert together["slower_than_none"] == 0
    assert [one.seed for one in worst_of(outcomes, 3)] == sorted(
        [one.seed for one in worst_of(outcomes, 3)], key=lambda seed: -outcomes[seed].ratio("latency-first")
    )


def test_the_same_seed_draws_the_same_case_and_figures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert draw_case(7) == draw_case(7)
    outcomes = [measure_case(seed) for seed in range(3)]
    print_optimum_figures(outcomes, as_json=False)
    told = capsys.readouterr().out
    assert "latency-first" in told
    assert "seed 0" in told
    print_optimum_figures(outcomes, as_json=True)
    assert '"worst"' in capsys.readouterr().out


def test_cases_that_are_not_of_their_kind_are_refused() -> None:
    late = Scenario(*(burst([2, 2], [1.0, 1.0], 1.0).__getattribute__(name) for name in ("models", "workers")),
                    (SimRequest(0.0, "m0"), SimRequest(5.0, "m1")))  # fmt: skip
    with pytest.raises(ValueError, match="come at once"):
        best_together(late, latency_cost)
