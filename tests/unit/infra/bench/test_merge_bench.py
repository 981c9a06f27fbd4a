"""The traffic that batching is measured on, how it is played, and how outcomes become figures."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest

from infra.bench import merge_replica
from infra.bench.merge import LIMIT, _compared, _in_all, print_merge_figures
from infra.bench.merge_replica import Outcome, Pattern, Service, grid, scenario


def test_the_grid_has_50_different_patterns_of_the_load_that_they_name() -> None:
    patterns = grid(0.1, 400, 20, seed=3)
    assert len({pattern.name for pattern in patterns}) == len(patterns) == 50
    for pattern in patterns:
        assert len(pattern.arrivals_s) == 420
        gaps = [later - earlier for earlier, later in pairwise(pattern.arrivals_s)]
        assert min(gaps) >= 0
        load = float(pattern.name.split("load ")[1].split(",")[0])
        assert 0.1 * len(gaps) / sum(gaps) == pytest.approx(load, rel=0.25)
        capacity = pattern.max_batch_size * 0.1 / pattern.service.duration_s(pattern.max_batch_size)
        assert load < capacity  # none is overload, where every figure grows with the length
    assert grid(0.1, 400, 20, seed=3) == patterns


def test_the_scenario_is_the_one_that_is_spoken_of() -> None:
    pattern = scenario()
    assert (len(pattern.arrivals_s), pattern.arrivals_s[10], pattern.max_batch_size) == (24, pytest.approx(1.0), 8)
    assert [pattern.service.duration_s(size) for size in (1, 8)] == pytest.approx([0.5, 0.57])


async def test_traffic_is_played_and_warm_requests_are_left_out() -> None:
    pattern = Pattern("tiny", Service("tiny", 0.0, 0.0), 8, (0.0, 0.001, 0.1, 0.101), num_warm=2)
    sizes: Counter[int] = Counter({1: 5})
    asked: list[int] = []

    async def submit(index: int) -> None:
        asked.append(index)
        sizes[1] += 1

    outcome = await merge_replica._serve(pattern, submit, sizes)
    assert asked == [0, 1, 0, 1]
    assert outcome.sizes == {1: 2}
    assert 0.001 <= outcome.makespan_s < 0.09  # from the first measured arrival on


def figures() -> dict[str, object]:
    outcomes = [
        Outcome(3.0, 1.0, {8: 3}),
        Outcome(12.0, 5.0, {1: 24}),
        Outcome(2.0, 2.0, {6: 4}),
        Outcome(2.5, 0.5, {}),
    ]
    return _compared("p", [0.01, 0.1, 0.2], outcomes)


def test_each_figure_is_beside_its_own_best() -> None:
    line = figures()
    assert (line["makespan_ratio"], line["latency_ratio"], line["best_wait_s"]) == (1.5, 2.0, 0.2)
    found = _in_all([line, line | {"pattern": "q", "makespan_ratio": 1.0, "latency_ratio": LIMIT}])
    assert found["makespan_ratio"] == {"worst": 1.5, "median": 1.25, "best": 1.0, "beyond": {"p": 1.5}}
    assert found["latency_ratio"]["beyond"] == {"p": 2.0}


def test_figures_are_one_json_object_or_tables(capsys: pytest.CaptureFixture[str]) -> None:
    line = figures()
    shown = {"makespan_s": 3.0, "mean_latency_s": 1.0, "sizes": {"8": 3}}
    every = {
        "scenario": line
        | {
            "ours": shown,
            "default": shown,
            "tuned": shown,
            "default_makespan_ratio": 4.0,
            "default_latency_ratio": 6.0,
        },
        "grid": _in_all([line]),
        "overhead": {
            "num_callers": 64,
            "serve_us": {"empty": {"p50": 900.0, "low": 800.0, "high": 1000.0}},
            "inside_us": {"batcher": 40.0},
        },
    }
    print_merge_figures(every, as_json=True)
    assert json.loads(capsys.readouterr().out) == every
    print_merge_figures(every, as_json=False)
    assert "4.00 (target 3.5)" in capsys.readouterr().out
