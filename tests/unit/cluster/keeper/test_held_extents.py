"""Room on a node, who gets it, and when: first come, first served, and nothing that is leased or pinned goes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from kit.clock import Clock
from kit.waiting import wait_until
from unit.counting import operations

from cluster.keeper.extent_book import ExtentBook
from cluster.keeper.held_extents import HeldExtents
from cluster.keeper.records import Claim, HeldExtent
from cluster.process.processes import ProcessMark
from weights.records.errors import BudgetExceeded, ExtentCorrupt
from weights.records.manifest import ExtentRef

WAIT_S = 10.0


def extent(id_: str, nbytes: int = 100) -> ExtentRef:
    return ExtentRef(id=id_, pack=f"pack-{id_}", offset=0, nbytes=nbytes, checksum="0" * 32)


def extents(ids: str) -> list[ExtentRef]:
    return [extent(id_) for id_ in ids]


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def changes() -> list[tuple[list[str], list[str]]]:
    return []


@pytest.fixture
def held(clock: Clock, changes: list[Any]) -> HeldExtents:
    told = SimpleNamespace(changed=lambda added, removed: changes.append((list(added), list(removed))))
    return HeldExtents(ExtentBook(300, clock=clock, neighbours=told))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def load(held: HeldExtents, claim: Claim) -> None:
    for found in claim.to_load:
        held.loaded(found.id, f"ref-{found.id}", np.zeros(found.nbytes, np.uint8), "storage")


def copy_of(id_: str, ref: str = "") -> HeldExtent:
    return HeldExtent(extent(id_), ref or f"ref-{id_}", np.zeros(100, np.uint8), "adopted")


def acquire(held: HeldExtents, ids: str, holder: str) -> dict[str, Any]:
    claim = held.claim(extents(ids), holder)
    load(held, claim)
    return held.settle(claim, holder)


def give(held: HeldExtents, ids: str, holder: str) -> None:
    held.holders.release(list(ids), holder)


def resident(held: HeldExtents) -> str:
    return "".join(sorted(held.residents.ids()))


def waiting(held: HeldExtents, pool: ThreadPoolExecutor, ids: str, holder: str) -> Future[Any]:
    """A request that waits in the queue by the time this returns."""
    before = held.residents.num_waiting
    future = pool.submit(acquire, held, ids, holder)
    wait_until(lambda: held.residents.num_waiting == before + 1)
    return future


def test_what_loading_needs_is_told_once(held: HeldExtents) -> None:
    first, second = held.claim(extents("ab"), "v"), held.claim(extents("bc"), "w")
    assert [[found.id for found in claim.to_load] for claim in (first, second)] == [["a", "b"], ["c"]]
    load(held, first)
    load(held, second)
    assert held.settle(second, "w") == {"b": "ref-b", "c": "ref-c"}
    assert {found.id: found.holders for found in held.residents.described()} == {
        "a": {"v": 1},
        "b": {"v": 1, "w": 1},
        "c": {"w": 1},
    }


def test_a_failure_reaches_all_who_wait_and_leaves_no_lease(held: HeldExtents, changes: list[Any]) -> None:
    claims = [held.claim(extents("a"), holder) for holder in "vw"]
    held.failed("a", ExtentCorrupt("other bytes"))
    for claim, holder in zip(claims, "vw", strict=True):
        with pytest.raises(ExtentCorrupt, match="other bytes"):
            held.settle(claim, holder)
    assert held.residents.bytes_by_holder() == {}
    assert changes == [([], ["a"])]
    acquire(held, "a", "v")
    assert held.residents.bytes_by_holder() == {"v": 100}


def test_room_that_is_leased_is_waited_for(held: HeldExtents, pool: ThreadPoolExecutor) -> None:
    acquire(held, "ab", "v")
    future = waiting(held, pool, "cd", "w")
    assert (held.residents.wanted_bytes, future.done()) == (100, False)
    give(held, "a", "v")
    assert future.result(WAIT_S) == {"c": "ref-c", "d": "ref-d"}
    assert (resident(held), held.residents.wanted_bytes) == ("bcd", 0)


def test_the_wait_ends_with_who_has_the_room(clock: Clock) -> None:
    held = HeldExtents(ExtentBook(300, clock=clock), max_wait_s=0.0)
    acquire(held, "ab", "worker-1")
    held.set_pins(["a"])
    with pytest.raises(BudgetExceeded) as caught:
        held.claim(extents("cd"), "worker-2")
    for words in (
        "2 extents of pack-c, pack-d need 200 bytes",
        "100 bytes are missing",
        "store.node_budget_bytes is 300 bytes",
        "worker-1 (200 bytes)",
        "pinned: 100 bytes",
    ):
        assert words in str(caught.value)
    assert (held.residents.num_waiting, resident(held)) == (0, "ab")


def test_the_wait_is_bounded_by_the_clock(held: HeldExtents, clock: Clock, pool: ThreadPoolExecutor) -> None:
    acquire(held, "abc", "v")
    future = waiting(held, pool, "d", "w")
    clock.now_s += 59.0
    give(held, "unknown", "v")  # wakes those who wait
    assert not future.done()
    clock.now_s += 1.0
    give(held, "unknown", "v")
    with pytest.raises(BudgetExceeded, match=r"waited 60\.0 s"):
        future.result(WAIT_S)


def test_two_models_that_do_not_fit_together_take_turns(pool: ThreadPoolExecutor) -> None:
    held = HeldExtents(ExtentBook(300))

    def work(ids: str, holder: str) -> int:
        for _ in range(50):
            acquire(held, ids, holder)
            give(held, ids, holder)
        return 50

    turns = [pool.submit(work, ids, f"{ids}-{number}") for ids in ("abc", "xyz") for number in range(3)]
    assert [future.result(WAIT_S) for future in turns] == [50] * 6
    assert held.residents.bytes_by_holder() == {}


def test_the_budget_shrinks_as_far_as_it_may_and_later_the_rest(held: HeldExtents, changes: list[Any]) -> None:
    acquire(held, "abc", "v")
    give(held, "a", "v")
    held.set_budget(100)
    assert resident(held) == "bc"
    give(held, "b", "v")
    assert resident(held) == "c"
    give(held, "c", "v")
    assert (resident(held), held.residents.num_evicted) == ("c", 2)
    assert changes[-2:] == [([], ["a"]), ([], ["b"])]


def test_a_larger_budget_lets_those_in_who_wait(held: HeldExtents, pool: ThreadPoolExecutor) -> None:
    acquire(held, "abc", "v")
    future = waiting(held, pool, "d", "w")
    held.set_budget(400)
    assert future.result(WAIT_S) == {"d": "ref-d"}
    assert resident(held) == "abcd"


def test_pinned_extents_stay_until_they_are_unpinned(held: HeldExtents) -> None:
    held.set_pins(["a"])  # before it is here
    acquire(held, "ab", "v")
    give(held, "ab", "v")
    acquire(held, "cd", "v")
    assert resident(held) == "acd"
    assert held.drop(list("acd")) == []
    held.set_pins([])
    assert held.drop(list("aacd")) == ["a"]
    assert {found.id: found.pinned for found in held.residents.described()} == {"c": False, "d": False}


def test_what_is_quick_to_get_again_goes_first(clock: Clock) -> None:
    held = HeldExtents(
        ExtentBook(300, clock=clock, rates=SimpleNamespace(reload_rate={"storage": 1e-8, "peer": 1e-9}.get))
    )
    for id_ in "abc":
        claim = held.claim(extents(id_), "v")
        held.loaded(id_, f"ref-{id_}", np.zeros(100, np.uint8), "storage" if id_ == "a" else "peer")
        held.settle(claim, "v")
        give(held, id_, "v")
    acquire(held, "d", "v")
    assert resident(held) == "acd"


def test_prefetch_takes_only_room_of_what_is_worth_less(held: HeldExtents, clock: Clock) -> None:
    acquire(held, "abc", "v")
    give(held, "ab", "v")
    assert held.prefetch(extents("xy")) == []  # everything was used just now
    clock.now_s += 3600.0
    take = held.prefetch(extents("xyz"))
    assert [found.id for found in take] == ["x", "y"]
    assert resident(held) == "c"
    claim = held.claim(extents("x"), "w")  # joins what is on its way
    assert claim.to_load == ()
    for found in take:
        held.loaded(found.id, "ref", np.zeros(100, np.uint8), "storage")
    assert held.settle(claim, "w") == {"x": "ref"}
    assert held.residents.bytes_by_holder() == {"v": 100, "w": 100}


def test_prefetch_does_not_take_the_room_that_somebody_waits_for(held: HeldExtents, pool: ThreadPoolExecutor) -> None:
    acquire(held, "ab", "v")
    future = waiting(held, pool, "cd", "w")
    assert held.prefetch(extents("x")) == []
    give(held, "ab", "v")
    future.result(WAIT_S)


def test_the_leases_of_the_dead_end_also_those_just_given(held: HeldExtents, pool: ThreadPoolExecutor) -> None:
    acquire(held, "ab", "dead")
    loading = held.claim(extents("c"), "dead")
    future = waiting(held, pool, "xyz", "alive")
    held.holders.end("dead")
    load(held, loading)
    held.settle(loading, "dead")
    assert future.result(WAIT_S)
    assert acquire(held, "x", "dead")  # its call was still on the way
    assert held.residents.bytes_by_holder() == {"alive": 300}


def test_a_damaged_extent_is_replaced_and_its_room_is_counted_while_leased(held: HeldExtents) -> None:
    acquire(held, "ab", "v")
    damaged = held.residents.held("a")
    assert damaged is not None
    assert held.invalidate("a", damaged.view)
    assert not held.invalidate("a", damaged.view)
    assert resident(held) == "b"
    claim = held.claim(extents("a"), "v")
    assert [found.id for found in claim.to_load] == ["a"]
    load(held, claim)
    assert held.settle(claim, "v")["a"] is not damaged
    with pytest.raises(BudgetExceeded):
        HeldExtents.claim(_impatient(held), extents("c"), "w")
    give(held, "a", "v")  # of the damaged copy
    assert held.residents.bytes_by_holder() == {"v": 200}
    acquire(held, "c", "w")
    assert resident(held) == "abc"


def _impatient(held: HeldExtents) -> HeldExtents:
    held._max_wait_s = 0.0
    return held


def test_adopted_extents_keep_their_leases_whatever_the_budget(held: HeldExtents) -> None:
    held.set_budget(100)
    for id_ in "ab":
        assert not held.holders.lease_same(id_, f"ref-{id_}", "v", 2)
        assert held.holders.adopt(copy_of(id_), "v", 2)
        assert held.holders.lease_same(id_, f"ref-{id_}", "w", 1)
    assert {found.id: (found.source, found.holders) for found in held.residents.described()} == {
        "a": ("adopted", {"v": 2, "w": 1}),
        "b": ("adopted", {"v": 2, "w": 1}),
    }
    assert acquire(held, "ab", "x") == {"a": "ref-a", "b": "ref-b"}
    for holder, count in {"v": 2, "w": 1, "x": 1}.items():
        for _ in range(count):
            give(held, "ab", holder)
    assert len(held.residents.ids()) == 1


def test_offers_are_waited_for_and_no_longer_than_given(held: HeldExtents, pool: ThreadPoolExecutor) -> None:
    future = pool.submit(held.wait_until_known, ["a"], WAIT_S)
    held.holders.adopt(copy_of("a"), "v", 1)
    future.result(WAIT_S)
    held.wait_until_known(["b"], 0.01)
    assert resident(held) == "a"


def test_shedding_frees_at_least_so_much_of_what_may_go(held: HeldExtents) -> None:
    acquire(held, "abc", "v")
    assert not held.shed(50)
    give(held, "ab", "v")
    assert held.shed(150)
    assert resident(held) == "c"


def test_what_is_mapped_beside_what_is_here_counts_until_it_is_given_back(held: HeldExtents) -> None:
    acquire(held, "a", "v")
    assert not held.holders.adopt(copy_of("a", "another"), "w", 2)
    assert held.residents.bytes_by_holder() == {"v": 100, "w": 100}
    with pytest.raises(BudgetExceeded):
        _impatient(held).claim(extents("bc"), "x")
    acquire(held, "a", "w")
    give(held, "a", "w")
    give(held, "a", "w")  # both of the copy that it came with
    assert held.residents.bytes_by_holder() == {"v": 100, "w": 100}
    assert acquire(held, "bc", "x")
    assert resident(held) == "abc"


def test_the_dead_get_leases_again_when_they_are_heard_of(held: HeldExtents) -> None:
    epoch = held.holders.greet("v")
    assert held.claim([], "v").epoch == held.holders.epoch("v") == epoch
    held.holders.end("v")
    assert held.claim([], "v").epoch == held.holders.epoch("v") == 0
    assert held.holders.greet("v") == held.holders.epoch("v") != epoch
    acquire(held, "a", "v")
    held.holders.release(["a"], "v", epoch)  # of before
    assert held.residents.bytes_by_holder() == {"v": 100}
    held.holders.release(["a"], "v", held.holders.epoch("v"))
    assert held.residents.bytes_by_holder() == {}
    assert held.holders.greet("v") == held.holders.epoch("v")


def test_a_killed_holder_gets_no_leases_by_what_it_had_asked_before(held: HeldExtents) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mark = ProcessMark(process.pid, psutil.Process(process.pid).create_time())
    held.holders.greet("v", mark)
    process.kill()
    process.communicate()
    held.holders.watch.check()
    assert held.holders.greet("v", mark) == held.claim([], "v").epoch == 0
    held.claim(extents("a"), "v")
    assert held.residents.bytes_by_holder() == {}


def test_half_of_a_claim_that_fails_leaves_the_other_half_to_others(held: HeldExtents) -> None:
    first = held.claim(extents("abc"), "v")
    second = held.claim(extents("a"), "w")
    held.failed("b", ExtentCorrupt("other bytes"))
    with pytest.raises(ExtentCorrupt):
        held.settle(Claim(first.entries[1:], first.arrivals[1:], (), first.epoch), "v")
    held._give_back(Claim(first.entries[:1], first.arrivals[:1], (), first.epoch), "v")
    for id_ in "ac":
        held.loaded(id_, f"ref-{id_}", np.zeros(100, np.uint8), "storage")
    held._give_back(first, "v")  # once more than it has: nobody else's goes
    assert held.settle(second, "w") == {"a": "ref-a"}
    assert held.residents.bytes_by_holder() == {"w": 100}


def filled(num_extents: int, num_leased: int = 50) -> HeldExtents:
    """Full, with some leased, some pinned, and the rest used a while ago."""
    clock = Clock(1000.0)
    held = HeldExtents(ExtentBook(100 * num_extents, clock=clock), max_wait_s=0.0)
    ids = [str(number) for number in range(num_extents)]
    for start in range(0, num_extents, 100):
        claim = held.claim([extent(id_) for id_ in ids[start : start + 100]], f"holder {start}")
        load(held, claim)
        held.settle(claim, f"holder {start}")
        held.holders.release(ids[start : start + 100], f"holder {start}")
        clock.now_s += 1.0
    for id_ in ids[:num_leased]:
        acquire_one(held, id_, "v")
    held.set_pins(ids[num_leased : 2 * num_leased])
    clock.now_s += 3600.0
    return held


def acquire_one(held: HeldExtents, id_: str, holder: str) -> None:
    claim = held.claim([extent(id_)], holder)
    load(held, claim)
    held.settle(claim, holder)


def make_room(held: HeldExtents) -> None:
    claim = held.claim([extent(f"new-{number}") for number in range(20)], "w")
    assert len(claim.to_load) == 20
    load(held, claim)


def refuse(held: HeldExtents) -> None:
    held.set_pins([])
    with pytest.raises(BudgetExceeded, match="are missing"):
        held.claim([extent("huge", 10**9)], "w")


WORK: dict[str, Callable[[HeldExtents], object]] = {
    "a release": lambda held: held.holders.release(["3"], "v"),
    "a release of many": lambda held: held.holders.release([str(number) for number in range(20)], "v"),
    "an unknown release": lambda held: held.holders.release(["unknown"], "stranger"),
    "what is here": lambda held: acquire_one(held, "200", "w"),
    "what needs room": make_room,
    "a refusal": refuse,
    "a prefetch": lambda held: held.prefetch([extent(f"next-{number}") for number in range(20)]),
    "a death": lambda held: held.holders.end("v"),
    "a heartbeat": lambda held: (held.holders.greet("v"), held.residents.wanted_bytes),
    "figures": lambda held: (held.residents.totals(), held.residents.bytes_by_holder(), held.residents.num_waiting),
    "who has what": lambda held: held.residents.holders_text(),
    "a drop": lambda held: held.drop(["3", "60", "200"]),
    "what is here of some": lambda held: held.residents.described(["3", "60", "200", "unknown"]),
    "a smaller budget": lambda held: held.set_budget(held.residents.budget_bytes - 1000),
    "a larger budget": lambda held: held.set_budget(held.residents.budget_bytes + 1000),
    "shedding": lambda held: held.shed(1000),
    "an invalidated copy": lambda held: held.invalidate("3", held.residents.held("3").view),  # type: ignore[union-attr]
    "a pin": lambda held: held.set_pins([str(number) for number in range(50, 99)]),
}


@pytest.mark.drawn(9)
@pytest.mark.parametrize("what", WORK)
def test_what_it_costs_does_not_grow_with_what_is_here(what: str) -> None:
    counts = []
    for size in (300, 1200):
        held = filled(size)
        counts.append(operations(lambda held=held: WORK[what](held)))
    assert counts[1] < 1.5 * counts[0] + 50, f"{counts[0]} steps beside 300 extents, {counts[1]} beside 1200"
