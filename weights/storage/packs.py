"""The choice of extents that a component shares with the store, a check of these before it relies on them, and writers
of what the store lacks: one `combined` pack, a file per tensor (`separate`), or `inline` files.

Tensors are 512-byte aligned (the external-weight file format of Ascend GE), extents 4 KiB aligned for direct I/O.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import heapq
import itertools
import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import xxhash

from weights.formats.tensors import FileTensor
from weights.platform.durable import sync
from weights.reading.extents import read_extent
from weights.records.dtypes import ITEM_BYTES
from weights.records.errors import ExtentCorrupt, FormatError, StoreError
from weights.records.manifest import EXTENT_ALIGNMENT, TENSOR_ALIGNMENT, ExtentRef, extent_id
from weights.storage.hashing import HASH_THREADS, HashedTensor, changed
from weights.storage.index import StoreMeta

# A reader stages whole extents: this many bytes per buffer. And it is what models share: of an extent of which one
# tensor differs, nothing is shared in memory.
MAX_EXTENT_BYTES: Final = 64 * 2**20
WRITE_THREADS: Final = 8
Placement = dict[str, str]  # the extent of each tensor of a component, both by id
_MAX_GAP_BYTES: Final = 4096  # between tensors of one extent; formats pad far less, and the id has to cover it
_CHUNK_BYTES: Final = 8 * 2**20
# An extent is read, leased and evicted as a whole: who wants less than this part of it has a copy of its own.
MIN_WANTED_PART: Final = 0.25


def _shared_extents(wanted: Mapping[str, int], meta: StoreMeta) -> dict[str, str]:
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
            yield from _shared_extents(tensors, known).values()

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


def write_combined(
    path: Path, pack: str, meta: StoreMeta, components: Iterable[Iterable[HashedTensor]]
) -> list[Placement]:
    """Write to `path` the tensors that are not shared with an extent of `meta`, and enter them as lying in `pack`.

    Each component begins an extent of its own, so that pipelines that share a component share whole extents.
    """
    with path.open("wb") as file:
        writer = _CombinedPack(file, pack, meta)
        placements = [writer.add_component(tensors) for tensors in components]
        file.flush()
        os.fsync(file.fileno())
    return placements


def write_separate(
    folder: Path, packs: Path, meta: StoreMeta, components: Iterable[Iterable[HashedTensor]]
) -> tuple[list[Placement], dict[str, Path]]:
    """Write to `folder` the tensors that are not shared, each as `weight_<sha256>`, and enter them; files by pack name.

    A file of that name that is in `packs` already, left by a writer that died, is taken when its bytes are right.
    """
    unknown: dict[str, HashedTensor] = {}
    placements = []
    for tensors in components:
        by_hash = {tensor.sha256: tensor for tensor in tensors}
        placement = _shared(by_hash.values(), meta)
        for sha256, tensor in by_hash.items():
            if sha256 not in placement:
                extent = _separate_extent(tensor)
                meta.add_extent(extent, {sha256: 0})
                placement[sha256] = extent.id
                unknown[sha256] = tensor
        placements.append(placement)
    folder.mkdir()

    def write(sha256: str) -> str | None:
        extent = _separate_extent(unknown[sha256])
        if _is_whole(packs, extent):
            return None
        path = folder / extent.pack
        path.write_bytes(unknown[sha256].read())
        sync(path)
        return extent.pack

    with concurrent.futures.ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="write") as pool:
        written = {pack: folder / pack for pack in pool.map(write, unknown) if pack}
    return placements, written


def _shared(tensors: Iterable[HashedTensor], meta: StoreMeta) -> Placement:
    return _shared_extents({tensor.sha256: tensor.nbytes for tensor in tensors}, meta)


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
    """Appends the tensors that are not shared."""

    def __init__(self, file: BinaryIO, name: str, meta: StoreMeta) -> None:
        self._file = file
        self._name = name
        self._meta = meta
        self._extent: _OpenExtent | None = None
        self._digest = xxhash.xxh3_128()

    def add_component(self, tensors: Iterable[HashedTensor]) -> Placement:
        """Write the tensors that are not shared, in extents of their own; return the places of all tensors."""
        by_hash = {tensor.sha256: tensor for tensor in tensors}
        placement = _shared(by_hash.values(), self._meta)
        for sha256, tensor in by_hash.items():
            if sha256 not in placement:
                self._add(tensor, placement)
        self._close_extent(placement)
        return placement

    def _add(self, tensor: HashedTensor, placement: Placement) -> None:
        position = self._file.tell()
        position += -position % TENSOR_ALIGNMENT
        if self._extent and position + tensor.nbytes - self._extent.start > MAX_EXTENT_BYTES:
            self._close_extent(placement)
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

    def _close_extent(self, placement: Placement) -> None:
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
        self._meta.add_extent(ref, extent.offsets)
        placement |= dict.fromkeys(extent.offsets, ref.id)

    def _pad(self, alignment: int, *, in_extent: bool) -> None:
        padding = bytes(-self._file.tell() % alignment)
        self._file.write(padding)
        if in_extent:
            self._digest.update(padding)


@dataclass(frozen=True, slots=True)
class FileExtent:
    """An extent of a file that is being staged, and the offset in it of each tensor, by name. `ref.pack` is the file's
    path below the model's pack."""

    ref: ExtentRef
    offsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _TensorPlace:
    offset: int
    tensor: HashedTensor

    @property
    def end(self) -> int:
        return self.offset + self.tensor.nbytes


