"""Decisions of many models and workers: what is counted are lines of code that run, not seconds."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from unit.cluster.placement.reporting import load, need, queue, versions, worker

from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, Placement
from cluster.admission.service_times import MAX_MODELS
from cluster.placement.deciding import Deciding
from cluster.placement.observing import Observations
from cluster.placement.state import SloClass
from cluster.placement.switching import LATENCY_FIRST
from cluster.records.overrides import Overrides
from configs.admission import AdmissionConfig

GB = 10**9


def num_lines(work: Callable[[], Any]) -> int:
    """Return how many lines of Python run, each turn of a loop or a comprehension anew."""
    number, before = 0, sys.gettrace()

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal number
        number += event == "line"
        return count

    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return number


class _Cluster:
    """As many workers as models, each with one that is asked for."""

    def __init__(self, size: int) -> None:
        self.observations = Observations(lambda model: SloClass(), 0.0)
        self.observations.catalog = versions(*(f"m{number}" for number in range(size)), "new")
        needs = {f"m{number}": need(**{f"c{number}": 10 * GB, "base": GB}) for number in range(size)}
        for number in range(size):
            self.report(number, {**needs} if not number else {})
        loads = [load(f"m{number}", rate_long=0.1) for number in range(size)]
        self.observations.queues.note("q", queue(loads, **{f"w{n}": {f"m{n}": 1} for n in range(size)}), 0.0)
        self.deciding = Deciding(LATENCY_FIRST, self.observations, map(str, itertools.count()))
        self.decide()

    def report(self, number: int, needs: dict[str, Any]) -> None:
        """Report as a worker does, and look up what it reported before, as the controller does."""
        name = f"w{number}"
        self.observations.workers.reports.get(name)
        self.observations.workers.note(
            name, worker(15 * GB, needs=needs, ready={f"c{number}": 10 * GB, "base": GB}), 0.0
        )

    def decide(self) -> None:
        assert self.deciding.decide(Overrides(), 0.1, 0.0) is not None

    def decide_after_a_new_model(self) -> None:
        self.report(0, {"new": need(cnew=5 * GB, base=GB)})
        self.decide()


@pytest.mark.parametrize("work", [_Cluster.decide, _Cluster.decide_after_a_new_model])
def test_a_decision_costs_no_more_for_each_worker_the_more_there_are(work: Callable[[_Cluster], None]) -> None:
    found = []
    for size in (200, 800):
        cluster = _Cluster(size)
        found.append(num_lines(lambda cluster=cluster: work(cluster)))  # type: ignore[misc]
    assert found[1] <= 4.4 * found[0]


def test_records_are_made_anew_only_where_something_has_changed() -> None:
    cluster = _Cluster(20)
    before = cluster.observations.observe(0.2, Overrides(), {})
    cluster.report(3, {})  # as the report before: another record that is equal
    same = cluster.observations.observe(0.3, Overrides(), {})
    cluster.observations.workers.note("w3", worker(15 * GB, ready={"base": GB}), 0.3)
    after = cluster.observations.observe(0.4, Overrides(), {})
    assert before is not None
    assert same is not None
    assert after is not None
    assert {id(one) for one in same.state.workers.values()} == {id(one) for one in before.state.workers.values()}
    assert {id(one) for one in same.state.models.values()} == {id(one) for one in before.state.models.values()}
    others = [name for name in after.state.workers if after.state.workers[name] is not same.state.workers[name]]
    assert others == ["w3"]
    assert after.state.workers["w3"].models == ()


def test_a_worker_that_is_as_before_has_nothing_ready_once_its_model_needs_more_or_is_gone() -> None:
    cluster = _Cluster(4)
    before = cluster.observations.observe(0.2, Overrides())
    cluster.report(0, {"m1": need("2", c1=10 * GB, base=GB, more=GB)})
    larger = cluster.observations.observe(0.3, Overrides())
    cluster.observations.catalog = versions("m0", "m2", "m3")
    without = cluster.observations.observe(0.4, Overrides())
    found = [observed.state.workers["w1"].models for observed in (before, larger, without) if observed]
    assert found == [("m1",), (), ()]
    assert without is not None
    assert without.state.workers["w1"].running == {}


def test_a_decision_without_a_change_takes_few_steps_for_each_model_and_worker() -> None:
    """190: of 10,000 of each it takes a tenth of a second. Where all records are made and checked anew it is 360."""
    few, many = (num_lines(_Cluster(size).decide) for size in (400, 800))
    assert many - few <= 220 * 400


def test_a_report_costs_the_same_in_a_cluster_of_any_size() -> None:
    found = []
    for size in (10, 400):
        cluster = _Cluster(size)
        found.append(num_lines(lambda cluster=cluster: cluster.report(3, {})))  # type: ignore[misc]
    assert found[1] <= found[0] + 5


def test_a_model_that_waits_stays_in_the_snapshot_whatever_else_is_asked_for() -> None:
    queue_ = AdmissionQueue(AdmissionConfig())
    queue_.set_replicas("worker", ["w0"], 0.0)
    queue_.set_placement(Placement({("worker", "waits"): ()}))
    queue_.submit(0, Demand("worker", "waits", 1.0, 1.0, 2, "default", 1e6), 0.0)
    for number in range(1, MAX_MODELS + 100):
        queue_.submit(number, Demand("worker", f"m{number}", 1.0, 1.0, 2, "default", 1e6), 1.0)
        queue_.pump(1.0)
        queue_.leave(number, 1.0, is_answered=True)
    loads = queue_.snapshot(2.0).models
    assert [one.waiting for one in loads if one.model == "waits"] == [1]
    queue_.leave(0, 2.0)
    queue_.submit(-1, Demand("worker", "other", 1.0, 1.0, 2, "default", 1e6), 3.0)
    assert len(queue_.snapshot(3.0).models) <= MAX_MODELS + 1
