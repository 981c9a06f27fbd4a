"""Imports in a process of their own, so that no checkpoint can stall the registry or take it down.

A file that crashes its reader, makes it compute for ever or fill the memory ends that process, and is said of that
model alone; the next import has another process.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import psutil

from cluster.errors import ImportFailed
from cluster.registry.directory import Entry
from cluster.registry.importing import ImportSettings, Job, Report
from cluster.registry.summaries import ModelSummary

POLL_S: Final = 1.0
MODULE: Final = "cluster.registry.importing"
STARTS: Final = 2  # a process that has gone idle may end just when it is asked

logger = logging.getLogger("atelier.registry")


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """How long an import may give no sign of progress: to read, to write, or to have hashed more.

    `computing_s` is processor time, of all its threads: nothing that is sound computes so long on what it has read.
    `silent_s` is wall-clock time: it may wait for another writer of the store.
    """

    computing_s: float = 120.0
    silent_s: float = 1800.0


DEFAULT_LIMITS: Final = ImportLimits()


@dataclass(slots=True)
class _Watched:
    """When, and after how much processor time, there was the last sign of progress."""

    sign: tuple[int, ...]
    at_s: float
    cpu_s: float

    def over(self, sign: tuple[int, ...], now_s: float, cpu_s: float, limits: ImportLimits) -> str:
        """What limit is passed, "" for none."""
        if sign != self.sign:
            self.sign, self.at_s, self.cpu_s = sign, now_s, cpu_s
        if cpu_s - self.cpu_s > limits.computing_s:
            return f"it computed for {limits.computing_s:.0f} s without reading or writing anything"
        if now_s - self.at_s > limits.silent_s:
            return f"nothing was read or written for {limits.silent_s:.0f} s"
        return ""


class ImportProcess:
    """One process, started with the first import, and again after it has ended. Thread-safe: one import at a time.

    HAZARD: the process ends with the thread that started it. The threads of `asyncio.to_thread` stay.
    """

    def __init__(
        self,
        settings: ImportSettings,
        limits: ImportLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def bring_in(self, entry: Entry, roots: tuple[Path, ...] | None = None) -> ModelSummary:
        """Block until the checkpoint is in the store. Raises the errors of `import_model`, and ImportFailed."""
        with self._lock:
            report = self._outcome(self._ask(Job(entry=entry, roots=roots)))
        if report.summary is None:
            raise report.failure.raised() if report.failure else ImportFailed("its import came to nothing")
        return report.summary

    def close(self) -> None:
        """End the process, in the middle of an import if need be: what it leaves in the store is cleaned by `gc`."""
        process = self._process
        if process is not None:
            process.kill()

    def _ask(self, job: Job) -> Connection:
        how = ""
        for _ in range(STARTS):
            try:
                connection = self._connection or self._start()
                connection.send_bytes(job.model_dump_json().encode())
                if _received(connection).begun:
                    return connection
            except (EOFError, OSError):
                how = self._ended()
        raise ImportFailed(f"the import process does not start: it {how}")

    def _outcome(self, connection: Connection) -> Report:
        """Raises ImportFailed when the process ended, or had to."""
        assert self._process is not None
        process = psutil.Process(self._process.pid)
        done_bytes, watched = 0, _Watched((), self._clock(), 0.0)
        try:
            while True:
                if not connection.poll(POLL_S):
                    sign = (done_bytes, *_transferred(process))
                    if problem := watched.over(sign, self._clock(), sum(process.cpu_times()[:2]), self._limits):
                        self._process.kill()
                        self._ended()
                        raise ImportFailed(f"its import was stopped: {problem}")
                elif (report := _received(connection)).done_bytes is None:
                    return report
                else:
                    done_bytes = report.done_bytes
        except (EOFError, OSError, psutil.NoSuchProcess):
            raise ImportFailed(f"the process that imported it {self._ended()}") from None

    def _start(self) -> Connection:
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self._connection = Connection(mine.detach())
        self._connection.send_bytes(self._settings.model_dump_json().encode())
        return self._connection

    def _ended(self) -> str:
        """Wait for the end, and say how it was."""
        assert self._connection is not None
        assert self._process is not None
        self._connection.close()
        self._connection = None
        code = self._process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (" (perhaps because memory was short)" if name == "SIGKILL" else "")


def _received(connection: Connection) -> Report:
    return Report.model_validate_json(connection.recv_bytes())


def _transferred(process: psutil.Process) -> tuple[int, ...]:
    """What it has read and written, by calls and by pages of mapped files. Zeros where the system does not tell."""
    try:
        counts = process.io_counters()
    except (psutil.AccessDenied, AttributeError, NotImplementedError):
        return ()
    return (counts.read_chars, counts.write_chars, counts.read_bytes, counts.write_bytes)
