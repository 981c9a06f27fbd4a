"""The choice of extents that a component shares with the store, and a check of these before it relies on them."""

from __future__ import annotations

import concurrent.futures
import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import xxhash

from weights.errors import StoreError
from weights.manifest import TENSOR_ALIGNMENT, ExtentRef
from weights.reading.extents import read_extent
from weights.storage.hashing import HASH_THREADS, HashedTensor
from weights.storage.meta import StoreMeta

# An extent is read, leased and evicted as a whole: who wants less than this part of it has a copy of its own.
MIN_WANTED_PART: Final = 0.25


def shared_extents(wanted: Mapping[str, int], meta: StoreMeta) -> dict[str, str]:
    """Choose the extent of `meta` that each tensor is taken from; tensors missing here are to be written.

    `wanted` has the bytes of the component's tensors by sha256. The extent that has most of what is still wanted
    comes first; one of which less than MIN_WANTED_PART is still wanted is not shared.
    """
    inside: dict[str, dict[str, int]] = defaultdict(dict)
    for sha256, nbytes in wanted.items():
        for id_ in meta.tensors.get(sha256, ()):
            # With its padding: a bias of 24 bytes takes 512, and an extent of such is wanted whole.
            inside[id_][sha256] = nbytes + -nbytes % TENSOR_ALIGNMENT
    shared: dict[str, str] = {}
    best_first = [(-sum(tensors.values()), id_) for id_, tensors in inside.items()]
    heapq.heapify(best_first)
    while best_first:
        promised_bytes, id_ = heapq.heappop(best_first)
        left = {sha256: nbytes for sha256, nbytes in inside[id_].items() if sha256 not in shared}
        left_bytes = sum(left.values())
        if left_bytes != -promised_bytes:  # others took of it meanwhile
            if left:
                heapq.heappush(best_first, (-left_bytes, id_))
        elif left and left_bytes >= MIN_WANTED_PART * meta.extents[id_].nbytes:
            shared |= dict.fromkeys(left, id_)
    return shared


class SharedExtents:
    """Chooses which extents the components of one model share, and reads each of these once, whole.

    The whole, because whoever uses an extent does. An extent that is shared is at most four times as large as what is
    wanted of it, so this reads no more than that many times the model.
    """

    def __init__(self, packs: Path, components: Sequence[Collection[HashedTensor]]) -> None:
        self._packs = packs
        self._components = [{tensor.sha256: tensor.nbytes for tensor in tensors} for tensors in components]
        self._tensors = {tensor.sha256: tensor for tensors in components for tensor in tensors}
        self._sound: set[ExtentRef] = set()

    @property
    def hashes(self) -> Collection[str]:
        """Hashes of the tensors whose places are to be looked up."""
        return self._tensors.keys()

    def choose(self, known: StoreMeta) -> set[str]:
        """Leave in `known` what is to be shared; returns the ids of extents that were found to be damaged.

        What an earlier call has read is not read again. HAZARD: `known` must be fresh from the index: places that it
        had before may be holes by now.
        """
        damaged: set[str] = set()
        while True:
            chosen = set(self._wanted_ids(known))
            broken = self._broken([known.extent(id_) for id_ in sorted(chosen)], known)
            if not broken:
                known.forget_extents(known.extents.keys() - chosen)
                return damaged
            known.forget_extents(broken)
            damaged |= broken

    def _wanted_ids(self, known: StoreMeta) -> Iterator[str]:
        for tensors in self._components:
            yield from shared_extents(tensors, known).values()

    def _broken(self, extents: Collection[ExtentRef], known: StoreMeta) -> set[str]:
        unread = [extent for extent in extents if extent not in self._sound]
        with concurrent.futures.ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="check") as pool:
            is_sound = dict(zip(unread, pool.map(lambda extent: self._is_sound(extent, known), unread), strict=True))
        self._sound |= {extent for extent in unread if is_sound[extent]}
        return {extent.id for extent in unread if not is_sound[extent]}

    def _is_sound(self, extent: ExtentRef, known: StoreMeta) -> bool:
        """Check that the extent's bytes are those written, with the tensors where the index says."""
        try:
            data = read_extent(self._packs, extent)
        except StoreError:
            return False
        for sha256, offset in known.extents[extent.id].tensors.items():
            tensor = self._tensors[sha256]
            if xxhash.xxh3_128_hexdigest(data[offset : offset + tensor.nbytes].data) != tensor.checksum:
                return False
        return True
