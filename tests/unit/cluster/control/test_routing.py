"""The choice of a worker for a request: planned, resident, cost; and what stale information leads to."""

from __future__ import annotations

import math
import random

import pytest

from cluster.control.routing import Choice, WaitingRequest, WorkerLoad, choose_worker, start_order


def choose(
    request: WaitingRequest, loads: list[WorkerLoad], planned: dict[str, tuple[str, ...]], age_s: float = 0.1
) -> Choice:
    return choose_worker(request, {load.id: load for load in loads}, planned, age_s)


ASKED = WaitingRequest("a", service_s=1.0)


def test_the_planned_worker_that_ends_first() -> None:
    loads = [WorkerLoad("w0", {"a"}, 1), WorkerLoad("w1", {"a"}, 3), WorkerLoad("w2", {"a"}, 9)]
    choice = choose(ASKED, loads, {"a": ("w0", "w1")})
    assert (choice.worker, choice.rank) == ("w1", "planned")
    fast, slow = WorkerLoad("w0", {"a"}, 1, busy_s=0.2, speed=2.0), WorkerLoad("w1", {"a"}, 4)
    assert choose(ASKED, [fast, slow], {"a": ("w0", "w1")}).worker == "w0"


def test_a_request_waits_for_its_planned_workers_unless_its_deadline_is_near() -> None:
    loads = [WorkerLoad("w0", {"a"}, 0), WorkerLoad("w1", {"a"}, 2, evicting=("a",)), WorkerLoad("w2", (), 4)]
    planned = {"a": ("w0", "w2")}
    assert choose(ASKED, loads, planned).rank == "wait"
    choice = choose(WaitingRequest("a", slack_s=1.5, service_s=1.0), loads, planned)
    assert (choice.worker, choice.rank) == ("w1", "resident")


def test_without_a_planned_worker_any_that_has_it() -> None:
    loads = [WorkerLoad("w0", {"b"}, 4), WorkerLoad("w1", {"a"}, 1)]
    assert choose(ASKED, loads, {}).worker == "w1"
    assert choose(ASKED, loads[:1], {}).rank == "wait"


@pytest.mark.parametrize("age_s", [99.0, -1.0, math.nan, math.inf])
def test_a_stale_plan_is_not_waited_for(age_s: float) -> None:
    loads = [
        WorkerLoad("w0", {"b"}, 2, busy_s=3.0, switch_s={"a": 1.0}),
        WorkerLoad("w1", {"b"}, 2, busy_s=0.0, switch_s={"a": 2.0}),
        WorkerLoad("w2", (), 2, is_usable=False),
    ]
    choice = choose(ASKED, loads, {"a": ("w2",)}, age_s)
    assert (choice.worker, choice.rank) == ("w1", "cost")
    resident = WorkerLoad("w3", {"a"}, 1, busy_s=50.0)
    assert choose(ASKED, [*loads, resident], {"a": ("w2",)}, age_s).worker == "w3"
    assert choose(ASKED, [WorkerLoad("w0", {"b"}, 0)], {}, age_s).rank == "wait"


def test_no_choice_names_a_worker_that_cannot_take_the_request() -> None:
    chance = random.Random(0)
    for _ in range(3000):
        loads = [
            WorkerLoad(
                f"w{number}",
                {each for each in "abc" if chance.random() < 0.4},
                chance.randrange(3),
                chance.random() * 9,
                chance.choice([0.5, 1.0]),
                {each for each in "abc" if chance.random() < 0.2},
                {"a": chance.random()} if chance.random() < 0.5 else {},
                chance.random() < 0.8,
            )
            for number in range(chance.randrange(5))
        ]
        planned = {"a": tuple(f"w{chance.randrange(7)}" for _ in range(chance.randrange(4)))}
        age_s = chance.choice([0.1, 2.9, 3.1, math.nan])
        request = WaitingRequest("a", slack_s=chance.choice([math.inf, 0.5, -1.0, math.nan]), service_s=1.0)
        choice = choose(request, loads, planned, age_s)
        if choice.worker is None:
            assert choice.rank == "wait"
            continue
        load = next(load for load in loads if load.id == choice.worker)
        assert load.is_usable
        assert load.free_slots > 0
        assert ("a" in load.models) == (choice.rank != "cost")
        assert choice.rank != "planned" or (load.id in planned["a"] and age_s < 3 and "a" not in load.evicting)
        assert choice.rank != "cost" or not age_s < 3


def test_the_doomed_come_last_then_priority_deadline_and_age() -> None:
    heads = [
        WaitingRequest("doomed", 9.0, 1, 0.5, 1.0),
        WaitingRequest("late", 1.0, 2, 5.0, 1.0),
        WaitingRequest("old", 9.0, 1, math.inf, 1.0),
        WaitingRequest("new", 1.0, 1, math.inf, 1.0),
        WaitingRequest("soon", 1.0, 1, 9.0, 1.0),
        WaitingRequest("broken", 1.0, 1, math.nan, 1.0),
    ]
    assert [head.model for head in sorted(heads, key=start_order)][:4] == ["soon", "old", "new", "late"]
