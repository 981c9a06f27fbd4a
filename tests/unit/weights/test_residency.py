"""Eviction plans: leased things stay, the least recently used goes, and room is made or nothing is touched."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from weights.residency import EvictionPlan, Resident, plan_eviction

RESIDENTS = st.lists(
    st.tuples(st.integers(0, 100), st.integers(0, 2), st.integers(0, 10**6)), max_size=12, unique_by=lambda x: x[2]
).map(lambda rows: [Resident(f"r{i}", n, used, leases) for i, (n, leases, used) in enumerate(rows)])


@settings(max_examples=300, deadline=None)
@given(RESIDENTS, st.integers(0, 500), st.integers(0, 600))
def test_any_plan(residents: list[Resident], needed: int, budget: int) -> None:
    plan = plan_eviction(residents, needed, budget)
    by_key = {resident.key: resident for resident in residents}
    evicted = [by_key[key] for key in plan.evict]
    total = sum(resident.nbytes for resident in residents) + needed
    free = [resident for resident in residents if not resident.leases]
    assert not any(resident.leases for resident in evicted)
    assert len(set(plan.evict)) == len(plan.evict)
    # It fits exactly when all that may go is enough.
    missing = total - sum(resident.nbytes for resident in free) - budget
    if missing > 0:
        assert plan == EvictionPlan((), missing, tuple(r.key for r in residents if r.leases))
        return
    assert plan.missing_bytes == 0
    assert total - sum(resident.nbytes for resident in evicted) <= budget
    # The least recently used ones, in order, and not one more than it takes.
    assert evicted == sorted(free, key=lambda resident: resident.last_used)[: len(evicted)]
    assert not evicted or total - sum(resident.nbytes for resident in evicted[:-1]) > budget


def test_what_is_in_the_way_is_named() -> None:
    residents = [Resident("a", 40, 1, 1), Resident("b", 40, 2), Resident("c", 10, 3, 2)]
    assert plan_eviction(residents, 30, 100) == EvictionPlan(("b",))
    assert plan_eviction(residents, 60, 100) == EvictionPlan((), 10, ("a", "c"))
    assert plan_eviction(residents, 10, 100) == EvictionPlan(())
