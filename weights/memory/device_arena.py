"""The arena: weights on one device, by content. A tensor that is there is not uploaded again, whichever model needs it.

Weights are immutable, so nothing is ever copied back: eviction drops the reference. Every tensor is an allocation
of its own. What is shared and evicted is the tensor; one block per model or extent could only be freed as a whole,
and torch's allocator reuses, splits and joins blocks well enough (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
keeps it from fragmenting). Freed memory goes back to that allocator, which gives it to activations as well.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weights.memory.block_plan import BlockPlan
from weights.memory.block_stream import BlockStream
from weights.memory.device_space import (
    Acquired,
    ArenaReport,
    ArenaStats,
    DeviceKey,
    DeviceSpace,
    HostViews,
    bytes_of,
    kernel_workspace_bytes,
    tensor_of,
)
from weights.memory.transfer import Transfer
from weights.records.errors import BudgetExceeded, WeightsError
from weights.residency.admission import describe_holders, refusal_text
from weights.residency.contents import Entry, MemoryTier
from weights.residency.entry_table import EntryTable
from weights.residency.room_plan import plan_prefetch, plan_room, plan_shrink
from weights.residency.sizes import shown_bytes

PER_TENSOR_S: Final = 10e-6  # to allocate it, start its copy and bind it, whatever its size
USUAL_S_PER_BYTE: Final = 1e-10  # until an upload was measured
_WORKSPACE: Final = "the workspace"  # its key and its holder; no hash has a blank in it
_RECENT_SHARE: Final = 0.2  # of the latest upload in the mean


class StillInUse(BudgetExceeded):
    """There is no room now, but tensors that were evicted are still used: when they are let go, there may be."""


@dataclass(eq=False, slots=True)
class _Copy:
    """A tensor that is on the device or on its way there; `key` says where it was uploaded from.

    `arrived` is of all that are uploaded together; False: that failed, and the entry is no more.
    """

    key: DeviceKey
    arrived: Future[bool]
    base: torch.Tensor | None = None  # 1-D uint8; None while it is on its way


class DeviceArena(MemoryTier):
    """Tensors of one device by the hash of their bytes, under a byte budget. Thread-safe.

    Uploads run outside the lock; of several callers that need the same tensor, one uploads it. What goes first is
    decided by the residency core; the seconds to get a tensor back are those that uploads took, per byte, and a
    little for each tensor: a large one goes before many small ones of equally many bytes.

    HAZARD: torch keeps memory as long as a tensor uses it. A tensor that is used without a lease may be evicted and
    stays valid, but its memory is not free; it counts against the budget until the last user lets go. On CUDA, work
    that reads a tensor must be done, or be on the stream of the next `acquire`'s thread, before its lease ends.
    """

    def __init__(
        self,
        device: str,
        budget_bytes: int,
        transfer: Transfer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._space = DeviceSpace(device, transfer)
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._table: EntryTable[_Copy | None] = EntryTable(budget_bytes, clock, self)
        self._lingering: list[tuple[StorageWeakRef, int]] = []
        self._upload_s_per_byte: float | None = None
        self._moved_bytes = 0
        self._lent: Counter[int] = Counter()  # bytes of the forwards that run, by call
        self._workspaces: dict[str, int] = {}  # what a forward of a holder needs of the budget at least
        self._turns = itertools.count()
        # Memory that this budget leaves free for whoever comes first, but for what kernels keep.
        self._kernel_bytes = kernel_workspace_bytes(self._space.device)
        self._beside_bytes = max(0.0, self._space.free_bytes() - budget_bytes)
        self._taken_beside: list[tuple[StorageWeakRef, int]] = []

    def acquire(
        self,
        wanted: Mapping[str, DeviceKey],
        views: HostViews,
        holder: str,
        working_bytes: int = 0,
        workspace_bytes: int = 0,
    ) -> Acquired:
        """Return the tensors by name, each hash leased to `holder` once more until it is released.

        With `working_bytes` it also makes room for what the holder itself allocates, a KV cache say, and counts that
        until the holder releases anything. Of the `workspace_bytes` of the budget that forwards of holders need at
        least, the most count, and not the sum: one runs at a time.
        Only what is missing is asked of `views` and uploaded. Raises BudgetExceeded when there is no room for all of
        it (then nothing is uploaded and nothing more is leased), StillInUse when trying again may help, WeightsError
        when a view is not what `wanted` says, and what `views` raises.
        """
        start_s = self._clock()
        names = _names_by_hash(wanted)
        leased: dict[str, Entry[_Copy | None]] = {}
        evicted: list[str] = []
        added_bytes = 0
        try:
            while missing := [hash_ for hash_ in names if hash_ not in leased]:
                with self._lock:
                    here = {hash_: self._table.entries[hash_] for hash_ in missing if hash_ in self._table.entries}
                    # First, so that making room for the others does not evict them.
                    for hash_, entry in here.items():
                        self._table.lease(entry, holder)
                        leased[hash_] = entry
                    absent = {hash_: wanted[names[hash_]] for hash_ in missing if hash_ not in here}
                    if absent:
                        what = f"{len(absent)} tensors for {holder} ({_some(names[hash_] for hash_ in absent)})"
                        evicted += self._make_room(self._sizes(absent), what)
                    fresh = self._expect(absent)
                    for entry in fresh.values():
                        self._table.lease(entry, holder)
                    leased |= fresh
                added_bytes += self._upload(fresh, names, wanted, views)
                # After our own: two callers may wait for each other's. What somebody else failed at, we try ourselves.
                for hash_, entry in here.items():
                    if (copy := entry.thing) is None or not copy.arrived.result():
                        del leased[hash_]
            tensors = {name: self._tensor(leased.get(key.sha256), key) for name, key in wanted.items()}
            evicted += self._take_working_memory(holder, working_bytes, workspace_bytes)
        except BaseException:
            with self._lock:
                for entry in leased.values():
                    self._table.unlease(entry, holder)
            raise
        wanted_bytes = sum(wanted[names[hash_]].nbytes for hash_ in leased)
        return Acquired(tensors, self._report(wanted_bytes, wanted_bytes - added_bytes, added_bytes, start_s, evicted))

    def _take_working_memory(self, holder: str, working_bytes: int, workspace_bytes: int) -> list[str]:
        """Make room for what a holder and its forwards need beside its tensors, which are leased; returns what went."""
        evicted: list[str] = []
        with self._lock:
            before = self._workspaces.get(holder, 0)
            try:
                self._workspaces[holder] = max(before, workspace_bytes)
                if workspace_bytes:
                    evicted += self._fit_workspace(f"the workspace of {holder}")
                if working_bytes:
                    evicted += self._make_room({_working(holder): working_bytes}, f"the working memory of {holder}")
                    self._table.add_detached(_working(holder), working_bytes, None, holder, 1)
            except BudgetExceeded:
                self._workspaces[holder] = before
                self._fit_workspace("")
                raise
            finally:
                if not self._workspaces[holder]:
                    del self._workspaces[holder]
        return evicted

    def hold(self, hashes: Iterable[str], holder: str) -> None:
        """Lease those that are here or on their way, for what is acquired next: making room then spares them."""
        with self._lock:
            for hash_ in set(hashes):
                if (entry := self._table.entries.get(hash_)) is not None:
                    self._table.lease(entry, holder)

    def end_holder(self, holder: str) -> None:
        """Give back all leases of `holder`."""
        with self._lock:
            self._table.end_holder(holder)

    def release(self, hashes: Iterable[str], holder: str) -> None:
        """Give back one lease of each. Unknown hashes and holders are ignored: releasing twice is not an error."""
        with self._lock:
            for key in {*hashes, _working(holder)}:
                self._table.release(key, holder)
            if self._workspaces.pop(holder, None) is not None:
                self._fit_workspace("")

    def prefetch(self, wanted: Mapping[str, DeviceKey], views: HostViews) -> ArenaReport:
        """Upload, without a lease, as much of `wanted` as has room that costs nothing leased, pinned, more valuable
        or prefetched by somebody else; the first of `wanted` come first. What has no room is left out.

        Raises WeightsError when a view is not what `wanted` says, and what `views` raises.
        """
        start_s = self._clock()
        names = _names_by_hash(wanted)
        keys = {hash_: wanted[name] for hash_, name in names.items()}
        with self._lock:
            here = [entry for hash_ in keys if (entry := self._table.entries.get(hash_)) is not None]
            take, victims = self._plan_prefetch(self._sizes(keys))
            for entry in here:
                self._table.announce(entry)
            fresh = self._expect({hash_: keys[hash_] for hash_ in take}, prefetched=True)
        added_bytes = self._upload(fresh, names, wanted, views)
        wanted_bytes = sum(key.nbytes for key in keys.values())
        here_bytes = sum(keys[entry.key].nbytes for entry in here)
        return self._report(wanted_bytes, here_bytes, added_bytes, start_s, victims)

    @property
    def beside_bytes(self) -> float:
        """Memory of the device that its budget and `take_beside` leave free, as it was at the start.

        Forwards take it first.
        """
        taken = [nbytes for holder, nbytes in self._taken_beside if not holder.expired()]  # type: ignore[no-untyped-call]
        return self._beside_bytes - sum(taken)

    def take_beside(self, holder: torch.UntypedStorage, nbytes: int) -> bool:
        """Count bytes as taken beside the budget for as long as `holder` lives; False where so many are not free there.

        Nothing is evicted for them.
        """
        with self._lock:
            if nbytes > self.beside_bytes - self._lent.total():
                return False
            others = [one for one in self._taken_beside if not one[0].expired()]  # type: ignore[no-untyped-call]
            self._taken_beside = [*others, (StorageWeakRef(holder), nbytes)]  # type: ignore[no-untyped-call]
            return True

    def room_bytes(self) -> float:
        """Return the bytes that a forward may take now: what is free and not lent, and what may be evicted for it."""
        with self._lock:
            movable_bytes = self._table.movable_bytes
            unused_bytes = self._budget_bytes - self._lingering_bytes() - self._table.used_bytes + self._workspace_bytes
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
        with self._lock:
            self._lent[turn] = nbytes
            try:
                self._fit_workspace(f"a forward of {shown_bytes(nbytes)}")
            except BudgetExceeded:
                self._lent[turn] = 0
        try:
            yield
        finally:
            with self._lock:
                del self._lent[turn]
                self._fit_workspace("")

    @property
    def _workspace_bytes(self) -> int:
        return sum(entry.nbytes for entry in self._table.detached if entry.key == _WORKSPACE)

    def _fit_workspace(self, what: str) -> list[str]:
        """Make the workspace as large as the largest forward needs; returns what was evicted. As `_make_room`."""
        lent_bytes = max(0, math.ceil(self._lent.total() - self.beside_bytes))
        inside = max([lent_bytes, *self._workspaces.values()])  # of the budget
        before = self._workspace_bytes
        evicted = self._make_room({_WORKSPACE: inside - before}, what) if inside > before else []
        if inside != before:
            self._table.end_holder(_WORKSPACE)
            if inside:
                self._table.add_detached(_WORKSPACE, inside, None, _WORKSPACE, 1)
        return evicted

    def pin(self, hashes: Iterable[str]) -> None:
        """Never evict these, nor when they come only later."""
        with self._lock:
            self._table.pin(hashes)

    def unpin(self, hashes: Iterable[str]) -> None:
        """Let these be evicted again."""
        with self._lock:
            self._table.unpin(hashes)

    def invalidate(self, is_damaged: Callable[[DeviceKey], bool]) -> list[str]:
        """Give out no more what was uploaded, or is being, for these keys: the host's bytes were not theirs.

        The next `acquire` uploads them anew. Who leases them keeps them; their memory counts until it lets go. Returns
        their hashes.
        """
        with self._lock:
            found = [entry for entry in self._table.entries.values() if entry.thing and is_damaged(entry.thing.key)]
            for entry in found:
                self._table.invalidate(entry)
            return [entry.key for entry in found]

    def resize(self, budget_bytes: int) -> tuple[str, ...]:
        """Change the budget and evict what no longer fits; returns what.

        Raises BudgetExceeded when too much is leased or pinned; the budget stays as it was. What is evicted and still
        in use does not count here: it goes by itself.
        """
        with self._lock:
            plan = plan_shrink(self._table, budget_bytes)
            if plan.missing_bytes:
                missing = shown_bytes(plan.missing_bytes)
                raise BudgetExceeded(
                    f"{self._budget_name} cannot be {shown_bytes(budget_bytes)}: {missing} more have to stay "
                    f"({describe_holders(self._table)})"
                )
            self._budget_bytes = self._table.budget_bytes = budget_bytes
            self._table.evict(plan.evict)
            return tuple(entry.key for entry in plan.evict)

    def open_stream(self, plan: BlockPlan, hosts: Mapping[str, torch.Tensor]) -> BlockStream:
        """Return the stream of a module's blocks; `hosts` has their tensors. Raises DeviceFull.

        Its buffers are working memory, which an `acquire` of its holder has made room for.
        """
        return BlockStream(plan, hosts, self._space)

    @property
    def _budget_name(self) -> str:
        return f"the budget of {self._space.name}"

    def size_of(self, nbytes: int) -> int:
        """Return the bytes that a tensor of `nbytes` bytes takes on the device."""
        return self._space.size_of(nbytes)

    def stats(self) -> ArenaStats:
        """Return a snapshot. Looks at every tensor."""
        with self._lock:
            return ArenaStats(
                device=self._space.name,
                budget_bytes=self._budget_bytes,
                num_tensors=len(self._table.entries),
                resident_bytes=self._table.used_bytes,
                leased_bytes=self._table.here.leased,
                pinned_bytes=self._table.here.pinned,
                arriving_bytes=sum(entry.nbytes for entry in self._table.entries.values() if not entry.is_here),
                lingering_bytes=self._lingering_bytes(),
                moved_bytes=self._moved_bytes,
                num_evicted=self._table.num_evicted,
                kernel_bytes=self._kernel_bytes,
            )

    def bytes_by_holder(self) -> dict[str, int]:
        """Return the bytes that each holder has leased, the most first."""
        with self._lock:
            return self._table.bytes_by_holder()

    def _sizes(self, keys: Mapping[str, DeviceKey]) -> dict[str, int]:
        """Return the bytes that these tensors take on the device, by hash."""
        return {hash_: self._space.size_of(key.nbytes) for hash_, key in keys.items()}

    def _expect(self, keys: Mapping[str, DeviceKey], *, prefetched: bool = False) -> dict[str, Entry[_Copy | None]]:
        """New entries, for which there is room already, by hash. Who made them uploads them together."""
        arrived: Future[bool] = Future()
        fresh: dict[str, Entry[_Copy | None]] = {}
        for hash_, key in keys.items():
            fresh[hash_] = self._table.expect(hash_, self._space.size_of(key.nbytes), prefetched=prefetched)
            fresh[hash_].thing = _Copy(key, arrived)
        return fresh

    def _make_room(self, wanted: Mapping[str, int], what: str) -> list[str]:
        """Evict until `wanted` fits; returns what. Raises BudgetExceeded or StillInUse saying who holds the memory."""
        evicted: list[str] = []
        while True:
            # Again when somebody still uses what went, so that its memory is not free.
            lingering_bytes = self._lingering_bytes()
            self._table.budget_bytes = self._budget_bytes - lingering_bytes
            plan = plan_room(self._table, wanted)
            if plan.missing_bytes:
                lingering = (
                    f"{shown_bytes(lingering_bytes)} more are evicted but still in use" if lingering_bytes else ""
                )
                refusal = refusal_text(self._table, what, wanted, plan.missing_bytes, self._budget_name, lingering)
                raise StillInUse(refusal) if lingering_bytes else BudgetExceeded(refusal)
            if not plan.evict:
                return evicted
            self._table.evict(plan.evict)
            evicted += [entry.key for entry in plan.evict]

    def _plan_prefetch(self, wanted: Mapping[str, int]) -> tuple[list[str], list[str]]:
        """Make room for those of `wanted` that are worth more than what has to go; returns (with room, evicted)."""
        self._table.budget_bytes = self._budget_bytes - self._lingering_bytes()
        take, evict = plan_prefetch(self._table, wanted)
        self._table.evict(evict)
        free_bytes = self._budget_bytes - self._lingering_bytes() - self._table.used_bytes
        while take and sum(wanted[hash_] for hash_ in take) > free_bytes:  # what went is still in use
            take.pop()
        return take, [entry.key for entry in evict]

    def entries_gone(self, entries: Sequence[Entry[Any]]) -> None:
        """Their memory is free when nobody uses it any more."""
        for entry in entries:
            if self._space.copies and entry.thing and entry.thing.base is not None:
                storage = StorageWeakRef(entry.thing.base.untyped_storage())  # type: ignore[no-untyped-call]
                self._lingering.append((storage, entry.nbytes))

    def _lingering_bytes(self) -> int:
        """Return the bytes of tensors that are out of the table and that somebody still uses."""
        self._lingering = [(weak, nbytes) for weak, nbytes in self._lingering if not weak.expired()]  # type: ignore[no-untyped-call]
        return sum(nbytes for _, nbytes in self._lingering)

    def reload_rate(self, origin: Hashable) -> float:
        """Return the seconds that a byte of a tensor of this size takes to reload; sizes are the origins of entries."""
        assert isinstance(origin, int)
        return PER_TENSOR_S / origin + (self._upload_s_per_byte or USUAL_S_PER_BYTE)

    def _upload(
        self,
        fresh: Mapping[str, Entry[_Copy | None]],
        names: Mapping[str, str],
        wanted: Mapping[str, DeviceKey],
        views: HostViews,
    ) -> int:
        """Bytes added. Whatever happens, those who wait for these entries are notified."""
        if not fresh:
            return 0
        copies = {hash_: entry.thing for hash_, entry in fresh.items() if entry.thing}
        arrived = next(iter(copies.values())).arrived
        try:
            missing = [names[hash_] for hash_ in fresh]
            found = views(missing) if callable(views) else views
            for name in missing:
                if name not in found:
                    raise WeightsError(f"tensor {name!r}: there is no host view of it (given: {len(found)} others)")
            hosts = [bytes_of(name, wanted[name], found[name]) for name in missing]
            start_s = self._clock()
            bases = self._space.upload_bytes(hosts)
            upload_s = self._clock() - start_s
        except BaseException:
            with self._lock:
                for entry in fresh.values():
                    self._table.fail(entry)
            arrived.set_result(False)
            raise
        added_bytes = sum(wanted[names[hash_]].nbytes for hash_ in fresh)
        with self._lock:
            for (hash_, entry), base in zip(fresh.items(), bases, strict=True):
                copies[hash_].base = base
                self._table.arrive(entry, copies[hash_], 1 << (entry.nbytes.bit_length() - 1))
            self._note_upload(added_bytes, upload_s)
        arrived.set_result(True)
        return added_bytes

    def _note_upload(self, nbytes: int, seconds: float) -> None:
        latest = seconds / nbytes
        before = self._upload_s_per_byte
        self._upload_s_per_byte = latest if before is None else before + _RECENT_SHARE * (latest - before)
        self._moved_bytes += nbytes if self._space.copies else 0

    def _tensor(self, entry: Entry[_Copy | None] | None, key: DeviceKey) -> torch.Tensor:
        if entry is None:  # a tensor without bytes
            return tensor_of(torch.empty(0, dtype=torch.uint8, device=self._space.device), key)
        assert entry.thing
        assert entry.thing.base is not None
        return tensor_of(entry.thing.base, key)

    def _report(
        self, wanted_bytes: int, reused_bytes: int, added_bytes: int, start_s: float, evicted: Sequence[str]
    ) -> ArenaReport:
        moved_bytes = added_bytes if self._space.copies else 0
        return ArenaReport(
            wanted_bytes, reused_bytes, added_bytes, moved_bytes, self._clock() - start_s, tuple(evicted)
        )


def _working(holder: str) -> str:
    """Return the key of a holder's own memory; no hash has a blank in it."""
    return f"memory of {holder}"


def _some(names: Iterable[str]) -> str:
    first = list(names)
    return ", ".join(first[:3]) + (", ..." if len(first) > 3 else "")


def _names_by_hash(wanted: Mapping[str, DeviceKey]) -> dict[str, str]:
    """One name for each hash; tensors without bytes need no room and have none."""
    names: dict[str, str] = {}
    for name, key in wanted.items():
        if key.nbytes:
            names.setdefault(key.sha256, name)
    return names
