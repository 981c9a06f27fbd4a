"""Forecasts: the longest wait that is allowed, and when a full queue has room again."""

from __future__ import annotations

import pytest

from cluster.admission.pool import _FairWait
from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, Refused
from configs.admission import AdmissionConfig

POOL = "worker"


def test_nobody_waits_for_a_larger_part_of_its_time_than_the_slowest_may() -> None:
    fair = _FairWait()
    assert fair.bound_s("a", 3.0, 0.3, 0.0) == pytest.approx(2.7)
    assert fair.bound_s("a", 3.0, 1.5, 0.1) == pytest.approx(1.5)
    assert fair.bound_s("a", 3.0, 0.3, 0.2) == pytest.approx(1.5, rel=0.05)
    assert fair.bound_s("a", 10.0, 0.3, 0.2) == pytest.approx(5.0, rel=0.05)  # who has time may wait for longer
    assert fair.bound_s("a", 3.0, 2.95, 0.3) == pytest.approx(0.05)  # one that can hardly wait holds nobody back
    assert fair.bound_s("a", 3.0, 0.3, 0.4) == pytest.approx(1.5, rel=0.1)
    assert fair.bound_s("a", 3.0, 0.3, 100.0) == pytest.approx(2.7)  # it came long ago


def test_what_one_tenant_asks_for_bounds_nobody_elses_wait() -> None:
    fair = _FairWait()
    fair.bound_s("hasty", 1.2, 1.0, 0.0)
    assert fair.bound_s("patient", 60.0, 1.0, 0.1) == pytest.approx(59.0)


@pytest.mark.parametrize("num_waiting", [10, 80])
def test_those_whom_a_full_queue_refuses_are_told_when_half_of_it_will_be_done(num_waiting: int) -> None:
    """A request takes a second of one of two replicas, alone; `num_waiting` of them are `num_waiting / 2` seconds."""
    queue = AdmissionQueue(AdmissionConfig(max_waiting_per_model=num_waiting))
    queue.set_replicas(POOL, ["a", "b"], 0.0)
    ask = Demand(POOL, "m", 1.0, 1.0, 2, "default", 1e6)
    for ticket in range(4):
        queue.submit(ticket, ask, float(ticket))
        queue.pump(float(ticket))
        queue.leave(ticket, ticket + 1.0, is_answered=True)
    for ticket in range(100, 102 + num_waiting):
        queue.submit(ticket, ask, 10.0)
        queue.pump(10.0)
    told_s = []
    for ticket in range(1000, 1020):  # every one is told the same: a forecast is the model's
        queue.submit(ticket, ask, 10.0)
        told_s += [event.refusal.retry_after_s for event in queue.pump(10.0) if isinstance(event, Refused)]
    assert told_s == [pytest.approx(1.0 + num_waiting / 4, abs=1.0)] * 20
    assert len(set(told_s)) == 1


def test_a_full_queue_without_a_replica_still_says_a_time() -> None:
    queue = AdmissionQueue(AdmissionConfig(max_waiting=1))
    for ticket in range(2):
        queue.submit(ticket, Demand(POOL, "m", 1.0, 0.5, 2, "default", 1e6), 0.0)
    (refused,) = queue.pump(0.0)
    assert isinstance(refused, Refused)
    assert refused.refusal.retry_after_s == 0.5
