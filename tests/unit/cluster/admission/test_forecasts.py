"""Forecasts refuse only what cannot be done: of other sizes, for other models, beside other tenants."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from kit.seeding import seeded_random

from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, Placement, Refused
from cluster.admission.replica_slots import PLAYED, PlayedStarts
from cluster.admission.service_times import Estimate, ServiceTimes
from configs.admission import AdmissionConfig

POOL, SLOT = "worker", 1 / 32


class _Door:
    """A queue before one replica; requests are asked for one after the other."""

    def __init__(self, config: AdmissionConfig | None = None) -> None:
        self.queue = AdmissionQueue(config or AdmissionConfig())
        self.queue.set_replicas(POOL, ["w0"], 0.0)
        self.now_s, self.num = 0.0, 0

    def ask(self, model: str, work: float, budget_s: float, share: float = SLOT, tenant: str = "default") -> str:
        """Return why the queue refuses a request, "" if it does not."""
        self.num += 1
        self.queue.submit(self.num, Demand(POOL, model, work, share, 2, tenant, self.now_s + budget_s), self.now_s)
        events = self.queue.pump(self.now_s)
        found = [event.refusal.reason for event in events if isinstance(event, Refused) and event.ticket == self.num]
        return found[0] if found else ""

    def serve(self, model: str, work: float, took_s: float, budget_s: float = 300.0, share: float = SLOT) -> str:
        """Ask, and answer after `took_s`."""
        if reason := self.ask(model, work, budget_s, share):
            return reason
        self.now_s += took_s
        self.queue.leave(self.num, self.now_s, is_answered=True)
        self.queue.pump(self.now_s)
        return ""


@pytest.mark.parametrize("num_small", [5, 200, 1500])
def test_small_requests_do_not_make_large_ones_hopeless(num_small: int) -> None:
    """0.3 s of prefill and 20 ms for each token that is really written, 300 of up to 512."""
    door = _Door()
    assert not any(door.serve("llm", 512.0, 6.3) for _ in range(5))
    assert not any(door.serve("llm", 1.0, 0.32) for _ in range(num_small))
    door.ask("llm", 1.0, 60.0)  # one that runs on, so that times are not stale
    assert [door.serve("llm", 512.0, 6.3, budget_s=60.0) for _ in range(20)] == [""] * 20


@pytest.mark.parametrize("max_tokens", [1024.0, 4096.0])
def test_a_size_that_was_never_measured_is_not_refused_for_its_size(max_tokens: float) -> None:
    door = _Door()
    assert not any(door.serve("llm", 1.0, 0.32) for _ in range(300))
    door.ask("llm", 1.0, 300.0)
    refused = []
    for _ in range(50):  # together, before the first one has ended
        refused += [reason] if (reason := door.ask("llm", max_tokens, 300.0)) else []
        door.now_s += 0.1
    assert "hopeless" not in refused
    assert len(refused) <= 50 - 31  # 31 of 32 slots were free


def test_what_takes_longer_than_its_time_even_alone_is_hopeless_and_tried_again_now_and_then() -> None:
    door, took_s = _Door(), 30.0
    assert not any(door.serve("m", 100.0, took_s, share=1.0) for _ in range(5))
    outcomes = []
    for _ in range(600):
        door.serve("m", 1.0, 1.0)  # small ones all the time: the model is not stale
        outcomes.append(door.ask("m", 100.0, 10.0))
        if not outcomes[-1]:
            door.queue.leave(door.num, door.now_s + 0.5, is_answered=True)  # it has become quicker
    assert outcomes[:100] == ["hopeless"] * 100
    assert outcomes[-1] == ""  # measured anew, it is served again


@pytest.mark.parametrize("num_large", [5, 60])
def test_what_waits_for_a_model_without_a_worker_delays_no_other_models_requests(num_large: int) -> None:
    door = _Door()
    for _ in range(3):
        door.serve("large", 1.0, 20.0, share=0.25)
        door.serve("usual", 1.0, 1.0, share=0.25)
    placed = {(POOL, "large"): (), (POOL, "usual"): ("w0",)}
    door.queue.set_placement(Placement(placed, math.inf, ready={"w0": ("usual",)}))
    assert not any(door.ask("large", 1.0, 300.0 + 20.0 * num_large, share=0.25) for _ in range(num_large))
    assert [door.serve("usual", 1.0, 1.0, budget_s=60.0, share=0.25) for _ in range(20)] == [""] * 20


def test_what_waits_counts_again_as_soon_as_its_model_has_a_worker() -> None:
    door = _Door()
    for model in ("large", "usual") * 3:
        door.serve(model, 1.0, 10.0, share=1.0)
    door.queue.set_placement(Placement({(POOL, "large"): (), (POOL, "usual"): ("w0",)}))
    for _ in range(10):
        assert not door.ask("large", 1.0, math.inf, share=1.0)
    assert not door.ask("usual", 1.0, math.inf, share=1.0)  # it runs
    assert not door.ask("usual", 1.0, 60.0, share=1.0)
    door.queue.set_placement(Placement({(POOL, "large"): ("w0",), (POOL, "usual"): ("w0",)}))
    assert door.ask("usual", 1.0, 60.0, share=1.0) == "late"


def test_hasty_requests_of_one_tenant_crowd_nobody_else_out() -> None:
    """One of least weight asks for 1 s of work within 1.2 s, every 2 s; another sends 40 such at once, with 60 s."""
    door = _Door(AdmissionConfig(tenants={"b": {"weight": 100}, "x": {"weight": 0.001}}))
    for _ in range(5):
        door.serve("m", 1.0, 1.0, share=1.0)
    refused = []
    for _ in range(5):
        for _ in range(20):
            assert not door.ask("m", 1.0, 1.2, share=1.0, tenant="x")
            door.now_s += 1.0
            door.queue.leave(door.num, door.now_s, is_answered=True)
            door.now_s += 1.0
        refused += [door.ask("m", 1.0, 60.0, share=1.0, tenant="b") for _ in range(40)]
        for ticket in range(door.num + 1):
            door.queue.leave(ticket, door.now_s)
        door.queue.pump(door.now_s)
    assert refused == [""] * 200


def test_those_that_wait_go_through_the_places_that_no_long_request_keeps() -> None:
    """One of 200 s runs in one of two places. Eleven of 2 s go through the other, one after the other."""
    door = _Door()
    for _ in range(5):
        door.serve("long", 1.0, 100.0, budget_s=1e6, share=0.5)  # among two it counts as twice as long
        door.serve("short", 1.0, 1.0, budget_s=1e6, share=0.5)
    for model in ("long", *["short"] * 11):
        assert not door.ask(model, 1.0, math.inf, share=0.5)
    assert [door.ask("short", 1.0, budget_s, share=0.5) for budget_s in (15.0, 40.0)] == ["late", ""]


@pytest.mark.parametrize("each_s", [0.0, 0.3, 7.0])
def test_starts_are_those_of_a_queue_that_is_played(each_s: float) -> None:
    free_s = sorted(seeded_random().uniform(5.0, 15.0) for _ in range(seeded_random().choice([1, 3, 16])))
    starts, places, played = PlayedStarts(list(free_s), each_s), list(free_s), []
    for _ in range(3 * PLAYED):
        first = places.index(min(places))
        played.append(places[first])
        places[first] += each_s
    assert [starts.at_s(number) for number in range(PLAYED)] == pytest.approx(played[:PLAYED])
    assert starts.at_s(2.5) == pytest.approx((played[2] + played[3]) / 2)
    if each_s > 1.0:  # all places have taken turns by then
        far = range(PLAYED, 3 * PLAYED)
        assert [starts.at_s(number) for number in far] == pytest.approx([played[number] for number in far], abs=each_s)


@pytest.mark.parametrize("seed", range(4))
def test_the_parts_of_a_time_outlast_any_number_of_requests_of_one_size(seed: int) -> None:
    rng = random.Random(seed)
    fixed_s, per_work_s = rng.uniform(0.1, 1.0), rng.uniform(0.01, 0.1)
    seconds = Estimate()
    for number in range(2000):
        work = rng.choice([1.0, 100.0, 400.0]) if number < 100 else 1.0
        seconds.note_seconds(work, (fixed_s + per_work_s * work) * rng.lognormvariate(0, 0.02))
    assert seconds.seconds_of(400.0) == pytest.approx(fixed_s + 400 * per_work_s, rel=0.5)


def test_no_request_takes_less_than_one_of_less_work_did() -> None:
    times = ServiceTimes()
    for number in range(10):
        times.note_served("m", float(number), 8.0, 2.0, 2.0)
        times.note_served("m", float(number), 64.0, 9.0, 9.0)
    known = times.times("m")
    assert known is not None
    assert known.least_s(4.0) == 0.0
    assert known.least_s(8.0) == pytest.approx(2.0, rel=0.3)
    assert known.least_s(16.0) == pytest.approx(2.0, rel=0.3)
    assert known.least_s(1000.0) == pytest.approx(9.0, rel=0.3)
    assert known.is_known(200.0)
    assert not known.is_known(1000.0)


@pytest.mark.parametrize("others", [0, 30])
def test_what_others_will_send_until_its_deadline_goes_before_a_request(others: int) -> None:
    """Work of a second each; another tenant of equal weight sends some every other second."""
    door = _Door()
    for _ in range(10):
        door.serve("m", 1.0, 1.0, share=1.0)
    for _ in range(others):
        assert not door.ask("m", 1.0, math.inf, share=1.0, tenant="other")
        door.now_s += 1.0
        door.queue.leave(door.num, door.now_s, is_answered=True)
        door.now_s += 1.0
    for _ in range(11):  # one of them runs
        assert not door.ask("m", 1.0, math.inf, share=1.0)
    assert door.ask("m", 1.0, 14.0, share=1.0) == ("late" if others else "")
    assert door.ask("m", 1.0, 40.0, share=1.0) == ""


def test_a_tenant_whose_long_request_runs_is_told_that_others_go_first() -> None:
    door = _Door()
    for model, took_s in (("long", 20.0), ("short", 1.0)):
        for _ in range(5):
            door.serve(model, 1.0, took_s, share=1.0)
    assert door.ask("long", 1.0, math.inf, share=1.0) == ""
    assert [door.ask("short", 1.0, math.inf, share=1.0, tenant="other") for _ in range(9)] == [""] * 9
    assert door.ask("short", 1.0, 24.0, share=1.0) == "late"
    assert door.ask("short", 1.0, 24.0, share=1.0, tenant="third") == ""


def test_a_request_that_waits_stays_until_it_cannot_be_done_any_more() -> None:
    """A request of 3 s has 9 s. A more urgent one of 20 s goes first; its client leaves, or does not."""
    for ends_s, outcome in ((5.0, ""), (math.inf, "late")):
        door = _Door()
        for model, took_s in (("long", 20.0), ("short", 3.0)):
            for _ in range(5):
                door.serve(model, 1.0, took_s, share=1.0)
        began_s = door.now_s
        assert not door.ask("short", 1.0, math.inf, share=1.0)  # it runs
        running = door.num
        assert not door.ask("short", 1.0, 9.0, share=1.0)
        waiting = door.num
        door.queue.submit(999, Demand(POOL, "long", 1.0, 1.0, 1, "default", math.inf), door.now_s)
        door.queue.leave(running, began_s + 3.0, is_answered=True)
        found: dict[int, tuple[Any, float]] = {}
        for tick in range(12, 40):
            now_s = began_s + tick / 4
            if now_s - began_s >= ends_s:
                door.queue.leave(999, now_s)
            found |= {one.ticket: (one, now_s - began_s) for one in door.queue.pump(now_s)}
        event, at_s = found[waiting]
        assert getattr(getattr(event, "refusal", None), "reason", "") == outcome
        assert at_s == (5.0 if not outcome else pytest.approx(6.25))
