"""The queue of one ingress among several: it starts what its own slots allow, and counts what others run beside it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from unit.cluster.admission import simulated_replicas
from unit.cluster.admission.simulated_replicas import POOL

from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import OnDemandSwitch, Placement, PoolPart, ReplicaPart, Started
from cluster.admission.service_times import SHORT_S
from configs.admission import AdmissionConfig

ask = partial(simulated_replicas.ask, share=0.25)


def queue(*replicas: str, **config: Any) -> AdmissionQueue:
    found = AdmissionQueue(AdmissionConfig(**config), num_sharing=2)
    found.set_replicas(POOL, replicas or ("a",), 0.0)
    return found


def own(found: AdmissionQueue, now_s: float = 0.0, bound_part: float = 0.5, **parts: ReplicaPart) -> None:
    found.parts.set_parts({POOL: PoolPart(parts, sum(part.limit for part in parts.values()))}, bound_part, now_s)


def started(found: AdmissionQueue, now_s: float = 0.0) -> list[str]:
    return [event.replica for event in found.pump(now_s) if isinstance(event, Started)]


def test_nothing_starts_before_it_is_told_of_slots_and_no_more_than_they_are() -> None:
    found = queue()
    for ticket in range(5):
        found.submit(ticket, ask(), 0.0)
    assert started(found) == []
    own(found, a=ReplicaPart(0.5))
    assert started(found) == ["a", "a"]
    own(found, a=ReplicaPart(0.25))  # one too many runs on
    found.leave(0, 1.0, is_answered=True)
    assert found.parts.take_news()
    assert started(found, 1.0) == []
    found.leave(1, 1.0, is_answered=True)
    assert started(found, 1.0) == ["a"]
    found.parts.hold(2.0)
    found.leave(2, 2.0, is_answered=True)
    assert started(found, 2.0) == []
    assert found.parts.claims(2.0)[POOL].replicas["a"].limit == 0.25  # still its own, as far as anyone knows
    found.parts.hold(4.0)
    assert started(found, 3.0) == ["a"]


def test_what_has_no_name_is_its_own() -> None:
    found = AdmissionQueue(AdmissionConfig(), num_sharing=2)
    found.set_replicas("pipelines", [""], 0.0)
    found.submit(1, ask(pool="pipelines"), 0.0)
    assert found.pump(0.0) == [Started(1, "")]
    found.parts.hold(0.0)
    found.submit(2, ask(pool="pipelines"), 0.0)
    assert found.pump(0.0) == [Started(2, "")]
    assert found.parts.claims(0.0) == {}


def test_a_replica_that_it_owns_a_part_of_is_told_of_although_it_is_not_listed_now() -> None:
    found = queue("a", "b")
    own(found, a=ReplicaPart(0.5), b=ReplicaPart(1.0))
    found.set_replicas(POOL, ("a",), 1.0)
    uses = found.parts.claims(1.0)[POOL].replicas
    assert (uses["b"].limit, uses["b"].is_listed) == (1.0, False)
    found.set_replicas(POOL, ("a", "b"), 2.0)
    found.submit(1, ask(share=1.0), 2.0)
    assert started(found, 2.0) == ["b"]


def test_claims_say_what_runs_and_waits_by_priority_tenant_and_place() -> None:
    found = queue("a", "b", tenants={"x": {"weight": 3}})
    found.set_placement(Placement({(POOL, "here"): ("b",), (POOL, "nowhere"): ()}))
    own(found, a=ReplicaPart(0.25), b=ReplicaPart(0.0))
    found.submit(0, ask(tenant="x"), 0.0)
    assert started(found) == ["a"]
    found.submit(1, ask(tenant="x"), 1.0)
    found.submit(2, ask(tenant="x", model="other", share=0.5), 2.0)
    found.submit(3, ask(priority=1, model="here"), 3.0)
    found.submit(4, ask(model="nowhere"), 3.0)
    assert started(found, 3.0) == []
    claims = found.parts.claims(5.0)[POOL]
    (running,) = claims.running
    assert (running.priority, running.tenant, running.weight, running.share, running.replicas) == (
        2,
        "x",
        3,
        0.25,
        ("a",),
    )
    waiting = {claim.replicas: claim for claim in claims.waiting}
    assert waiting.keys() == {None, ("b",)}
    assert (waiting[None].share, waiting[None].oldest_age_s, waiting[None].next_share) == (0.75, 4.0, 0.25)
    assert waiting["b",].priority == 1
    assert (claims.least_share, claims.num_started) == (0.25, 1)
    arrivals = ((0.25, 0.0), (0.25, 1.0), (0.5, 2.0), (0.25, 3.0), (0.25, 3.0))
    shares = [share * math.exp((at_s - 5.0) / SHORT_S) / SHORT_S for share, at_s in arrivals]
    assert claims.share_per_s == pytest.approx(sum(shares))


def test_a_more_urgent_request_that_waits_is_news_and_another_one_like_it_is_not() -> None:
    found = queue()
    for ticket, (priority, is_news) in enumerate([(2, True), (2, False), (3, False), (1, True), (1, False)]):
        found.submit(ticket, ask(priority=priority), 0.0)
        found.pump(0.0)
        assert found.parts.take_news() is is_news
    own(found, a=ReplicaPart(1.0))
    assert len(started(found)) == 4
    assert not found.parts.take_news()


def test_a_slot_that_is_free_is_news_only_where_others_wait() -> None:
    for is_wanted in (False, True):
        found = queue()
        found.parts.set_parts({POOL: PoolPart({"a": ReplicaPart(1.0)}, 1.0, is_wanted)}, 0.5, 0.0)
        found.submit(1, ask(), 0.0)
        found.pump(0.0)
        found.parts.take_news()
        found.leave(1, 1.0, is_answered=True)
        found.pump(1.0)
        assert found.parts.take_news() is is_wanted


@pytest.mark.parametrize(("others_used", "busy_s"), [(0.0, 4.0), (0.75, 1.0)])
def test_seconds_of_a_replica_are_shared_with_what_others_run(others_used: float, busy_s: float) -> None:
    found = queue()
    own(found, a=ReplicaPart(0.25, {"m": 3}, others_used))
    found.submit(1, ask(), 0.0)
    found.pump(0.0)
    found.leave(1, 4.0, is_answered=True)
    times = found._times.times("m")
    assert times is not None
    assert times.busy.mean() == pytest.approx(busy_s)
    assert times.usual_s == pytest.approx(4.0)


def test_a_forecast_counts_on_its_own_part() -> None:
    def wait_s(part: float) -> float:
        found = queue("a", "b")
        own(found, a=ReplicaPart(part), b=ReplicaPart(part))
        slots = found._pools[POOL].slots
        return slots.start_in_s(0.25, 6.0, 1.0, 0.0)

    assert (wait_s(1.0), wait_s(0.5), wait_s(0.0)) == (3.0, 6.0, math.inf)


def test_a_replica_that_is_busy_for_others_is_no_idle_one() -> None:
    """Nor is it said to be without the model that others run there."""
    found = queue("a", "b")
    on_demand = {(POOL, "x"): {name: OnDemandSwitch(1.0) for name in ("a", "b")}}
    found.set_placement(Placement({(POOL, "x"): ("a", "b")}, on_demand=on_demand))
    own(found, a=ReplicaPart(0.5, {"m": 2}, 0.5, 1.0), b=ReplicaPart(0.5))
    found.submit(1, ask(model="x"), 0.0)
    assert started(found) == ["b"]
    found.submit(2, ask(model="m"), 0.0)
    found.submit(3, ask(model="x"), 0.0)
    assert started(found) == ["a", "b"]


def test_bounds_are_divided() -> None:
    found = queue(max_waiting_per_model=10, max_waiting=12)
    own(found, bound_part=0.3, a=ReplicaPart(0.0))
    for ticket in range(6):
        found.submit(ticket, ask(), 0.0)
    assert len(found.pump(0.0)) == 3
    assert found.num_waiting == 3
    found.submit(10, ask(model="other"), 0.0)
    assert len(found.pump(0.0)) == 1  # of 12 it has 3, too
