"""The simulated parts of the bench, on clusters small enough for a moment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from infra.bench import schedule as bench
from infra.simulator.running import simulate


def test_parts_are_printed_one_by_one_and_are_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"tick": {"tick_ms": 1.5}, "oracle": [{"rate": 0.1, "static": None}]}
    seen: list[str] = []

    def parts() -> Iterator[tuple[str, Any]]:
        for name, part in found.items():
            yield name, part
            seen.append(capsys.readouterr().out)

    bench.print_schedule_figures(parts(), as_json=True)
    assert [name in text for name, text in zip(found, seen, strict=True)] == [True, True]
    assert json.loads("".join(seen) + capsys.readouterr().out) == found
    bench.print_schedule_figures(found.items(), as_json=False)
    told = capsys.readouterr().out
    assert "1.5" in told
    assert "never" in told


def test_rows_are_means_over_the_seeds() -> None:
    with ThreadPoolExecutor(1) as pool:
        rows = bench._measure_zipf(pool, 3, 2, (0.5, 1.0), 30.0, [1, 2], 1.0)
    assert [(row["rate"], row["policy"]) for row in rows] == [
        (rate, each) for rate in (0.5, 1.0) for each in bench.POLICIES
    ]
    runs = [simulate(bench._scenario_of(3, 2, 1.0, 30.0, seed, 1.0), "static")[0] for seed in (1, 2)]
    (row,) = [row for row in rows if (row["rate"], row["policy"]) == (1.0, "static")]
    assert row["mean_s"] == pytest.approx((runs[0].mean_s + runs[1].mean_s) / 2)
    assert row["switches"] == (runs[0].switches + runs[1].switches) / 2


def test_dearer_switches_need_no_fewer_workers() -> None:
    with ThreadPoolExecutor(1) as pool:
        rows = bench._measure_sizing(pool, (2,), (1.0,), 20.0, 1)
    assert [row["switch"] for row in rows] == list(bench.SWITCHES)
    assert rows[0]["latency-first"] <= rows[-1]["latency-first"]


def test_nobody_is_faster_than_who_knows_the_future() -> None:
    with ThreadPoolExecutor(1) as pool:
        rows = bench._measure_oracle(pool, 1)
    for row in rows:
        assert all(row["oracle_that_switches_ahead"] <= row[policy] + 1e-9 for policy in bench.POLICIES)
