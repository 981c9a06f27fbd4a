"""Processes of this machine: distinguished from those that have had their numbers; started to be spoken with."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

import psutil

# Start times are computed from the time of boot, which moves a little when the clock is set.
CLOCK_STEP_S: Final = 2.0


class ProcessMark(NamedTuple):
    """A process id, and when that process started: ids are given again, and mean another process in a container."""

    pid: int
    started_s: float

    @classmethod
    def this(cls) -> ProcessMark:
        """Return the mark of this process."""
        return cls(os.getpid(), psutil.Process().create_time())

    def seen(self) -> psutil.Process | None:
        """Return the process; None where it cannot be seen, or is gone."""
        try:
            found = psutil.Process(self.pid)
            return found if abs(found.create_time() - self.started_s) < CLOCK_STEP_S else None
        except psutil.Error:
            return None


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. One that is not reaped yet is still there, and does nothing more."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_connected(module: str, *arguments: object) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a module as a process, and return it and a connection to it, whose descriptor is its first argument."""
    mine, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), *map(str, arguments)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    return process, Connection(mine.detach())
