"""Threads that processes of one node lease: never more than there are, a dead process's are free, waits have an end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configs.cluster import WorkerConfig
from deployments.engines.costs.node_threads import NodeThreads
from deployments.modules.loading import node_threads

HOLD = """
import sys
from pathlib import Path
from deployments.engines.costs.node_threads import NodeThreads
with NodeThreads(Path(sys.argv[1]), 3).leased(int(sys.argv[2])) as held:
    print(held, flush=True)
    sys.stdin.read()
"""
WORK = """
import random, sys, time
from pathlib import Path
from deployments.engines.costs.node_threads import NodeThreads
threads = NodeThreads(Path(sys.argv[1]), 3)
for _ in range(25):
    with threads.leased(random.randint(1, 3)) as held:
        begin = time.monotonic()
        time.sleep(random.uniform(0, 0.004))
        print(begin, time.monotonic(), held)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    begun: list[subprocess.Popen[str]] = []

    def begin(code: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(tmp_path / "threads"), *map(str, arguments)]
        begun.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def test_what_another_process_holds_is_free_when_it_lets_go_or_dies(tmp_path: Path, start: Start) -> None:
    mine = NodeThreads(tmp_path / "threads", 3, max_wait_s=0.05)
    other = start(HOLD, 2)
    assert other.stdout
    assert other.stdout.readline() == "2\n"
    begin_s = time.monotonic()
    with mine.leased(3) as held:
        assert held == 1, "it computes all the same when the wait is over"
    assert 0.05 <= time.monotonic() - begin_s < 5.0
    with mine.leased(1) as held:
        assert held == 1
    other.kill()
    other.wait()
    for wanted, got in ((3, 3), (99, 3), (1, 1)):
        with mine.leased(wanted) as held:
            assert held == got


def test_an_error_in_a_step_gives_its_threads_back(tmp_path: Path, start: Start) -> None:
    mine = NodeThreads(tmp_path / "threads", 3)
    with pytest.raises(ZeroDivisionError), mine.leased(3):
        _ = 1 / 0
    other = start(HOLD, 3)
    assert other.stdout
    assert other.stdout.readline() == "3\n"


def test_processes_never_hold_more_threads_than_there_are_and_all_get_their_turn(start: Start) -> None:
    workers = [start(WORK) for _ in range(4)]
    held = []
    for worker in workers:
        lines = worker.communicate(timeout=60)[0].splitlines()
        assert len(lines) == 25
        held += [tuple(map(float, line.split())) for line in lines]
    for begin_s, _, _ in held:
        assert sum(count for start_s, end_s, count in held if start_s <= begin_s < end_s) <= 3


def test_a_replica_leases_where_its_steps_have_more_threads_than_ray_reserves() -> None:
    for settings in ({}, {"num_cpus": 4}, {"num_cpus": 4, "prefill_threads": 4}, {"num_cpus": 2.5, "num_threads": 3}):
        assert node_threads(WorkerConfig.model_validate(settings)) is None
    for settings in ({"num_threads": 2}, {"num_cpus": 4, "prefill_threads": 5}, {"decode_threads": 2}):
        assert node_threads(WorkerConfig.model_validate(settings)) is not None
