"""The planner of forwards: every text once, padding bounded, and no cheaper plan among all partitions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engines.text.forward_plan import ForwardLimits, plan_forwards

LENGTHS = st.lists(st.integers(1, 512), max_size=40)
LIMITS = st.builds(
    ForwardLimits,
    max_padding=st.floats(0, 0.9),
    max_tokens=st.integers(1, 4096),
    overhead_tokens=st.integers(0, 500),
)


def positions(lengths, plan):
    return sum(len(group) * max(lengths[index] for index in group) for group in plan)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, LIMITS)
def test_each_text_once_and_little_padding(lengths, limits):
    plan = plan_forwards(lengths, limits)
    assert sorted(index for group in plan for index in group) == list(range(len(lengths)))
    assert all(plan)
    for group in plan:
        size = len(group) * max(lengths[index] for index in group)
        assert size <= limits.max_tokens or len(group) == 1
    total = positions(lengths, plan)
    assert total - sum(lengths) <= limits.max_padding * total + 1e-9


def cheapest(lengths, limits):
    """Over all partitions of the sorted lengths into runs, by brute force."""
    ordered = sorted(lengths)
    best = None
    for cuts in range(2 ** (len(ordered) - 1)):
        runs, run = [], [ordered[0]]
        for place, length in enumerate(ordered[1:]):
            if cuts >> place & 1:
                runs.append(run)
                run = []
            run.append(length)
        runs.append(run)
        if all(len(run) * run[-1] - sum(run) <= limits.max_padding * len(run) * run[-1] for run in runs):
            cost = sum(limits.overhead_tokens + len(run) * run[-1] for run in runs)
            best = cost if best is None else min(best, cost)
    return best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.floats(0, 0.9), st.integers(1, 100))
def test_no_cheaper_partition(lengths, max_padding, overhead_tokens):
    limits = ForwardLimits(max_padding=max_padding, max_tokens=10**9, overhead_tokens=overhead_tokens)
    plan = plan_forwards(lengths, limits)
    assert len(plan) * overhead_tokens + positions(lengths, plan) == cheapest(lengths, limits)


def test_what_the_limits_do():
    lengths = [5, 300, 6, 5, 290]
    assert plan_forwards([]) == ()
    assert plan_forwards(lengths) == ((0, 3, 2), (4, 1))
    assert plan_forwards(lengths, ForwardLimits(max_padding=0)) == ((0, 3), (2,), (4,), (1,))
    assert plan_forwards(lengths, ForwardLimits(max_padding=0.9, overhead_tokens=10**6)) == ((0, 3, 2, 4, 1),)
    assert plan_forwards([10] * 7, ForwardLimits(max_tokens=30)) == ((0, 1), (2, 3), (4, 5, 6))


@pytest.mark.parametrize("limits", [{"max_padding": 1.0}, {"max_padding": -0.1}, {"max_tokens": 0}])
def test_limits_that_mean_nothing(limits):
    with pytest.raises(ValueError, match=r"expected max_padding in \[0, 1\)"):
        ForwardLimits(**limits)
