"""Overload on a virtual clock: shares of tenants, goodput, deadlines and Retry-After."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest
from kit.drawing import seeds
from unit.cluster.admission import simulated_replicas
from unit.cluster.admission.simulated_replicas import POOL, Simulation

from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, Placement, Refusal, Started
from configs.admission import AdmissionConfig

ask = partial(simulated_replicas.ask, share=1 / 8)

SECONDS_PER_WORK = 0.05


def simulation(num_replicas: int = 2, **config: Any) -> Simulation:
    queue = AdmissionQueue(AdmissionConfig(**config))
    return Simulation(queue, num_replicas, lambda asked: asked.work * SECONDS_PER_WORK)


@seeds(50)
def test_tenants_with_work_share_the_replicas_by_weight(seed: int) -> None:
    weights = {"small": 1.0, "middle": 2.0, "large": 5.0}
    tenants = {name: {"weight": weight} for name, weight in weights.items()}
    sim = simulation(tenants=tenants, max_waiting=10**6, max_waiting_per_model=10**6)
    rng = random.Random(seed)
    for tenant in weights:
        # Requests of one tenant are larger than those of another: shares are of time, not of requests.
        mean = rng.uniform(0.5, 4.0)
        for _ in range(int(1600 / mean)):
            work, model = rng.uniform(0.1, 2) * mean, rng.choice("ab")
            sim.at(rng.uniform(0, 0.01), lambda now, t=tenant, w=work, m=model: ask(tenant=t, work=w, model=m))
    sim.run_until(5.0)
    sim.busy_s.clear()  # nothing was known of them
    sim.run_until(45.0)
    total = sum(sim.busy_s.values())
    assert total == pytest.approx(2 * 40, rel=0.02)  # nobody idles meanwhile
    for tenant, weight in weights.items():
        assert sim.busy_s[tenant] / total == pytest.approx(weight / 8, rel=0.05)


def test_a_tenant_alone_gets_all_and_saves_up_nothing() -> None:
    tenants = {"early": {}, "late": {}}
    sim = simulation(1, tenants=tenants, max_waiting=10**6, max_waiting_per_model=10**6)
    for _ in range(1000):
        sim.at(0.0, lambda now: ask(tenant="early"))
        sim.at(20.0, lambda now: ask(tenant="late"))
    sim.run_until(20.0)
    assert sim.busy_s["early"] == pytest.approx(20.0, abs=0.5)
    sim.run_until(50.0)
    assert sim.busy_s["late"] == pytest.approx(15.0, rel=0.05)


@pytest.mark.drawn
@pytest.mark.parametrize("overload", [1.5, 3.0, 10.0])
def test_under_overload_replicas_work_for_answers_in_time_only(overload: float) -> None:
    sim, rng = simulation(), random.Random(0)
    capacity_per_s = 2 / SECONDS_PER_WORK
    now_s, end_s = 0.0, 30.0
    while now_s < end_s:
        now_s += rng.expovariate(overload * capacity_per_s)
        patience_s = rng.uniform(1.0, 4.0)
        sim.at(now_s, lambda now, p=patience_s: ask(deadline_s=now + p))
    sim.run_until(end_s)
    in_time = [one for one in sim.served if one.ended_s <= one.ask.deadline_s]
    assert len(in_time) >= 0.9 * capacity_per_s * end_s
    assert len(in_time) >= 0.95 * len(sim.served)
    started_late = [one for one in sim.served if one.started_s > one.ask.deadline_s]
    assert not started_late


@pytest.mark.drawn
@pytest.mark.parametrize("num_waiting", [20, 200])
def test_who_comes_back_when_told_is_served(num_waiting: int) -> None:
    """A thousand at once: all come back at the time that they were told, and find half of the queue free."""
    sim = simulation(max_waiting_per_model=num_waiting)
    for n in range(40):  # it knows what a request takes
        sim.at(n * 0.03, lambda now: ask())
    sim.run_until()
    begin_s, tries = sim.now_s, 0

    def comes_back(again: Demand, refusal: Refusal) -> None:
        nonlocal tries
        assert refusal.retry_after_s is not None
        tries += 1
        sim.at(sim.now_s + refusal.retry_after_s, lambda now: again)

    sim.on_refused = comes_back
    num_before = len(sim.served)
    for _ in range(1000):
        sim.at(begin_s, lambda now: ask())
    sim.run_until()
    assert len(sim.served) - num_before == 1000
    num_rounds = 1000 / (num_waiting / 2)
    assert tries <= 1000 * (1 + num_rounds / 2) * 1.1
    makespan_s = sim.now_s - begin_s
    ideal_s = 1000 * SECONDS_PER_WORK / 2
    assert makespan_s <= 1.25 * ideal_s


def test_who_would_be_late_is_told_when_it_would_not() -> None:
    sim = simulation()
    for n in range(40):
        sim.at(n * 0.03, lambda now: ask())
    sim.run_until()
    for _ in range(400):  # 10 s of work
        sim.at(sim.now_s, lambda now: ask())
    sim.run_until(sim.now_s + 1.0)
    sim.at(sim.now_s, lambda now: ask(deadline_s=now + 2.0, tenant="default"))
    sim.run_until(sim.now_s + 1e-3)
    (_, _, refusal), *others = sim.refused
    assert not others
    assert refusal.reason == "late"
    assert refusal.retry_after_s == pytest.approx(9.0 - 2.0, rel=0.25)
    sim.at(sim.now_s + refusal.retry_after_s, lambda now: ask(deadline_s=now + 2.0))
    sim.run_until()
    assert len(sim.refused) == 1
    late = [one for one in sim.served if one.ask.deadline_s < one.ended_s]
    assert not late


def test_those_that_became_hopeless_leave_before_they_cost_work() -> None:
    """Nothing is known of the model when they come, so all are let in."""
    sim = simulation(1)
    for _ in range(400):
        sim.at(0.0, lambda now: ask(deadline_s=now + 2.2))
    sim.run_until()
    assert {refusal.reason for _, _, refusal in sim.refused} == {"late"}
    assert max(when for _, when, _ in sim.refused) < 1.5  # and not when their time was over
    in_time = [one for one in sim.served if one.ended_s <= one.ask.deadline_s]
    assert len(in_time) >= 0.9 * 2.0 / SECONDS_PER_WORK  # in batches of 8
    assert len(in_time) >= 0.9 * len(sim.served)


def test_those_that_are_given_up_at_their_deadlines_are_heard_of() -> None:
    """They never end, and those who come after them would be let in for ever."""
    queue, now_s = AdmissionQueue(AdmissionConfig()), 0.0
    queue.set_replicas(POOL, ["r"], now_s)
    queue.submit(0, ask(model="other", share=1 / 2), now_s)  # the replica is never idle

    def runs_for(ticket: int, passed_s: float, *, is_answered: bool) -> bool:
        nonlocal now_s
        queue.submit(ticket, ask(share=1 / 2, deadline_s=now_s + 2.0), now_s)
        has_started = any(isinstance(event, Started) and event.ticket == ticket for event in queue.pump(now_s))
        now_s += passed_s
        queue.leave(ticket, now_s, is_answered=is_answered)
        return has_started

    assert all(runs_for(ticket, 0.5, is_answered=True) for ticket in range(1, 10))
    assert all(
        runs_for(ticket, 0.1, is_answered=False) for ticket in range(10, 20)
    )  # a client that leaves says nothing
    started = [runs_for(ticket, 2.0, is_answered=False) for ticket in range(20, 40)]
    assert started[0]
    assert not all(started)


def test_what_takes_long_in_company_is_not_called_hopeless_alone() -> None:
    """Full replicas are all that was seen of late; 504 would say that no other time is better."""
    sim = simulation(1)
    sim.at(0.0, lambda now: ask())
    sim.run_until()
    for n in range(400):
        sim.at(1.0 + n * SECONDS_PER_WORK, lambda now: ask())
        sim.at(1.0 + n * SECONDS_PER_WORK, lambda now: ask(deadline_s=now + 60.0))
    sim.run_until(15.0)
    sim.at(15.0, lambda now: ask(deadline_s=now + 4 * SECONDS_PER_WORK))
    sim.run_until(15.01)
    (_, _, refusal), *others = sim.refused
    assert not others
    assert refusal.reason == "late"
    assert refusal.retry_after_s is not None
    sim.run_until()
    sim.at(sim.now_s, lambda now: ask(deadline_s=now + SECONDS_PER_WORK / 4))
    sim.run_until()
    assert [refusal.reason for _, _, refusal in sim.refused] == ["late", "hopeless"]


def test_an_old_measurement_does_not_refuse_for_ever() -> None:
    sim = simulation(1)
    for n in range(5):
        sim.at(n * 100.0, lambda now: ask(work=1.0))
    sim.run_until()
    slow_until_s = sim.now_s + 1.0
    sim.seconds_of = lambda asked: 5.0 if sim.now_s < slow_until_s else 0.05
    for _ in range(5):
        sim.at(sim.now_s, lambda now: ask(share=1.0))
    sim.run_until(sim.now_s + 30)
    sim.at(sim.now_s + 60, lambda now: ask(deadline_s=now + 1.0))
    sim.run_until()
    assert sim.served[-1].ended_s - sim.served[-1].arrived_s == pytest.approx(0.05)


def test_a_model_that_was_slow_once_is_tried_again_beside_others() -> None:
    """It is refused for as long as its times are believed, and then nothing of it would ever be measured."""
    sim = simulation(1)
    sim.seconds_of = lambda asked: 4.0 if asked.model == "slow" and sim.now_s < 60 else SECONDS_PER_WORK
    for _ in range(5):
        sim.at(0.0, lambda now: ask(model="slow"))
    for n in range(40 * 16):  # the replica is never idle, and not overloaded
        sim.at(40 + n / 16, lambda now: ask(model="other"))
    for n in range(60):
        sim.at(61 + n / 4, lambda now: ask(model="slow", deadline_s=now + 1.0))
    sim.run_until(59.0)
    num_before = len(sim.served)
    sim.run_until()
    answered = [one for one in sim.served[num_before:] if one.ask.model == "slow"]
    assert len(answered) >= 40
    assert all(one.ended_s <= one.ask.deadline_s for one in answered)


def test_a_placement_says_where_and_whether_a_model_starts_and_holds_up_no_other() -> None:
    queue = AdmissionQueue(AdmissionConfig())
    queue.set_replicas(POOL, ["a", "b"], 0.0)
    orders = {(POOL, "here"): ("b",), (POOL, "held"): ()}
    queue.set_placement(Placement(orders, until_s=10.0))
    for ticket, model in enumerate(["held", "here", "free", "here"]):
        queue.submit(ticket, ask(model=model, share=1.0), 0.0)
    assert {(event.ticket, event.replica) for event in queue.pump(1.0)} == {(1, "b"), (2, "a")}  # type: ignore[union-attr]
    queue.leave(2, 2.0, is_answered=True)
    assert queue.pump(3.0) == []  # "a" is free, and both that wait may not go there
    assert [event.ticket for event in queue.pump(11.0)] == [0]  # the controller is gone


def test_a_model_starts_where_it_is_said_to_be_at_hand() -> None:
    def replicas_of(resident: dict[str, list[str]]) -> dict[str, str]:
        queue = AdmissionQueue(AdmissionConfig())
        queue.set_replicas(POOL, ["a", "b", "c"], 0.0)
        for ticket, model in enumerate("xyz"):  # a switch to each has been seen to take a second
            queue.submit(ticket, ask(model=model, share=1.0), 0.0)
        assert len(queue.pump(0.0)) == 3
        for ticket in range(3):
            queue.leave(ticket, 2.0, is_answered=True, switch_s=1.0)
        queue.set_placement(Placement(ready=resident))
        for ticket, model in enumerate("xyz", start=3):
            queue.submit(ticket, ask(model=model, share=1.0), 3.0)
        return {"xyz"[event.ticket - 3]: event.replica for event in queue.pump(3.0)}  # type: ignore[union-attr]

    for order in itertools.permutations("xyz"):
        resident = dict(zip("abc", order, strict=True))
        assert replicas_of({replica: [model] for replica, model in resident.items()} | {"gone": ["x"]}) == {
            model: replica for replica, model in resident.items()
        }


def test_a_new_replica_gets_work_at_once() -> None:
    queue = AdmissionQueue(AdmissionConfig())
    queue.set_replicas(POOL, ["a"], 0.0)
    for ticket in range(80):
        queue.submit(ticket, ask(), 0.0)
    assert len(queue.pump(0.0)) == 8
    queue.set_replicas(POOL, ["a", "b"], 1.0)
    assert [event.replica for event in queue.pump(1.0)] == ["b"] * 8  # type: ignore[union-attr]
    queue.set_replicas(POOL, ["b"], 2.0)
    for ticket in range(8):  # what still runs there ends there
        queue.leave(ticket, 2.0)
    assert queue.pump(2.0) == []
    assert queue.num_running == 8
    assert queue.num_waiting == 64


def test_a_model_is_without_a_start_since_the_last_one_or_since_something_waits() -> None:
    def unstarted(now_s: float) -> float:
        return next(load.unstarted_s for load in queue.snapshot(now_s).models if load.model == "m")

    queue = AdmissionQueue(AdmissionConfig())
    queue.set_replicas(POOL, ["a"], 0.0)
    queue.submit(1, ask(1.0, share=1.0), 1.0)
    queue.pump(1.0)
    assert unstarted(5.0) == 0.0  # nothing waits
    queue.submit(2, ask(5.0, share=1.0), 5.0)
    queue.submit(3, ask(6.0, share=1.0), 6.0)
    assert unstarted(9.0) == 4.0
    queue.leave(1, 10.0, is_answered=True)
    assert queue.pump(10.0) == [Started(2, "a")]
    assert unstarted(12.0) == 2.0
    queue.give_back(2, 13.0)
    assert unstarted(13.0) == 3.0
