"""Eviction plans: leased things stay, the least valuable goes, and room is made or nothing is touched."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weights.residency.plans import EvictionPlan, Resident, keep_values, plan_eviction, plan_prefetch

ROWS = st.tuples(
    st.integers(0, 100),
    st.integers(0, 10**6),
    st.sampled_from([0, 0, 1, 2]),
    st.none() | st.floats(0.001, 100),
    st.floats(0, 50),
    st.sampled_from([False, False, True]),
)
RESIDENTS = st.lists(ROWS, max_size=9).map(lambda rows: [Resident(f"r{i}", *row) for i, row in enumerate(rows)])


@settings(max_examples=300, deadline=None)
@given(RESIDENTS, st.integers(0, 500), st.integers(0, 600))
def test_any_eviction(residents: list[Resident], needed: int, budget: int) -> None:
    plan = plan_eviction(residents, needed, budget)
    by_key = {resident.key: resident for resident in residents}
    evicted = [by_key[key] for key in plan.evict]
    total = sum(resident.nbytes for resident in residents) + needed
    held = [resident for resident in residents if resident.leases or resident.pinned]
    assert not set(plan.evict) & {resident.key for resident in held}
    assert len(set(plan.evict)) == len(plan.evict)
    # It fits exactly when all that may go is enough.
    missing = sum(resident.nbytes for resident in held) + needed - budget
    if missing > 0:
        assert plan == EvictionPlan((), missing, tuple(resident.key for resident in held))
        return
    assert plan.missing_bytes == 0
    assert total - sum(resident.nbytes for resident in evicted) <= budget
    # Not one of them could have stayed.
    for spared in evicted:
        assert total - sum(resident.nbytes for resident in evicted) + spared.nbytes > budget


@settings(max_examples=300, deadline=None)
@given(RESIDENTS, RESIDENTS, st.integers(0, 600))
def test_any_prefetch(residents: list[Resident], wanted: list[Resident], budget: int) -> None:
    newcomers = [replace(resident, key=f"n{resident.key}") for resident in wanted]
    plan = plan_prefetch(residents, newcomers, budget)
    by_key = {resident.key: resident for resident in [*residents, *newcomers]}
    values = keep_values(list(by_key.values()))
    taken, evicted = [by_key[key] for key in plan.take], [by_key[key] for key in plan.evict]
    assert not any(resident.leases or resident.pinned for resident in evicted)
    if evicted:
        assert max(values[resident.key] for resident in evicted) < max(values[newcomer.key] for newcomer in taken)
    if taken:
        stay = [resident for resident in residents if resident not in evicted]
        assert sum(resident.nbytes for resident in [*stay, *taken]) <= budget
    else:
        assert not evicted


@given(
    st.lists(st.floats(0.01, 100), min_size=2, max_size=8, unique=True),
    st.integers(1, 1000),
    st.data(),
)
def test_of_equal_size_and_popularity_the_cheapest_to_reload_goes_first(
    reload_s: list[float], nbytes: int, data: st.DataObject
) -> None:
    residents = [Resident(f"r{i}", nbytes, i, reload_s=cost) for i, cost in enumerate(reload_s)]
    needed = data.draw(st.integers(0, nbytes * len(residents)))
    plan = plan_eviction(residents, needed, nbytes * len(residents))
    cheapest = sorted(residents, key=lambda resident: resident.reload_s or 0)
    assert plan.evict == tuple(resident.key for resident in cheapest[: math.ceil(needed / nbytes)])


def test_value_is_reload_time_times_popularity_per_byte() -> None:
    small, large = Resident("small", 10, 0, reload_s=2.0), Resident("large", 100, 0, reload_s=2.0)
    assert plan_eviction([small, large], 10, 110).evict == ("large",)
    assert plan_eviction([small, replace(large, popularity=11.0)], 10, 110).evict == ("small",)
    assert keep_values([replace(small, popularity=3.0)]) == {"small": pytest.approx(0.6)}


def test_without_costs_the_least_recently_used_goes() -> None:
    residents = [Resident("a", 10, 3), Resident("b", 10, 1), Resident("c", 10, 2)]
    assert plan_eviction(residents, 20, 30).evict == ("b", "c")


def test_an_unknown_reload_takes_as_long_as_the_others_per_byte() -> None:
    known = [Resident("cheap", 10, 0, reload_s=1.0), Resident("dear", 10, 0, reload_s=3.0)]
    unknown = Resident("unknown", 40, 0)
    assert keep_values([*known, unknown]) == {"cheap": 0.1, "dear": 0.3, "unknown": pytest.approx(0.2)}


def test_what_is_not_needed_after_all_is_spared() -> None:
    residents = [Resident("old", 10, 1), Resident("older", 20, 0), Resident("new", 90, 2)]
    assert plan_eviction(residents, 90, 120).evict == ("new",)


def test_what_is_in_the_way_is_named() -> None:
    residents = [Resident("a", 40, 1, 1), Resident("b", 40, 2), Resident("c", 10, 3, pinned=True)]
    assert plan_eviction(residents, 30, 100) == EvictionPlan(("b",))
    assert plan_eviction(residents, 60, 100) == EvictionPlan((), 10, ("a", "c"))
    assert plan_eviction(residents, 10, 100) == EvictionPlan(())


def test_a_prefetch_takes_what_has_room() -> None:
    residents = [Resident("cold", 30, 0, popularity=0.1), Resident("hot", 30, 0, popularity=9.0)]
    newcomers = [Resident("big", 50, 0), Resident("next", 40, 0), Resident("small", 5, 0)]
    assert plan_prefetch(residents, newcomers, 75) == plan_prefetch(residents, newcomers[1:], 75)
    assert plan_prefetch(residents, newcomers, 75).take == ("next", "small")
    assert plan_prefetch(residents, newcomers, 75).evict == ("cold",)
    assert plan_prefetch(residents, newcomers, 60).take == ("small",)
