"""A worker under the controller: what it reports of its models, and how it follows orders."""

from __future__ import annotations

import asyncio

import pytest
from kit.waiting import until
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError
from unit.deployments.modules.test_module_cache import Host

from cluster.placement.reports import Order, Orders, WorkerReport
from cluster.records.errors import ModelUnknown
from cluster.records.load_failures import LONGEST_RETRY_S
from deployments.services.ordered_models import OrderedModels
from weights.records.manifest import Manifest


class Ordered(OrderedModels):
    """The models of a host over fakes; `carried_out` waits until all orders have ended."""

    def __init__(self) -> None:
        self.host = Host(100)
        super().__init__(
            self.host,
            lambda component: True,
            {"diffusion"},
            pool="worker",
            node="n",
            slots=4,
        )

    async def carried_out(self, *orders: Order, describe: tuple[tuple[str, str], ...] = ()) -> WorkerReport:
        self.apply(Orders(orders, describe))
        async with asyncio.timeout(10):
            while self._tasks:
                await asyncio.wait(self._tasks)
        return await self.report()


@pytest.fixture
async def ordered() -> Ordered:
    return Ordered()


def switch(id_: str, model: str, *evict: str) -> Order:
    return Order(id_, "switch", model, evict, 0.5)


async def test_a_switch_lets_go_and_gets_ready_and_what_is_shared_stays(ordered: Ordered) -> None:
    report = await ordered.carried_out(switch("1", "a"))
    assert (sorted(report.ready.values()), report.switching_to, report.taken) == ([30, 60], None, ("1",))
    assert [(one.order, one.error) for one in report.outcomes] == [("1", "")]
    report = await ordered.carried_out(switch("2", "b", "a"))
    assert sorted(report.ready.values()) == [30, 60]
    assert ordered.host.builder.counts == {"a": 1, "b": 1, "shared": 1}
    assert report.budget_bytes == 100
    report = await ordered.carried_out(Order("3", "evict", "b"))
    assert report.ready == {}


async def test_an_order_is_carried_out_once_however_often_it_comes(ordered: Ordered) -> None:
    for _ in range(3):
        await ordered.carried_out(switch("1", "c"))
    await ordered.carried_out(switch("1", "c"), Order("2", "evict", "c"))
    assert (await ordered.carried_out(switch("1", "c"))).ready == {}
    assert ordered.host.builder.counts == {"c": 1}


async def test_while_it_switches_it_says_so(ordered: Ordered) -> None:
    gate = asyncio.Event()
    find = ordered.host.manifests.newest

    async def slow(model: str) -> object:
        await gate.wait()
        return await find(model)

    ordered.host.manifests.newest = slow  # type: ignore[method-assign, assignment]
    ordered.apply(Orders((switch("1", "c"),)))
    await asyncio.sleep(0)
    assert ordered.changed.is_set()
    report = await ordered.report()
    assert (report.switching_to, report.ready_in_s, report.taken) == ("c", 0.5, ("1",))
    ordered.host.now_s = 9.0
    assert (await ordered.report()).ready_in_s == 0.0
    gate.set()
    assert (await ordered.carried_out()).switching_to is None


async def test_what_runs_is_not_evicted_by_an_order(ordered: Ordered) -> None:
    async with ordered.host.lease("a", lambda component: True):
        report = await ordered.carried_out(Order("1", "evict", "a"))
        assert sorted(report.ready.values()) == [30, 60]
        assert report.leased == report.ready.keys()


async def test_failures_are_counted_until_it_works_or_is_not_tried_for_long(ordered: Ordered) -> None:
    ordered.host.builder.failing.add("c")
    for number in range(2):
        ordered.host.now_s += 1.0
        report = await ordered.carried_out(switch(str(number), "c"))
    ordered.host.now_s += 3.0
    (failure,) = (await ordered.report()).failures.values()
    assert (failure.num, failure.age_s) == (2, 3.0)
    assert "c cannot be built" in failure.error
    assert [bool(one.error) for one in report.outcomes] == [True, True]
    ordered.host.builder.failing.clear()
    assert (await ordered.carried_out(switch("9", "c"))).failures == {}
    ordered.host.builder.failing.add("d")
    await ordered.carried_out(switch("10", "d"))
    ordered.host.now_s += 2 * LONGEST_RETRY_S + 1
    assert (await ordered.report()).failures == {}


async def test_a_load_of_a_request_that_fails_is_reported_and_modules_of_one_load_count_once(ordered: Ordered) -> None:
    for _ in range(2):
        ordered.note_load("c", "1", "torn")
    (failure,) = (await ordered.report()).failures.values()
    assert (failure.version, failure.num, failure.error) == ("1", 1, "torn")
    assert ordered.changed.is_set()
    ordered.note_load("c", "1", None)
    assert (await ordered.report()).failures == {}


async def test_needs_are_told_as_they_count_against_the_budget(ordered: Ordered) -> None:
    report = await ordered.carried_out(describe=(("a", ""), ("b", "")))
    sizes = {model: sorted(need.sizes.values()) for model, need in report.needs.items()}
    assert sizes == {"a": [30, 60], "b": [30, 60]}
    shared = report.needs["a"].sizes.keys() & report.needs["b"].sizes.keys()
    assert [report.needs["a"].extents[key] for key in shared] == [("shared",)]
    assert (await ordered.carried_out(switch("1", "a"))).ready.keys() == report.needs["a"].sizes.keys()


async def test_a_registry_that_is_away_is_no_failure_of_a_model(
    ordered: Ordered, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*arguments: object) -> Manifest:
        raise error

    monkeypatch.setattr(ordered.host.manifests, "_fetch", refuse)
    for error in (ActorUnavailableError("it restarts", None), ActorDiedError(), GetTimeoutError("no answer")):
        report = await ordered.carried_out(switch(type(error).__name__, "a"), describe=(("a", ""), ("b", "")))
        assert (report.failures, report.needs) == ({}, {})
        assert report.outcomes[-1].error  # the order was not carried out
    error = ModelUnknown("no model 'b' (known: a)")
    report = await ordered.carried_out(switch("last", "a"), describe=(("b", ""),))
    assert {model: failure.error for model, failure in report.failures.items()} == dict.fromkeys("ab", str(error))
    monkeypatch.undo()
    assert (await ordered.carried_out(describe=(("b", ""),))).needs.keys() == {"b"}


async def test_a_prefetch_builds_nothing(ordered: Ordered) -> None:
    report = await ordered.carried_out(Order("1", "prefetch", "a"))
    await until(lambda: ordered.host.provider.prefetched.keys() == {"a", "shared"})
    assert (report.ready, report.switching_to) == ({}, None)


async def test_a_switch_of_a_request_is_measured_like_an_ordered_one(ordered: Ordered) -> None:
    before = (await ordered.report()).attach_bytes_per_s
    async with ordered.host.lease("a", lambda component: True):
        pass
    assert (await ordered.report()).attach_bytes_per_s != before
