"""The virtual workers against a naive simulation in small steps, and the books that must balance."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from kit.drawing import seeds
from unit.infra.simulator.random_scenarios import GB, random_scenario

from cluster.placement.state import Components
from infra.simulator.controlled import Controlled
from infra.simulator.running import POLICIES, simulate
from infra.simulator.scenario import Fault, Scenario, SimModel, SimRequest, SimWorker
from infra.simulator.world import World


class AtOnce:
    """Starts every request as it comes, on the one worker, which has everything."""

    def __init__(self, world: World) -> None:
        self.world = world

    def on_request(self, request: SimRequest) -> None:
        worker = self.world.workers["w"]
        worker.models.setdefault(request.model, 0.0)
        self.world.start_loaded(worker, request)

    def on_worker(self, worker) -> None: ...

    def on_load_failed(self, worker, model: str) -> None: ...

    def on_fault(self, fault: Fault) -> None: ...


@seeds(50)
def test_requests_share_a_worker_as_a_step_loop_shares_it(seed: int) -> None:
    chance = random.Random(seed)
    models = tuple(
        SimModel(f"m{n}", Components({f"c{n}": GB}), chance.uniform(0.2, 1.0), chance.random()) for n in range(3)
    )
    requests = tuple(
        sorted((SimRequest(chance.uniform(0, 4), f"m{chance.randrange(3)}") for _ in range(12)), key=lambda r: r.at_s)
    )
    worker = SimWorker("w", "n", 9 * GB, slots=99, speed=chance.choice([0.5, 1.0, 2.0]))
    world = World(Scenario(models, (worker,), requests), AtOnce)
    world.run(1e9)
    assert len(world.served) == 12
    ends = {(each.request.at_s, each.request.model): each.ended_s for each in world.served}
    # The naive one: small slices of time, each given to one model after the other, to its whole batch.
    left, step_s, now_s, found = {}, 0.0005, 0.0, {}
    specs = {model.id: model for model in models}
    waiting = list(requests)
    while waiting or left:
        while waiting and waiting[0].at_s <= now_s:
            left[waiting[0]] = 1.0
            waiting.pop(0)
        active = {request.model for request in left}
        for request in left:
            model = specs[request.model]
            size = sum(other.model == request.model for other in left)
            batch_s = model.service_s * (1 + model.batch_growth * (size - 1))
            left[request] -= step_s / len(active) * worker.speed / batch_s
        now_s += step_s
        for request in [request for request, share in left.items() if share <= 0]:
            found[request.at_s, request.model] = now_s
            del left[request]
    assert found.keys() == ends.keys()
    for key, end_s in ends.items():
        assert found[key] == pytest.approx(end_s, abs=0.01)


@seeds(50)
@pytest.mark.parametrize("policy", ["latency-first", "throughput-first", "static", "least-loaded"])
def test_every_request_is_answered_once_and_no_budget_is_passed(seed: int, policy, monkeypatch) -> None:
    scenario = random_scenario(seed)
    original = World.switch

    def checked(self, worker, model_id, evict):
        assert not set(worker.running()).intersection(evict), "evicts what runs"
        done = original(self, worker, model_id, evict)
        assert sum(worker.resident.values()) <= worker.spec.budget_bytes
        for id_ in worker.models:
            assert self.models[id_].components.sizes.keys() <= worker.resident.keys()
        return done

    monkeypatch.setattr(World, "switch", checked)
    figures, world = simulate(scenario, policy, patience=40.0)
    assert figures.served == figures.requests
    assert sorted(map(id, (each.request for each in world.served))) == sorted(map(id, scenario.requests))
    assert all(each.started_s >= each.request.at_s for each in world.served)


@seeds(50)
def test_the_controller_loses_and_doubles_nothing_under_faults(seed: int) -> None:
    scenario = random_scenario(seed, with_faults=True)
    figures, world = simulate(scenario, "latency-first", patience=40.0)
    assert figures.served == figures.requests
    assert sorted(map(id, (each.request for each in world.served))) == sorted(map(id, scenario.requests))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_lost_worker_costs_no_request_under_any_policy(policy) -> None:
    for seed in range(3):
        scenario = random_scenario(seed)
        faults = [Fault(10.0 + 5 * n, "worker_lost", each.id) for n, each in enumerate(scenario.workers)]
        faults += [Fault(40.0, "worker_back", each.id) for each in scenario.workers]
        faulty = Scenario(scenario.models, scenario.workers, scenario.requests, tuple(faults))
        figures, _ = simulate(faulty, policy, patience=60.0)
        assert figures.served == figures.requests


def test_all_workers_gone_and_back() -> None:
    model = SimModel("m", Components({"c": GB}))
    workers = tuple(SimWorker(f"w{n}", "n", GB) for n in range(3))
    requests = tuple(SimRequest(float(n), "m") for n in range(30))
    faults = [Fault(5.0, "worker_lost", each.id) for each in workers]
    faults += [Fault(60.0, "worker_back", each.id) for each in workers]
    figures, _ = simulate(Scenario((model,), workers, requests, tuple(faults)), "latency-first")
    assert figures.served == 30
    assert 60 < figures.ended_s < 75


@pytest.mark.parametrize("policy", ["latency-first", "no-controller"])
def test_a_worker_that_is_gone_for_good_is_asked_no_more(policy) -> None:
    workers = tuple(SimWorker(f"w{n}", "n", GB) for n in range(2))
    requests = tuple(SimRequest(float(n), "m") for n in range(30))
    scenario = Scenario((SimModel("m", Components({"c": GB})),), workers, requests, (Fault(5.5, "worker_lost", "w0"),))
    figures, world = simulate(scenario, policy)
    assert figures.served == 30
    assert {each.worker for each in world.served if each.started_s > 5.5} == {"w1"}


def test_two_workers_of_a_node_read_a_cold_model_once() -> None:
    workers = tuple(SimWorker(f"w{n}", "n", 10 * GB, load_bytes_per_s=1e9, attach_bytes_per_s=10e9) for n in range(2))
    model, request = SimModel("m", Components({"c": 10 * GB})), SimRequest(20.0, "m")
    scenario = Scenario((model,), workers, (request,), nodes_hold_all=False)
    world = World(scenario, Controlled)
    world.call_at(1.0, lambda: world.switch(world.workers["w0"], "m", ()))
    world.call_at(5.0, lambda: world.switch(world.workers["w1"], "m", ()))
    world.run(40.0)
    ends_s = {span.worker: span.end_s for span in world.spans if span.is_switch}
    assert (world.read_bytes, ends_s) == (10 * GB, {"w0": pytest.approx(12.0), "w1": pytest.approx(12.0)})


def test_a_herd_on_a_cold_model_is_one_load_and_one_read() -> None:
    models = tuple(SimModel(f"m{n}", Components({f"c{n}": 10 * GB}), 0.001, 0.0) for n in range(4))
    workers = tuple(SimWorker(f"w{n}", "n", 10 * GB, 64, attach_bytes_per_s=5e9) for n in range(4))
    herd = tuple(SimRequest(1.0, "m0") for _ in range(1000))
    figures, _ = simulate(Scenario(models, workers, herd, nodes_hold_all=False), "latency-first")
    assert (figures.served, figures.switches, figures.read_bytes) == (1000, 1, 10 * GB)


def test_a_model_that_fails_to_load_is_backed_off_and_harms_no_other() -> None:
    bad = SimModel("bad", Components({"bad": GB}), num_failing_loads=10**6)
    good = SimModel("good", Components({"good": GB}), 0.5)
    requests = tuple(SimRequest(n * 0.5, ("bad", "good")[n % 2]) for n in range(120))
    worker = SimWorker("w", "n", GB, attach_bytes_per_s=2e9)
    figures, world = simulate(Scenario((bad, good), (worker,), requests), "latency-first", patience=2.0)
    assert {each.request.model for each in world.served} == {"good"}
    assert figures.served == 60
    assert max(each.latency_s for each in world.served) < 6.0
    assert 3 <= figures.failed_loads <= 10  # 1, 2, 4, ... 60 s apart in three minutes


def test_a_load_that_fails_is_backed_off_only_where_it_failed() -> None:
    """As in the cluster, where each worker reports its own failures: the next one tries at once."""
    bad = SimModel("bad", Components({"bad": GB}), num_failing_loads=5)
    workers = tuple(SimWorker(f"w{n}", "n", GB, fixed_switch_s=10.0, attach_bytes_per_s=1e12) for n in range(8))
    world = World(Scenario((bad,), workers, (SimRequest(0.0, "bad"),)), Controlled)
    world.run(500.0)
    loads = [(span.worker, span.start_s) for span in world.spans if span.is_switch]
    assert all(name != next_ for (name, _), (next_, _) in pairwise(loads))
    assert [at_s for _, at_s in loads] == pytest.approx([0.0, 10.0, 20.0, 30.0, 40.0, 50.0], abs=0.2)
    assert len(world.served) == 1


def test_a_dead_controller_is_not_waited_for() -> None:
    """The last plan grows stale; the router goes on by itself, and a model that no worker has gets one."""
    models = tuple(SimModel(name, Components({name: GB}), 0.2) for name in ("old", "new"))
    requests = tuple(SimRequest(n * 0.5, "old" if n < 40 else "new") for n in range(80))
    workers = (SimWorker("w", "n", GB, attach_bytes_per_s=1e9),)

    def dispatch(world: World) -> Controlled:
        controlled = Controlled(world)
        world.call_at(10.0, lambda: setattr(controlled, "is_controller_up", False))
        return controlled

    world = World(Scenario(models, workers, requests), dispatch)
    world.run(400.0)
    assert len(world.served) == 80
    assert max(each.latency_s for each in world.served) < 3.0


def test_a_liar_gets_nothing_and_is_named() -> None:
    model = SimModel("m", Components({"c": GB}), 0.2)
    workers = tuple(SimWorker(f"w{n}", "n", GB) for n in range(2))
    requests = tuple(SimRequest(2.0 + n * 0.1, "m") for n in range(50))
    world = World(Scenario((model,), workers, requests, (Fault(0.5, "worker_lies", "w0"),)), Controlled)
    world.run(500.0)
    assert len(world.served) == 50
    assert any("w0" in line for line in world.dispatcher.ignored)  # type: ignore[attr-defined]
