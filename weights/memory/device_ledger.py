"""The books of a device arena: what is there, who leases it, how popular it is, what had to go. Not thread-safe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weights.errors import BudgetExceeded
from weights.memory.device_records import DeviceKey
from weights.residency import Popularity, Resident, plan_eviction, plan_prefetch

MAX_REMEMBERED: Final = 100_000  # tensors that are gone and whose popularity is still known


@dataclass(eq=False, slots=True)
class Entry:
    """A tensor that is on the device or on its way there; `key` says where it was uploaded from."""

    key: DeviceKey
    nbytes: int
    last_used: float
    reload_s: float | None
    holders: Counter[str]
    arrived: Future[bool]  # of all that are uploaded together; False: that failed, and the entry is no more
    base: torch.Tensor | None = None  # 1-D uint8; None while it is on its way
    is_expected: bool = False  # prefetched, and not used since
    is_condemned: bool = False  # what arrives is not to be kept


class DeviceLedger:
    """All of it by hash. Its own memory is bounded by what is resident and MAX_REMEMBERED."""

    def __init__(
        self,
        device: str,
        budget_bytes: int,
        half_life_s: float,
        reload_s: Callable[[DeviceKey], float] | None,
        on_evict: Callable[[Sequence[str]], None],
        *,
        owns_memory: bool,
    ) -> None:
        """`owns_memory` False: the bytes are somebody else's, and count only as long as they are in the books."""
        self.entries: dict[str, Entry] = {}
        self.pinned: set[str] = set()
        self.budget_bytes = budget_bytes
        self.num_evicted = 0
        self._device = device
        self._never_used = Popularity(half_life_s)
        self._reload_s = reload_s
        self._on_evict = on_evict
        self._owns_memory = owns_memory
        self._popularity: dict[str, Popularity] = {}
        self._lingering: list[tuple[StorageWeakRef, int]] = []

    @property
    def resident_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def lingering_bytes(self) -> int:
        """Of tensors that were evicted and that somebody still uses."""
        self._lingering = [(weak, nbytes) for weak, nbytes in self._lingering if not weak.expired()]  # type: ignore[no-untyped-call]
        return sum(nbytes for _, nbytes in self._lingering)

    def residents(self, now_s: float) -> list[Resident]:
        return [
            Resident(
                hash_,
                entry.nbytes,
                entry.last_used,
                entry.holders.total(),
                entry.reload_s,
                self._popularity.get(hash_, self._never_used).value(now_s),
                pinned=hash_ in self.pinned or entry.base is None,
            )
            for hash_, entry in self.entries.items()
        ]

    def bytes_by_holder(self) -> dict[str, int]:
        """Bytes leased by each; what two of them share counts for both."""
        held: Counter[str] = Counter()
        for entry in self.entries.values():
            for holder in entry.holders:
                held[holder] += entry.nbytes
        return dict(held)

    def claim(self, keys: Iterable[DeviceKey], now_s: float, holder: str | None) -> dict[str, Entry]:
        """New entries, for which there must be room already, by hash."""
        arrived: Future[bool] = Future()
        fresh = {
            key.sha256: Entry(
                key,
                key.nbytes,
                now_s,
                self._reload_s(key) if self._reload_s else None,
                Counter([holder] if holder is not None else []),
                arrived,
            )
            for key in keys
        }
        self.entries |= fresh
        return fresh

    def fill(self, fresh: Mapping[str, Entry], bases: Iterable[torch.Tensor]) -> None:
        """The entries of one claim, at least one, have arrived."""
        for (hash_, entry), base in zip(fresh.items(), bases, strict=True):
            entry.base = base
            if entry.is_condemned:
                self._forget(hash_)
        next(iter(fresh.values())).arrived.set_result(True)

    def abandon(self, fresh: Mapping[str, Entry]) -> None:
        """The entries of one claim, at least one, will not arrive."""
        for hash_ in fresh:
            del self.entries[hash_]
        next(iter(fresh.values())).arrived.set_result(False)

    def use(self, hash_: str, entry: Entry, now_s: float) -> None:
        """A use counts once: a prefetch counted it early."""
        if not entry.is_expected:
            self._touch(hash_, now_s)
        entry.is_expected = False
        entry.last_used = now_s

    def expect(self, hashes: Iterable[str], now_s: float) -> None:
        for hash_ in hashes:
            if not self.entries[hash_].is_expected:
                self._touch(hash_, now_s)
                self.entries[hash_].is_expected = True

    def make_room(self, needed_bytes: int, what: str, now_s: float) -> list[str]:
        """Evict until `needed_bytes` are free; returns what. Raises BudgetExceeded saying who holds the memory."""
        evicted: list[str] = []
        # Again when somebody still uses what went, so that its memory is not free.
        while self.resident_bytes + (lingering_bytes := self.lingering_bytes) + needed_bytes > self.budget_bytes:
            plan = plan_eviction(self.residents(now_s), needed_bytes + lingering_bytes, self.budget_bytes)
            if plan.missing_bytes:
                raise BudgetExceeded(
                    f"{what} need {needed_bytes} bytes on {self._device}; {plan.missing_bytes} bytes are missing under "
                    f"its budget of {self.budget_bytes} (held by: {self._who_holds()})"
                )
            evicted += self._evict(plan.evict)
        return evicted

    def make_spare_room(self, keys: Mapping[str, DeviceKey], now_s: float) -> tuple[list[str], list[str]]:
        """For those of `keys` that are worth more than what has to go; returns (hashes with room, evicted).

        What another prefetch brought for a use to come stays, or two of them could go on displacing each other.
        """
        stay = {hash_ for hash_, entry in self.entries.items() if entry.is_expected or hash_ in keys}
        residents = [
            replace(resident, pinned=resident.pinned or resident.key in stay) for resident in self.residents(now_s)
        ]
        newcomers = [
            Resident(
                hash_,
                key.nbytes,
                now_s,
                reload_s=self._reload_s(key) if self._reload_s else None,
                popularity=self._popularity.get(hash_, self._never_used).touch(now_s).value(now_s),
            )
            for hash_, key in keys.items()
            if hash_ not in self.entries
        ]
        plan = plan_prefetch(residents, newcomers, self.budget_bytes - self.lingering_bytes)
        evicted = self._evict(plan.evict)
        take = list(plan.take)
        free_bytes = self.budget_bytes - self.lingering_bytes - self.resident_bytes
        while sum(keys[hash_].nbytes for hash_ in take) > free_bytes:  # what went is still in use
            take.pop()
        return take, evicted

    def condemn(self, is_damaged: Callable[[DeviceKey], bool]) -> list[str]:
        """Forget those, and what of them is on its way; who leases them keeps them. Returns their hashes."""
        found = [hash_ for hash_, entry in self.entries.items() if is_damaged(entry.key)]
        if found:
            self._on_evict(found)
        for hash_ in found:
            if self.entries[hash_].base is None:
                self.entries[hash_].is_condemned = True
            else:
                self._forget(hash_)
        return found

    def _forget(self, hash_: str) -> Entry:
        """Out of the books; its memory is free when nobody uses it any more."""
        entry = self.entries.pop(hash_)
        if self._owns_memory and entry.base is not None:
            self._lingering.append((StorageWeakRef(entry.base.untyped_storage()), entry.nbytes))  # type: ignore[no-untyped-call]
        return entry

    def _evict(self, hashes: Sequence[str]) -> list[str]:
        if hashes:
            self._on_evict(hashes)
        for hash_ in hashes:
            self._forget(hash_).base = None
        self.num_evicted += len(hashes)
        return list(hashes)

    def _touch(self, hash_: str, now_s: float) -> None:
        self._popularity[hash_] = self._popularity.get(hash_, self._never_used).touch(now_s)
        if len(self._popularity) > len(self.entries) + 2 * MAX_REMEMBERED:
            gone = sorted(
                (hash_ for hash_ in self._popularity if hash_ not in self.entries),
                key=lambda hash_: self._popularity[hash_].value(now_s),
            )
            for hash_ in gone[:-MAX_REMEMBERED]:
                del self._popularity[hash_]

    def _who_holds(self) -> str:
        parts = [f"{holder} {nbytes}" for holder, nbytes in sorted(self.bytes_by_holder().items())]
        pinned_bytes = sum(entry.nbytes for hash_, entry in self.entries.items() if hash_ in self.pinned)
        arriving_bytes = sum(e.nbytes for e in self.entries.values() if e.base is None and not e.holders)
        for label, nbytes in (
            ("pinned", pinned_bytes),
            ("prefetches under way", arriving_bytes),
            ("evicted but still in use", self.lingering_bytes),
        ):
            if nbytes:
                parts.append(f"{label} {nbytes}")
        return ", ".join(parts) or "nobody"
