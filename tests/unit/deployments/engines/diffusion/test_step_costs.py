"""Measured costs that were wrong once: what others' work on the same cores made slow is found out again."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from kit.drawing import seeds

from deployments.engines.costs.step_costs import TRUSTED_CALLS, StepCosts
from deployments.engines.diffusion.batch_selection import Candidate, select_batch

NUM_WAITING = 16
KIND = "small"


def choose(costs: StepCosts) -> int:
    """Return how many of the requests that wait share the next call."""
    waiting = [Candidate(frozenset([KIND]), KIND, 1, 64, float(end)) for end in range(NUM_WAITING)]
    return len(select_batch(waiting, costs))


@pytest.mark.parametrize("is_remembered", [False, True])
@seeds(50)
def test_sizes_that_were_slow_once_are_tried_again(seed: int, is_remembered: bool) -> None:
    chance = random.Random(seed)
    fixed_s, row_s = chance.uniform(0.002, 0.03), chance.uniform(0.001, 0.003)
    right, wrong = StepCosts(), StepCosts()
    for rows in range(1, NUM_WAITING + 1):
        right.note_call(KIND, rows, fixed_s + row_s * rows)
        slowness = chance.uniform(3, 6) if rows > 4 or chance.random() < 0.3 else 1.0
        for _ in range(chance.randrange(1, 6)):
            wrong.note_call(KIND, rows, slowness * (fixed_s + row_s * rows))
    if is_remembered:
        figures = wrong.figures()
        wrong = StepCosts()
        wrong.begin_with(figures)
    best = choose(right)
    for _ in range(8 * TRUSTED_CALLS):
        size = choose(wrong)
        wrong.note_call(KIND, size, (fixed_s + row_s * size) * chance.lognormvariate(0, 0.02))
    per_row_s = wrong.seconds(KIND, size) / size
    assert per_row_s == pytest.approx(right.seconds(KIND, best) / best, rel=0.1)
    assert wrong.seconds(KIND, best) == pytest.approx(right.seconds(KIND, best), rel=0.5)


def test_sizes_that_stay_slow_are_tried_seldom() -> None:
    chance, costs, tried = random.Random(0), StepCosts(), Counter[int]()
    for _ in range(20 * TRUSTED_CALLS):
        size = choose(costs)
        tried[size] += 1
        costs.note_call(KIND, size, (0.01 + 0.01 * size + (0.5 if size > 8 else 0.0)) * chance.lognormvariate(0, 0.05))
    assert sum(count for size, count in tried.items() if size > 8) <= 20 * (NUM_WAITING - 8)
