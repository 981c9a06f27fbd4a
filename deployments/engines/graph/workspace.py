"""The device's memory for forwards: how many rows have room, and the room itself while they run."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from deployments.engines.graph.footprint import Footprint

if TYPE_CHECKING:
    import torch


class LendingMemory(Protocol):
    """The books of a device (`weights/memory/device_arena.py`)."""

    def room_bytes(self) -> float:
        """Return the bytes that a forward may take now; infinity where nobody counts."""

    @property
    def is_lending(self) -> bool:
        """Return whether a forward is under way that has something lent."""

    def lend(self, nbytes: int) -> AbstractContextManager[None]:
        """Count so many bytes as a forward's within the block."""

    def take_beside(self, holder: torch.UntypedStorage, nbytes: int) -> bool:
        """Count bytes beside the budget for as long as `holder` lives; False where so many are not free there."""


class Footprints(Protocol):
    """The footprints of forwards by kind: a mapping, or a book that records them when it is asked."""

    def get(self, kind: Hashable, /) -> Footprint | None:
        """Return the footprint of forwards of a kind; None where nobody has planned it."""


class Workspace:
    """The room of forwards by kind. Without memory that is counted, and for kinds that nobody has planned, no limit.

    One row always runs: what has no room then finds none, and fails as if nothing were planned.
    """

    def __init__(self, memory: LendingMemory | None = None, footprints: Footprints | None = None) -> None:
        self._memory = memory
        self._footprints = footprints

    def most_rows(self, kind: Hashable, most: int) -> int:
        """Return the number of rows of that kind that have room now, from 1 to `most`."""
        return most if (planned := self._planned(kind)) is None else self._most_rows(*planned, most)

    def largest(self, kinds: Collection[Hashable], rows: int) -> Hashable:
        """Return the kind of which so many rows take most, as far as anybody knows: rows of several take less."""
        if len(kinds) == 1:
            return next(iter(kinds))
        known = {kind: planned[1].bytes_of(rows) for kind in kinds if (planned := self._planned(kind)) is not None}
        return max(known or kinds, key=lambda kind: known.get(kind, 0))

    def has_room(self, kind: Hashable) -> bool:
        """Return whether one row of that kind has room now, as far as anybody knows."""
        planned = self._planned(kind)
        return planned is None or planned[1].bytes_of(1) <= planned[0].room_bytes()

    @contextmanager
    def lend(self, kind: Hashable, rows: int, most: int) -> Iterator[int]:
        """Yield the number of `rows` that may run at once, at most `most`, and count their bytes within the block."""
        wanted = max(1, min(rows, most))
        if (planned := self._planned(kind)) is None:
            yield wanted
            return
        memory, found = planned
        allowed = self._most_rows(memory, found, wanted)
        with memory.lend(found.bytes_of(allowed)):
            yield allowed

    def take_beside(self, holder: torch.UntypedStorage, nbytes: int) -> bool:
        """Count what forwards keep, for as long as `holder` lives; False where the device has no room for it."""
        return self._memory is None or self._memory.take_beside(holder, nbytes)

    def _planned(self, kind: Hashable) -> tuple[LendingMemory, Footprint] | None:
        if self._memory is None or self._footprints is None:
            return None
        found = self._footprints.get(kind)
        return None if found is None else (self._memory, found)

    @staticmethod
    def _most_rows(memory: LendingMemory, found: Footprint, most: int) -> int:
        room = memory.room_bytes()
        return most if room >= found.bytes_of(most) else max(1, found.rows_within(int(room), most))


UNBOUNDED: Final = Workspace()
