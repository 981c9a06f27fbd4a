"""Serve's looks at the nodes of Ray: as many as its period has room for, and at once again after one that failed."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from kit.clock import Clock
from kit.seeding import seeded_rng

from cluster.ray_seam import shims
from cluster.ray_seam.haproxy import PERIOD_S, look_up_nodes_seldom, prune_logs, seldom


def test_nodes_are_looked_up_once_in_a_period() -> None:
    clock, found_s = Clock(), []
    update = seldom(lambda cache: found_s.append(clock()), clock)
    rng, steps_s = seeded_rng(), []
    for _ in range(500):
        clock.now_s += float(rng.uniform(0.0, 0.2))
        steps_s.append(clock())
        update(None)
    expected: list[float] = []
    for step_s in steps_s:
        if not expected or step_s >= expected[-1] + PERIOD_S:
            expected.append(step_s)
    assert found_s == expected


def test_a_look_that_failed_is_tried_again_at_the_next_step() -> None:
    looks: list[bool] = [False, True]

    def look(_: object) -> None:
        if not looks.pop(0):
            raise RuntimeError("Ray does not answer")

    update = seldom(look, Clock())
    with pytest.raises(RuntimeError):
        update(None)
    update(None)
    update(None)
    assert looks == []


def test_a_ray_with_another_name_for_its_nodes_is_asked_as_often_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ray.serve._private.cluster_node_info_cache import ClusterNodeInfoCache

    looks: list[object] = []
    monkeypatch.setattr(ClusterNodeInfoCache, "update", looks.append)
    clock, cache = Clock(), object()
    monkeypatch.setattr(shims, "problems", lambda _: ["no method update"])
    with caplog.at_level(logging.WARNING):
        look_up_nodes_seldom(clock)
    assert "no method update" in caplog.text
    assert ClusterNodeInfoCache.update == looks.append
    monkeypatch.setattr(shims, "problems", lambda _: [])
    look_up_nodes_seldom(clock)
    for _ in range(3):
        ClusterNodeInfoCache.update(cache)
    assert looks == [cache]


def test_of_the_logs_of_dead_processes_the_newest_stay(tmp_path: Path) -> None:
    names = [f"admin.1.{spawn}.{stream}.log" for spawn in range(20) for stream in ("stdout", "stderr")]
    for age, name in enumerate(reversed(names)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    (tmp_path / "admin").touch()
    (tmp_path / "haproxy.cfg").touch()
    prune_logs(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {*names[-8:], "admin", "haproxy.cfg"}
    prune_logs(tmp_path)
    assert len([*tmp_path.iterdir()]) == 10
