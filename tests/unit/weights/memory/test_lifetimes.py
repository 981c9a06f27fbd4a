"""Buffers in one arena: none that live together overlap, and the arena is hardly too large."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.seeding import seeded_random

from infra.bench.best_fit import best_fit_bytes
from weights.memory.lifetimes import ALIGNMENT_BYTES, Lifetime, MemoryPlan, place

GB = 10**9
LIFETIMES = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 9), st.integers(0, 5)), max_size=12).map(
    lambda rows: [Lifetime(at, size, first, first + more) for at, (size, first, more) in enumerate(rows)]
)


def check_plan(lifetimes: list[Lifetime[int]], plan: MemoryPlan[int]) -> None:
    for one in lifetimes:
        assert plan.offsets[one.key] % ALIGNMENT_BYTES == 0
        assert plan.offsets[one.key] + one.nbytes <= plan.nbytes
    alive_bytes = [0]
    for at in {one.first for one in lifetimes}:
        spans = sorted((plan.offsets[one.key], one.nbytes) for one in lifetimes if one.first <= at <= one.last)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
        alive_bytes.append(sum(size for _, size in spans))
    assert max(alive_bytes) == plan.live_bytes <= plan.nbytes


@settings(max_examples=60, deadline=None)
@given(LIFETIMES)
def test_no_two_live_buffers_overlap(lifetimes: list[Lifetime[int]]) -> None:
    check_plan(lifetimes, place(lifetimes))


def test_a_chain_shares_two_places() -> None:
    """a -> b -> c -> d: only neighbours live together, whatever the length of the chain."""
    plan = place([Lifetime(at, 4096, at, at + 1) for at in range(20)])
    assert plan.nbytes == plan.live_bytes == 2 * 4096


def random_lifetimes(count: int = 15) -> list[Lifetime[int]]:
    draw = seeded_random()
    rows = [(draw.randint(1, 64) * ALIGNMENT_BYTES, draw.randint(0, 9), draw.randint(0, 4)) for _ in range(count)]
    return [Lifetime(at, size, first, first + more) for at, (size, first, more) in enumerate(rows)]


def test_the_arena_is_near_the_least_possible() -> None:
    """Nearer than best fit in time; what is above the bound finds a place below in other tries."""
    plans, peers = [], []
    for _ in range(50):
        lifetimes = random_lifetimes()
        plan = place(lifetimes)
        check_plan(lifetimes, plan)
        plans.append(plan.nbytes / plan.live_bytes)
        peers.append(best_fit_bytes(lifetimes) / plan.live_bytes)
    assert sum(plans) / 50 < 1.05
    assert sum(plans) < sum(peers)


def test_what_ends_above_the_bound_is_placed_again_before_the_others() -> None:
    """By size alone this takes 10 units: 5 and 4 share a place, 3 lies behind 4, and the other 3 behind that."""
    unit = ALIGNMENT_BYTES
    rows = [(3, 0, 1), (5, 2, 2), (4, 0, 0), (3, 1, 3)]
    lifetimes = [Lifetime(at, size * unit, first, last) for at, (size, first, last) in enumerate(rows)]
    plan = place(lifetimes)
    check_plan(lifetimes, plan)
    assert plan.nbytes == plan.live_bytes == 8 * unit


def test_two_models_in_turn_need_the_larger_workspace() -> None:
    """The example of 8 and 6 GB: 14 at once, 8 in turn, so a pool of 12 holds either."""
    in_turn = place([Lifetime("a", 8 * GB, 0, 0), Lifetime("b", 6 * GB, 1, 1)])
    assert in_turn.nbytes == 8 * GB < 12 * GB
    at_once = place([Lifetime("a", 8 * GB, 0, 1), Lifetime("b", 6 * GB, 1, 2)])
    assert at_once.nbytes == 14 * GB > 12 * GB


def test_nothing_needs_nothing() -> None:
    plan = place([])
    assert (plan.nbytes, plan.live_bytes, plan.offsets) == (0, 0, {})


# Cases of ggml's test-alloc.cpp: bytes of its tensors, what each reads, and the most that all may take.


class Node(NamedTuple):
    """`within` is the node in whose memory this one lies: a view, or an operation in place."""

    nbytes: int
    reads: tuple[int, ...] = ()
    within: int | None = None


CASES = {
    "too many tensors for one buffer": (
        32,
        [Node(8), Node(8), Node(8), Node(8, (0, 1)), Node(8, (1, 2), 2), Node(8, (3, 0), 0), Node(8, (4, 5), 4)],
    ),
    "a tensor too large for the rest": (56, [Node(16), Node(8), Node(24, (0, 1))]),
    "larger than any buffer": (24, [Node(24), Node(24, (0,), 0)]),
    "more buffers than chunks": (
        18 * 8,
        [*(Node(8) for _ in range(17)), Node(8, (0, 1)), *(Node(8, (16 + n, 1 + n), 16 + n) for n in range(1, 16))],
    ),
    "the space that is left over": (28, [Node(8), Node(16, (0,)), Node(4, (1,))]),
    "views": (24, [Node(16), Node(16, (0,), 0), Node(16, (1,), 1), Node(8, (2,), 2), Node(8), Node(8, (3, 4), 3)]),
    "reuse and free": (
        104,
        [
            *(Node(24), Node(8), Node(8), Node(8, (1, 2), 1), Node(32, (0,)), Node(32, (4,))),
            *(Node(32, (4, 5), 4), Node(8, (6,), 6), Node(8, (3, 7), 3)),
        ],
    ),
    "free blocks that join": (
        88,
        [
            *(Node(16), Node(16), Node(16), Node(4, (0,)), Node(4, (1,)), Node(24, (2,))),
            *(Node(4, (3, 4), 3), Node(24, (6,)), Node(24, (5, 7), 5)),
        ],
    ),
    "memory that is there already": (28, [Node(24), Node(4, (0,)), Node(4, (1,))]),
    "nobody reads it": (16, [Node(8), Node(8, (0,)), Node(8, (1,), 1)]),
}


@pytest.mark.parametrize("name", CASES)
def test_cases_of_ggml(name: str) -> None:
    most, nodes = CASES[name]
    roots = list(range(len(nodes)))
    ends = [0] * len(nodes)
    for at, node in enumerate(nodes):
        roots[at] = at if node.within is None else roots[node.within]
        for read in (*node.reads, at):
            ends[roots[read]] = at
    scale = ALIGNMENT_BYTES // 4  # its least tensor is one place of ours
    # Inputs are there before the first operation.
    lifetimes = [
        Lifetime(at, node.nbytes * scale, at if node.reads else 0, ends[at])
        for at, node in enumerate(nodes)
        if roots[at] == at
    ]
    plan = place(lifetimes)
    check_plan(lifetimes, plan)
    assert plan.nbytes <= most * scale
