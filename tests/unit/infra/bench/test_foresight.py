"""One who knows the law of the requests: what he does if they come as drawn, and if nobody comes any more."""

from __future__ import annotations

import itertools
import random

import pytest
from kit.drawing import seeds

from infra.bench.foresight import expecting_latencies, played_s
from infra.bench.optimum import KNOWN_LAW, ONE_OVER_TIME, draw_case, measure_case

SWITCH_S = [[0.0, 10.0], [10.0, 0.0], [10.0, 10.0]]  # the last row is from nothing
SERVICE_S = [1.0, 1.0]


def test_a_worker_waits_for_what_comes_at_once_and_switches_if_nothing_will() -> None:
    coming = [(0.0, 0), (11.0, 1), (11.2, 0), (11.3, 0)]
    knowing = expecting_latencies(coming, SWITCH_S, SERVICE_S, lambda now_s, num: [coming[num:]])
    assert [model for model, _ in knowing] == [0, 0, 0, 1]
    doubting = expecting_latencies(coming, SWITCH_S, SERVICE_S, lambda now_s, num: [[(1e6, 0)] * (4 - num)])
    assert [model for model, _ in doubting] == [0, 1, 0, 0]
    assert sum(latency_s for _, latency_s in doubting) == pytest.approx(11.0 + 11.0 + 21.8 + 22.7)


@seeds(20)
def test_a_play_lasts_as_long_as_the_same_choices_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    service_s, waiting = [rng.uniform(0.1, 5.0) for _ in range(2)], [rng.randint(1, 4), rng.randint(1, 4)]

    def together_s(order: tuple[int, ...]) -> float:
        at_s, attached, total_s = 0.0, 0, 0.0
        for model in order:
            at_s += SWITCH_S[attached][model] + service_s[model]
            attached, total_s = model, total_s + at_s
        return total_s

    orders = set(itertools.permutations([0] * waiting[0] + [1] * waiting[1]))
    best_s = min(map(together_s, orders))
    played = [played_s(first, (), 0.0, 0, waiting, SWITCH_S, service_s) for first in range(2)]
    assert all(any(one == pytest.approx(together_s(order)) for order in orders) for one in played)
    assert min(played) == pytest.approx(best_s)


def test_a_case_over_time_stands_beside_who_knows_its_law() -> None:
    for seed in range(1, 4):
        assert draw_case(seed)[0] in ONE_OVER_TIME
        one, again = measure_case(seed), measure_case(seed)
        assert one == again
        assert one.ratio(KNOWN_LAW) >= 0.999
        assert one.in_time[KNOWN_LAW] <= one.in_time["optimum"] + 1e-9
