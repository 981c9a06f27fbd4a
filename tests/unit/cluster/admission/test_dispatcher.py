"""The queue on an event loop: places are awaited, and who goes leaves nothing."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import pytest
from kit.seeding import seeded_random
from unit.cluster.admission import simulated_replicas
from unit.cluster.admission.simulated_replicas import POOL

from cluster.admission.dispatcher import Dispatcher, NotAdmitted
from cluster.admission.records import Demand, Placement, Refusal
from configs.admission import AdmissionConfig

ask = partial(simulated_replicas.ask, share=0.25)


def dispatcher(*replicas: str, **config: Any) -> Dispatcher:
    queue = Dispatcher(AdmissionConfig(**config))
    queue.set_replicas(POOL, replicas)
    return queue


async def numbers(queue: Dispatcher) -> tuple[int, int]:
    models = (await queue.snapshot()).models
    return sum(load.waiting for load in models), sum(load.running for load in models)


@pytest.mark.parametrize("num_requests", [3_000, pytest.param(10_000, marks=pytest.mark.long)])
async def test_random_cancellations_leave_nothing(monkeypatch: pytest.MonkeyPatch, num_requests: int) -> None:
    monkeypatch.setattr("cluster.admission.dispatcher.AVOID_S", 0.0)
    queue = dispatcher("a", "b", max_waiting=1_000_000, max_waiting_per_model=1_000_000)
    rng = seeded_random()
    on: dict[str, int] = {"a": 0, "b": 0}
    num_answered = 0

    async def request() -> None:
        nonlocal num_answered
        ticket = queue.submit(ask(model=rng.choice("xyz"), priority=rng.randint(1, 3)))
        is_answered = False
        try:
            replica = await queue.slot(ticket)
            on[replica] += 1
            assert on[replica] <= 4
            try:
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(0)
                if rng.random() < 0.1:
                    on[replica] -= 1
                    replica = "gone"
                    on[replica] = 1
                    replica = await queue.reassign(ticket)
                    on[replica] += 1
                is_answered = True
                num_answered += 1
            finally:
                on[replica] -= 1
        finally:
            queue.leave(ticket, is_answered=is_answered)

    tasks = []
    for _ in range(num_requests):
        tasks.append(asyncio.create_task(request()))
        if rng.random() < 0.7:
            rng.choice(tasks[-50:]).cancel()
        if rng.random() < 0.3:
            await asyncio.sleep(0)
    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert await numbers(queue) == (0, 0)
    assert not queue._slots
    assert num_answered == sum(outcome is None for outcome in outcomes)


async def test_a_request_that_leaves_the_queue_makes_room_at_once() -> None:
    queue = dispatcher("a", max_waiting_per_model=1)
    running = [queue.submit(ask(share=1.0)), queue.submit(ask(share=1.0))]
    assert await queue.slot(running[0]) == "a"
    waiting = queue.slot(running[1])
    await asyncio.sleep(0)
    third = queue.submit(ask(share=1.0))
    with pytest.raises(NotAdmitted):
        await queue.slot(third)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    queue.leave(running[1])
    fourth = queue.submit(ask(share=1.0))
    place = queue.slot(fourth)
    await asyncio.sleep(0)
    assert await numbers(queue) == (1, 1)
    queue.leave(running[0], is_answered=True)
    assert await place == "a"


async def test_what_was_lost_goes_first_and_not_to_where_it_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.admission.dispatcher.AVOID_S", 0.3)
    queue = dispatcher("a")
    lost, other = queue.submit(ask(share=1.0)), queue.submit(ask(share=1.0))
    assert await queue.slot(lost) == "a"
    waiting = queue.slot(other)
    again = queue.reassign(lost)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not again.done()  # "a" is thought to be dead
    queue.set_replicas(POOL, ["a", "b"])
    assert await again == "b"
    assert await waiting == "a"  # it was not, and after a moment that counts


async def test_a_time_that_is_over_ends_the_wait_without_a_call() -> None:
    queue = dispatcher("a")
    first, second = queue.submit(ask(share=1.0)), queue.submit(ask(share=1.0, deadline_s=0.01))
    await queue.slot(first)
    async with asyncio.timeout(5):
        with pytest.raises(NotAdmitted) as raised:
            await queue.slot(second)
    assert raised.value.refusal.reason == "expired"


async def test_a_placement_holds_for_as_long_as_it_says_from_now() -> None:
    now_s = random.uniform(0, 1e6)
    queue = Dispatcher(AdmissionConfig(), lambda: now_s)
    queue.set_replicas(POOL, ["a", "b"])
    queue.set_placement(Placement({(POOL, "here"): ("b",), (POOL, "held"): ()}, until_s=10.0))
    here, held = queue.submit(ask(model="here")), queue.submit(ask(model="held"))
    assert await queue.slot(here) == "b"
    now_s += 9.9
    queue.leave(here, is_answered=True)
    assert await numbers(queue) == (1, 0)
    now_s += 0.2
    other = queue.submit(ask(model="other"))
    assert await queue.slot(held) in ("a", "b")
    assert await queue.slot(other) in ("a", "b")


async def started(queue: Dispatcher, *asks: Demand) -> list[str | None]:
    """Submit requests, and return their replicas, None for those that wait."""
    places = [queue.slot(queue.submit(one)) for one in asks]
    await asyncio.sleep(0)
    found = [place.result() if place.done() else None for place in places]
    for place in places:
        place.cancel()
    return found


async def test_a_model_that_a_controller_calls_unservable_is_refused_now_and_later() -> None:
    queue = dispatcher("a")
    why = Refusal("unservable", 3.0, text="tensor t is missing")
    waiting = queue.submit(ask(model="x", share=1.0))
    behind = queue.slot(queue.submit(ask(model="x", share=1.0)))
    assert await queue.slot(waiting) == "a"
    queue.set_placement(Placement(unservable={(POOL, "x"): why}, until_s=60.0))
    with pytest.raises(NotAdmitted) as refused:
        await behind
    assert refused.value.refusal == why
    with pytest.raises(NotAdmitted):
        await queue.slot(queue.submit(ask(model="x")))
    queue.leave(waiting)
    assert await started(queue, ask(model="y")) == ["a"]
    queue.set_placement(Placement(unservable={(POOL, "x"): why}, until_s=0.0))  # a word that has ended
    assert await started(queue, ask(model="x")) == ["a"]


async def test_nobody_slips_past_on_a_replica_that_an_earlier_request_waits_for() -> None:
    """Models with places of their own do not hold each other up; those that share a replica take turns."""
    queue = dispatcher("a", "b")
    queue.set_placement(Placement({(POOL, "x"): ("a",), (POOL, "y"): ("a",), (POOL, "z"): ("a", "b"), (POOL, "n"): ()}))
    found = await started(
        queue,
        ask(model="x", share=0.75),
        ask(model="n"),  # waits for the controller, and holds nobody up
        ask(model="x", share=0.5),  # does not fit
        ask(model="y"),  # would fit beside the first one, for ever
        ask(model="z"),
    )
    assert found == ["a", None, None, None, "b"]


async def test_a_controller_is_called_for_requests_without_a_place_and_for_other_replicas() -> None:
    queue = dispatcher("a")
    queue.changed.clear()
    queue.set_placement(Placement({(POOL, "x"): ("a",), (POOL, "n"): ()}))
    await started(queue, ask(model="x"), ask(model="unnamed"))
    assert not queue.changed.is_set()
    await started(queue, ask(model="n", deadline_s=5.0))
    assert queue.changed.is_set()
    slack_s = {load.model: load.slack_s for load in (await queue.snapshot()).models}
    assert slack_s["x"] is None
    assert slack_s["n"] == pytest.approx(5.0, abs=1.0)
    queue.changed.clear()
    queue.set_replicas(POOL, ["a", "b"])
    assert queue.changed.is_set()
