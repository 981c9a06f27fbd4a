"""Costs of the queue, counted: many tenants, models and waiting requests cost a request hardly more than few."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import pytest
from kit.seeding import seeded_random
from unit.cluster.admission import simulated_replicas
from unit.cluster.admission.simulated_replicas import POOL
from unit.counting import operations

from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, Placement, Started
from configs.admission import AdmissionConfig

ask = partial(simulated_replicas.ask, deadline_s=1e6)
ROOMY = AdmissionConfig(max_waiting=1_000_000, max_waiting_per_model=1_000_000)
LOGARITHMIC = 1.6  # for ten times as many: a heap is a few levels higher


class Crowded:
    """A queue with one busy replica; `number` requests wait, each as `fields_of` says."""

    def __init__(self, number: int, own_models: bool, tenants: int = 10**9) -> None:
        self.queue = AdmissionQueue(ROOMY)
        self.queue.set_replicas(POOL, ["a"], 0.0)
        self.number = 0
        self.running: list[int] = []
        models = [f"m{each}" for each in range(number)] if own_models else ["m"]
        self.queue.set_placement(Placement({(POOL, id_): ("a",) if at < 16 else () for at, id_ in enumerate(models)}))
        for each in range(number + 1):
            self.come(model=models[each % len(models)], tenant=f"t{each % tenants}")
        for _ in range(3):  # so that times are measured
            self.end()

    def come(self, **fields: Any) -> None:
        self.queue.submit(self.number, ask(**fields), 0.0)
        self.number += 1
        self.pump()

    def end(self) -> None:
        self.queue.leave(self.running.pop(), 0.0, is_answered=True)
        self.pump()

    def pump(self) -> None:
        for event in self.queue.pump(0.0):
            assert not hasattr(event, "refusal"), event
            self.running.append(event.ticket)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("own_models", [False, True], ids=["one model", "a model each"])
@pytest.mark.parametrize("tenants", [1, 10**9], ids=["one tenant", "a tenant each"])
def test_a_request_costs_the_same_whoever_else_waits(own_models: bool, tenants: int) -> None:
    def cost(number: int) -> int:
        crowded = Crowded(number, own_models, tenants=tenants)

        def come_and_go() -> None:
            for each in range(10):
                crowded.come(model=f"m{each}" if own_models else "m", tenant=f"t{min(each, tenants - 1)}")
                crowded.end()

        return operations(come_and_go)

    assert cost(1000) < LOGARITHMIC * cost(100)


@pytest.mark.parametrize("tenants", [1, 10**9], ids=["of one tenant", "of a tenant each"])
def test_a_request_costs_the_same_where_the_queue_is_full(tenants: int) -> None:
    def cost(number: int) -> int:
        queue = Crowded(number, True, tenants=tenants).queue
        queue.retune(AdmissionConfig(max_waiting=number - 3, max_waiting_per_model=number))

        def come_too_many() -> None:
            for each in range(20):
                queue.submit(10**6 + each, ask(tenant=f"new{each}" if tenants == 1 else f"t{each + 5}"), 0.0)

        return operations(come_too_many)

    assert cost(1000) < LOGARITHMIC * cost(100)


def test_the_first_placement_after_a_backlog_costs_what_it_names() -> None:
    def cost(num_models: int, num_workers: int) -> int:
        queue = AdmissionQueue(ROOMY)
        workers = [f"w{number}" for number in range(num_workers)]
        queue.set_replicas(POOL, workers, 0.0)
        models = [f"m{number}" for number in range(num_models)]
        queue.set_placement(Placement({(POOL, model): () for model in models}))
        for number in range(4 * num_models):
            queue.submit(number, ask(model=models[number % num_models], share=0.25), 0.0)
            if not number % 100:
                queue.pump(0.0)
        replicas = {(POOL, model): (workers[number % num_workers],) for number, model in enumerate(models)}

        def place() -> None:
            queue.set_placement(Placement(replicas, ready=dict.fromkeys(workers, ())))
            assert len(queue.pump(0.0)) == 4 * num_workers

        return operations(place)

    assert cost(800, 80) < 4.6 * cost(200, 20)  # four times the cluster


def test_reviews_look_at_no_more_requests_a_second_the_more_wait() -> None:
    def looked_at(number: int) -> int:
        queue = Crowded(number, False).queue
        seen = 0
        walk = queue._forecast.late_ones

        def counted(pool: Any, now_s: float) -> Any:
            nonlocal seen
            seen += len(pool.lanes)
            return walk(pool, now_s)

        queue._forecast.late_ones = counted  # type: ignore[method-assign]
        now_s = 0.0
        while now_s < 20.0:
            now_s = max(now_s + 1e-6, min(queue.look_again_s(), 20.0))
            queue.pump(now_s)
        return seen

    assert looked_at(3200) < 1.3 * looked_at(800)
    assert math.isfinite(looked_at(10))


def test_a_look_at_the_queue_costs_the_same_however_many_wait() -> None:
    few, many = (Crowded(number, own_models=False, tenants=5).queue for number in (100, 1000))
    assert operations(lambda: many.snapshot(1.0)) < 1.1 * operations(lambda: few.snapshot(1.0))


def test_a_snapshot_counts_exactly_who_waits_whatever_came_left_and_came_back() -> None:
    rng = seeded_random()
    queue, running, waiting = AdmissionQueue(ROOMY), list[int](), dict[int, tuple[Demand, float]]()
    queue.set_replicas(POOL, ["a", "b"], 0.0)
    started: dict[int, tuple[Demand, float]] = {}
    for number in range(300):
        now_s = 0.1 * number
        choice = rng.random()
        if choice < 0.6:
            deadline_s = rng.choice([math.inf, 1e6 + rng.random()])
            demand = ask(model=rng.choice("xyz"), tenant=rng.choice("tu"), deadline_s=deadline_s)
            waiting[number] = demand, now_s
            queue.submit(number, demand, now_s)
        elif choice < 0.75 and waiting:
            ticket = rng.choice(list(waiting))
            del waiting[ticket]
            queue.leave(ticket, now_s)
        elif choice < 0.85 and running:
            ticket = running.pop(rng.randrange(len(running)))
            waiting[ticket] = started.pop(ticket)
            queue.give_back(ticket, now_s)
        elif running:
            ticket = running.pop(0)
            del started[ticket]
            queue.leave(ticket, now_s, is_answered=True)
        for event in queue.pump(now_s):
            assert isinstance(event, Started)
            running.append(event.ticket)
            started[event.ticket] = waiting.pop(event.ticket)
        seen = queue.snapshot(now_s)
        for model in "xyz":
            those = [one for one in waiting.values() if one[0].model == model]
            loads = [load for load in seen.models if load.model == model and load.waiting]
            assert sum(load.waiting for load in loads) == len(those)
            for load in loads:
                assert load.oldest_age_s == pytest.approx(now_s - min(at_s for _, at_s in those))
                deadline_s = min(demand.deadline_s for demand, _ in those)
                expected_s = None if deadline_s == math.inf else pytest.approx(deadline_s - now_s)
                assert load.slack_s == expected_s
            for tenant in "tu":
                ages = [now_s - at_s for demand, at_s in those if demand.tenant == tenant]
                found = [one for one in seen.shares if (one.model, one.tenant) == (model, tenant) and one.waiting]
                assert [(one.waiting, pytest.approx(one.oldest_age_s)) for one in found] == (
                    [(len(ages), max(ages))] if ages else []
                )
        assert seen.tenants == Counter(demand.tenant for demand, _ in waiting.values())
