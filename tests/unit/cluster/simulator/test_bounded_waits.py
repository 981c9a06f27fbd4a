"""Nobody starves: rare requests beside models that have more work than all workers can do."""

from __future__ import annotations

import random

import pytest
from kit.drawing import seeds
from unit.cluster.simulator.random_scenarios import GB

from cluster.placement.state import ClusterState, Components
from cluster.placement.switching import LATENCY_FIRST, THROUGHPUT_FIRST, SwitchingPolicy
from cluster.simulator.controlled import TICK_S, Controlled
from cluster.simulator.scenario import Scenario, SimModel, SimRequest, SimWorker, poisson
from cluster.simulator.world import World


class Noting(Controlled):
    """Notes the most work, in seconds of all workers, that ever waited without a worker."""

    most_s = 0.0

    def observe(self) -> ClusterState:
        state = super().observe()
        served = {id_ for worker in state.workers.values() for id_ in (*worker.models, worker.switching_to)}
        lacking = [model for id_, model in state.models.items() if id_ not in served]
        self.most_s = max(self.most_s, state.queue_s(lacking))
        return state


def overloaded(seed: int) -> tuple[Scenario, list[str], float, float]:
    """Return as many models with too much work as workers, rare ones beside them, a switch's and a batch's seconds."""
    chance = random.Random(seed)
    num_workers, switch_s, slots = chance.randrange(1, 4), chance.uniform(1, 5), chance.randrange(1, 5)
    hot = [f"hot{number}" for number in range(num_workers)]
    rare = [f"rare{number}" for number in range(chance.randrange(1, 3))]
    models = {id_: SimModel(id_, Components({id_: GB}), chance.uniform(0.3, 1.0), 0.6) for id_ in hot + rare}
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
    world = World(scenario, lambda world: Noting(world, policy))
    world.run(1e4)
    assert len(world.served) == len(scenario.requests)
    noting = world.dispatcher
    assert isinstance(noting, Noting)
    patience_s = max(policy.max_wait_switches * max(switch_s, 1.0), policy.max_wait_queues * noting.most_s)
    turns_s = (len(rare) + 1) * (batch_s + switch_s + TICK_S)  # of one after the other: what runs ends, and a switch
    waits = [one.started_s - one.request.at_s for one in world.served if one.request.model in rare]
    assert max(waits) <= patience_s + turns_s
