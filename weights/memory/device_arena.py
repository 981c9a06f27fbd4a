"""The arena: weights on one device, by content. A tensor that is there is not uploaded again, whichever model needs it.

Weights are immutable, so nothing is ever copied back: eviction drops the reference. Every tensor is an allocation
of its own. What is shared and evicted is the tensor; one block per model or extent could only be freed as a whole,
and torch's allocator reuses, splits and joins blocks well enough (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
keeps it from fragmenting). Freed memory goes back to that allocator, which gives it to activations as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import torch

from weights.memory.arena_room import ArenaRoom, DeviceCopy
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
from weights.memory.forward_memory import ForwardMemory
from weights.memory.transfer import Transfer
from weights.records.errors import WeightsError
from weights.residency.contents import Entry


class DeviceArena:
    """Tensors of one device by the hash of their bytes, under a byte budget. Thread-safe.

    Uploads run outside the lock; of several callers that need the same tensor, one uploads it. `forwards` has the
    books in which forwards take room beside them.

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
        self._room = ArenaRoom(self._space, budget_bytes, clock)
        self._clock = clock
        self._kernel_bytes = kernel_workspace_bytes(self._space.device)
        self.forwards = ForwardMemory(self._space, self._room)

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
        leased: dict[str, Entry[DeviceCopy | None]] = {}
        evicted: list[str] = []
        added_bytes = 0
        try:
            while missing := [hash_ for hash_ in names if hash_ not in leased]:
                with self._room.lock:
                    here = {
                        hash_: self._room.table.entries[hash_] for hash_ in missing if hash_ in self._room.table.entries
                    }
                    # First, so that making room for the others does not evict them.
                    for hash_, entry in here.items():
                        self._room.table.lease(entry, holder)
                        leased[hash_] = entry
                    absent = {hash_: wanted[names[hash_]] for hash_ in missing if hash_ not in here}
                    if absent:
                        what = f"{len(absent)} tensors for {holder} ({_some(names[hash_] for hash_ in absent)})"
                        evicted += self._room.make_room(self._sizes(absent), what)
                    fresh = self._expect(absent)
                    for entry in fresh.values():
                        self._room.table.lease(entry, holder)
                    leased |= fresh
                added_bytes += self._upload(fresh, names, wanted, views)
                # After our own: two callers may wait for each other's. What somebody else failed at, we try ourselves.
                for hash_, entry in here.items():
                    if (copy := entry.thing) is None or not copy.arrived.result():
                        del leased[hash_]
            tensors = {name: self._tensor(leased.get(key.sha256), key) for name, key in wanted.items()}
            evicted += self.forwards.take_working(holder, working_bytes, workspace_bytes)
        except BaseException:
            with self._room.lock:
                for entry in leased.values():
                    self._room.table.unlease(entry, holder)
            raise
        wanted_bytes = sum(wanted[names[hash_]].nbytes for hash_ in leased)
        return Acquired(tensors, self._report(wanted_bytes, wanted_bytes - added_bytes, added_bytes, start_s, evicted))

    def hold(self, hashes: Iterable[str], holder: str) -> None:
        """Lease those that are here or on their way, for what is acquired next: making room then spares them."""
        with self._room.lock:
            for hash_ in set(hashes):
                if (entry := self._room.table.entries.get(hash_)) is not None:
                    self._room.table.lease(entry, holder)

    def end_holder(self, holder: str) -> None:
        """Give back all leases of `holder`."""
        with self._room.lock:
            self._room.table.end_holder(holder)

    def release(self, hashes: Iterable[str], holder: str) -> None:
        """Give back one lease of each. Unknown hashes and holders are ignored: releasing twice is not an error."""
        with self._room.lock:
            for key in set(hashes):
                self._room.table.release(key, holder)
            self.forwards.give_back(holder)

    def prefetch(self, wanted: Mapping[str, DeviceKey], views: HostViews) -> ArenaReport:
        """Upload, without a lease, as much of `wanted` as has room that costs nothing leased, pinned, more valuable
        or prefetched by somebody else; the first of `wanted` come first. What has no room is left out.

        Raises WeightsError when a view is not what `wanted` says, and what `views` raises.
        """
        start_s = self._clock()
        names = _names_by_hash(wanted)
        keys = {hash_: wanted[name] for hash_, name in names.items()}
        with self._room.lock:
            here = [entry for hash_ in keys if (entry := self._room.table.entries.get(hash_)) is not None]
            take, victims = self._room.plan_prefetch(self._sizes(keys))
            for entry in here:
                self._room.table.announce(entry)
            fresh = self._expect({hash_: keys[hash_] for hash_ in take}, prefetched=True)
        added_bytes = self._upload(fresh, names, wanted, views)
        wanted_bytes = sum(key.nbytes for key in keys.values())
        here_bytes = sum(keys[entry.key].nbytes for entry in here)
        return self._report(wanted_bytes, here_bytes, added_bytes, start_s, victims)

    def pin(self, hashes: Iterable[str]) -> None:
        """Never evict these, nor when they come only later."""
        with self._room.lock:
            self._room.table.pin(hashes)

    def unpin(self, hashes: Iterable[str]) -> None:
        """Let these be evicted again."""
        with self._room.lock:
            self._room.table.unpin(hashes)

    def invalidate(self, is_damaged: Callable[[DeviceKey], bool]) -> list[str]:
        """Give out no more what was uploaded, or is being, for these keys: the host's bytes were not theirs.

        The next `acquire` uploads them anew. Who leases them keeps them; their memory counts until it lets go. Returns
        their hashes.
        """
        with self._room.lock:
            found = [
                entry for entry in self._room.table.entries.values() if entry.thing and is_damaged(entry.thing.key)
            ]
            for entry in found:
                self._room.table.invalidate(entry)
            return [entry.key for entry in found]

    def resize(self, budget_bytes: int) -> tuple[str, ...]:
        """Change the budget and evict what no longer fits; returns what. Raises BudgetExceeded; the budget stays."""
        with self._room.lock:
            return self._room.resize(budget_bytes)

    def open_stream(self, plan: BlockPlan, hosts: Mapping[str, torch.Tensor]) -> BlockStream:
        """Return the stream of a module's blocks; `hosts` has their tensors. Raises DeviceFull.

        Its buffers are working memory, which an `acquire` of its holder has made room for.
        """
        return BlockStream(plan, hosts, self._space)

    def size_of(self, nbytes: int) -> int:
        """Return the bytes that a tensor of `nbytes` bytes takes on the device."""
        return self._space.size_of(nbytes)

    def stats(self) -> ArenaStats:
        """Return a snapshot. Looks at every tensor."""
        with self._room.lock:
            return ArenaStats(
                device=self._space.name,
                budget_bytes=self._room.budget_bytes,
                num_tensors=len(self._room.table.entries),
                resident_bytes=self._room.table.used_bytes,
                leased_bytes=self._room.table.here.leased,
                pinned_bytes=self._room.table.here.pinned,
                arriving_bytes=sum(entry.nbytes for entry in self._room.table.entries.values() if not entry.is_here),
                lingering_bytes=self._room.lingering_bytes(),
                moved_bytes=self._room.moved_bytes,
                num_evicted=self._room.table.num_evicted,
                kernel_bytes=self._kernel_bytes,
            )

    def bytes_by_holder(self) -> dict[str, int]:
        """Return the bytes that each holder has leased, the most first."""
        with self._room.lock:
            return self._room.table.bytes_by_holder()

    def _sizes(self, keys: Mapping[str, DeviceKey]) -> dict[str, int]:
        """Return the bytes that these tensors take on the device, by hash."""
        return {hash_: self._space.size_of(key.nbytes) for hash_, key in keys.items()}

    def _expect(
        self, keys: Mapping[str, DeviceKey], *, prefetched: bool = False
    ) -> dict[str, Entry[DeviceCopy | None]]:
        """New entries, for which there is room already, by hash. Who made them uploads them together."""
        arrived: Future[bool] = Future()
        fresh: dict[str, Entry[DeviceCopy | None]] = {}
        for hash_, key in keys.items():
            fresh[hash_] = self._room.table.expect(hash_, self._space.size_of(key.nbytes), prefetched=prefetched)
            fresh[hash_].thing = DeviceCopy(key, arrived)
        return fresh

    def _upload(
        self,
        fresh: Mapping[str, Entry[DeviceCopy | None]],
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
            with self._room.lock:
                for entry in fresh.values():
                    self._room.table.fail(entry)
            arrived.set_result(False)
            raise
        added_bytes = sum(wanted[names[hash_]].nbytes for hash_ in fresh)
        with self._room.lock:
            for (hash_, entry), base in zip(fresh.items(), bases, strict=True):
                copies[hash_].base = base
                self._room.table.arrive(entry, copies[hash_], 1 << (entry.nbytes.bit_length() - 1))
            self._room.note_upload(added_bytes, upload_s)
        arrived.set_result(True)
        return added_bytes

    def _tensor(self, entry: Entry[DeviceCopy | None] | None, key: DeviceKey) -> torch.Tensor:
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
