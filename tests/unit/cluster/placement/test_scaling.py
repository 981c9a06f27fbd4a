"""Workers that come and go, with a Serve that stops the newest: nobody goes with work, or with what only it has."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from pydantic import ValidationError
from unit.cluster.placement.random_states import cluster
from unit.cluster.placement.reporting import load, need, queue, versions, worker

from cluster.placement.autoscaling import LONGEST_DRAIN_S, STOP_S, Scaling, _can_leave, _stop_order
from cluster.placement.deciding import Deciding
from cluster.placement.observing import Observations
from cluster.placement.state import ClusterState, Components, ModelState, SloClass, WorkerState
from cluster.placement.switching import LATENCY_FIRST
from cluster.records.overrides import Overrides
from configs.admission import ControllerConfig, ScalingConfig

POLICY = ScalingConfig(
    min_workers=0, max_workers=4, spare_workers=0, drain_s=10.0, downscale_delay_s=5.0, to_zero_delay_s=20.0
)
A, B = (ModelState(id_, Components({f"own-{id_}": 10})) for id_ in "ab")


def state_of(models: list[ModelState], *workers: WorkerState) -> ClusterState:
    return cluster(models, workers)


def here(id_: str, *models: ModelState, **more) -> WorkerState:
    sizes = {key: size for each in models for key, size in each.components.sizes.items()}
    return WorkerState(id_, more.pop("node", "n"), 10, Components(sizes), tuple(each.id for each in models), **more)


def test_more_are_asked_for_at_once_and_get_ready_for_what_waits() -> None:
    scaling = Scaling(POLICY, 1)
    busy = replace(A, waiting=40)
    scaling.follow(state_of([busy, B], here("w0", A)), {"w0": 9.0}, 0.0)
    assert scaling.target == 4
    assert list(scaling.preloads) == ["a", "a", "a"]
    assert scaling.preload_orders(state_of([busy], here("w0", A)), ()) == []
    orders = scaling.preload_orders(state_of([busy], here("w0", A), here("w1"), here("w2"), here("w3")), ["w3"])
    assert [(one.action, one.worker, one.model) for one in orders] == [("switch", "w1", "a"), ("switch", "w2", "a")]
    assert scaling.preload_orders(state_of([busy], here("w0", A), here("w1"), here("w2")), ()) == []  # once


def test_the_newest_leaves_when_its_model_is_ready_elsewhere() -> None:
    scaling = Scaling(POLICY, 2)
    wanted = [replace(A, rate_long=0.1, service_s=1.0), replace(B, rate_long=0.01, service_s=1.0)]
    up_s = {"old": 100.0, "new": 10.0}
    for now_s in (0.0, 6.0):
        scaling.follow(state_of(wanted, here("old", A), here("new", B)), up_s, now_s)
    assert (scaling.target, scaling.draining) == (2, {"new"})  # only it has b
    drains = here("new", B, is_draining=True, running={"b": 1})
    both = replace(here("old", A, B), budget_bytes=20)
    scaling.follow(state_of(wanted, both, drains), up_s, 7.0)
    assert scaling.target == 2  # it still works
    scaling.follow(state_of(wanted, both, replace(drains, running={})), up_s, 8.0)
    assert (scaling.target, scaling.draining) == (1, {"new"})
    scaling.follow(state_of(wanted, both), up_s, 9.0)
    assert (scaling.target, scaling.draining) == (1, frozenset())


def test_demand_that_comes_back_calls_back_who_has_not_left() -> None:
    scaling = Scaling(POLICY, 2)
    workers = here("old", A, running={"a": 1}), here("new", A, running={"a": 1})
    for now_s in (0.0, 6.0):
        scaling.follow(state_of([A], *workers), {"old": 9.0}, now_s)
    assert scaling.draining == {"new"}
    scaling.follow(state_of([replace(A, waiting=15)], *workers), {"old": 9.0}, 7.0)
    assert (scaling.target, scaling.draining) == (2, frozenset())


def test_to_zero_and_back() -> None:
    scaling = Scaling(POLICY, 1)
    for now_s in (0.0, 21.0, 27.0):
        scaling.follow(state_of([A], here("w", A)), {}, now_s)
    assert scaling.target == 0  # nobody stays who could take over
    scaling.follow(state_of([A]), {}, 28.0)
    assert scaling.target == 0
    scaling.follow(state_of([replace(A, waiting=1, service_s=0.01)]), {}, 29.0)
    assert (scaling.target, list(scaling.preloads)) == (1, ["a"])


def test_one_that_is_pinned_or_frozen_by_hand_keeps_those_behind_it() -> None:
    for by_hand in ({"pinned": frozenset({"a"})}, {"is_frozen": True}):
        scaling = Scaling(POLICY, 3)
        workers = here("w0", A), here("w1", A), replace(here("w2", A), **by_hand)
        for now_s in (0.0, 6.0):
            scaling.follow(state_of([A], *workers), {"w0": 9.0, "w1": 8.0}, now_s)
        assert (scaling.target, scaling.draining) == (3, frozenset())


def test_a_worker_that_does_not_get_rid_of_its_work_leaves_in_the_end() -> None:
    scaling = Scaling(POLICY, 2)
    workers = here("old", A), here("new", A, running={"a": 1})
    for now_s in (0.0, 6.0, 6.0 + LONGEST_DRAIN_S - 0.1):
        scaling.follow(state_of([A], *workers), {"old": 9.0}, now_s)
        assert scaling.target == 2
    scaling.follow(state_of([A], *workers), {"old": 9.0}, 6.0 + LONGEST_DRAIN_S)
    assert scaling.target == 1
    scaling.follow(state_of([A], *workers), {"old": 9.0}, 6.1 + LONGEST_DRAIN_S + STOP_S)
    assert "old" not in scaling.draining  # Serve stopped another one, or none


def test_those_that_have_not_come_yet_are_undone_first() -> None:
    scaling = Scaling(POLICY, 3)
    for now_s in (0.0, 6.0):
        scaling.follow(state_of([A], here("w", A, running={"a": 1})), {}, now_s)
    assert (scaling.target, scaling.draining) == (1, frozenset())


SPARE = POLICY.model_copy(update={"spare_workers": 1})


def with_spare(policy: ScalingConfig = SPARE) -> Scaling:
    """One worker that works and a spare."""
    scaling = Scaling(policy, 1)
    used = replace(A, rate_long=0.1, service_s=1.0)
    scaling.assign(["w0"])
    scaling.follow(state_of([used], here("w0", A, running={"a": 1})), {"w0": 9.0}, 0.0)
    assert (scaling.target, scaling.spares) == (2, [])  # it is coming
    scaling.assign(["w0", "w1"])
    assert scaling.draining == {"w1"}
    return scaling


def test_a_spare_is_started_once_all_others_are_here_and_gets_no_work() -> None:
    scaling = Scaling(SPARE, 1)
    scaling.follow(state_of([replace(A, waiting=1)]), {}, 0.0)
    assert scaling.target == 1  # the one that is needed first
    assert with_spare().target == 2


def test_more_demand_takes_the_spare_at_once_and_another_one_is_started() -> None:
    scaling = with_spare()
    state = state_of([replace(A, waiting=15)], here("w0", A, running={"a": 1}), here("w1", is_draining=True))
    scaling.preload_orders(state, ())
    scaling.follow(state, {"w0": 9.0}, 1.0)
    assert (scaling.draining, scaling.target) == (frozenset(), 3)
    worker = here("w1")
    orders = scaling.preload_orders(state_of([A], here("w0", A), worker), ())
    assert [(one.action, one.worker, one.model) for one in orders] == [("switch", "w1", "a")]
    scaling.assign(["w0", "w1", "w2"])
    assert scaling.draining == {"w2"}


def test_the_spare_works_for_one_that_died_and_who_is_started_instead_is_the_spare() -> None:
    scaling = with_spare()
    scaling.assign(["w1"])
    assert (scaling.draining, scaling.target) == (frozenset(), 2)
    scaling.assign(["w1", "w2"])
    assert scaling.draining == {"w2"}


def test_a_spare_that_is_still_coming_works_when_it_is_wanted() -> None:
    scaling = Scaling(SPARE, 1)
    busy = here("w0", A, running={"a": 1})
    scaling.assign(["w0"])
    scaling.follow(state_of([A], busy), {}, 0.0)
    scaling.follow(state_of([replace(A, waiting=15)], busy), {}, 1.0)
    assert scaling.target == 2  # no other one is started while it comes
    scaling.assign(["w0", "w1"])
    assert scaling.draining == frozenset()


def test_who_has_drained_is_the_spare_and_the_younger_one_is_stopped() -> None:
    scaling = with_spare(SPARE.model_copy(update={"min_workers": 1}))
    up_s = {"w0": 9.0, "w1": 8.0, "w2": 1.0}
    busy = [here(name, A, running={"a": 1}) for name in ("w0", "w1")]
    scaling.follow(state_of([replace(A, waiting=15)], *busy), up_s, 1.0)
    scaling.assign(["w0", "w1", "w2"])
    for now_s in (2.0, 8.0):
        scaling.follow(state_of([A], *busy, here("w2")), up_s, now_s)
    assert (scaling.draining, scaling.target) == ({"w1", "w2"}, 3)
    drained = here("w1", A, is_draining=True)
    scaling.follow(state_of([A], here("w0", A), drained, here("w2", is_draining=True)), up_s, 9.0)
    assert (scaling.spares, list(scaling.released), scaling.target) == (["w1"], ["w2"], 2)


def test_there_is_no_spare_beyond_the_most_workers_nor_with_none() -> None:
    scaling = with_spare(SPARE.model_copy(update={"max_workers": 2}))
    both = here("w0", A, running={"a": 1}), here("w1")
    scaling.follow(state_of([replace(A, waiting=100)], *both), {}, 1.0)
    assert (scaling.target, scaling.draining) == (2, frozenset())
    scaling = with_spare()
    both = here("w0", A), here("w1", is_draining=True)
    for now_s in (2.0, 23.0, 29.0):
        scaling.follow(state_of([A], *both), {}, now_s)
    assert (scaling.target, scaling.draining) == (0, {"w0", "w1"})


def test_a_controller_that_begins_anew_takes_the_idle_one_for_the_spare() -> None:
    observations = Observations(lambda model: SloClass(), 0.0)
    observations.catalog = versions("a")
    for name, leased in (("older", frozenset()), ("used", frozenset({"x"}))):
        up_s = 9.0 if name == "older" else 1.0
        report = worker(needs={"a": need(x=10)}, ready={"x": 10}, leased=leased, up_s=up_s)
        observations.workers.note(name, report, 0.0)
    observations.queues.note("q", queue([load("a")], older={}, used={"a": 1}), 0.0)
    scaling = Scaling(SPARE, 2)
    decided = Deciding(LATENCY_FIRST, observations, iter("123456")).decide(Overrides(), 0.1, 0.0, scaling)
    assert decided is not None
    assert [name for name, one in decided.observed.state.workers.items() if one.is_draining] == ["older"]


def test_serve_stops_new_ones_of_nodes_with_few() -> None:
    state = state_of([], here("a", node="x"), here("b", node="x"), here("c", node="y"), here("d", node="x"))
    assert _stop_order(state, {"a": 3.0, "b": 9.0, "c": 5.0, "d": 1.0}) == ["c", "d", "a", "b"]


def test_at_random_no_worker_is_stopped_that_may_not_go() -> None:
    for seed in range(30):
        chance = random.Random(seed)
        drawn = {"min_workers": chance.randrange(3), "downscale_delay_s": chance.choice([0.0, 3.0])}
        policy = POLICY.model_copy(update=drawn | {"spare_workers": chance.choice([0, 1, 2])})
        scaling, names = Scaling(policy, 2), iter(f"w{number}" for number in range(1000))
        born = {next(names): 0.0, next(names): 0.0}
        for second in range(200):
            now_s = float(second)
            waiting = chance.choice([0, 0, 0, 5, 60]) if second % 40 < 15 else 0
            model = replace(A, waiting=waiting, rate_long=0.1 if waiting else 0.0)
            scaling.assign(sorted(born, key=born.__getitem__))
            assert len(scaling.spares) <= policy.spare_workers
            running = {name: {"a": 1} if name not in scaling.spares and chance.random() < 0.3 else {} for name in born}
            workers = [here(name, A, running=running[name], is_draining=name in scaling.draining) for name in born]
            state = state_of([model], *workers)
            before = scaling.target
            scaling.follow(state, {name: now_s - at_s for name, at_s in born.items()}, now_s)
            assert policy.min_workers <= scaling.target <= max(policy.max_workers, before)
            while len(born) > scaling.target:  # Serve, at once
                newest = max(born, key=lambda name: (born[name], [-ord(letter) for letter in name]))
                assert _can_leave(state, state.workers[newest]) or newest not in running
                del born[newest]
            while len(born) < scaling.target:
                born[next(names)] = now_s + 0.001 * len(born)
        assert policy.min_workers <= len(born) <= policy.max_workers


def test_one_that_leaves_gets_no_new_requests_and_one_that_comes_gets_its_model() -> None:
    observations = Observations(lambda model: SloClass(), 0.0)
    observations.catalog = versions("a")
    observations.held = {"node": ["x"]}
    for name in ("old", "new"):
        observations.workers.note(name, worker(needs={"a": need(x=10)}, ready={"x": 10}, fixed_switch_s=1.0), 0.0)
    observations.workers.note("fresh", worker(fixed_switch_s=1.0), 0.0)
    observations.queues.note("q", queue([load("a", rate_long=0.5)], old={}, new={}, fresh={}), 0.0)
    scaling = Scaling(POLICY, 3)
    scaling.leaving["new"] = 0.0
    scaling.preloads.append("a")
    decided = Deciding(LATENCY_FIRST, observations, iter("123456")).decide(Overrides(), 0.1, 0.0, scaling)
    assert decided is not None
    assert set(decided.placement.replicas["worker", "a"]) == {"old"}
    assert [(order.action, order.model) for order in decided.orders["fresh"].orders] == [("switch", "a")]


def test_without_any_worker_the_queues_say_what_is_wanted() -> None:
    observations = Observations(lambda model: SloClass(), 0.0)
    assert observations.demand() is None
    observations.queues.note("q", queue([load("a", waiting=3)], gone=["w"]), 0.0)
    found = observations.demand()
    assert found is not None
    assert (found.models["a"].waiting, found.workers) == (3, {})
    observations.queues.note("q", queue([], w={}), 0.0)  # it has not reported yet
    assert observations.demand() is None


def test_a_config_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValidationError, match="min_workers is 3, more than max_workers, 2"):
        ControllerConfig.model_validate({"scaling": {"min_workers": 3, "max_workers": 2}})
    with pytest.raises(ValidationError, match="scaling needs the controller"):
        ControllerConfig.model_validate({"enabled": False, "scaling": {"max_workers": 2}})
