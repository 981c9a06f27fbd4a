"""The nodes by themselves, without Ray: who reaches whom, and that nothing stays."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest
from kit.waiting import wait_until
from nodes.namespaces import Network, Node, missing

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(missing()), reason=missing())]


def reaches(one: Node, other: Node) -> bool:
    """Return whether one can open a connection to the other, which refuses it at once if it hears of it."""
    script = f"import socket; s = socket.socket(); s.settimeout(3); print(s.connect_ex(('{other.address}', 9)))"
    return one.run("python3", "-c", script).strip() == "111"


def test_nodes_see_each_other_and_only_their_own_processes(tmp_path: Path) -> None:
    with Network(tmp_path) as network:
        one, other = network.add("one"), network.add("other")
        assert reaches(one, other)
        assert reaches(network.switch, one)
        sleeper = one.start("sleep", "1000")
        (process,) = wait_until(lambda: one.processes("sleep 1000"))
        assert other.processes("sleep 1000") == []
        one.run("bash", "-c", "echo here > /dev/shm/mine; echo here > /tmp/mine")
        assert other.run("ls", "/dev/shm", "/tmp").split() == ["/dev/shm:", "/tmp:"]
        assert one.run("hostname") == "one\n"
        one.kill()
        assert sleeper.wait(10) != 0
        assert not process.is_running()
        assert not reaches(other, one)
        assert reaches(other, network.add("one"))


def test_a_cut_link_is_silent_until_it_is_healed_and_a_slow_one_takes_its_time(tmp_path: Path) -> None:
    with Network(tmp_path) as network:
        one, other = network.add("one"), network.add("other")
        network.cut(one)
        assert not reaches(other, one)
        network.heal(one)
        assert reaches(other, one)
        network.plug(one, delay_s=0.05, loss=0.01)
        start_s = time.monotonic()
        assert reaches(other, one)
        assert time.monotonic() - start_s > 0.1  # there and back
        network.plug(one)
        assert reaches(other, one)


def test_nothing_stays_whatever_happens(tmp_path: Path) -> None:
    before = _left()
    first: list[int] = []
    with pytest.raises(RuntimeError, match="in the middle"), Network(tmp_path) as network:  # noqa: PT012
        node = network.add("one")
        node.start("sleep", "1000")
        wait_until(lambda: node.processes("sleep 1000"))
        first = [node.pid, network.switch.pid, *(process.pid for process in node.processes())]
        raise RuntimeError("in the middle")
    assert len(first) > 3
    assert not any(psutil.pid_exists(pid) for pid in first)
    assert _left() == before


def _left() -> str:
    listed = [["ip", "-o", "link"], ["ip", "netns"], ["cat", "/proc/self/mountinfo"]]
    return "".join(subprocess.run(one, capture_output=True, text=True, check=True).stdout for one in listed)
