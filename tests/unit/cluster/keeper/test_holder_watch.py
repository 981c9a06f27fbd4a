"""A death is told once; a holder that is only silent, or busy, lives."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psutil
import pytest

from cluster.keeper.holder_watch import HolderWatch
from cluster.process.processes import ProcessMark

NEVER_S = 3600.0


@dataclass
class Watched:
    """A watch that checks when it is told to, at a time that is set."""

    now_s: float = 0.0
    dead: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = HolderWatch(self, NEVER_S, silence_s=60, clock=lambda: self.now_s)

    def end(self, holder: str) -> None:
        self.dead.append(holder)

    def found_dead(self, now_s: float) -> list[str]:
        self.now_s = now_s
        self.watch.check()
        return self.dead


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.watch.close()


@pytest.fixture
def start() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def spawn() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return started[-1]

    yield spawn
    for process in started:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[bytes]) -> ProcessMark:
    return ProcessMark(process.pid, psutil.Process(process.pid).create_time())


def test_who_was_killed_is_told_once_and_who_is_only_silent_is_not(
    watched: Watched, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    processes = {holder: start() for holder in ("a", "b", "stopped")}
    for holder, process in processes.items():
        watched.watch.on_heartbeat(holder, told(process))
    psutil.Process(processes["stopped"].pid).suspend()
    assert watched.found_dead(1000.0) == []
    processes["b"].kill()
    psutil.wait_procs([psutil.Process(processes["b"].pid)], timeout=10)  # reaps it
    assert watched.found_dead(1001.0) == ["b"]
    assert watched.found_dead(1002.0) == ["b"]


def test_the_dead_are_dead_before_their_parent_looks(
    watched: Watched, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    process = start()
    watched.watch.on_heartbeat("a", told(process))
    process.kill()
    seen = psutil.Process(process.pid)
    while seen.status() != psutil.STATUS_ZOMBIE:
        pass
    assert watched.found_dead(0.0) == ["a"]


def test_words_of_the_dead_that_come_late_bring_nobody_back(
    watched: Watched, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """Its calls were under way when it was killed: whatever they took would be its own for a minute."""
    process = start()
    mark = told(process)
    assert watched.watch.on_heartbeat("a", mark)
    process.kill()
    process.wait()
    assert watched.found_dead(1.0) == ["a"]
    assert not watched.watch.on_heartbeat("a", mark)
    assert not watched.watch.on_heartbeat("a")
    assert not watched.watch.lives("a")
    assert watched.watch.num_holders == 0
    assert watched.watch.on_heartbeat("a", ProcessMark.this())  # of that name, and it lives
    assert watched.watch.lives("a")


def test_whose_process_cannot_be_seen_is_dead_after_a_time_of_silence(watched: Watched) -> None:
    mine = ProcessMark.this()
    elsewhere = mine._replace(started_s=mine.started_s - 100)  # the id means another process here
    watched.watch.on_heartbeat("gone", elsewhere)
    watched.watch.on_heartbeat("elsewhere", elsewhere)
    watched.watch.on_heartbeat("unknown")
    assert watched.found_dead(40.0) == []
    watched.watch.on_heartbeat("elsewhere", elsewhere)
    assert sorted(watched.found_dead(61.0)) == ["gone", "unknown"]
    assert sorted(watched.found_dead(101.0)) == ["elsewhere", "gone", "unknown"]


def test_time_in_which_the_watch_stood_still_is_nobodys_silence() -> None:
    """Its process was stopped, and the heartbeats that came meanwhile were not heard."""
    watched = Watched()
    watched.watch = HolderWatch(watched, interval_s=1.0, silence_s=60, clock=lambda: watched.now_s)
    watched.watch.on_heartbeat("elsewhere")
    for seconds, expected in ((30.0, []), (1000.0, []), (1.0, []), *((1.0, []),) * 20, *((5.0, None),) * 12):
        dead = watched.found_dead(watched.now_s + seconds)
        assert expected is None or dead == expected
    assert watched.dead == ["elsewhere"]


def test_a_clock_that_was_set_a_little_makes_nobody_invisible(watched: Watched) -> None:
    mine = ProcessMark.this()
    watched.watch.on_heartbeat("a", mine._replace(started_s=mine.started_s + 1.0))
    assert watched.found_dead(1000.0) == []


def test_a_process_that_is_told_later_counts_from_then(watched: Watched) -> None:
    watched.watch.on_heartbeat("a")
    watched.watch.on_heartbeat("a", ProcessMark.this())
    watched.watch.on_heartbeat("a")
    assert watched.found_dead(1000.0) == []


def test_the_watch_runs_by_itself_and_survives_what_goes_wrong(start: Callable[[], subprocess.Popen[bytes]]) -> None:
    told_dead, heard = [], threading.Event()

    class Leases:
        def end(self, holder: str) -> None:
            told_dead.append(holder)
            if len(told_dead) == 1:
                raise RuntimeError("cannot end its leases")
            heard.set()

    watch = HolderWatch(Leases(), interval_s=0.001)
    watch.start()
    for holder in ("a", "b"):
        process = start()
        watch.on_heartbeat(holder, told(process))
        process.kill()
        process.wait()
    assert heard.wait(10)
    watch.close()


def test_who_lives_is_told_at_any_time_from_who_has_died(
    watched: Watched, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """Asked of one that does not answer, between two rounds."""
    process = start()
    watched.watch.on_heartbeat("stopped", told(process))
    watched.watch.on_heartbeat("unseen")
    psutil.Process(process.pid).suspend()
    watched.now_s = 59.0
    assert [watched.watch.lives(holder) for holder in ("stopped", "unseen", "stranger")] == [True, True, False]
    watched.now_s = 61.0
    assert [watched.watch.lives(holder) for holder in ("stopped", "unseen")] == [True, False]
    process.kill()
    psutil.wait_procs([psutil.Process(process.pid)], timeout=10)
    assert not watched.watch.lives("stopped")
    assert watched.dead == []  # told by the next round
