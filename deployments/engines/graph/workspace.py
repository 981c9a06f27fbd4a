"""The device's memory for forwards: how many rows have room, and the room itself while they run."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Final, Protocol

from deployments.engines.graph.footprint import Footprint


class LendingMemory(Protocol):
    """The books of a device (`weights/memory/device_arena.py`)."""

    def room_bytes(self) -> float:
        """Return what a forward may take now; infinity where nobody counts."""

    def lend(self, nbytes: int) -> AbstractContextManager[None]:
        """Count so many bytes as a forward's within the block."""


class Workspace:
    """The room of forwards by kind. Without memory that is counted, and for kinds that nobody has planned, no limit.

    One row always runs: what has no room then finds none, and fails as if nothing were planned.
    """

    def __init__(
        self, memory: LendingMemory | None = None, footprints: Mapping[Hashable, Footprint] | None = None
    ) -> None:
        self._memory = memory
        self._footprints = {} if footprints is None else footprints

    def most_rows(self, kind: Hashable, most: int) -> int:
        """Return how many rows of that kind have room now, from 1 to `most`."""
        found = self._footprints.get(kind)
        if self._memory is None or found is None:
            return most
        room = self._memory.room_bytes()
        return most if room >= found.bytes_of(most) else max(1, found.rows_within(int(room), most))

    @contextmanager
    def lend(self, kind: Hashable, rows: int, most: int) -> Iterator[int]:
        """Yield how many of `rows` may run at once, at most `most`, and count their bytes within the block."""
        allowed = self.most_rows(kind, max(1, min(rows, most)))
        found = self._footprints.get(kind)
        if self._memory is None or found is None:
            yield allowed
            return
        with self._memory.lend(found.bytes_of(allowed)):
            yield allowed


UNBOUNDED: Final = Workspace()
