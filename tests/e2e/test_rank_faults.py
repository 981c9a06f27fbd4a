"""A worker of several ranks whose processes are killed or stand still, under load."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e.rank_kills import LAYOUTS, Load, config_of, kill_ranks, running, texts, wait_whole
from kit.seeding import seeded_random
from kit.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(600)]

KILLING_S = 30.0
BOUND_S = 4.0
NOTICED_S = 10.0  # Serve looks this often whether a replica lives


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_lost_when_ranks_are_killed(layout: str, tmp_path: Path, record_property: Any) -> None:
    kills = kill_ranks(tmp_path, layout, 50, KILLING_S, seeded_random())
    record_property("kills", str(kills))
    print(f"{layout}: {kills}")
    assert (kills.lost, kills.wrong) == ([], [])
    assert {rank for rank, _ in kills.back_s} == {0, 1}
    assert max(took for _, took in kills.back_s) < NOTICED_S + kills.start_s


def test_a_follower_that_stands_still_is_given_up_within_the_bound(tmp_path: Path) -> None:
    questions = texts()
    with running(config_of(tmp_path, {"tensor": 2, "timeout_s": BOUND_S}, "adder")) as client:
        processes = wait_whole(client)
        expected = [question.ask(client) for question in questions]
        with Load(str(client.base_url), questions, expected) as load:
            load.more()
            os.kill(processes[1], signal.SIGSTOP)
            stopped_s = time.monotonic()
            wait_until(lambda: not _lives(processes[0]), "the end of rank 0", 60)
            ended_s = time.monotonic() - stopped_s
            wait_whole(client, processes)
            load.more()
        assert (load.lost, load.wrong) == ([], [])
        assert ended_s < 4 * BOUND_S  # the collective's own bound, the notice of the others, a busy machine
        wait_until(lambda: not _lives(processes[1]), "the end of the rank that stands still", 60)


def _lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
