"""The order that is kept gives the plans that sorting everything gives, and costs what it looks at."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from unit.cluster.counting import operations

from cluster.keeper.eviction_order import MIN_STALE, EvictionOrder, Idle, Newcomer
from weights.residency import Popularity, Resident, plan_eviction, plan_prefetch

HALF_LIFE_S = 600.0
ORIGINS = ("storage", "peer", "adopted")

moments = st.floats(0, 5000, allow_nan=False).map(lambda value: round(value, 3))
uses = st.lists(moments, max_size=5).map(sorted)
things = st.tuples(uses, st.integers(1, 50), st.sampled_from(ORIGINS))
rates = st.fixed_dictionaries({origin: st.sampled_from((1.0, 2.0, 7.0)) for origin in ORIGINS})


def used_at(moments_s: list[float]) -> Popularity:
    popularity = Popularity(HALF_LIFE_S)
    for at_s in moments_s:
        popularity = popularity.touch(at_s)
    return popularity


def both(
    found: list[Any], rates: dict[str, float], now_s: float, spare: set[str] = frozenset()
) -> tuple[EvictionOrder, list[Resident]]:
    """The same as an order and as residents; what is spared is leased there."""
    order, residents = EvictionOrder(), []
    for number, (moments_s, nbytes, origin) in enumerate(found):
        key, popularity = str(number), used_at(moments_s)
        order.put(Idle(key, nbytes, origin, popularity, number))
        residents.append(
            Resident(key, nbytes, number, int(key in spare), nbytes * rates[origin], popularity.value(now_s))
        )
    return order, residents


@given(st.lists(things, max_size=12), rates, moments, st.integers(0, 300), st.sets(st.integers(0, 11).map(str)))
@settings(max_examples=300, deadline=None)
def test_the_same_goes_as_when_everything_is_sorted(
    found: list[Any], rates: dict[str, float], later_s: float, lacking_bytes: int, spare: set[str]
) -> None:
    now_s = 5000.0 + later_s
    order, residents = both(found, rates, now_s, spare)
    budget = sum(resident.nbytes for resident in residents)
    expected = plan_eviction(residents, lacking_bytes, budget)
    for _ in range(2):  # a plan changes nothing
        plan = order.plan_eviction(lacking_bytes, rates, now_s, spare)
        assert (plan.evict, plan.missing_bytes) == (expected.evict, expected.missing_bytes)
    assert (len(order), order.nbytes) == (len(found), budget)


@given(
    st.lists(things, max_size=12),
    st.lists(st.tuples(st.integers(1, 50), st.sampled_from((1.0, 1.5, 4.0))), max_size=6),
    rates,
    moments,
    st.integers(0, 100),
)
@settings(max_examples=300, deadline=None)
def test_the_same_comes_in_as_when_everything_is_sorted(
    found: list[Any], coming: list[Any], rates: dict[str, float], later_s: float, free_bytes: int
) -> None:
    now_s = 5000.0 + later_s
    order, residents = both(found, rates, now_s)
    newcomers = [Newcomer(f"new {number}", nbytes, use) for number, (nbytes, use) in enumerate(coming)]
    expected = plan_prefetch(
        residents,
        [Resident(new.key, new.nbytes, 1e9, reload_s=new.nbytes * 2.0, popularity=new.popularity) for new in newcomers],
        free_bytes + sum(resident.nbytes for resident in residents),
    )
    assert order.plan_prefetch(newcomers, free_bytes, rates, 2.0, now_s) == expected
    assert len(order) == len(found)


def test_what_was_never_used_goes_first_and_equals_by_least_recent_use() -> None:
    order = EvictionOrder()
    for key, moments_s in (("used", [1.0]), ("first", []), ("second", [])):
        order.put(Idle(key, 1, "storage", used_at(moments_s), len(order)))
    assert order.plan_eviction(2, {"storage": 1.0}, 2.0).evict == ("first", "second")


def test_what_is_put_again_is_there_once() -> None:
    order = EvictionOrder()
    for number in range(10 * MIN_STALE):
        order.put(Idle("a", 5, "storage", used_at([float(number)]), number))
    order.put(Idle("b", 5, "peer", used_at([1.0]), 0))
    assert (len(order), order.nbytes) == (2, 10)
    assert order.plan_eviction(10, {"storage": 1.0, "peer": 1.0}, 1e6).evict == ("b", "a")
    assert sum(len(heap) for heaps in order._heaps.values() for heap in heaps) < 4 * MIN_STALE  # what went is swept


def test_a_plan_costs_what_goes_and_not_what_is_here() -> None:
    counts = []
    rates = dict.fromkeys(ORIGINS, 1.0)
    for size in (1000, 10_000):
        order = EvictionOrder()
        for number in range(size):
            order.put(Idle(str(number), 1, ORIGINS[number % 3], used_at([float(number)]), number))
        counts.append(operations(lambda order=order: order.plan_eviction(20, rates, 1e5)))
    assert counts[0] > 20
    assert counts[1] < 1.5 * counts[0]


@pytest.mark.parametrize("num_free", [0, 5])
def test_an_empty_order_has_no_room(num_free: int) -> None:
    assert EvictionOrder().plan_eviction(10 - num_free, {}, 0.0).missing_bytes == 10 - num_free
    newcomers = [Newcomer("a", 5, 1.0)]
    taken = EvictionOrder().plan_prefetch(newcomers, num_free, {}, 1.0, 0.0).take
    assert taken == (("a",) if num_free else ())
