"""Reading what is about to be shared: a place of the index is a hint, and bytes on a disk may have changed."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import xxhash

from weights.errors import StoreError
from weights.manifest import ExtentRef
from weights.reading.extents import read_extent
from weights.storage.hashing import HASH_THREADS, HashedTensor
from weights.storage.meta import StoreMeta
from weights.storage.sharing import shared_extents


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
        """The tensors whose places are to be looked up."""
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
                known.forget(known.extents.keys() - chosen)
                return damaged
            known.forget(broken)
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
        """Whether its bytes are what was written, and the tensors in them where the index says."""
        try:
            data = read_extent(self._packs, extent)
        except StoreError:
            return False
        for sha256, offset in known.extents[extent.id].tensors.items():
            tensor = self._tensors[sha256]
            if xxhash.xxh3_128_hexdigest(data[offset : offset + tensor.nbytes].data) != tensor.checksum:
                return False
        return True
