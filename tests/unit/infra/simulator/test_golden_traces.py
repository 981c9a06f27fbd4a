"""Small traces whose right course is known, decision by decision; and what holds of every trace."""

from __future__ import annotations

import random

import pytest
from kit.drawing import seeds
from unit.infra.simulator.random_scenarios import GB, random_scenario

from cluster.placement.state import Components, SloClass
from infra.bench.oracle import best_over_time, latency_cost
from infra.simulator.controlled import Controlled
from infra.simulator.running import simulate
from infra.simulator.scenario import Fault, Scenario, SimModel, SimRequest, SimWorker, poisson, zipf_shares
from infra.simulator.world import World


def course(scenario: Scenario) -> tuple[list[tuple[float, str, str, str]], World]:
    """Return (time, action, worker, model) of the decisions, repeated drains once, and the world afterwards."""
    world = World(scenario, Controlled)
    world.run(1e4)
    controlled = world.dispatcher
    assert isinstance(controlled, Controlled)
    found: list[tuple[float, str, str, str]] = []
    for each in controlled.decisions:
        order = each.decision
        line = (round(each.at_s, 2), order.action, order.worker, order.model)
        if order.action != "drain" or line[1:] not in [other[1:] for other in found]:
            found.append(line)
    return found, world


def models_of(*names: str, service_s: float = 1.0) -> tuple[SimModel, ...]:
    return tuple(SimModel(name, Components({f"c-{name}": 4 * GB}), service_s) for name in names)


def requests_of(*batches: tuple[float, str, int]) -> tuple[SimRequest, ...]:
    return tuple(SimRequest(at_s, name) for at_s, name, count in batches for _ in range(count))


ONE = SimWorker("w0", "n", 4 * GB, slots=1, attach_bytes_per_s=1e9)  # a switch takes 4 s
TWO = (ONE, SimWorker("w1", "n", 4 * GB, slots=1, attach_bytes_per_s=1e9))


def test_a_queue_ends_before_the_switch() -> None:
    found, world = course(Scenario(models_of("a", "b"), (ONE,), requests_of((1.1, "a", 5), (1.2, "b", 1))))
    # a is ready at 5.12; its last request starts at 9.12 and ends at 10.12.
    assert found == [(1.12, "switch", "w0", "a"), (9.14, "drain", "w0", "b"), (10.14, "switch", "w0", "b")]
    assert [each.request.model for each in world.served] == ["a"] * 5 + ["b"]


def test_a_queue_that_is_served_is_not_interrupted_for_a_lone_request() -> None:
    """It once was, after three switches: 18 others each waited 9 s longer so that it waited 13 s less."""
    scenario = Scenario(models_of("a", "b"), (ONE,), requests_of((0.0, "a", 30), (4.6, "b", 1)))
    found, world = course(scenario)
    assert [line[1:] for line in found] == [("switch", "w0", "a"), ("drain", "w0", "b"), ("switch", "w0", "b")]
    mean_s = sum(one.latency_s for one in world.served) / len(world.served)
    assert mean_s <= 1.01 * best_over_time(scenario, False, latency_cost)


def test_bursts_over_three_models_on_two_workers() -> None:
    bursts = requests_of((1.1, "a", 8), (1.1, "b", 8), (1.1, "c", 8))
    found, world = course(Scenario(models_of("a", "b", "c"), TWO, bursts))
    orders = [line[1:] for line in found]
    assert orders[:2] == [("switch", "w0", "a"), ("switch", "w1", "b")]
    # c is due at 13.1 and takes one of them; at its end both are free, and nothing is loaded for a third time.
    assert next(order for order in orders if order[2] == "c")[0] == "drain"
    assert world.num_switches <= 5
    assert len(world.served) == 24


def test_a_worker_that_dies_while_it_switches_is_replaced_at_the_next_tick() -> None:
    faults = (Fault(3.0, "worker_lost", "w0"),)
    found, world = course(Scenario(models_of("a"), TWO, requests_of((1.1, "a", 1)), faults))
    assert found == [(1.12, "switch", "w0", "a"), (3.0, "switch", "w1", "a")]
    assert len(world.served) == 1


