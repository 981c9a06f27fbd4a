"""Predicted seconds beside numpy's least squares and the law that made them."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from kit.drawing import seeds

from cluster.admission.service_times import BATCH_SIZES, Estimate, ServiceTimes


@seeds(50)
def test_a_fixed_part_and_one_by_work_are_told_apart(seed: int) -> None:
    rng = random.Random(seed)
    fixed_s, per_work_s = rng.uniform(0, 1), rng.uniform(0.001, 0.1)
    seconds, works, took = Estimate(), [], []
    for _ in range(300):
        work = rng.choice([4, 8, 16, 64])
        works.append(work)
        took.append((fixed_s + per_work_s * work) * rng.lognormvariate(0, 0.05))
        seconds.note_seconds(work, took[-1])
    slope, start = np.polyfit(works, took, 1)
    for work in (1, 4, 10, 64, 100):
        assert seconds.seconds_of(work) == pytest.approx(start + slope * work, rel=0.15)


def test_one_kind_of_work_counts_as_proportional() -> None:
    seconds = Estimate()
    for _ in range(20):
        seconds.note_seconds(16, 2.0)
    assert [seconds.seconds_of(work) for work in (8, 16, 32)] == pytest.approx([1.0, 2.0, 4.0])


@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_the_level_follows_soon_and_the_parts_stay(factor: float) -> None:
    seconds, rng = Estimate(), random.Random(0)
    for _ in range(300):
        work = rng.choice([2, 20])
        seconds.note_seconds(work, 1 + 0.1 * work)
    for _ in range(25):
        work = rng.choice([2, 20])
        seconds.note_seconds(work, factor * (1 + 0.1 * work))
    assert seconds.seconds_of(2) == pytest.approx(factor * 1.2, rel=0.15)
    assert seconds.seconds_of(20) == pytest.approx(factor * 3.0, rel=0.15)


def test_a_stall_moves_little_and_nothing_is_negative() -> None:
    seconds = Estimate()
    assert seconds.seconds_of(3) == 0
    for _ in range(50):
        seconds.note_seconds(1, 1.0)
    seconds.note_seconds(1, 1000.0)
    assert seconds.seconds_of(1) < 1.6
    rng = random.Random(1)
    for _ in range(500):  # the more work, the less time: no law of ours
        work = rng.choice([1, 100])
        seconds.note_seconds(work, 1 / work)
        assert min(seconds.seconds_of(each) for each in (0.01, 1, 100, 10_000)) >= 0


@pytest.mark.parametrize("spread", [0.05, 0.3])
def test_few_requests_take_longer_than_the_late_latency(spread: float) -> None:
    times, rng, num_late = ServiceTimes(), random.Random(2), 0
    for number in range(3000):
        known, size = times.times("m"), rng.randrange(1, 9)
        late_s = known.late_s(5, size) if known else 9.0
        took_s = (1 + 0.3 * size) * rng.lognormvariate(0, spread)
        num_late += number >= 1000 and took_s > late_s
        times.note_served("m", float(number), 5, took_s / size, took_s)
    assert num_late / 2000 <= 0.08


@seeds(50)
def test_what_a_request_adds_to_a_batch_is_told_from_batches_of_several_sizes(seed: int) -> None:
    times, rng = ServiceTimes(), random.Random(seed)
    alone_s, slowdown = rng.uniform(0.05, 2.0), rng.uniform(0.1, 0.9)
    for number in range(200):
        size, work = rng.randrange(1, 9), rng.choice([4.0, 12.0])
        took_s = alone_s * work * (1 + slowdown * (size - 1)) * rng.lognormvariate(0, 0.03)
        times.note_served("m", float(number), work, took_s / size, took_s)
    known = times.times("m")
    assert known is not None
    assert known.joining_s(4.0) == pytest.approx(4.0 * slowdown * alone_s, rel=0.2)


@pytest.mark.parametrize("seed", range(4))
def test_the_latency_in_any_company_is_told_from_that_in_others(seed: int) -> None:
    """A request waits for its text, whatever its batch-mates; each of its steps is the longer, the more share it."""
    times, rng = ServiceTimes(), random.Random(seed)
    before_s, alone_s, slowdown = rng.uniform(0.0, 1.0), rng.uniform(0.05, 2.0), rng.uniform(0.1, 0.9)

    def latency_s(work: float, size: float) -> float:
        return before_s + alone_s * work * (1 + slowdown * (size - 1))

    for number in range(300):
        size, work = rng.uniform(1, 9), rng.choice([4.0, 12.0])
        took_s = latency_s(work, size) * rng.lognormvariate(0, 0.03)
        times.note_served("m", float(number), work, took_s / size, took_s)
    known = times.times("m")
    assert known is not None
    for work in (4.0, 12.0):
        for size in (2.0, 5.0, 16.0):
            assert known.expected_s(work, size) == pytest.approx(latency_s(work, size), rel=0.2)
    assert known.expected_s(8.0, known.usual_sharing) == pytest.approx(latency_s(8.0, 5.0), rel=0.5)
    assert known.usual_s == pytest.approx(latency_s(8.0, 5.0), rel=0.5)


@seeds(50)
def test_small_requests_do_not_spoil_what_company_does_to_large_ones(seed: int) -> None:
    """Nearly all of one unit of work is the fixed part, which mates slow as well."""
    times, rng = ServiceTimes(), random.Random(seed)
    fixed_s, each_s, slowdown = rng.uniform(0.1, 0.4), rng.uniform(0.001, 0.003), rng.uniform(0.3, 0.9)
    for number in range(300):
        size, work = rng.choice([1.0, 2.0, 4.0, 8.0]), math.exp(rng.uniform(0.0, math.log(1000.0)))
        took_s = (fixed_s + each_s * work) * (1 + slowdown * (size - 1)) * rng.lognormvariate(0, 0.03)
        times.note_served("m", float(number), work, took_s / size, took_s)
    known = times.times("m")
    assert known is not None
    true_s = (fixed_s + each_s * 800) * (1 + slowdown * 7)
    assert known.expected_s(800.0, 8.0) == pytest.approx(true_s, rel=0.75)


@seeds(50)
def test_company_that_is_seen_all_the_time_does_not_drift_away_from_other_company(seed: int) -> None:
    times, rng = ServiceTimes(), random.Random(seed)
    factors: list[float] = []
    for number in range(4000):
        size = rng.choice([1.0, 4.0, 16.0]) if number < 400 else 16.0
        took_s = (1 + 0.5 * size) * rng.uniform(0.4, 1.6)
        times.note_served("m", float(number), 1.0, took_s / size, took_s)
        if number in (400, 3999):
            known = times.times("m")
            assert known is not None
            factors.append(known.slowdown.factors()[BATCH_SIZES.index(16)])
    assert factors[1] == pytest.approx(factors[0], rel=0.5)


@pytest.mark.parametrize("num_began", [1, 8])
def test_after_an_idle_time_the_quickest_of_many_replaces_not_what_was_known(num_began: int) -> None:
    times = ServiceTimes()
    for number in range(50):
        times.note_served("m", number / 10, 1.0, 0.25, 1.0)
    times.note_served("m", 100.0, 1.0, 0.01, 0.04, num_began - 1)
    known = times.times("m")
    assert known is not None
    expected_s = 0.04 if num_began == 1 else 1 + (0.04 - 1) * 0.15
    assert known.expected_s(1.0, known.usual_sharing) == pytest.approx(expected_s, rel=0.1)


def test_before_a_second_size_of_batch_is_seen_it_counts_as_no_gain() -> None:
    times = ServiceTimes()
    for number in range(5):
        times.note_served("m", float(number), 2.0, 0.5, 0.5)
    known = times.times("m")
    assert known is not None
    assert known.joining_s(2.0) == pytest.approx(0.5)
