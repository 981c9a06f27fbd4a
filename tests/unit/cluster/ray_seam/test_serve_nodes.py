"""Serve's looks at the nodes of Ray: as many as its period has room for, and at once again after one that failed."""

from __future__ import annotations

import pytest
from kit.clock import Clock
from kit.seeding import seeded_rng

from cluster.ray_seam.haproxy import PERIOD_S, seldom


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
