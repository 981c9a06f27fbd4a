"""Replicas that cannot load a model: its requests go elsewhere, and those of other models do not care."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, Placement, Started
from cluster.records.load_failures import LONGEST_RETRY_S, FailedLoad, LoadFailures, retry_after_s
from configs.admission import AdmissionConfig

POOL = "worker"
M = Demand(POOL, "m", 1.0, 0.5, 1, "default", 1e6, version="1")
OTHER = replace(M, model="n")


class Queue:
    """An admission queue over replicas `a` and `b`, at a time that only tests move."""

    def __init__(self, *names: str) -> None:
        self.queue = AdmissionQueue(AdmissionConfig())
        self.queue.set_replicas(POOL, names, 0.0)
        self.now_s = 0.0
        self._ticket = 0

    def start(self, demand: Demand) -> tuple[int, str | None]:
        """Let a request in. Return its ticket and where it starts."""
        self._ticket += 1
        self.queue.submit(self._ticket, demand, self.now_s)
        return self._ticket, self.pump().get(self._ticket)

    def pump(self) -> dict[int, str]:
        return {one.ticket: one.replica for one in self.queue.pump(self.now_s) if isinstance(one, Started)}

    def fail(self, ticket: int) -> bool:
        """Let the request's replica be unable; it goes elsewhere where it can, and else it ends."""
        if is_elsewhere := self.queue.note_unable(ticket, self.now_s):
            self.queue.give_back(ticket, self.now_s)
        else:
            self.queue.leave(ticket, self.now_s)
        return is_elsewhere

    def end(self, ticket: int) -> None:
        self.queue.leave(ticket, self.now_s, is_answered=True)


def test_a_model_goes_elsewhere_and_others_still_come() -> None:
    queue = Queue("a", "b")
    ticket, where = queue.start(M)
    assert where == "a"
    assert queue.fail(ticket)
    assert queue.pump() == {ticket: "b"}
    assert [queue.start(demand)[1] for demand in (OTHER, M, OTHER)] == ["a", "b", "a"]
    waiting, where = queue.start(M)
    assert where is None  # it waits for the one that can
    assert queue.start(OTHER)[1] is None
    queue.end(ticket)
    assert queue.pump() == {waiting: "b"}


def test_where_every_replica_has_failed_each_is_asked_again() -> None:
    queue = Queue("a", "b")
    ticket, _ = queue.start(M)
    assert queue.fail(ticket)
    assert queue.pump() == {ticket: "b"}
    assert not queue.fail(ticket)
    assert queue.start(M)[1] in ("a", "b")


def test_the_placement_is_followed_as_well() -> None:
    queue = Queue("a", "b", "c")
    queue.queue.set_placement(Placement({(POOL, "m"): ("a", "c")}))
    ticket, where = queue.start(M)
    assert where == "a"
    assert queue.fail(ticket)
    assert queue.pump() == {ticket: "c"}
    queue.queue.set_placement(Placement({(POOL, "m"): ("a",)}))
    later, where = queue.start(M)
    assert where is None  # until the controller knows
    queue.queue.set_placement(Placement({(POOL, "m"): ("b",)}))
    assert queue.pump() == {later: "b"}


@pytest.mark.parametrize("heals", ["time", "version", "replaced", "answered"])
def test_it_heals(heals: str) -> None:
    queue, demand = Queue("a", "b"), M
    first, _ = queue.start(M)
    second, where = queue.start(replace(M, share=1.0))
    assert where == "b"
    queue.fail(first)
    assert queue.pump() == {}
    if heals == "time":
        queue.now_s = retry_after_s(1)
    elif heals == "version":
        demand = replace(M, version="2")
        queue.queue.leave(first, queue.now_s)
    elif heals == "replaced":
        queue.queue.set_replicas(POOL, ["b"], 0.0)
        queue.queue.set_replicas(POOL, ["b", "a"], 0.0)
    else:
        queue.fail(second)  # all have failed, and each is asked again
        assert queue.pump().get(first) == "a"
        queue.end(first)
    assert "a" in [*queue.pump().values(), queue.start(demand)[1]]


def test_the_time_doubles_up_to_a_bound_and_an_answer_ends_it() -> None:
    failures, now_s = LoadFailures(), 0.0
    for number in range(12):
        failures.note_failure("m", "1", "a", now_s)
        rest_s = min(2.0**number, LONGEST_RETRY_S)
        assert failures.unable("m", "1", now_s + 0.99 * rest_s) == {"a"}
        now_s += rest_s
        assert failures.unable("m", "1", now_s) == frozenset()
    assert failures.unable("n", "1", now_s - 1.0) == failures.unable("m", "2", now_s - 1.0) == frozenset()
    failures.note_load("m", "1", "a")
    failures.note_failure("m", "1", "a", now_s)
    assert failures.unable("m", "1", now_s + 1.0) == frozenset()


def test_a_replica_without_a_name_is_no_other() -> None:
    queue = Queue("")
    ticket, where = queue.start(M)
    assert where == ""
    assert not queue.fail(ticket)


def test_a_model_is_unavailable_where_all_replicas_of_one_deployment_have_failed() -> None:
    failures = LoadFailures()
    workers, encoder = ("SERVE_REPLICA::app#worker#a", "SERVE_REPLICA::app#worker#b"), "SERVE_REPLICA::app#encoder#c"
    failures.note_failure("m", "1", workers[0], 0.0, "torn")
    assert failures.why_unavailable("m", "1", [*workers, encoder]) == ""
    failures.note_failure("m", "1", workers[1], 0.0, "worn")
    assert failures.why_unavailable("m", "1", [*workers, encoder]) == "torn; worn"
    assert failures.why_unavailable("m", "2", [*workers, encoder]) == ""


def test_failures_of_one_load_count_as_one_and_old_ones_are_forgotten() -> None:
    failures = LoadFailures(one_load_s=0.5)
    for at_s in (10.0, 10.4, 10.8):
        failures.note_failure("m", "1", "a", at_s, f"at {at_s}")
    failures.note_failure("m", "1", "b", 10.8, "other")
    assert failures.of_replica("a") == {("m", "1"): FailedLoad(1, 10.8, "at 10.8")}
    failures.note_failure("m", "1", "a", 11.3, "again")
    assert failures.of_replica("a") == {("m", "1"): FailedLoad(2, 11.3, "again")}
    assert failures.unable("m", "1", 11.3 + retry_after_s(2) - 0.1) == {"a"}
    failures.note_failure("m", "2", "a", 11.4)
    assert failures.of_replica("a") == {("m", "2"): FailedLoad(1, 11.4, "")}
    failures.note_failure("n", "", "a", 12.0)
    failures.forget_before(12.0)
    assert failures.of_replica("a").keys() == {("n", "")}
    failures.forget_model("n")  # of a version that is not known as well
    assert failures.models() == []
