"""Any load and any number of equal models: how long one that is asked for may be without a start."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from kit.drawing import seeds
from unit.infra.simulator.random_scenarios import GB

from cluster.placement.state import MAX_WAIT_TARGETS, Components, SloClass
from cluster.placement.switching import LATENCY_FIRST, THROUGHPUT_FIRST, TURN_SWITCHES, SwitchingPolicy
from infra.simulator.controlled import TICK_S, Controlled
from infra.simulator.scenario import Scenario, SimModel, SimRequest, SimWorker, poisson
from infra.simulator.world import WorkerInWorld, World

POLICIES = pytest.mark.parametrize("policy", [LATENCY_FIRST, THROUGHPUT_FIRST], ids=lambda policy: policy.mode)


class Watched(World):
    """A world that notes when a request of each model starts."""

    def __init__(self, scenario: Scenario, policy: SwitchingPolicy) -> None:
        self.starts_s: dict[str, list[float]] = defaultdict(list)
        super().__init__(scenario, lambda world: Controlled(world, policy))

    def start_loaded(self, worker: WorkerInWorld, request: SimRequest) -> None:
        self.starts_s[request.model].append(self.now_s)
        super().start_loaded(worker, request)

    def longest_without_a_start_s(self) -> float:
        """Return the longest time in which requests of a model waited and none of them started."""
        longest_s = 0.0
        for id_ in self.models:
            arrivals = [(request.at_s, 1) for request in self.scenario.requests if request.model == id_]
            num_waiting, since_s = 0, 0.0
            for at_s, change in sorted([*arrivals, *((at_s, -1) for at_s in self.starts_s[id_]), (self.now_s, 0)]):
                if at_s > self.now_s:
                    break
                if num_waiting and change <= 0:
                    longest_s = max(longest_s, at_s - since_s)
                if change < 0 or not num_waiting:
                    since_s = at_s
                num_waiting += change
        return longest_s


def equal_models(
    num_models: int, num_workers: int, load: float, switch_s: float, slots: int, target_s: float, seed: int
) -> tuple[Scenario, float]:
    """Return a scenario whose models are asked for alike, `load` times what all workers can do; and a batch's time."""
    slo = SloClass("bench", target_s)
    models = [SimModel(f"m{number}", Components({f"own{number}": GB}), 1.0, 0.6, slo) for number in range(num_models)]
    workers = [
        SimWorker(f"w{number}", "n", GB, slots, attach_bytes_per_s=GB / switch_s) for number in range(num_workers)
    ]
    batch_s = models[0].batch_service_s(slots) * slots
    rate = load * num_workers * slots / batch_s
    shares = {model.id: 1 / num_models for model in models}
    requests = tuple(poisson(rate, shares, 6 * target_s + num_models * (batch_s + switch_s), random.Random(seed)))
    return Scenario(tuple(models), tuple(workers), requests), batch_s


def longest_allowed_s(num_models: int, num_workers: int, batch_s: float, switch_s: float, target_s: float) -> float:
    """Return the bound: the ceiling or a round, and a turn of each other model before: what runs ends, a switch, two
    looks.
    """
    round_s = num_models * (1 + TURN_SWITCHES) * switch_s / num_workers
    return max(MAX_WAIT_TARGETS * target_s, round_s) + num_models * (batch_s + switch_s + 2 * TICK_S)


@pytest.mark.drawn
@POLICIES
def test_of_three_equal_models_on_two_workers_none_starves_under_overload(policy: SwitchingPolicy) -> None:
    scenario, batch_s = equal_models(3, 2, 2.0, 3.0, 2, 20.0, 1)
    world = Watched(scenario, policy)
    world.run(scenario.duration_s)
    assert world.longest_without_a_start_s() <= longest_allowed_s(3, 2, batch_s, 3.0, 20.0)


@POLICIES
@seeds(50)
def test_no_model_is_without_a_start_for_longer_than_the_rules_say(seed: int, policy: SwitchingPolicy) -> None:
    chance = random.Random(seed)
    num_workers = chance.randrange(1, 6)
    num_models = num_workers + chance.randrange(1, 5)
    load, switch_s, target_s = chance.choice([0.5, 1.2, 2.0, 4.0]), chance.uniform(0.05, 10), chance.uniform(5, 15)
    scenario, batch_s = equal_models(num_models, num_workers, load, switch_s, chance.randrange(1, 6), target_s, seed)
    world = Watched(scenario, policy)
    world.run(scenario.duration_s)
    longest_s = world.longest_without_a_start_s()
    assert longest_s <= longest_allowed_s(num_models, num_workers, batch_s, switch_s, target_s)
