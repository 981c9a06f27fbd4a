"""Extents from a pack into memory. Every byte passes the checksum on its way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from weights.errors import ExtentCorrupt
from weights.manifest import ExtentRef

CHUNK_BYTES = 8 * 2**20  # large enough for sequential bandwidth, small enough to stay in cache for the checksum

ByteArray = npt.NDArray[np.uint8]


def read_extent(packs: Path, extent: ExtentRef) -> ByteArray:
    """The bytes of an extent, verified while they arrive.

    Raises ExtentCorrupt naming the pack: missing, shorter than the manifest says, or other bytes than were written.
    """
    path = packs / extent.pack
    out = np.empty(extent.nbytes, np.uint8)
    view = out.data
    digest = xxhash.xxh3_128()
    position = 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(extent.offset)
            while position < extent.nbytes:
                chunk = view[position : position + CHUNK_BYTES]
                read = file.readinto(chunk)
                if not read:
                    raise ExtentCorrupt(
                        f"{path}: ends at byte {extent.offset + position}, extent {extent.id} needs bytes up to "
                        f"{extent.offset + extent.nbytes}"
                    )
                digest.update(chunk[:read])
                position += read
    except FileNotFoundError:
        raise ExtentCorrupt(f"{path}: missing; extent {extent.id} was in it") from None
    except OSError as error:
        raise ExtentCorrupt(f"{path}: reading extent {extent.id} failed: {error}") from error
    if digest.hexdigest() != extent.checksum:
        raise ExtentCorrupt(
            f"{path}: bytes {extent.offset}..{extent.offset + extent.nbytes} (extent {extent.id}) have checksum "
            f"{digest.hexdigest()}, expected {extent.checksum}"
        )
    return out
