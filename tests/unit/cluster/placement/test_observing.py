"""Reports become the state that is planned with: who is counted where, and what missing and wrong reports do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from kit.seeding import seeded_random
from unit.cluster.placement.random_states import mistakes
from unit.cluster.placement.reporting import POOL, load, need, queue, versions, worker

from cluster.placement.autoscaling import ScalingMemory, target_replicas
from cluster.placement.observing import WARM_UP_S, Observations, Observed
from cluster.placement.reports import LoadFailure
from cluster.placement.seen_queues import QUEUE_LOST_S, SeenQueues
from cluster.placement.state import INTERACTIVE, LOST_S, STALE_S, STANDARD
from cluster.placement.switching import plan_switches
from cluster.records.load_failures import retry_after_s
from cluster.records.overrides import Overrides
from configs.admission import ScalingConfig

NO = Overrides()


def observations(*models: str, began_s: float = 0.0) -> Observations:
    found = Observations(lambda model: INTERACTIVE if model == "a" else STANDARD, began_s)
    found.catalog = versions(*models)
    return found


def seen(found: Observations, now_s: float, overrides: Overrides = NO) -> Observed:
    observed = found.observe(now_s, overrides, {})
    assert observed is not None
    return observed


def test_queues_count_requests_and_workers_count_memory() -> None:
    found = observations("a", "b", "c")
    needs = {"a": need(x=10, v=5), "b": need(y=20, v=5)}
    report = worker(budget=100, ready={"x": 10, "v": 5}, coming={"y": 20}, leased={"x", "v", "y"}, needs=needs)
    found.workers.note("w", report, 10.0)
    found.queues.note("q", queue([load("a", waiting=3, oldest_age_s=2.0, service_s=0.5)], w={"a": 2}), 10.1)
    observed = seen(found, 10.2)
    assert observed.state.ignored == ()
    a, b = observed.state.models["a"], observed.state.models["b"]
    assert (a.waiting, a.oldest_age_s, a.service_s, a.slo, a.slack_s) == (3, 2.0, 0.5, INTERACTIVE, math.inf)
    assert (b.waiting, b.service_s, b.slo) == (0, 0.5, STANDARD)  # as much as the others, while nobody knows
    assert a.components.sizes == {"x": 10, "v": 5}
    (state,) = observed.state.workers.values()
    assert (state.models, state.running, state.leased) == (("a",), {"a": 2}, frozenset({"y"}))  # x, v: by what runs
    assert (state.resident.sizes, state.budget_bytes) == ({"x": 10, "v": 5, "y": 20}, 100)
    assert state.age_s == 0.0  # its figures are fresh
    assert seen(found, 10.0 + STALE_S + 0.5).state.workers["w"].age_s == pytest.approx(STALE_S + 0.5)
    assert observed.unknown == (("c", "1"),)
    assert list(observed.names) == ["a", "b", "c"]


def test_a_switch_that_a_request_began_is_seen_by_what_is_on_its_way() -> None:
    found = observations("a", "b")
    needs = {"a": need(x=10, v=5), "b": need(y=20, v=5)}
    speeds = {"fixed_switch_s": 1.0, "attach_bytes_per_s": 10.0, "load_bytes_per_s": 4.0}
    found.held = {"node": {"v"}}
    found.workers.note("w", worker(ready={"x": 10, "v": 5}, needs=needs, **speeds), 10.0)
    found.queues.note("q", queue([], w={"b": 1}), 10.0)
    (before,) = seen(found, 10.1).state.workers.values()
    assert before.switching_to is None  # it waits for what must end first
    found.workers.note("w", worker(ready={"v": 5}, coming={"y": 20}, needs=needs, **speeds), 10.2)
    (state,) = seen(found, 10.7).state.workers.values()
    assert (state.switching_to, state.ready_in_s) == ("b", pytest.approx(1 + 20 / 10 + 20 / 4 - 0.5))
    found.held = {"node": {"v", "y"}}  # what was read meanwhile moves the end not
    found.workers.note("w", worker(ready={"v": 5}, coming={"y": 20}, needs=needs, **speeds), 12.2)
    (state,) = seen(found, 12.2).state.workers.values()
    assert (state.switching_to, state.ready_in_s) == ("b", pytest.approx(6.0))
    assert seen(found, 12.2).state.workers["w"].models == ()
    found.workers.note("w", worker(ready={"v": 5, "y": 20}, needs=needs, **speeds), 13.0)
    (after,) = seen(found, 13.0).state.workers.values()
    assert (after.switching_to, after.ready_in_s, after.models) == (None, 0.0, ("b",))


def test_several_queues_are_one() -> None:
    found = observations("a")
    found.workers.note("w", worker(ready={"x": 1}, needs={"a": need(x=1)}), 0.0)
    first = load("a", waiting=1, oldest_age_s=1.0, rate_short=2.0, slack_s=9.0, unstarted_s=0.5)
    found.queues.note("q1", queue([first], w={"a": 1}), 0.0)
    found.queues.note("q2", queue([load("a", waiting=2, oldest_age_s=3.0, rate_short=1.0)], w={"a": 4}), 0.0)
    a = seen(found, 0.1).state.models["a"]
    assert (a.waiting, a.oldest_age_s, a.rate_short, a.slack_s, a.unstarted_s) == (3, 3.0, 3.0, 9.0, 0.5)
    assert seen(found, 0.1).state.workers["w"].running == {"a": 5}
    found.queues.note("q2", queue([], w={}), QUEUE_LOST_S)
    found.workers.note("w", worker(ready={"x": 1}), QUEUE_LOST_S)
    found.forget_silent(QUEUE_LOST_S + 0.1)  # the ingress of q1 is gone, and its requests with it
    assert seen(found, QUEUE_LOST_S + 0.1).state.models["a"].waiting == 0


def test_queues_together_add_what_is_counted_and_keep_the_longest() -> None:
    draws = seeded_random()
    sums = ("waiting", "running", "rate_short", "rate_long", "started", "refused")
    longest = ("oldest_age_s", "service_s", "latency_s", "switch_s", "unstarted_s")
    one, other = ({name: draws.randint(1, 99) for name in (*sums, *longest)} for _ in range(2))
    found = SeenQueues()
    found.note("q1", queue([load("a", **one)], gone=["w1", "w3"], w2={"a": 2}), 0.0)
    found.note("q2", queue([load("a", **other), load("b")], gone=["w3"], w1={"a": 1}, w2={"a": 3, "b": 4}), 0.0)
    a, b = found.joined().models
    assert {name: getattr(a, name) for name in sums} == {name: one[name] + other[name] for name in sums}
    assert {name: getattr(a, name) for name in longest} == {name: max(one[name], other[name]) for name in longest}
    assert (b, found.loads("other pool")) == (load("b"), {})
    replicas = {replica.name: (replica.is_gone, replica.running) for replica in found.joined().replicas[POOL]}
    assert replicas == {"w1": (False, {"a": 1}), "w2": (False, {"a": 5, "b": 4}), "w3": (True, {})}


def test_a_worker_that_the_queue_does_not_list_is_gone_at_once_and_a_silent_one_in_time() -> None:
    found = observations("a")
    for name in ("w1", "w2"):
        found.workers.note(name, worker(ready={"x": 1}, needs={"a": need(x=1)}), 0.0)
    found.queues.note("q", queue([], w1={}, w2={}), 0.0)
    assert seen(found, 0.1).state.workers.keys() == {"w1", "w2"}
    found.queues.note("q", queue([], gone=["w1"], w2={}), 0.2)
    assert seen(found, 0.3).state.workers.keys() == {"w2"}
    found.workers.note("w1", worker(), LOST_S)
    found.queues.note("q", queue([], w1={}, w2={}), LOST_S)
    assert seen(found, LOST_S).state.workers["w2"].is_stale
    found.forget_silent(LOST_S + 0.1)
    assert seen(found, LOST_S + 0.1).state.workers.keys() == {"w1"}


def test_a_new_controller_waits_for_every_worker_but_not_for_ever() -> None:
    found = observations("a", began_s=100.0)
    assert found.observe(100.1, NO, {}) is None
    found.workers.note("w1", worker(), 100.1)
    assert found.observe(100.1, NO, {}) is None  # nobody knows what is asked for
    found.queues.note("q", queue([], w1={}, w2={}), 100.1)
    assert found.observe(100.2, NO, {}) is None
    found.workers.note("w2", worker(), 100.3)
    assert seen(found, 100.3).state.workers.keys() == {"w1", "w2"}
    found.queues.note("q", queue([], w1={}, w2={}, w3={}), 101.0)
    assert found.observe(101.0, NO, {}) is None
    assert seen(found, 100.0 + WARM_UP_S).state.workers.keys() == {"w1", "w2"}


def test_a_failed_load_is_backed_off_by_worker_and_forgotten_with_its_version() -> None:
    found = observations("a")
    for name, num, age_s in (("w1", 4, 1.0), ("w2", 2, 0.5)):
        failures = {"a": LoadFailure("1", num, age_s, f"broken on {name}")}
        found.workers.note(name, worker(needs={"a": need(x=1)}, failures=failures), 0.0)
    found.queues.note("q", queue([load("a", waiting=1, rate_short=1.0, rate_long=1.0)], w1={}, w2={}), 0.0)
    observed = seen(found, 0.25)
    assert observed.state.models["a"].retry_in_s == pytest.approx(retry_after_s(2) - 0.75)  # of the first that may
    assert [observed.state.workers[name].unable for name in ("w1", "w2")] == [{"a"}, {"a"}]
    later = seen(found, 4.0)
    a = later.state.models["a"]
    assert (a.retry_in_s, a.waiting, a.rate) == (0.0, 1, 0.0)  # tried again for who waits, not ahead
    assert [later.state.workers[name].unable for name in ("w1", "w2")] == [{"a"}, set()]
    error = observed.backoffs["a"].error
    assert error == "worker w1 on node node: broken on w1; worker w2 on node node: broken on w2"
    found.catalog = versions("a", version="2")
    observed = seen(found, 0.25)
    assert (observed.state.models["a"].retry_in_s, observed.backoffs) == (0.0, {})
    assert observed.unknown == (("a", "2"),)


def test_a_model_that_another_worker_may_load_is_not_backed_off_unless_that_one_leaves() -> None:
    found = observations("a")
    found.workers.note("w1", worker(needs={"a": need(x=1)}, failures={"a": LoadFailure("1", 5, 0.0, "torn")}), 0.0)
    found.workers.note("w2", worker(), 0.0)
    found.queues.note("q", queue([load("a", waiting=1, rate_long=1.0)], w1={}, w2={}), 0.0)
    observed = seen(found, 0.1)
    assert (observed.backoffs, observed.state.models["a"].retry_in_s) == ({}, 0.0)
    assert observed.state.models["a"].rate == 1.0  # others get ready ahead
    assert [observed.state.workers[name].unable for name in ("w1", "w2")] == [{"a"}, set()]
    leaving = found.observe(0.1, Overrides(draining=frozenset({"w2"})), {})
    assert leaving is not None
    assert leaving.backoffs.keys() == {"a"}


def test_what_an_operator_unloaded_is_not_expected_until_a_request_waits() -> None:
    found = observations("a")
    found.workers.note("w", worker(needs={"a": need(x=1)}), 0.0)
    found.queues.note("q", queue([load("a", waiting=2, rate_short=1.0, rate_long=1.0)], w={}), 0.0)
    assert seen(found, 0.1).state.models["a"].rate == 1.0
    found.catalog = {"a": replace(found.catalog["a"], is_unloaded=True)}
    a = seen(found, 0.1).state.models["a"]
    assert (a.rate, a.waiting) == (0.0, 2)


def test_what_is_waited_for_is_asked_first_and_nothing_while_it_is_backed_off() -> None:
    found = observations("a", "b", "c")
    found.workers.note("w", worker(failures={"c": LoadFailure("1", 1, 0.0, "no manifest")}), 0.0)
    found.queues.note("q", queue([load("b", waiting=1), load("c", waiting=9)], w={}), 0.0)
    observed = seen(found, 0.1)
    assert observed.unknown == (("b", "1"), ("a", "1"))
    assert observed.waits == {"b", "c"}
    assert observed.backoffs.keys() == {"c"}


def test_overrides_reach_the_workers_and_pins_of_unknown_models_do_not() -> None:
    found = observations("a")
    found.workers.note("w", worker(needs={"a": need(x=1)}, ready={"x": 1}, pinned={"x"}), 0.0)
    found.queues.note("q", queue([], w={}), 0.0)
    (state,) = seen(found, 0.1).state.workers.values()
    assert (state.pinned, state.is_frozen, state.is_draining) == ({"a"}, False, False)  # pinned where it is
    by_hand = Overrides(
        is_frozen=True, frozen=frozenset("w"), draining=frozenset("w"), pins={"w": frozenset({"a", "nobody"})}
    )
    observed = seen(found, 0.1, by_hand)
    (state,) = observed.state.workers.values()
    assert (state.pinned, state.is_frozen, state.is_draining) == ({"a"}, True, True)
    assert observed.state.is_frozen


JUNK = (None, -1, math.nan, math.inf, -math.inf, "x", [], {}, 10**400, object(), 0.0, 0.5, 1e300)


def test_lies_are_mended_or_refused_and_never_end_the_planning() -> None:
    """Figures of workers and queues may be anything: sizes that are none are refused, all else makes a state."""
    chance, num_named = seeded_random(), 0
    rest = {"w": {"a": 1, "ghost": 3}, "good": {}}
    for _ in range(300):
        found = observations("a", "b")
        with pytest.raises(ValueError, match="whole number"):
            found.workers.note("liar", worker(ready={"x": -1}), 0.0)
        figures = ("budget", "slots", "ready_in_s", "fixed_switch_s", "attach_bytes_per_s", "load_bytes_per_s", "up_s")
        report = worker(
            **{name: chance.choice(JUNK) for name in figures if chance.random() < 0.5},
            ready={"x": 1},
            coming={"y": 1},
            switching_to=chance.choice(["a", "nobody", None]),
            failures={"b": LoadFailure("1", 1, chance.choice([math.nan, -1.0, math.inf, 1e300]), "x")},
            needs={"a": need(x=1), "b": need(y=1, x=1), "ghost": need(x=1)},
        )
        found.workers.note("w", report, chance.choice([0.0, 50.0]))
        found.workers.note("good", worker(ready={"x": 1}), 0.0)
        odd = {name: chance.choice((math.nan, -1.0, math.inf, 1e300)) for name in ("rate_long", "service_s", "slack_s")}
        loads = [load("a", waiting=2, oldest_age_s=chance.choice([math.nan, 1e300, 2.0]), **odd)]
        found.queues.note("q", queue(loads, **rest), 0.0)
        observed = found.observe(4.0, NO)
        assert observed is not None
        assert mistakes(observed.state, plan_switches(observed.state)) == []
        scaling = ScalingConfig(min_workers=0, max_workers=9)
        assert 0 <= target_replicas(observed.state, scaling, ScalingMemory(), 2, 0.0).target <= 9
        assert observed.state.models.keys() == {"a", "b"}
        assert all(0 < model.service_s < 1e16 and model.retry_in_s >= 0 for model in observed.state.models.values())
        assert observed.state.workers["good"].models == ("a",)
        assert observed.pool == POOL
        assert not any(line.startswith("good") for line in observed.state.ignored)
        num_named += any(line.startswith("w: ") for line in observed.state.ignored)
        found.workers.note("w", worker(), 4.0)
        found.queues.note("q", queue([load("a", service_s=0.5)], **rest), 4.0)
        sound = found.observe(4.1, NO)
        assert sound is not None
        assert sound.state.ignored == ()
    assert num_named > 150


def test_an_impossible_figure_becomes_its_default_and_is_named() -> None:
    found = observations("a")
    found.workers.note("w", worker(slots=-3, attach_bytes_per_s=math.nan, needs={"a": need(x=1)}), 0.0)
    found.queues.note("q", queue([load("a", waiting=1, oldest_age_s=math.inf, service_s=0.5)], w={}), 0.0)
    state = seen(found, 0.1).state
    assert (state.workers["w"].slots, state.workers["w"].attach_bytes_per_s) == (1, 10e9)
    assert (state.models["a"].waiting, state.models["a"].oldest_age_s) == (1, 0.0)
    assert state.ignored == (
        "a: oldest_age_s is inf; taken as 0.0",
        "w: slots is -3; taken as 1",
        "w: attach_bytes_per_s is nan; taken as 10000000000.0",
    )
