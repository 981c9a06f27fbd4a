"""Plans become orders and places: what is ordered once, where requests start, and what is remembered of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from unit.cluster.placement.reporting import POOL, load, need, queue, versions, worker

from cluster.placement.deciding import PATIENCE_S, UNCONFIRMED_S, Decided, Deciding
from cluster.placement.observing import Observations
from cluster.placement.on_demand import chances_of
from cluster.placement.reports import LoadFailure, Order, OrderOutcome, WorkerReport
from cluster.placement.state import NOTHING, STANDARD, ClusterState, ModelState
from cluster.placement.switching import LATENCY_FIRST
from cluster.records.overrides import Overrides

FITS_ONE = 12
NEEDS = {"a": need(x=10), "b": need(y=10)}
NO = Overrides()


class Cluster:
    """Workers that fit one model each, as far as the controller can tell, and a queue."""

    def __init__(self, *names: str, models: Iterable[str] = "ab") -> None:
        self.now_s = 1000.0
        self.observations = Observations(lambda _: STANDARD, 0.0)
        self.observations.catalog = versions(*models)
        ids = (f"order{number}" for number in itertools.count())
        self.deciding = Deciding(LATENCY_FIRST, self.observations, ids)
        self.reports = {name: worker(budget=FITS_ONE, needs=NEEDS, fixed_switch_s=0.2) for name in names}
        self.running: dict[str, dict[str, int]] = {name: {} for name in names}
        self.waiting: dict[str, tuple[int, float]] = {}  # by model: how many, since when

    def decide(self, overrides: Overrides = NO, passed_s: float = 0.1) -> Decided:
        self.now_s += passed_s
        loads = [
            load(model, waiting=count, oldest_age_s=self.now_s - since_s, service_s=0.1)
            for model, (count, since_s) in self.waiting.items()
        ]
        self.observations.queues.note("q", queue(loads, **self.running), self.now_s)
        for name, report in self.reports.items():
            self.observations.workers.note(name, report, self.now_s)
        decided = self.deciding.decide(overrides, self.now_s, self.now_s)
        assert decided is not None
        return decided

    def ask(self, model: str, count: int = 1) -> None:
        self.waiting[model] = count, self.now_s

    def change(self, name: str, **fields: object) -> WorkerReport:
        self.reports[name] = replace(self.reports[name], **fields)
        return self.reports[name]


def places(decided: Decided, model: str) -> tuple[str, ...] | None:
    return decided.placement.replicas.get((POOL, model))


def orders(decided: Decided, name: str) -> list[tuple[str, str]]:
    return [(order.action, order.model) for order in decided.orders[name].orders]


def the_order(decided: Decided, name: str) -> Order:
    (order,) = decided.orders[name].orders
    return order


def test_a_cold_model_is_ordered_once_and_starts_where_it_is_ready() -> None:
    cluster = Cluster("w")
    assert places(cluster.decide(), "a") == ()  # named although nobody asks: the first request waits for a decision
    cluster.ask("a")
    order = the_order(cluster.decide(), "w")
    assert (order.action, order.model, order.evict) == ("switch", "a", ())
    assert the_order(cluster.decide(), "w") == order  # not confirmed: the same one again
    cluster.change("w", taken=(order.id,), switching_to="a", ready_in_s=5.0, coming={"x": 10})
    decided = cluster.decide()
    assert (orders(decided, "w"), places(decided, "a")) == ([], ())
    cluster.change("w", ready_in_s=0.05)
    assert places(cluster.decide(), "a") == ("w",)  # its texts can be encoded meanwhile
    done = OrderOutcome(order.id, 0.2)
    cluster.change("w", switching_to=None, ready_in_s=0.0, coming={}, ready={"x": 10}, outcomes=(done,))
    decided = cluster.decide()
    assert (orders(decided, "w"), places(decided, "a"), places(decided, "b")) == ([], ("w",), ())
    (logged,) = cluster.deciding.log
    assert (logged.order, logged.is_taken, logged.outcome, logged.decision.model) == (order, True, done, "a")
    assert "1 wait without a worker" in logged.decision.reason


def test_an_order_that_is_lost_is_given_anew() -> None:
    cluster = Cluster("w")
    cluster.ask("a")
    first = the_order(cluster.decide(), "w")
    second = the_order(cluster.decide(passed_s=UNCONFIRMED_S + 0.1), "w")
    assert (first.model, second.model) == ("a", "a")
    assert first.id != second.id


def test_a_worker_drains_before_it_switches_and_a_new_controller_goes_on_with_it() -> None:
    cluster = Cluster("w")
    cluster.change("w", ready={"x": 10}, leased=frozenset("x"))
    cluster.running["w"] = {"a": 2}
    cluster.ask("b", 4)
    decided = cluster.decide()
    assert [one.action for one in decided.plan.decisions] == ["drain", "prefetch"]
    assert orders(decided, "w") == [("prefetch", "b")]
    assert places(decided, "a") == ()  # nothing of it starts here any more
    again = cluster.decide()
    assert orders(again, "w") == [("prefetch", "b")]
    assert again.orders["w"].orders == decided.orders["w"].orders
    assert [one.decision.action for one in cluster.deciding.log] == ["drain", "prefetch"]  # told once
    cluster.running["w"] = {}
    cluster.change("w", leased=frozenset())
    other = Deciding(LATENCY_FIRST, cluster.observations, itertools.repeat("anew"))  # killed, and restarted here
    cluster.deciding, before = other, cluster.deciding
    switch = cluster.decide().orders["w"].orders[-1]
    assert (switch.id, switch.action, switch.model, switch.evict) == ("anew", "switch", "b", ("a",))
    cluster.deciding = before
    switch = cluster.decide().orders["w"].orders[-1]
    assert (switch.action, switch.model, switch.evict) == ("switch", "b", ("a",))


def test_a_model_that_no_worker_can_load_is_refused_with_the_reasons_and_the_others_go_on() -> None:
    cluster = Cluster("w1", "w2")
    cluster.change("w1", ready={"y": 10}, failures={"a": LoadFailure("1", 3, 0.0, "the disk is full")})
    cluster.change("w2", failures={"a": LoadFailure("1", 2, 0.0, "tensor t is missing")})
    cluster.ask("a")
    decided = cluster.decide()
    refusal = decided.placement.unservable.get((POOL, "a"))
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after_s) == ("unservable", pytest.approx(2.0))
    assert refusal.text == (
        "worker w1 on node node: the disk is full; worker w2 on node node: tensor t is missing (tried again in 2.0 s)"
    )
    assert decided.placement.unservable.get((POOL, "b")) is None
    assert places(decided, "b") == ("w1",)
    assert ("switch", "a") not in [*orders(decided, "w1"), *orders(decided, "w2")]
    cluster.change("w2", failures={"a": LoadFailure("1", 2, 2.1, "tensor t is missing")})
    decided = cluster.decide()
    assert (orders(decided, "w1"), orders(decided, "w2")) == ([], [("switch", "a")])
    assert decided.placement.unservable.get((POOL, "a")) is None


def test_what_one_worker_cannot_load_another_does_and_the_first_goes_on_with_other_models() -> None:
    cluster = Cluster("w1", "w2")
    cluster.change("w2", failures={"a": LoadFailure("1", 1, 0.0, "a file is missing")})
    cluster.ask("a", 3)
    cluster.ask("b")
    decided = cluster.decide()
    assert decided.placement.unservable == {}
    assert (orders(decided, "w1"), orders(decided, "w2")) == ([("switch", "a")], [("switch", "b")])
    assert any("w2 could not load it" in note for note in decided.plan.notes)


@pytest.mark.parametrize("change", ["replaced", "version"])
def test_a_worker_that_is_replaced_and_a_new_version_begin_anew(change: str) -> None:
    cluster = Cluster("w1")
    cluster.change("w1", failures={"a": LoadFailure("1", 9, 0.0, "torn")})
    cluster.ask("a")
    assert cluster.decide().placement.unservable.get((POOL, "a")) is not None
    if change == "version":
        cluster.observations.catalog = versions("a", "b", version="2")
        cluster.change("w1", needs={"a": need("2", x=10), "b": need("2", y=10)})
    else:
        cluster.reports = {"w9": replace(cluster.reports["w1"], failures={})}
        cluster.running = {"w9": {}}
    decided = cluster.decide()
    assert decided.placement.unservable.get((POOL, "a")) is None
    (name,) = cluster.reports
    assert orders(decided, name) == [("switch", "a")]


def test_while_frozen_nothing_is_ordered_and_what_no_worker_has_is_refused() -> None:
    cluster = Cluster("w")
    cluster.change("w", ready={"y": 10})
    cluster.ask("a")
    frozen = cluster.decide(Overrides(is_frozen=True), passed_s=9.0)
    assert frozen.plan.decisions == ()
    assert places(frozen, "b") == ("w",)
    refusal = frozen.placement.unservable.get((POOL, "a"))
    assert refusal is not None
    assert "frozen" in refusal.text
    thawed = cluster.decide()
    assert orders(thawed, "w") == [("switch", "a")]
    assert thawed.placement.unservable == {}


def test_a_worker_that_drains_by_hand_hands_over_before_nothing_starts_there() -> None:
    cluster = Cluster("w1", "w2")
    cluster.change("w1", ready={"x": 10})
    cluster.running["w1"] = {"a": 1}
    cluster.ask("a")
    by_hand = Overrides(draining=frozenset({"w1"}))
    decided = cluster.decide(by_hand)
    assert orders(decided, "w2") == [("switch", "a")]
    assert places(decided, "a") == ("w1",)  # until the other one has it
    cluster.change("w2", ready={"x": 10}, taken=(the_order(decided, "w2").id,))
    assert places(cluster.decide(by_hand), "a") == ("w2",)
    assert set(places(cluster.decide(), "a") or ()) == {"w1", "w2"}


def test_a_pin_brings_a_model_and_keeps_it() -> None:
    cluster = Cluster("w")
    cluster.change("w", ready={"x": 10})
    pinned = Overrides(pins={"w": frozenset({"b"})})
    order = the_order(cluster.decide(pinned), "w")
    assert (order.model, order.evict) == ("b", ("a",))
    cluster.change("w", ready={"y": 10}, taken=(order.id,))
    cluster.ask("a", 50)
    assert orders(cluster.decide(pinned, passed_s=60.0), "w") == []
    assert orders(cluster.decide(), "w") == [("switch", "a")]


def test_models_that_nobody_can_describe_or_that_fit_nowhere_start_anywhere() -> None:
    cluster = Cluster("w1", "w2", models="abc")
    cluster.change("w1", needs={"a": need(x=100)})
    cluster.change("w2", needs={})
    cluster.ask("c")
    decided = cluster.decide()
    assert places(decided, "a") is None
    assert places(decided, "c") == ()
    asked = [name for name in ("w1", "w2") if ("c", "1") in decided.orders[name].describe]
    decided = cluster.decide(passed_s=1.0)
    assert asked != [name for name in ("w1", "w2") if ("c", "1") in decided.orders[name].describe]
    decided = cluster.decide(passed_s=PATIENCE_S)
    assert places(decided, "c") is None
    assert places(decided, "b") == ()


def test_without_workers_there_is_no_word_on_where_requests_start() -> None:
    cluster = Cluster("w")
    cluster.running = {"other": {}}
    assert cluster.decide().placement.replicas == {}


def test_chances_that_fade_alike_are_no_news() -> None:
    rates = {"a": 1 / 3, "b": 0.7, "c": 2.9}
    states = [
        ClusterState(
            {id_: ModelState(id_, NOTHING, rate_long=rate * math.exp(-age_s / 60)) for id_, rate in rates.items()}
        )
        for age_s in (0.0, 0.25, 7.1, 33.0)
    ]
    assert all(chances_of(state) == chances_of(states[0]) for state in states)
    assert sum(chances_of(states[0]).values()) == pytest.approx(1.0, abs=0.01)


def test_a_drained_worker_hands_over_what_another_one_can_start() -> None:
    cluster = Cluster("v", "w")
    for name in "vw":
        cluster.change(name, ready={"x": 10})
    cluster.running["w"] = {"a": 2}
    drained = Overrides(draining=frozenset("w"))
    assert {name: of.migrate for name, of in cluster.decide().orders.items()} == {"v": (), "w": ()}
    assert {name: of.migrate for name, of in cluster.decide(drained).orders.items()} == {"v": (), "w": ("a",)}
    cluster.change("v", ready={})
    assert cluster.decide(drained).orders["w"].migrate == ()
