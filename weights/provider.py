"""The border between tensors and where their bytes come from: extent ids in, read-only buffers out."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from weights.manifest import ExtentRef
from weights.reading.extents import ByteArray, read_extent


class ExtentProvider(Protocol):
    """Gives the bytes of extents. Loaders and engines cannot tell a local store from a node's shared memory."""

    def fetch(self, extents: Sequence[ExtentRef]) -> Mapping[str, ByteArray]:
        """Read-only uint8 arrays by extent id, valid as long as they are referenced.

        Raises ExtentCorrupt when storage does not have the bytes, BudgetExceeded when they do not fit.
        """
        ...


class LocalExtents:
    """Reads the store of this machine, extents in parallel. Keeps nothing: the caller's views keep the bytes."""

    def __init__(self, packs: Path, *, num_threads: int | None = None) -> None:
        self._packs = packs
        self._num_threads = num_threads or min(8, (os.cpu_count() or 1) * 2)

    def fetch(self, extents: Sequence[ExtentRef]) -> Mapping[str, ByteArray]:
        with concurrent.futures.ThreadPoolExecutor(self._num_threads) as pool:
            arrays = list(pool.map(lambda extent: read_extent(self._packs, extent), extents))
        for array in arrays:
            array.flags.writeable = False
        return {extent.id: array for extent, array in zip(extents, arrays, strict=True)}
