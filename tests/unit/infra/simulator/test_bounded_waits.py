"""Nobody starves: rare requests beside models that have more work than all workers can do."""

from __future__ import annotations

import random

import pytest
from kit.drawing import seeds
from unit.infra.simulator.random_scenarios import GB

from cluster.placement.state import MAX_WAIT_TARGETS, Components, SloClass
from cluster.placement.switching import LATENCY_FIRST, PUSH_SWITCHES, THROUGHPUT_FIRST, TURN_SWITCHES, SwitchingPolicy
from infra.simulator.controlled import TICK_S, Controlled
from infra.simulator.scenario import Scenario, SimModel, SimRequest, SimWorker, poisson
from infra.simulator.world import World

HURRIED = SloClass("hurried", 5.0)


def overloaded(seed: int) -> tuple[Scenario, list[str], float, float]:
    """Return as many models with too much work as workers, rare ones beside them, a switch's and a batch's seconds."""
    chance = random.Random(seed)
    num_workers, switch_s, slots = chance.randrange(1, 4), chance.uniform(1, 5), chance.randrange(1, 5)
    hot = [f"hot{number}" for number in range(num_workers)]
    rare = [f"rare{number}" for number in range(chance.randrange(1, 3))]
    models = {id_: SimModel(id_, Components({id_: GB}), chance.uniform(0.3, 1.0), 0.6, HURRIED) for id_ in hot + rare}
    requests = [SimRequest(chance.uniform(3, 15), id_) for id_ in rare for _ in range(2)]
    for id_ in hot:
        requests += poisson(1.3 / models[id_].batch_service_s(slots), {id_: 1.0}, 25.0, chance)
    workers = tuple(SimWorker(id_, "n", GB, slots, attach_bytes_per_s=GB / switch_s) for id_ in hot)
    scenario = Scenario(tuple(models.values()), workers, tuple(sorted(requests, key=lambda request: request.at_s)))
    return scenario, rare, switch_s, max(model.batch_service_s(slots) * slots for model in models.values())


@pytest.mark.parametrize("policy", [LATENCY_FIRST, THROUGHPUT_FIRST], ids=lambda policy: policy.mode)
@seeds(50)
def test_who_waits_beside_an_endless_queue_waits_no_longer_than_the_rules_say(
    seed: int, policy: SwitchingPolicy
) -> None:
    scenario, rare, switch_s, batch_s = overloaded(seed)
    world = World(scenario, lambda world: Controlled(world, policy))
    world.run(1e4)
    assert len(world.served) == len(scenario.requests)
    num_models, num_workers = len(scenario.models), len(scenario.workers)
    bound_s = max(MAX_WAIT_TARGETS * HURRIED.target_s, num_models * (1 + TURN_SWITCHES) * switch_s / num_workers)
    bound_s += 2 * PUSH_SWITCHES * switch_s  # a queue that ends as soon is not interrupted
    turns_s = (len(rare) + 1) * (batch_s + switch_s + TICK_S)  # of one after the other: what runs ends, and a switch
    waits = [one.started_s - one.request.at_s for one in world.served if one.request.model in rare]
    assert max(waits) <= bound_s + turns_s
