"""Writing what the store does not have yet: into one `combined` pack, or one file per tensor (`separate`).

Tensors are 512-byte aligned (the external-weight file format of Ascend GE), extents 4 KiB aligned for direct I/O.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import xxhash

from weights.errors import ExtentCorrupt
from weights.manifest import EXTENT_ALIGNMENT, TENSOR_ALIGNMENT, ExtentRef, extent_id
from weights.reading.extents import read_extent
from weights.storage.durable import sync
from weights.storage.hashing import HashedTensor
from weights.storage.meta import StoreMeta

# A reader stages whole extents: this many bytes per buffer. And it is what models share: of an extent of which one
# tensor differs, nothing is shared in memory.
MAX_EXTENT_BYTES: Final = 64 * 2**20
WRITE_THREADS: Final = 8


def write_combined(path: Path, pack: str, meta: StoreMeta, components: Iterable[Iterable[HashedTensor]]) -> bool:
    """Write to `path` the tensors that `meta` lacks, and enter them as lying in `pack`. False: there were none.

    Each component begins an extent of its own, so that pipelines that share a component share whole extents.
    """
    known = len(meta.tensors)
    with path.open("wb") as file:
        writer = _CombinedPack(file, pack, meta)
        for tensors in components:
            for tensor in tensors:
                writer.add(tensor)
            writer.close_extent()
        file.flush()
        os.fsync(file.fileno())
    return len(meta.tensors) > known


def write_separate(folder: Path, packs: Path, meta: StoreMeta, tensors: Iterable[HashedTensor]) -> dict[str, Path]:
    """Write to `folder` the tensors that `meta` lacks, each as `weight_<sha256>`, and enter them; files by pack name.

    A file of that name that is in `packs` already, left by a writer that died, is taken when its bytes are right.
    """
    unknown = {tensor.sha256: tensor for tensor in tensors if tensor.sha256 not in meta.tensors}
    extents = {sha256: _separate_extent(tensor) for sha256, tensor in unknown.items()}
    folder.mkdir()

    def write(sha256: str) -> str | None:
        extent = extents[sha256]
        if _is_whole(packs, extent):
            return None
        path = folder / extent.pack
        path.write_bytes(unknown[sha256].read())
        sync(path)
        return extent.pack

    with concurrent.futures.ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="write") as pool:
        written = {pack: folder / pack for pack in pool.map(write, unknown) if pack}
    for sha256, extent in extents.items():
        meta.add(extent, {sha256: 0})
    return written


def _separate_extent(tensor: HashedTensor) -> ExtentRef:
    return ExtentRef(
        id=extent_id([tensor.sha256]),
        pack=f"weight_{tensor.sha256}",
        offset=0,
        nbytes=tensor.nbytes,
        checksum=tensor.checksum,
    )


def _is_whole(packs: Path, extent: ExtentRef) -> bool:
    path = packs / extent.pack
    if path.is_symlink() or not path.is_file() or path.stat().st_size != extent.nbytes:
        return False
    try:
        read_extent(packs, extent)
    except ExtentCorrupt:
        return False
    return True


@dataclass
class _OpenExtent:
    start: int
    offsets: dict[str, int] = field(default_factory=dict)


class _CombinedPack:
    """Appends the tensors that the store does not have yet."""

    def __init__(self, file: BinaryIO, name: str, meta: StoreMeta) -> None:
        self._file = file
        self._name = name
        self._meta = meta
        self._extent: _OpenExtent | None = None
        self._digest = xxhash.xxh3_128()

    def add(self, tensor: HashedTensor) -> None:
        if tensor.sha256 in self._meta.tensors or (self._extent and tensor.sha256 in self._extent.offsets):
            return
        position = self._file.tell()
        position += -position % TENSOR_ALIGNMENT
        if self._extent and position + tensor.nbytes - self._extent.start > MAX_EXTENT_BYTES:
            self.close_extent()
        if self._extent is None:
            self._pad(EXTENT_ALIGNMENT, in_extent=False)
            self._extent = _OpenExtent(self._file.tell())
            self._digest.reset()
        else:
            self._pad(TENSOR_ALIGNMENT, in_extent=True)
        self._extent.offsets[tensor.sha256] = self._file.tell() - self._extent.start
        data = tensor.read()
        self._file.write(data)
        self._digest.update(data)

    def close_extent(self) -> None:
        """End the extent, if one is open, and enter it and its tensors."""
        if self._extent is None:
            return
        extent, self._extent = self._extent, None
        ref = ExtentRef(
            id=extent_id(extent.offsets),
            pack=self._name,
            offset=extent.start,
            nbytes=self._file.tell() - extent.start,
            checksum=self._digest.hexdigest(),
        )
        self._meta.add(ref, extent.offsets)

    def _pad(self, alignment: int, *, in_extent: bool) -> None:
        padding = bytes(-self._file.tell() % alignment)
        self._file.write(padding)
        if in_extent:
            self._digest.update(padding)
