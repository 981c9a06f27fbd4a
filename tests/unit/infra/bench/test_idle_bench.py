"""The bench of an idle cluster: what it counts of processes whose use is known."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kit.seeding import seeded_rng

from infra.bench.idle import Usage, idle_figures, print_idle_figures, short_name, usage_by_name

SMAPS = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="PSS is read from Linux's /proc")
OWN_BYTES, SHARED_BYTES, CPU_S = 48 * 2**20, 80 * 2**20, 0.5
TICK_S = 0.01  # by which each of the four times of a process may be short
# A process that has such memory, a child that has used so much CPU time and has ended, and waits.
PROCESS = f"""
import mmap, subprocess, sys, time
own = bytearray({OWN_BYTES})
shared = mmap.mmap(-1, {SHARED_BYTES})
for at in range(0, {SHARED_BYTES}, 4096): shared[at] = 1
for at in range(0, {OWN_BYTES}, 4096): own[at] = 1
print("before", flush=True); input()
subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < {CPU_S}: pass"])
print("after", flush=True); input()
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PROCESS], text=True, **pipes) as running:
        yield running
        running.kill()


def until(process: subprocess.Popen[str], line: str) -> dict[str, Usage]:
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == f"{line}\n"
    found = usage_by_name([psutil.Process(process.pid)])
    process.stdin.write("\n")
    process.stdin.flush()
    return found


@SMAPS
def test_cpu_time_counts_with_that_of_ended_children_and_shared_memory_apart(process: subprocess.Popen[str]) -> None:
    before, after = until(process, "before"), until(process, "after")
    row, total = idle_figures(before, after, wall_s=10.0)["rows"]
    assert CPU_S - 4 * TICK_S <= 10 * row["share"] < CPU_S + 0.5
    assert SHARED_BYTES <= row["shared_bytes"] < SHARED_BYTES + 2**20
    assert OWN_BYTES <= row["own_bytes"] < OWN_BYTES + SHARED_BYTES
    assert (row["processes"], row["threads"]) == (1, 1)
    assert {**total, "name": row["name"]} == row


def test_the_row_of_all_is_the_sum_and_comes_last(capsys: pytest.CaptureFixture[str]) -> None:
    rng = seeded_rng()
    before = {name: Usage(1, 2, cpu_s=float(rng.uniform(0, 9))) for name in "abc"}
    after = {name: one + Usage(1, 3, float(rng.uniform(1, 2)), 2**20, 2**21) for name, one in before.items()}
    figures = idle_figures(before, after, wall_s=4.0)
    *rows, total = figures["rows"]
    assert [row["name"] for row in rows] == sorted("abc", key=lambda name: before[name].cpu_s - after[name].cpu_s)
    spent_s = sum(after[name].cpu_s - before[name].cpu_s for name in "abc")
    assert total["share"] == pytest.approx(spent_s / 4)
    assert (total["processes"], total["own_bytes"], total["shared_bytes"]) == (6, 3 * 2**20, 3 * 2**21)
    less = idle_figures(before, {name: one + Usage(cpu_s=0.4) for name, one in before.items()}, wall_s=4.0)
    print_idle_figures({"ours": figures, "floor": less}, as_json=False)
    shown = capsys.readouterr().out
    assert "missed" in shown
    assert f"{100 * (spent_s - 3 * 0.4) / 4:.1f} % of a core and 3 MiB" in shown


def test_time_of_a_process_that_ended_meanwhile_counts_once() -> None:
    """Its whole time has gone over to the process that has ended it."""
    before = {"parent": Usage(1, 1, cpu_s=3.0), "child": Usage(1, 1, cpu_s=5.0)}
    after = {"parent": Usage(1, 1, cpu_s=3.0 + 5.5)}
    assert idle_figures(before, after, wall_s=1.0)["rows"][-1]["share"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["ray::NodeKeeper"], "NodeKeeper"),
        (["ray::ServeReplica:studio:worker.handle_request"], "ServeReplica:studio:worker"),
        (["/usr/lib/ray/raylet", "--store=/x.py/y"], "raylet"),
        (["/usr/lib/ray/raylet", "--worker_command=python", "/lib/ray/setup_worker.py"], "raylet"),
        (["/usr/bin/python", "-c", "import cluster.ray_seam.templates.template as t; t.main()"], "template"),
        (["/usr/bin/python3.11", "-u", "/lib/ray/_private/log_monitor.py", "--logs"], "log_monitor.py"),
        (["/usr/bin/python", "-m", "infra.bench", "idle"], "infra.bench"),
        ([], ""),
    ],
)
def test_a_process_is_named_by_what_it_is(command: list[str], name: str) -> None:
    assert short_name(command) == name
