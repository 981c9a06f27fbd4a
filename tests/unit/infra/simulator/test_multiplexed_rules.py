"""The port of Serve's routing against Serve's own code, on random situations."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
from kit.drawing import seeds
from ray.serve._private import constants
from ray.serve._private.request_router import request_router as serve_router
from unit.infra.simulator.random_scenarios import GB, random_scenario

from cluster.placement.state import Components
from infra.simulator import multiplexed
from infra.simulator.running import simulate
from infra.simulator.scenario import Fault, Scenario, SimModel, SimRequest, SimWorker
from infra.simulator.world import World


def test_candidates_are_those_of_serve(monkeypatch) -> None:
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(serve_router.time, "time", lambda: now.s)
    chance = random.Random(0)
    num_compared = 0
    for seed in range(300):
        names = [f"m{n}" for n in range(4)]
        workers = tuple(SimWorker(f"w{n}", "n", GB) for n in range(chance.randrange(1, 5)))
        models = tuple(SimModel(name, Components({name: GB})) for name in names)
        world = World(Scenario(models, workers, ()), lambda world: multiplexed._Multiplexed(world, 2))
        ours = world.dispatcher
        theirs = serve_router.MultiplexMixin()
        now.s = 1000.0
        asked: dict[str, tuple] = {}
        for step in range(30):
            now.s += chance.uniform(0, 0.7)
            world.now_s = now.s
            known = {each.id: frozenset(name for name in names if chance.random() < 0.3) for each in workers}
            ours._known = known
            replicas = {id_: SimpleNamespace(replica_id=id_, multiplexed_model_ids=have) for id_, have in known.items()}
            theirs._replicas, theirs._replica_id_set = replicas, set(replicas)
            theirs._update_multiplexed_model_ids_with_replicas(list(replicas.values()))
            name = chance.choice(names)
            if name not in asked or chance.random() < 0.3:
                context = SimpleNamespace(
                    multiplexed_start_matching_time=None,
                    tried_first_multiplexed_models=False,
                    tried_fewest_multiplexed_models=False,
                    should_backoff=False,
                )
                metadata = SimpleNamespace(multiplexed_model_id=name)
                pending = multiplexed._Pending(SimRequest(now.s, name))
                asked[name] = (pending, SimpleNamespace(routing_context=context, metadata=metadata))
            pending, request = asked[name]
            part = chance.random()
            uniform = lambda low, high, part=part: low + part * (high - low)  # noqa: E731
            ours._chance = SimpleNamespace(uniform=uniform)
            monkeypatch.setattr(serve_router.random, "uniform", uniform)
            assert ours._candidates(pending) == theirs.apply_multiplex_routing(request), (seed, step)
            num_compared += 1
    assert num_compared == 9000


def test_it_waits_and_tells_as_long_as_serve(monkeypatch) -> None:
    """A full worker is asked again by Serve's own pauses, the first one none."""
    asked_s: list[float] = []
    choose = multiplexed._Multiplexed._choose

    def chosen(self, pending):
        if pending.request.at_s:
            asked_s.append(self._world.now_s)
        return choose(self, pending)

    monkeypatch.setattr(multiplexed._Multiplexed, "_choose", chosen)
    model = SimModel("a", Components({"a": GB}), 9.0)
    worker = SimWorker("w", "n", GB, slots=1)
    requests = (SimRequest(0.0, "a"), SimRequest(1.0, "a"))
    World(Scenario((model,), (worker,), requests), lambda world: multiplexed._Multiplexed(world, 1)).run(6.0)
    router = SimpleNamespace(
        initial_backoff_s=constants.RAY_SERVE_ROUTER_RETRY_INITIAL_BACKOFF_S,
        backoff_multiplier=constants.RAY_SERVE_ROUTER_RETRY_BACKOFF_MULTIPLIER,
        max_backoff_s=constants.RAY_SERVE_ROUTER_RETRY_MAX_BACKOFF_S,
    )
    pauses_s = [0.0, *(serve_router.RequestRouter._compute_backoff_s(router, attempt) for attempt in range(9))]
    assert [later - earlier for earlier, later in pairwise(asked_s[:11])] == pytest.approx(pauses_s)
    assert multiplexed.PUSH_S == constants.PUSH_MULTIPLEXED_MODEL_IDS_INTERVAL_S


def test_the_least_recently_used_goes_by_count_and_loads_are_serial() -> None:
    models = tuple(SimModel(name, Components({name: GB}), 1.0, 0.0) for name in "abc")
    worker = SimWorker("w", "n", 9 * GB, slots=9, attach_bytes_per_s=1e9)
    requests = tuple(
        SimRequest(at_s, name) for at_s, name in ((0, "a"), (3, "b"), (6, "a"), (7.5, "c"), (12, "a"), (14, "b"))
    )
    world = World(Scenario(models, (worker,), requests), lambda world: multiplexed._Multiplexed(world, 2))
    world.run(100.0)
    loads = [span.model for span in sorted(world.spans, key=lambda span: span.start_s) if span.is_switch]
    assert loads == ["a", "b", "c", "b"]
    assert len(world.served) == 6
    both = tuple(SimRequest(0.0, name) for name in "ab")
    world = World(Scenario(models, (worker,), both), lambda world: multiplexed._Multiplexed(world, 2))
    world.run(100.0)
    spans = sorted((span.start_s, span.end_s) for span in world.spans if span.is_switch)
    assert spans == [(0.0, 1.0), (1.0, 2.0)]


def test_a_load_waits_until_what_runs_leaves_room_for_it() -> None:
    models = tuple(SimModel(name, Components({name: GB}), 4.0, 0.0) for name in "ab")
    requests = (SimRequest(0.0, "a"), SimRequest(2.0, "b"), SimRequest(3.0, "a"))
    ends = {}
    for num_bytes in (GB, 2 * GB):
        worker = SimWorker("w", "n", num_bytes, slots=9, attach_bytes_per_s=1e9)
        world = World(Scenario(models, (worker,), requests), lambda world: multiplexed._Multiplexed(world, 1))
        world.run(100.0)
        ends[num_bytes] = [(one.request.model, one.ended_s) for one in world.served]
    # a runs from 1 to 5; only then b is loaded, and only when b has ended is a again.
    assert ends[GB] == [("a", 5.0), ("b", 10.0), ("a", 15.0)]
    assert ends[2 * GB][:1] == [("a", 7.0)]  # where both have room they take turns


@seeds(50)
def test_a_lost_worker_costs_no_request(seed: int) -> None:
    scenario = random_scenario(seed)
    faults = [Fault(10.0 + 5 * n, "worker_lost", each.id) for n, each in enumerate(scenario.workers)]
    faults += [Fault(40.0, "worker_back", each.id) for each in scenario.workers]
    faulty = Scenario(scenario.models, scenario.workers, scenario.requests, tuple(faults))
    policies = multiplexed.policies_and_multiplexed(seed)
    figures, _ = simulate(faulty, "serve.multiplexed", policies, patience=60.0)
    assert figures.served == figures.requests
