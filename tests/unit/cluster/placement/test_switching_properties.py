"""Plans of random states are feasible; of broken states too; and nothing moves where nothing is missing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from kit.drawing import seeds
from unit.cluster.placement.random_states import GB, cluster, mistakes, random_records

from cluster.placement.state import Components, ModelState, WorkerState
from cluster.placement.switching import LATENCY_FIRST, THROUGHPUT_FIRST, plan_switches

MODES = [LATENCY_FIRST, THROUGHPUT_FIRST]


@pytest.mark.drawn
@pytest.mark.parametrize("policy", MODES, ids=lambda policy: policy.mode)
def test_plans_of_random_states_are_feasible_and_the_same_twice(policy) -> None:
    seen = set()
    for seed in range(1500):
        models, workers, held = random_records(seed)
        state = cluster(models, workers, held)
        plan = plan_switches(state, policy)
        assert mistakes(state, plan) == [], seed
        assert plan_switches(state, policy) == plan
        seen.update(order.action for order in plan.decisions)
    assert seen == {"switch", "drain", "prefetch"}


@pytest.mark.parametrize("policy", MODES, ids=lambda policy: policy.mode)
@seeds(50)
def test_nothing_moves_while_all_that_is_wanted_fits(policy, seed: int) -> None:
    chance = random.Random(seed)
    num = chance.randrange(1, 6)
    models = [
        ModelState(
            f"m{number}",
            Components({f"own{number}": chance.randrange(1, 9) * GB}),
            waiting=chance.randrange(0, 2),
            oldest_age_s=0.1,
            rate_short=chance.random(),
            rate_long=chance.random() * 0.8,
            service_s=0.5,
        )
        for number in range(num)
    ]
    workers = [
        WorkerState(
            f"w{number}",
            "n",
            10 * GB,
            model.components,
            (model.id,),
            {model.id: 1} if chance.random() < 0.5 else {},
            slots=4,
            idle_s=chance.random() * 99,
        )
        for number, model in enumerate(models)
    ]
    assert plan_switches(cluster(models, workers, {}), policy).decisions == ()


def test_a_plan_that_was_carried_out_is_not_ordered_again() -> None:
    """Carry out every order at once and plan again: a cluster whose requests wait comes to rest."""
    for seed in range(300):
        models, workers, held = random_records(seed)
        models = [replace(model, retry_in_s=0.0, oldest_age_s=0.0, waiting=min(model.waiting, 2)) for model in models]
        workers = [replace(each, running={}, reserved_for=None, switching_to=None, age_s=0.0) for each in workers]
        counts = []
        for _ in range(12):
            state = cluster(models, workers, held)
            plan = plan_switches(state)
            counts.append(len(plan.decisions))
            for order in plan.decisions:
                place = next(index for index, worker in enumerate(workers) if worker.id == order.worker)
                workers[place] = carried_out(state, workers[place], order)
            # What has a worker now is served; what has none goes on waiting.
            ready = {id_ for worker in workers for id_ in worker.models}
            models = [replace(model, waiting=0) if model.id in ready else model for model in models]
        assert counts[-1] == 0, (seed, counts)


def carried_out(state, worker, order):
    stay = [id_ for id_ in worker.models if id_ not in order.evict]
    models = (*stay, order.model) if order.action != "evict" else tuple(stay)
    keep = {key for id_ in models for key in state.models[id_].components.sizes} | worker.leased
    sizes = {key: size for key, size in worker.resident.sizes.items() if key in keep}
    sizes |= state.models[order.model].components.sizes if order.action != "evict" else {}
    return replace(worker, models=models, resident=Components(sizes), idle_s=60.0)
