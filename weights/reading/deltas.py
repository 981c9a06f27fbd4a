"""Extents read from their deltas: what is stored of them, decoded with the base's bytes from wherever these are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from weights.manifest import DeltaRef, ExtentRef
from weights.memory.pages import ByteArray
from weights.reading.report import StageClock
from weights.storage.deltas.codec import ChunkDecoder, DeltaDamaged, Source, chunk_sizes, read_header

# Gives the bytes of a plain extent that somebody has in memory, for as long as they are referenced; None: nobody has.
Resident = Callable[[ExtentRef], ByteArray | None]
OpenPart = Callable[[ExtentRef], contextlib.AbstractContextManager[Iterator[memoryview]]]

_MAX_SKIP_BYTES: Final = 2**20  # of a base between two tensors: read on rather than open it again


class Bases:
    """The bases of one delta: those that are `resident`, by number, and the others on disk. To be closed.

    One file is open at a time: tensors are mostly asked for in the order in which they lie.
    """

    def __init__(self, delta: DeltaRef, resident: Mapping[int, ByteArray], open_part: OpenPart) -> None:
        self._delta, self._resident, self._open_part = delta, resident, open_part
        self._opened = contextlib.ExitStack()
        self._source = Source(())
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
            self._source = Source(self._opened.enter_context(self._open_part(part)))
            position = offset
        self._source.take(offset - position)
        self._place = number, offset + nbytes
        return np.frombuffer(self._source.take(nbytes), np.uint8)


def decoded(extent: ExtentRef, source: Source, bases: Bases, stages: StageClock) -> Iterator[memoryview]:
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
