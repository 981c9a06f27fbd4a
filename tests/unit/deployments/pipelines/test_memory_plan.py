"""Buffers of a segment in one arena: none that live together overlap, and the arena is hardly too large."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from kit.seeding import seeded_random

from deployments.pipelines.plans import ALIGNMENT_BYTES, _BufferNeed, _plan_memory

NEEDS = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 9), st.integers(0, 5)), max_size=12).map(
    lambda rows: [_BufferNeed(at, size, first, first + more) for at, (size, first, more) in enumerate(rows)]
)


@settings(max_examples=60, deadline=None)
@given(NEEDS)
def test_no_two_live_buffers_overlap(needs: list[_BufferNeed[int]]) -> None:
    plan = _plan_memory(needs)
    for need in needs:
        offset = plan.offsets[need.key]
        assert offset % ALIGNMENT_BYTES == 0
        assert offset + need.nbytes <= plan.nbytes
    for at in range(16):
        spans = sorted((plan.offsets[n.key], n.nbytes) for n in needs if n.first <= at <= n.last)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
        assert sum(size for _, size in spans) <= plan.live_bytes
    assert plan.live_bytes <= plan.nbytes or not needs


def test_a_chain_shares_two_places() -> None:
    """a -> b -> c -> d: only neighbours live together, whatever the length of the chain."""
    needs = [_BufferNeed(at, 4096, at, at + 1) for at in range(20)]
    plan = _plan_memory(needs)
    assert plan.nbytes == plan.live_bytes == 2 * 4096


def test_the_arena_is_near_the_least_possible() -> None:
    draw = seeded_random()
    over = []
    for _ in range(50):
        rows = [(draw.randint(1, 64) * ALIGNMENT_BYTES, draw.randint(0, 9), draw.randint(0, 4)) for _ in range(15)]
        plan = _plan_memory([_BufferNeed(at, size, first, first + more) for at, (size, first, more) in enumerate(rows)])
        over.append(plan.nbytes / plan.live_bytes)
    assert sum(over) / len(over) < 1.15


def test_nothing_needs_nothing() -> None:
    plan = _plan_memory([])
    assert (plan.nbytes, plan.live_bytes, plan.offsets) == (0, 0, {})