def copy_file(source: Path, target: Path, pack: str, tensors: Mapping[str, HashedTensor]) -> list[FileExtent]:
    """Copy a weight file byte for byte. Raises FormatError when a tensor is not in it as it was hashed."""
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError as error:
        raise FormatError(f"{error.filename}: gone while it was read") from None
    places = {name: tensor.source.offset for name, tensor in tensors.items() if isinstance(tensor.source, FileTensor)}
    return file_extents(target, pack, tensors, places)


def file_extents(
    path: Path, pack: str, tensors: Mapping[str, HashedTensor], offsets: Mapping[str, int]
) -> list[FileExtent]:
    """Cut the file at tensor borders: at most MAX_EXTENT_BYTES unless a tensor is larger, and so that in each extent
    every tensor is aligned to its element type, as files of this or other writers need not be.

    Every byte is read again: raises FormatError when a tensor at its offset is not the one that was hashed.
    """
    places = sorted(
        (_TensorPlace(offsets[name], tensor) for name, tensor in tensors.items()), key=lambda p: (p.offset, p.end)
    )
    extents = []
    with path.open("rb", buffering=0) as file:
        for group in _groups(places):
            start, end = group[0].offset, max(place.end for place in group)
            id_, checksum = _identify(file, group)
            ref = ExtentRef(id=id_, pack=pack, offset=start, nbytes=end - start, checksum=checksum)
            extents.append(FileExtent(ref, {place.tensor.name: place.offset - start for place in group}))
    return extents


def _groups(places: list[_TensorPlace]) -> Iterable[list[_TensorPlace]]:
    group: list[_TensorPlace] = []
    for place in places:
        if group:
            start, end = group[0].offset, group[-1].end
            is_misaligned = (place.offset - start) % ITEM_BYTES.get(place.tensor.dtype, 1)
            is_far = place.offset - end > _MAX_GAP_BYTES or place.end - start > MAX_EXTENT_BYTES
            if is_misaligned or is_far:
                yield group
                group = []
        group.append(place)
    if group:
        yield group


def _identify(file: BinaryIO, group: list[_TensorPlace]) -> tuple[str, str]:
    """Return id and xxh3-128 of the extent that `group` makes.

    The id of a `combined` extent leaves the zeros between tensors unsaid: they follow from the sizes. Whatever else is
    between tensors here is a piece of the id, so that equal ids mean equal bytes in every layout.
    """
    start = position = group[0].offset
    digest = xxhash.xxh3_128()
    pieces = []
    for (offset, _), tied in itertools.groupby(group, key=lambda place: (place.offset, place.end)):
        tensor, *twins = (place.tensor for place in tied)
        if offset < position:
            raise FormatError(f"{tensor.source.file}: tensor {tensor.name!r} overlaps the one before it")
        file.seek(position)
        gap = file.read(offset - position)
        if gap != bytes(-(position - start) % TENSOR_ALIGNMENT):
            pieces.append(f"gap {len(gap)} {hashlib.sha256(gap).hexdigest()}")
        pieces.append(tensor.sha256)
        digest.update(gap)
        position = offset + tensor.nbytes
        _check(file, tensor, digest)
        for twin in twins:
            if twin.sha256 != tensor.sha256:
                raise changed(twin)
    return extent_id(pieces), digest.hexdigest()


def _check(file: BinaryIO, tensor: HashedTensor, extent_digest: xxhash.xxh3_128) -> None:
    digest = xxhash.xxh3_128()
    left = tensor.nbytes
    while left:
        chunk = file.read(min(left, _CHUNK_BYTES))
        if not chunk:
            raise changed(tensor)
        digest.update(chunk)
        extent_digest.update(chunk)
        left -= len(chunk)
    if digest.hexdigest() != tensor.checksum:
        raise changed(tensor)
