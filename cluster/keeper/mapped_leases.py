"""A replica's mappings of its node's extents, and its leases on them as the keeper counts them. Ray-free."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cluster.keeper.records import HeldOffer, LeasedRefs, copy_name
from weights.memory.host_pool import ByteArray
from weights.records.manifest import ExtentRef
from weights.residency.recent import Recent

MAX_REMEMBERED: Final = 65_536  # copies given to this replica, which may have made modules of them


@dataclass
class _Mapped:
    """An extent that is mapped here. Reference and view keep it alive when its owner, the keeper, dies.

    `num_leases` is the keeper's count, `num_uses` the number of fetches not released.
    """

    extent: ExtentRef
    ref: Any
    view: ByteArray
    num_leases: int
    num_uses: int
    is_damaged: bool = False


@dataclass(frozen=True, slots=True)
class GivenBack:
    """Leases to give back: an extent id for each, of a generation."""

    ids: list[str]
    generation: str


class MappedLeases:
    """The leases of one replica with its present keeper, which `generation` names if it is known. Thread-safe.

    With `keeps`, one lease on an unused extent stays until it is recalled.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.generation = ""
        self._keeps = keeps
        self._lock = threading.Lock()
        self._mapped: dict[str, _Mapped] = {}
        self._called: set[str] = set()  # recalled: released once they are unused
        self._uses: Counter[str] = Counter()  # of kept extents, since the last heartbeat
        self._given: Recent[str, str] = Recent(MAX_REMEMBERED)  # extent ids by copy
        self._offered: dict[str, int] = {}  # leases by id, in an offer under way

    def use_kept(self, extents: Sequence[ExtentRef]) -> Mapping[str, ByteArray] | None:
        """Return the views, used once more; None unless all are mapped, sound and not recalled."""
        if not self._keeps:
            return None
        with self._lock:
            mapped = [self._mapped.get(extent.id) for extent in extents]
            if not all(found and not found.is_damaged and found.extent.id not in self._called for found in mapped):
                return None
            for found in filter(None, mapped):
                found.num_uses += 1
                self._uses[found.extent.id] += 1
            return {found.extent.id: found.view for found in mapped if found}

    def keep(
        self, extents: Sequence[ExtentRef], acquired: LeasedRefs, found: Mapping[str, ByteArray]
    ) -> GivenBack | None:
        """Take in leases and views. Return the unneeded leases.

        None if the keeper that gave the leases was replaced since: they ended with it.
        """
        with self._lock:
            if self.generation != acquired.generation:
                return None
            surplus: list[str] = []
            for extent in extents:
                id_, before = extent.id, self._mapped.get(extent.id)
                # The newest copy: an older one may be damaged and given up by the keeper.
                self._mapped[id_] = mapped = _Mapped(extent, acquired.refs[id_], found[id_], 1, 1)
                if before:
                    mapped.num_leases += before.num_leases
                    mapped.num_uses += before.num_uses
                self._called.discard(id_)
                surplus += self._surplus(mapped)
            return GivenBack(surplus, acquired.generation)

    def release(self, extents: Sequence[ExtentRef]) -> GivenBack:
        """End one use of each. Return the leases no longer needed."""
        with self._lock:
            ids: list[str] = []
            for extent in extents:
                mapped = self._mapped.get(extent.id)
                if mapped and mapped.num_uses:
                    mapped.num_uses -= 1
                    ids += self._surplus(mapped)
            return GivenBack(ids, self.generation)

    def note_uses(self, extents: Sequence[ExtentRef]) -> None:
        """Count a use of fetched extents."""
        with self._lock:
            self._uses.update(extent.id for extent in extents)

    def take_uses(self) -> dict[str, int]:
        """Return the uses by extent id that were counted since the last call."""
        with self._lock:
            uses, self._uses = self._uses, Counter()
            return dict(uses)

    def call_back(self, ids: Collection[str]) -> str:
        """Recall these: keep them only while they are used. Return the generation."""
        with self._lock:
            self._called.update(id_ for id_ in ids if id_ in self._mapped)
            return self.generation

    def is_called_back(self, extents: Sequence[ExtentRef]) -> bool:
        """Return whether one of them is recalled."""
        return bool(self._called) and not self._called.isdisjoint(extent.id for extent in extents)

    def forget_calls(self) -> None:
        """Cancel the recalls: their bytes are no longer needed, and the leases stay."""
        with self._lock:
            self._called.clear()

    def surplus_of(self, ids: Sequence[str]) -> GivenBack:
        """Return the unneeded leases on these extents."""
        with self._lock:
            found = filter(None, map(self._mapped.get, ids))
            return GivenBack([id_ for mapped in found for id_ in self._surplus(mapped)], self.generation)

    def note_given(self, refs: Mapping[str, Any]) -> None:
        """Note which copies this replica was given, by extent id."""
        with self._lock:
            for id_, ref in refs.items():
                self._given.note(copy_name(ref), id_)

    def note_damage(self, copies: Sequence[str]) -> tuple[list[str], GivenBack]:
        """Return the extents of the given damaged copies, each copy once, and the leases to give back."""
        with self._lock:
            damaged = [self._given.pop(copy) for copy in copies if copy in self._given]
            ids: list[str] = []
            for id_ in damaged:
                if mapped := self._mapped.get(id_):
                    mapped.is_damaged = True
                    ids += self._surplus(mapped)
            return damaged, GivenBack(ids, self.generation)

    def begin_offer(self) -> list[HeldOffer]:
        """Return all mapped extents for an offer. A late answer of the previous keeper is not recorded any more."""
        with self._lock:
            self.generation = ""
            self._offered = {id_: mapped.num_leases for id_, mapped in self._mapped.items()}
            return [HeldOffer(mapped.extent, mapped.ref, mapped.num_leases) for mapped in self._mapped.values()]

    def end_offer(self, generation: str) -> GivenBack:
        """Note that a keeper has adopted the offer. Return leases given back meanwhile, which it still counts."""
        with self._lock:
            self.generation = generation
            surplus = [
                id_
                for id_, count in self._offered.items()
                for _ in range(count - (self._mapped[id_].num_leases if id_ in self._mapped else 0))
            ]
            return GivenBack(surplus, generation)

    def _surplus(self, mapped: _Mapped) -> list[str]:
        """Return the ids of unneeded leases, one per lease. With the lock held."""
        id_ = mapped.extent.id
        is_kept = self._keeps and not mapped.is_damaged and id_ not in self._called
        needed = max(mapped.num_uses, 1 if is_kept else 0)
        num_surplus = max(0, mapped.num_leases - needed)
        mapped.num_leases -= num_surplus
        if not mapped.num_leases:
            del self._mapped[id_]
            self._called.discard(id_)
        return [id_] * num_surplus
