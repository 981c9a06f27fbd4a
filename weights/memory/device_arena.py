"""The weights on one device, by content: what is there already is never uploaded again, whichever model brought it.

Weights are immutable, so nothing is ever copied back: eviction drops the reference. Every tensor is an allocation
of its own. What is shared and evicted is the tensor; one block per model or extent could only be freed as a whole,
and torch's allocator reuses, splits and joins blocks well enough (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
keeps it from fragmenting). Freed memory goes back to that allocator, which gives it to activations as well.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import torch

from weights.errors import WeightsError
from weights.memory.device_ledger import DeviceLedger, Entry
from weights.memory.device_records import Acquired, ArenaReport, ArenaStats, DeviceKey, HostViews
from weights.memory.device_space import DeviceSpace, bytes_of, tensor_of
from weights.memory.transfer import Transfer
from weights.residency import Resident

HALF_LIFE_S: Final = 600.0


class DeviceArena:
    """Tensors of one device by the hash of their bytes, under a byte budget. Thread-safe.

    Uploads run outside the lock; of several callers that need the same tensor, one uploads it. `reload_s` says what
    it takes to get a tensor back (None: all cost alike per byte). `on_evict` hears of hashes that are about to go, so
    that whoever keeps views without a lease, such as a module skeleton, lets go of them; it is called under the lock
    and must not call the arena.

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
        *,
        half_life_s: float = HALF_LIFE_S,
        reload_s: Callable[[DeviceKey], float] | None = None,
        on_evict: Callable[[Sequence[str]], None] = lambda hashes: None,
    ) -> None:
        self._space = DeviceSpace(device, transfer)
        self._ledger = DeviceLedger(
            self._space.name, budget_bytes, half_life_s, reload_s, on_evict, owns_memory=self._space.copies
        )
        self._clock = clock
        self._lock = threading.Lock()
        self._moved_bytes = 0

    def acquire(self, wanted: Mapping[str, DeviceKey], views: HostViews, holder: str) -> Acquired:
        """The tensors by name, each hash leased to `holder` once more until it is released.

        Only what is missing is asked of `views` and uploaded. Raises BudgetExceeded when there is no room for all of
        it (then nothing is uploaded and nothing more is leased), WeightsError when a view is not what `wanted` says,
        and what `views` raises.
        """
        start_s = self._clock()
        names = _names_by_hash(wanted)
        leased: dict[str, Entry] = {}
        evicted: list[str] = []
        added_bytes = 0
        try:
            while missing := [hash_ for hash_ in names if hash_ not in leased]:
                with self._lock:
                    here = {hash_: self._ledger.entries[hash_] for hash_ in missing if hash_ in self._ledger.entries}
                    # First, so that making room for the others does not evict them.
                    for hash_, entry in here.items():
                        entry.holders[holder] += 1
                        leased[hash_] = entry
                    absent = [wanted[names[hash_]] for hash_ in missing if hash_ not in here]
                    if absent:
                        what = f"{len(absent)} tensors for {holder} ({_some(names[key.sha256] for key in absent)})"
                        evicted += self._ledger.make_room(sum(key.nbytes for key in absent), what, start_s)
                    fresh = self._ledger.claim(absent, start_s, holder)
                    leased |= fresh
                added_bytes += self._upload(fresh, names, wanted, views)
                # After our own: two callers may wait for each other's. What somebody else failed at, we try ourselves.
                failed = {arrived for arrived in {entry.arrived for entry in here.values()} if not arrived.result()}
                for hash_, entry in here.items():
                    if entry.arrived in failed:
                        del leased[hash_]
            tensors = {name: self._tensor(leased.get(key.sha256), key) for name, key in wanted.items()}
        except BaseException:
            with self._lock:
                for entry in leased.values():
                    entry.holders -= Counter([holder])
            raise
        now_s = self._clock()
        with self._lock:
            for hash_, entry in leased.items():
                self._ledger.use(hash_, entry, now_s)
        wanted_bytes = sum(entry.nbytes for entry in leased.values())
        return Acquired(tensors, self._report(wanted_bytes, wanted_bytes - added_bytes, added_bytes, start_s, evicted))

    def release(self, hashes: Iterable[str], holder: str) -> None:
        """Give back one lease of each. Unknown hashes and holders are ignored: releasing twice is not an error."""
        with self._lock:
            for hash_ in set(hashes):
                if entry := self._ledger.entries.get(hash_):
                    entry.holders -= Counter([holder])

    def release_all(self, holder: str) -> None:
        """Everything that `holder` leases, however often: it is done, or it died."""
        with self._lock:
            for entry in self._ledger.entries.values():
                del entry.holders[holder]

    def prefetch(self, wanted: Mapping[str, DeviceKey], views: HostViews) -> ArenaReport:
        """Upload, without a lease, as much of `wanted` as has room that costs nothing leased, pinned, more valuable
        or prefetched by somebody else; the first of `wanted` come first. What has no room is left out.

        Raises WeightsError when a view is not what `wanted` says, and what `views` raises.
        """
        start_s = self._clock()
        names = _names_by_hash(wanted)
        keys = {hash_: wanted[name] for hash_, name in names.items()}
        with self._lock:
            reused_bytes = sum(key.nbytes for hash_, key in keys.items() if hash_ in self._ledger.entries)
            take, evicted = self._ledger.make_spare_room(keys, start_s)
            fresh = self._ledger.claim([keys[hash_] for hash_ in take], start_s, None)
            self._ledger.expect((hash_ for hash_ in keys if hash_ in self._ledger.entries), start_s)
        added_bytes = self._upload(fresh, names, wanted, views)
        wanted_bytes = sum(key.nbytes for key in keys.values())
        return self._report(wanted_bytes, reused_bytes, added_bytes, start_s, evicted)

    def pin(self, hashes: Iterable[str]) -> None:
        """Never evict these, nor when they come only later."""
        with self._lock:
            self._ledger.pinned.update(hashes)

    def unpin(self, hashes: Iterable[str]) -> None:
        with self._lock:
            self._ledger.pinned.difference_update(hashes)

    def condemn(self, is_damaged: Callable[[DeviceKey], bool]) -> list[str]:
        """Give out no more what was uploaded, or is being, for these keys: the host's bytes were not theirs.

        The next `acquire` uploads them anew. Who leases them keeps them; their memory counts until it lets go. Returns
        their hashes.
        """
        with self._lock:
            return self._ledger.condemn(is_damaged)

    def resize(self, budget_bytes: int) -> tuple[str, ...]:
        """Change the budget and evict what no longer fits; returns what.

        Raises BudgetExceeded when too much is leased or pinned; the budget stays as it was.
        """
        with self._lock:
            before, self._ledger.budget_bytes = self._ledger.budget_bytes, budget_bytes
            try:
                return tuple(self._ledger.make_room(0, "the tensors that are there", self._clock()))
            except BaseException:
                self._ledger.budget_bytes = before
                raise

    def residents(self) -> tuple[Resident, ...]:
        """What is there or on its way (that counts as pinned), by hash."""
        with self._lock:
            return tuple(self._ledger.residents(self._clock()))

    def bytes_by_holder(self) -> dict[str, int]:
        """Bytes that each holder leases; what two of them share counts for both."""
        with self._lock:
            return self._ledger.bytes_by_holder()

    def stats(self) -> ArenaStats:
        with self._lock:
            entries = self._ledger.entries
            return ArenaStats(
                device=self._space.name,
                budget_bytes=self._ledger.budget_bytes,
                num_tensors=len(entries),
                resident_bytes=self._ledger.resident_bytes,
                leased_bytes=sum(entry.nbytes for entry in entries.values() if entry.holders),
                pinned_bytes=sum(entry.nbytes for hash_, entry in entries.items() if hash_ in self._ledger.pinned),
                arriving_bytes=sum(entry.nbytes for entry in entries.values() if entry.base is None),
                lingering_bytes=self._ledger.lingering_bytes,
                moved_bytes=self._moved_bytes,
                num_evicted=self._ledger.num_evicted,
            )

    def _upload(
        self, fresh: Mapping[str, Entry], names: Mapping[str, str], wanted: Mapping[str, DeviceKey], views: HostViews
    ) -> int:
        """Bytes added. Whatever happens, those who wait for these entries hear of it."""
        if not fresh:
            return 0
        try:
            missing = [names[hash_] for hash_ in fresh]
            found = views(missing) if callable(views) else views
            for name in missing:
                if name not in found:
                    raise WeightsError(f"tensor {name!r}: there is no host view of it (given: {len(found)} others)")
            bases = self._space.place([bytes_of(name, wanted[name], found[name]) for name in missing])
        except BaseException:
            with self._lock:
                self._ledger.abandon(fresh)
            raise
        added_bytes = sum(entry.nbytes for entry in fresh.values())
        with self._lock:
            self._ledger.fill(fresh, bases)
            self._moved_bytes += added_bytes if self._space.copies else 0
        return added_bytes

    def _tensor(self, entry: Entry | None, key: DeviceKey) -> torch.Tensor:
        if entry is None or entry.base is None:  # a tensor without bytes
            return tensor_of(torch.empty(0, dtype=torch.uint8, device=self._space.device), key)
        return tensor_of(entry.base, key)

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
