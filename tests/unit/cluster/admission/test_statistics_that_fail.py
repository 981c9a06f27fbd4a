"""Statistics beside what they count: nothing that is measured may hold up, refuse or lose a request."""

from __future__ import annotations

import asyncio
import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.cluster.admission import simulated_replicas
from unit.cluster.admission.simulated_replicas import POOL

from cluster.admission.dispatcher import Dispatcher
from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Started
from cluster.admission.service_times import ServiceTimes
from configs.admission import AdmissionConfig

ask = partial(simulated_replicas.ask, deadline_s=1000.0)
ANY_FLOAT = st.one_of(st.floats(), st.sampled_from([0.0, -1.0, 1e-320, 1e-200, 1e200, math.inf, math.nan]))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(ANY_FLOAT, ANY_FLOAT, ANY_FLOAT), max_size=12))
def test_whatever_is_measured_predictions_are_numbers(measured: list[tuple[float, float, float]]) -> None:
    times = ServiceTimes()
    for now_s, (work, busy_s, latency_s) in enumerate(measured):
        times.note_served("m", float(now_s), work, busy_s, latency_s)
    found = times.times("m")
    for work in (1.0, 1e6) if found else ():
        figures = [found.late_s(work, 3.0), found.cost_s(work, 0.25), found.joining_s(work), found.usual_s]
        figures += [found.expected_s(work, num_sharing) for num_sharing in (found.usual_sharing, 1, 3.0, 1024, 1e6)]
        assert all(0 <= figure < math.inf for figure in figures)


@pytest.mark.parametrize(
    "fields", [{"work": 0.0}, {"work": math.nan}, {"work": math.inf}, {"share": 0.0}, {"share": 2}]
)
def test_what_no_statistic_can_count_is_no_ask(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"work|share"):
        ask(**fields)


@pytest.fixture
def broken_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(ServiceTimes, "note_served", fail)


@pytest.mark.usefixtures("broken_statistics")
def test_a_place_is_free_again_whatever_becomes_of_the_statistics() -> None:
    queue = AdmissionQueue(AdmissionConfig())
    queue.set_replicas(POOL, ["a"], 0.0)
    for ticket in range(3):
        queue.submit(ticket, ask(), 0.0)
    for ticket in range(3):
        assert queue.pump(float(ticket)) == [Started(ticket, "a")]
        queue.leave(ticket, ticket + 0.5, is_answered=True)
    assert (queue.num_running, queue.num_waiting) == (0, 0)


@pytest.mark.usefixtures("broken_statistics")
async def test_who_waits_gets_the_place_of_one_that_could_not_be_counted() -> None:
    queue = Dispatcher(AdmissionConfig())
    queue.set_replicas(POOL, ["a"])
    first, second = queue.submit(ask()), queue.submit(ask())
    assert await queue.slot(first) == "a"
    queue.leave(first, is_answered=True)
    async with asyncio.timeout(5):
        assert await queue.slot(second) == "a"
    queue.leave(second)


async def test_a_queue_whose_forecast_fails_looks_again_and_keeps_no_place_of_a_refused_ticket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = Dispatcher(AdmissionConfig())
    queue.set_replicas(POOL, ["a"])
    running, waiting = queue.submit(ask()), queue.submit(ask())
    with monkeypatch.context() as patched:
        patched.setattr(queue._queue._forecast, "why_untimely", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            queue.submit(ask())
        patched.setattr(queue._queue, "pump", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            queue.leave(running)
    assert queue._slots.keys() == {waiting}
    async with asyncio.timeout(5):
        assert await queue.slot(waiting) == "a"  # by the timer: nobody says anything
    queue.leave(waiting)
