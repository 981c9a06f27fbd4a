"""The processor's threads of a node, which its replicas lease for a step each, so that they do not fight for cores.

Each core is a byte of one file, locked by the process that computes there: the system gives a dead one's back. Whoever
collects locks holds the gate, one more byte, so that two never wait for each other's, and many small leases do not
keep a large one waiting. HAZARD: such locks are a process's, not a thread's, and go when it closes any descriptor of
the file: one object per process, and one thread that uses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MAX_WAIT_S: Final = 5.0  # then a step runs all the same: slow is better than never
_POLL_S: Final = 2e-4
_GATE: Final = 2**20  # behind all threads


class NodeThreads:
    """So many threads of this node, as `file` has them. All its processes must agree on their number."""

    def __init__(self, file: Path, count: int, *, max_wait_s: float = MAX_WAIT_S) -> None:
        """Open the file, or make it. Raises OSError."""
        self._count, self._max_wait_s = count, max_wait_s
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    @contextlib.contextmanager
    def leased(self, count: int) -> Iterator[int]:
        """Hold so many threads within the block, or all there are; yields how many came free in time."""
        held: list[int] = []
        try:
            self._take(min(count, self._count), held)
            yield len(held)
        finally:
            for place in held:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)

    def _take(self, count: int, held: list[int]) -> None:
        deadline_s = time.monotonic() + self._max_wait_s
        while not self._locks(_GATE):
            if time.monotonic() > deadline_s:
                return
            time.sleep(_POLL_S)
        try:
            while True:
                for place in range(self._count):
                    if len(held) < count and place not in held and self._locks(place):
                        held.append(place)
                if len(held) == count or time.monotonic() > deadline_s:
                    return
                time.sleep(_POLL_S)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _GATE)

    def _locks(self, place: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except (BlockingIOError, PermissionError):
            return False
        return True
