"""The room of one device under a budget: what is there, what went and is still used, and what goes for what comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weights.memory.device_space import DeviceKey, DeviceSpace
from weights.records.errors import BudgetExceeded
from weights.residency.admission import describe_holders, refusal_text
from weights.residency.contents import Entry, MemoryTier
from weights.residency.entry_table import EntryTable
from weights.residency.room_plan import plan_prefetch, plan_room, plan_shrink
from weights.residency.sizes import shown_bytes

PER_TENSOR_S: Final = 10e-6  # to allocate it, start its copy and bind it, whatever its size
USUAL_S_PER_BYTE: Final = 1e-10  # until an upload was measured
_RECENT_SHARE: Final = 0.2  # of the latest upload in the mean


class StillInUse(BudgetExceeded):
    """There is no room now, but tensors that were evicted are still used: when they are let go, there may be."""


@dataclass(eq=False, slots=True)
class DeviceCopy:
    """A tensor that is on the device or on its way there; `key` says where it was uploaded from.

    `arrived` is of all that are uploaded together; False: that failed, and the entry is no more.
    """

    key: DeviceKey
    arrived: Future[bool]
    base: torch.Tensor | None = None  # 1-D uint8; None while it is on its way


class ArenaRoom(MemoryTier):
    """The table of a device's tensors and of what else takes its budget, and how quick uploads are.

    What goes first is decided by the residency core; the seconds to get a tensor back are those that uploads took, per
    byte, and a little for each tensor: a large one goes before many small ones of equally many bytes. Whoever calls
    holds `lock`.
    """

    def __init__(self, space: DeviceSpace, budget_bytes: int, clock: Callable[[], float]) -> None:
        self.lock = threading.Lock()
        self.budget_bytes = budget_bytes
        self.table: EntryTable[DeviceCopy | None] = EntryTable(budget_bytes, clock, self)
        self.name = f"the budget of {space.name}"
        self.moved_bytes = 0
        self._space = space
        self._lingering: list[tuple[StorageWeakRef, int]] = []
        self._upload_s_per_byte: float | None = None

    def make_room(self, wanted: Mapping[str, int], what: str) -> list[str]:
        """Evict until `wanted` fits; returns what. Raises BudgetExceeded or StillInUse saying who holds the memory."""
        evicted: list[str] = []
        while True:
            # Again when somebody still uses what went, so that its memory is not free.
            lingering_bytes = self.lingering_bytes()
            self.table.budget_bytes = self.budget_bytes - lingering_bytes
            plan = plan_room(self.table, wanted)
            if plan.missing_bytes:
                lingering = (
                    f"{shown_bytes(lingering_bytes)} more are evicted but still in use" if lingering_bytes else ""
                )
                refusal = refusal_text(self.table, what, wanted, plan.missing_bytes, self.name, lingering)
                raise StillInUse(refusal) if lingering_bytes else BudgetExceeded(refusal)
            if not plan.evict:
                return evicted
            self.table.evict(plan.evict)
            evicted += [entry.key for entry in plan.evict]

    def plan_prefetch(self, wanted: Mapping[str, int]) -> tuple[list[str], list[str]]:
        """Make room for those of `wanted` that are worth more than what has to go; returns (with room, evicted)."""
        self.table.budget_bytes = self.budget_bytes - self.lingering_bytes()
        take, evict = plan_prefetch(self.table, wanted)
        self.table.evict(evict)
        free_bytes = self.budget_bytes - self.lingering_bytes() - self.table.used_bytes
        while take and sum(wanted[hash_] for hash_ in take) > free_bytes:  # what went is still in use
            take.pop()
        return take, [entry.key for entry in evict]

    def resize(self, budget_bytes: int) -> tuple[str, ...]:
        """Change the budget and evict what no longer fits; returns what.

        Raises BudgetExceeded when too much is leased or pinned; the budget stays as it was. What is evicted and still
        in use does not count here: it goes by itself.
        """
        plan = plan_shrink(self.table, budget_bytes)
        if plan.missing_bytes:
            missing = shown_bytes(plan.missing_bytes)
            raise BudgetExceeded(
                f"{self.name} cannot be {shown_bytes(budget_bytes)}: {missing} more have to stay "
                f"({describe_holders(self.table)})"
            )
        self.budget_bytes = self.table.budget_bytes = budget_bytes
        self.table.evict(plan.evict)
        return tuple(entry.key for entry in plan.evict)

    def entries_gone(self, entries: Sequence[Entry[Any]]) -> None:
        """Their memory is free when nobody uses it any more."""
        for entry in entries:
            if self._space.copies and entry.thing and entry.thing.base is not None:
                storage = StorageWeakRef(entry.thing.base.untyped_storage())  # type: ignore[no-untyped-call]
                self._lingering.append((storage, entry.nbytes))

    def lingering_bytes(self) -> int:
        """Return the bytes of tensors that are out of the table and that somebody still uses."""
        self._lingering = [(weak, nbytes) for weak, nbytes in self._lingering if not weak.expired()]  # type: ignore[no-untyped-call]
        return sum(nbytes for _, nbytes in self._lingering)

    def reload_rate(self, origin: Hashable) -> float:
        """Return the seconds that a byte of a tensor of this size takes to reload; sizes are the origins of entries."""
        assert isinstance(origin, int)
        return PER_TENSOR_S / origin + (self._upload_s_per_byte or USUAL_S_PER_BYTE)

    def note_upload(self, nbytes: int, seconds: float) -> None:
        """Count an upload that was made."""
        latest = seconds / nbytes
        before = self._upload_s_per_byte
        self._upload_s_per_byte = latest if before is None else before + _RECENT_SHARE * (latest - before)
        self.moved_bytes += nbytes if self._space.copies else 0