def test_the_model_with_shared_components_comes_cheaper_than_the_other() -> None:
    base, tuned = Components({"encoders": 3 * GB, "base": GB}), Components({"encoders": 3 * GB, "tuned": GB})
    models = (SimModel("base", base), SimModel("tuned", tuned), SimModel("other", Components({"other": 4 * GB})))
    batches = requests_of((0.0, "base", 1), (0.0, "other", 1), (20.0, "tuned", 1))
    _, world = course(Scenario(models, TWO, batches))
    assert world.moved_bytes == 9 * GB
    (span,) = [span for span in world.spans if span.is_switch and span.model == "tuned"]
    assert span.end_s - span.start_s == 1.0


@seeds(3)
def test_the_wait_of_the_coldest_model_is_bounded_where_the_work_leaves_room(seed: int) -> None:
    slo = SloClass("test", 60.0)
    models = tuple(SimModel(f"m{n:02d}", Components({f"c{n}": 30 * GB}), 1.0, 0.6, slo) for n in range(12))
    workers = tuple(SimWorker(f"w{n}", "n", 30 * GB, 4, attach_bytes_per_s=6e9) for n in range(4))
    shares = zipf_shares([model.id for model in models])
    requests = tuple(poisson(0.8, shares, 200.0, random.Random(seed)))
    figures, _ = simulate(Scenario(models, workers, requests), "latency-first")
    assert figures.served == figures.requests
    assert figures.coldest_wait_s <= 5 * 5.0


def test_a_steady_state_that_fits_has_no_switch_but_the_first() -> None:
    for seed in range(3):
        models = models_of("a", "b", service_s=0.2)
        requests = tuple(poisson(2.0, {"a": 0.5, "b": 0.5}, 100.0, random.Random(seed)))
        figures, _ = simulate(Scenario(models, TWO, requests), "latency-first")
        assert figures.switches == 2
        assert figures.served == len(requests)


@pytest.mark.drawn
@pytest.mark.parametrize("switch_s", [0.01, 0.05, 0.15])
def test_where_switches_are_cheap_it_is_no_slower_than_no_controller_and_switches_less(switch_s: float) -> None:
    """Two workers with room for one of four models, as in the demo: a controller once cost a third more there."""
    times = {"flux": 0.12, "inverted": 0.12, "sdxl": 0.2, "adder": 0.03}
    models = tuple(SimModel(id_, Components({f"own-{id_}": GB}), time_s, 0.7) for id_, time_s in times.items())
    workers = tuple(SimWorker(f"w{n}", "n", GB, 16, fixed_switch_s=switch_s) for n in range(2))
    shares = {"flux": 0.5, "inverted": 0.25, "sdxl": 0.15, "adder": 0.1}
    for rate in (4.0, 8.0, 14.0):
        means, switches = [], []
        for policy in ("latency-first", "no-controller"):
            traces = [tuple(poisson(rate, shares, 25.0, random.Random(seed))) for seed in range(3)]
            runs = [simulate(Scenario(models, workers, requests), policy)[0] for requests in traces]
            means.append(sum(run.mean_s for run in runs))
            switches.append(sum(run.switches for run in runs))
        assert means[0] <= 1.05 * means[1], (rate, means)
        assert switches[0] < 0.9 * switches[1], (rate, switches)


@pytest.mark.parametrize("num_traces", [3, pytest.param(12, marks=pytest.mark.long)])
def test_more_capacity_does_not_hurt(num_traces: int) -> None:
    """Have every worker twice: no trace gets much worse (a little is what Graham 1969 allows), and most are faster.

    The worst of twelve takes 1.201 times as long: models that start anywhere are spread over more workers, and
    each of those has to switch.
    """
    ratios = []
    for seed in range(num_traces):
        scenario = random_scenario(seed)
        copies = tuple(
            SimWorker(f"{each.id}-copy", each.node, each.budget_bytes, each.slots, each.speed, each.fixed_switch_s,
                      each.attach_bytes_per_s)
            for each in scenario.workers
        )  # fmt: skip
        more = Scenario(scenario.models, (*scenario.workers, *copies), scenario.requests)
        alike = Scenario(scenario.models, scenario.workers, scenario.requests)
        few = simulate(alike, "latency-first", patience=60.0)[0].mean_s
        ratios.append(simulate(more, "latency-first", patience=60.0)[0].mean_s / few)
    assert max(ratios) <= 1.21
    assert sorted(ratios)[-2] <= 1.1
    assert sum(ratios) / len(ratios) < 0.9
