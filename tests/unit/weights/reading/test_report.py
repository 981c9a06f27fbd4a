"""Figures of a load, from a clock that the test turns."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from kit.clock import Clock

from weights.memory.host_pool import PoolStats
from weights.reading.report import LoadReport, StageClock, StageFigures
from weights.reading.strategy import Medium, ReadStrategy

MEDIUM = Medium("local", "ext4", "/", "/dev/vda")


def report(stages: dict, **options: object) -> LoadReport:
    settings: dict = {"what": "m", "nbytes": 4 * 10**9, "wall_s": 2.0, "medium": MEDIUM, "verified": True}
    return LoadReport(stages=stages, strategy=ReadStrategy(True, 4, 2**20), **settings | options)


def test_busy_seconds_are_summed_over_threads_and_elapsed_ones_are_not() -> None:
    clock = Clock()
    stages = StageClock(clock)
    first, second = stages.measure("read", 100), stages.measure("read", 200)
    first.__enter__()
    clock.now_s = 1.0
    second.__enter__()
    clock.now_s = 3.0
    first.__exit__(None, None, None)
    clock.now_s = 4.0
    second.__exit__(None, None, None)
    clock.now_s = 10.0
    with stages.measure("read", 300):
        clock.now_s = 12.0
    assert stages.figures() == {"read": StageFigures(600, busy_s=8.0, elapsed_s=6.0)}
    assert stages.figures()["read"].gbps == pytest.approx(100 / 1e9)


def test_a_stage_that_fails_took_time_and_moved_nothing() -> None:
    clock = Clock()
    stages = StageClock(clock)

    def fail() -> None:
        with stages.measure("put", 100):
            clock.now_s = 2.0
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        fail()
    assert stages.figures() == {"put": StageFigures(0, 2.0, 2.0)}


def test_many_threads_lose_nothing() -> None:
    stages = StageClock()
    start = threading.Barrier(8)

    def work(_: int) -> None:
        start.wait(10)
        for _ in range(500):
            with stages.measure("read"):
                stages.add_bytes("read", 1)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    figures = stages.figures()["read"]
    assert figures.nbytes == 4000
    assert 0 < figures.elapsed_s <= figures.busy_s


def test_rates_are_of_the_wall_clock_and_of_the_measured_peak() -> None:
    figures = report({}, peak_gbps=2.5)
    assert (figures.gbps, figures.share_of_peak) == (2.0, pytest.approx(0.8))
    assert report({}).share_of_peak is None
    assert report({}, wall_s=0.0).gbps == 0.0


def test_the_limiting_stage_is_where_a_thread_spends_most_time() -> None:
    # Four threads: 7.2 s of reading are 1.8 s of each. What comes after the stream has one thread only.
    stages = {"read": StageFigures(1, 7.2, 2.0), "verify": StageFigures(1, 0.8, 0.5), "put": StageFigures(1, 0.4, 0.4)}
    assert report(stages).limiting_stage == "read"
    assert report(stages).with_stage("attach", 0, 1.0).limiting_stage == "read"
    assert report(stages).with_stage("upload", 10, 1.9).limiting_stage == "upload"
    assert report(stages | {"put": StageFigures(1, 7.9, 2.0)}).limiting_stage == "put"
    assert report({}).limiting_stage is None


def test_a_stage_that_comes_later_makes_the_load_longer() -> None:
    before = report({"read": StageFigures(1, 1.0, 1.0)})
    after = before.with_stage("upload", 50, 2.0)
    assert (after.wall_s, after.stages["upload"]) == (4.0, StageFigures(50, 2.0, 2.0))
    assert (before.wall_s, list(before.stages)) == (2.0, ["read"])


def test_the_record_is_json_and_says_everything() -> None:
    pool = PoolStats(max_bytes=100, held_bytes=50, used_bytes=0, hits=3, misses=1, waits=2)
    full = report({"read": StageFigures(4 * 10**9, 7.2, 2.0)}, peak_gbps=2.5, pool=pool, advice="mount it otherwise")
    record = json.loads(json.dumps(full.as_record()))
    assert record == {
        "what": "m",
        "nbytes": 4 * 10**9,
        "wall_s": 2.0,
        "gbps": 2.0,
        "peak_gbps": 2.5,
        "share_of_peak": 0.8,
        "limiting_stage": "read",
        "verified": True,
        "medium": {"kind": "local", "fs_type": "ext4", "device": "/dev/vda"},
        "strategy": "direct:4:1024KiB",
        "advice": "mount it otherwise",
        "sources": {},
        "stages": {"read": {"nbytes": 4 * 10**9, "busy_s": 7.2, "elapsed_s": 2.0, "gbps": 2.0}},
        "pool": {"max_bytes": 100, "held_bytes": 50, "hit_rate": 0.75, "waits": 2},
    }
    assert json.loads(json.dumps(report({}).as_record()))["pool"] is None
