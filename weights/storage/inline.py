"""The `inline` layout: a model's weights stay in files of their stock format, and its extents are byte ranges of them.

The files are the model's own: not in meta.json, not deduplicated on disk (this is mode 0 of Ascend GE). In memory they
are shared like all others: an extent's id says what its bytes are.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import xxhash

from weights.dtypes import ITEM_BYTES
from weights.errors import FormatError
from weights.formats.tensors import FileTensor
from weights.manifest import TENSOR_ALIGNMENT, ExtentRef, extent_id
from weights.storage.hashing import HashedTensor, changed
from weights.storage.packs import MAX_EXTENT_BYTES

MAX_GAP_BYTES: Final = 4096  # between tensors of one extent; formats pad far less, and the id has to cover it
_CHUNK_BYTES: Final = 8 * 2**20


@dataclass(frozen=True, slots=True)
class FileExtent:
    """An extent of a file that is being staged, and the offset in it of each tensor, by name. `ref.pack` is the file's
    path below the model's pack."""

    ref: ExtentRef
    offsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Place:
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
        (_Place(offsets[name], tensor) for name, tensor in tensors.items()), key=lambda p: (p.offset, p.end)
    )
    extents = []
    with path.open("rb", buffering=0) as file:
        for group in _groups(places):
            start, end = group[0].offset, max(place.end for place in group)
            id_, checksum = _identify(file, group)
            ref = ExtentRef(id=id_, pack=pack, offset=start, nbytes=end - start, checksum=checksum)
            extents.append(FileExtent(ref, {place.tensor.name: place.offset - start for place in group}))
    return extents


def _groups(places: list[_Place]) -> Iterable[list[_Place]]:
    group: list[_Place] = []
    for place in places:
        if group:
            start, end = group[0].offset, group[-1].end
            is_misaligned = (place.offset - start) % ITEM_BYTES.get(place.tensor.dtype, 1)
            is_far = place.offset - end > MAX_GAP_BYTES or place.end - start > MAX_EXTENT_BYTES
            if is_misaligned or is_far:
                yield group
                group = []
        group.append(place)
    if group:
        yield group


def _identify(file: BinaryIO, group: list[_Place]) -> tuple[str, str]:
    """Id and xxh3-128 of the extent that `group` makes.

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
