"""Counters against sums that are made beside them."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest

from deployments.ingress.kserve.repository import Duration, Statistics, statistics_of
from deployments.records.errors import UnknownModel

NOW_S = 1_700_000_000.25


def test_durations_are_those_of_the_phases() -> None:
    statistics = Statistics(lambda: NOW_S)
    times = {"queue": 1.0, "switch": 20.0, "encode": 3.0, "denoise": 100.0, "decode": 7.0, "total": 140.0}
    statistics.succeeded("flux", timings_ms=times, batch_size=4, cache_hits=3, cache_misses=1)
    found = statistics.of_model("flux")
    assert (found.inference_count, found.execution_count, found.last_inference) == (4, 1, 1_700_000_000_250)
    assert asdict(found.inference_stats) == {
        "success": {"count": 1, "ns": 140_000_000},
        "fail": {"count": 0, "ns": 0},
        "queue": {"count": 1, "ns": 1_000_000},
        "compute_input": {"count": 1, "ns": 20_000_000},
        "compute_infer": {"count": 1, "ns": 110_000_000},
        "compute_output": {"count": 1, "ns": 9_000_000},
        "cache_hit": {"count": 3, "ns": 0},
        "cache_miss": {"count": 1, "ns": 0},
    }
    (batch,) = found.batch_stats
    assert (batch.batch_size, batch.compute_infer) == (4, Duration(1, 110_000_000))


def test_phases_side_by_side_leave_nothing_for_the_output() -> None:
    statistics = Statistics(lambda: NOW_S)
    statistics.succeeded("flux", timings_ms={"switch": 20.0, "encode": 20.0, "total": 25.0})
    stats = statistics.of_model("flux").inference_stats
    assert stats.success == Duration(1, 25_000_000)
    assert stats.compute_output == Duration(1, 0)


def test_without_a_total_the_phases_are_the_whole() -> None:
    statistics = Statistics(lambda: NOW_S)
    statistics.succeeded("m", timings_ms={"queue": 1.5, "generate": 2.5})
    assert statistics.of_model("m").inference_stats.success == Duration(1, 4_000_000)


def test_what_failed_is_no_inference() -> None:
    statistics = Statistics(lambda: NOW_S)
    statistics.failed("m", 2.0)
    found = statistics.of_model("m")
    assert found.inference_stats.fail == Duration(1, 2_000_000)
    assert (found.inference_count, found.execution_count, found.batch_stats) == (0, 0, [])


def test_sums_over_many_requests_in_constant_memory() -> None:
    statistics = Statistics(lambda: NOW_S)
    sizes = [random.randint(1, 5_000) for _ in range(500)] + list(range(1, 40)) + [64, 65, 4096]
    for size in sizes:
        statistics.succeeded("m", timings_ms={"encode": 0.5, "total": 1.0}, batch_size=size)
    found = statistics.of_model("m")
    assert found.inference_count == sum(sizes)
    assert found.execution_count == len(sizes)
    assert found.inference_stats.success == Duration(len(sizes), len(sizes) * 1_000_000)
    seen = [batch.batch_size for batch in found.batch_stats]
    assert seen == sorted(set(seen))
    assert set(range(1, 33)) <= set(seen) <= {*range(1, 33), 64, 128, 256, 512, 1024, 2048, 4096, 8192}
    for batch in found.batch_stats:
        smaller = batch.batch_size // 2 if batch.batch_size > 32 else batch.batch_size - 1
        assert batch.compute_infer.count == sum(smaller < size <= batch.batch_size for size in sizes)


def test_the_models_used_longest_ago_are_forgotten() -> None:
    statistics = Statistics(lambda: NOW_S, max_models=2)
    for model in ("a", "b", "a", "c"):
        statistics.succeeded(model, timings_ms={"total": 1.0})
    assert [statistics.of_model(model).execution_count for model in "abc"] == [2, 0, 1]


class Names:
    async def names(self, model: str = "", version: str = "") -> list[str]:
        if model not in ("", "a", "b"):
            raise UnknownModel(f"no model {model!r}")
        return [model] if model else ["a", "b"]


async def test_every_model_is_reported_used_or_not() -> None:
    statistics = Statistics(lambda: NOW_S)
    statistics.succeeded("b", timings_ms={"total": 1.0})
    counts = {found.name: found.execution_count for found in await statistics_of(Names(), statistics)}
    assert counts == {"a": 0, "b": 1}
    assert [found.name for found in await statistics_of(Names(), statistics, "b", "1")] == ["b"]
    with pytest.raises(UnknownModel):
        await statistics_of(Names(), statistics, "c")
