"""Extents read from their deltas: what is stored of them, decoded with the base's bytes from wherever these are;
and whether that is sooner than the plain bytes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from weights.manifest import DeltaRef, ExtentRef
from weights.memory.pages import ByteArray
from weights.reading.report import StageClock
from weights.storage.deltas.codec import ByteSource, ChunkDecoder, DeltaDamaged, chunk_sizes, read_header

# Gives the bytes of a plain extent that somebody has in memory, for as long as they are referenced; None: nobody has.
Resident = Callable[[ExtentRef], ByteArray | None]
OpenPart = Callable[[ExtentRef], contextlib.AbstractContextManager[Iterator[memoryview]]]

_MAX_SKIP_BYTES: Final = 2**20  # of a base between two tensors: read on rather than open it again
# Of the latest measurement in the mean: a medium that others use as well changes within seconds.
_NEWEST_SHARE: Final = 0.2
MIN_MEASURED_BYTES: Final = 2**20
# Of one core, until it is measured.
ASSUMED_DECODE_BYTES_PER_S: Final = 1e9


class Bases:
    """The bases of one delta: those that are `resident`, by number, and the others on disk. To be closed.

    One file is open at a time: tensors are mostly asked for in the order in which they lie.
    """

    def __init__(self, delta: DeltaRef, resident: Mapping[int, ByteArray], open_part: OpenPart) -> None:
        self._delta, self._resident, self._open_part = delta, resident, open_part
        self._opened = contextlib.ExitStack()
        self._source = ByteSource(())
        self._place = (-1, 0)  # number of the base that is open, and the next byte of it

    def close(self) -> None:
        self._opened.close()

    def take(self, number: int, offset: int, nbytes: int) -> ByteArray:
        """Return bytes that the base has, valid until the next call. Raises ExtentCorrupt, StoreError."""
        if number in self._resident:
            return self._resident[number][offset : offset + nbytes]
        opened, position = self._place
        if opened != number or not 0 <= offset - position <= _MAX_SKIP_BYTES:
            self._opened.close()
            base = self._delta.bases[number]
            part = base.part(offset, base.nbytes - offset)
            self._source = ByteSource(self._opened.enter_context(self._open_part(part)))
            position = offset
        self._source.take(offset - position)
        self._place = number, offset + nbytes
        return np.frombuffer(self._source.take(nbytes), np.uint8)


def decoded(extent: ExtentRef, source: ByteSource, bases: Bases, stages: StageClock) -> Iterator[memoryview]:
    """Yield the plain bytes of an extent that has a delta, which `source` gives; each valid until the next.

    Raises DeltaDamaged, also for what would take more memory or bytes of a base than there are.
    """
    assert extent.delta
    decoder = ChunkDecoder()
    segments = read_header(source, extent.nbytes, extent.delta.nbytes, [base.nbytes for base in extent.delta.bases])
    for segment in segments:
        offset = segment.offset
        for nbytes in chunk_sizes(segment):
            is_difference, frames, data = decoder.frames(source, nbytes, segment.item_bytes)
            base = None
            if is_difference:
                if segment.base is None:
                    raise DeltaDamaged("a chunk is a difference from no base")
                base = bases.take(segment.base, offset, nbytes)
            with stages.measure("decode", nbytes):
                block = decoder.decode(nbytes, segment.item_bytes, frames, data, base)
            yield block
            offset += nbytes
    source.end()


class MeasuredRate:
    """Bytes per second of one thread at some work, lately. Thread-safe. None: nothing measured."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._s_per_byte: float | None = None

    @property
    def bytes_per_s(self) -> float | None:
        s_per_byte = self._s_per_byte
        return 1 / s_per_byte if s_per_byte else None

    def add(self, nbytes: int, seconds: float) -> None:
        """Count work that was done; little of it says more about its beginning and end than about the rate."""
        if nbytes < MIN_MEASURED_BYTES or seconds <= 0:
            return
        with self._lock:
            new, mean = seconds / nbytes, self._s_per_byte
            self._s_per_byte = new if mean is None else mean + _NEWEST_SHARE * (new - mean)


def prefers_delta(
    plain_bytes: int,
    delta_bytes: int,
    *,
    base_is_resident: bool,
    plain_bytes_per_s: float | None,
    read_bytes_per_s: float | None,
    decode_bytes_per_s: float | None,
) -> bool:
    """Return whether an extent is here sooner from its delta.

    Rates are of one thread beside the others: of plain extents from storage to their place; of reading deltas; and of
    all else that these take, decoding most of all, in plain bytes. Without a resident base, as many bytes as the extent
    has are read of that. A medium that nobody has measured is no reason to leave the plain bytes.
    """
    if plain_bytes_per_s is None:
        return False
    read_bytes = delta_bytes + (0 if base_is_resident else plain_bytes)
    decode_s = plain_bytes / (decode_bytes_per_s or ASSUMED_DECODE_BYTES_PER_S)
    return read_bytes / (read_bytes_per_s or plain_bytes_per_s) + decode_s < plain_bytes / plain_bytes_per_s
