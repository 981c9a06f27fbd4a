"""The memory of a device beside its tensors: what holders allocate themselves, and what forwards take."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weights.memory.arena_room import ArenaRoom
from weights.memory.device_space import DeviceSpace
from weights.records.errors import BudgetExceeded
from weights.residency.sizes import shown_bytes

_WORKSPACE: Final = "the workspace"  # its key and its holder; no hash has a blank in it


class ForwardMemory:
    """The books of one device in which holders and forwards take room. Thread-safe."""

    def __init__(self, space: DeviceSpace, room: ArenaRoom) -> None:
        self._space = space
        self._room = room
        self._lent: Counter[int] = Counter()  # bytes of the forwards that run, by call
        self._workspaces: dict[str, int] = {}  # what a forward of a holder needs of the budget at least
        self._turns = itertools.count()
        # Memory that this budget leaves free for whoever comes first, but for what kernels keep.
        self._beside_bytes = max(0.0, space.free_bytes() - room.budget_bytes)
        self._unbudgeted: list[tuple[StorageWeakRef, int]] = []

    @property
    def beside_bytes(self) -> float:
        """Memory of the device that its budget and `take_unbudgeted` leave free, as it was at the start.

        Forwards take it first.
        """
        taken = [nbytes for holder, nbytes in self._unbudgeted if not holder.expired()]  # type: ignore[no-untyped-call]
        return self._beside_bytes - sum(taken)

    def take_unbudgeted(self, holder: torch.UntypedStorage, nbytes: int) -> bool:
        """Count bytes outside of the budget as taken while `holder` lives; False if so many are not free there.

        Nothing is evicted for them.
        """
        with self._room.lock:
            if nbytes > self.beside_bytes - self._lent.total():
                return False
            others = [one for one in self._unbudgeted if not one[0].expired()]  # type: ignore[no-untyped-call]
            self._unbudgeted = [*others, (StorageWeakRef(holder), nbytes)]  # type: ignore[no-untyped-call]
            return True

    def room_bytes(self) -> float:
        """Return the bytes that a forward may take now: what is free and not lent, and what may be evicted for it."""
        with self._room.lock:
            movable_bytes = self._room.table.movable_bytes
            unused_bytes = (
                self._room.budget_bytes
                - self._room.lingering_bytes()
                - self._room.table.used_bytes
                + self._workspace_bytes
            )
            room_bytes = self.beside_bytes + unused_bytes - self._lent.total()
            return max(0.0, min(room_bytes, self._space.free_bytes()) + movable_bytes)

    @property
    def is_lending(self) -> bool:
        """Return whether a forward is under way that has something lent."""
        return bool(self._lent)

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[None]:
        """Count so many bytes as those of a forward within the block, so that nothing is uploaded there.

        They are the workspace's, which is as large as the largest forward needs. What is larger runs uncounted.
        """
        turn = next(self._turns)
        with self._room.lock:
            self._lent[turn] = nbytes
            try:
                self._fit_workspace(f"a forward of {shown_bytes(nbytes)}")
            except BudgetExceeded:
                self._lent[turn] = 0
        try:
            yield
        finally:
            with self._room.lock:
                del self._lent[turn]
                self._fit_workspace("")

    def take_working(self, holder: str, working_bytes: int, workspace_bytes: int) -> list[str]:
        """Make room for what a holder and its forwards need beside its tensors, which are leased; returns what went."""
        evicted: list[str] = []
        with self._room.lock:
            before = self._workspaces.get(holder, 0)
            try:
                self._workspaces[holder] = max(before, workspace_bytes)
                if workspace_bytes:
                    evicted += self._fit_workspace(f"the workspace of {holder}")
                if working_bytes:
                    evicted += self._room.make_room(
                        {_working(holder): working_bytes}, f"the working memory of {holder}"
                    )
                    self._room.table.add_detached(_working(holder), working_bytes, None, holder, 1)
            except BudgetExceeded:
                self._workspaces[holder] = before
                self._fit_workspace("")
                raise
            finally:
                if not self._workspaces[holder]:
                    del self._workspaces[holder]
        return evicted

    def give_back(self, holder: str) -> None:
        """Take back the room of a holder and its forwards. Whoever calls holds the lock of the room."""
        self._room.table.release(_working(holder), holder)
        if self._workspaces.pop(holder, None) is not None:
            self._fit_workspace("")

    @property
    def _workspace_bytes(self) -> int:
        return sum(entry.nbytes for entry in self._room.table.detached if entry.key == _WORKSPACE)

    def _fit_workspace(self, what: str) -> list[str]:
        """Make the workspace as large as the largest forward needs; returns what was evicted.

        Raises as `ArenaRoom.make_room`.
        """
        lent_bytes = max(0, math.ceil(self._lent.total() - self.beside_bytes))
        inside = max([lent_bytes, *self._workspaces.values()])  # of the budget
        before = self._workspace_bytes
        evicted = self._room.make_room({_WORKSPACE: inside - before}, what) if inside > before else []
        if inside != before:
            self._room.table.end_holder(_WORKSPACE)
            if inside:
                self._room.table.add_detached(_WORKSPACE, inside, None, _WORKSPACE, 1)
        return evicted


def _working(holder: str) -> str:
    """Return the key of a holder's own memory; no hash has a blank in it."""
    return f"memory of {holder}"
