"""Extents that are stored as deltas: decoded with the bytes of their bases, from wherever these are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from weights.memory.host_pool import ByteArray, HostBufferPool
from weights.reading.delta_codec import ByteSource, ChunkDecoder, DeltaDamaged, chunk_sizes, read_header
from weights.reading.measured_rate import MeasuredRate
from weights.reading.plain_extents import Passed, Place, PlainReader
from weights.reading.report import StageClock
from weights.records.errors import ExtentCorrupt
from weights.records.manifest import DeltaRef, ExtentRef

# Gives the bytes of a plain extent that somebody has in memory, for as long as they are referenced; None: nobody has.
Resident = Callable[[ExtentRef], ByteArray | None]
OpenPart = Callable[[ExtentRef], contextlib.AbstractContextManager[Iterator[memoryview]]]

_MAX_SKIP_BYTES: Final = 2**20  # of a base between two tensors: read on rather than open it again
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


class DeltaReader:
    """Makes extents from their deltas. Thread-safe. `resident` gives the bases that are in memory."""

    def __init__(self, plain: PlainReader, pool: HostBufferPool | None, resident: Resident) -> None:
        self._plain = plain
        self._pool = pool
        self._resident = resident
        # Of deltas, and of all but the reading that these take, in plain bytes.
        self._reading, self._decoding = MeasuredRate(), MeasuredRate()

    def prefers(self, extent: ExtentRef) -> bool:
        """Return whether an extent that has a delta is here sooner from it than from its plain bytes."""
        assert extent.delta
        return prefers_delta(
            extent.nbytes,
            extent.delta.nbytes,
            base_is_resident=len(self._resident_bases(extent)) == len(extent.delta.bases),
            plain_bytes_per_s=self._plain.rate.bytes_per_s,
            read_bytes_per_s=self._reading.bytes_per_s,
            decode_bytes_per_s=self._decoding.bytes_per_s,
        )

    def prefers_sent(self, extent: ExtentRef, bytes_per_s: float | None) -> bool:
        """Return whether an extent is here sooner when its delta comes over a link of this rate: see `decode_sent`.

        For that its bases must be resident, and the delta fit into the pool. An unmeasured link is no reason.
        """
        delta = extent.delta
        if delta is None or self._pool is None or delta.nbytes > self._pool.max_bytes:
            return False
        return len(self._resident_bases(extent)) == len(delta.bases) and prefers_delta(
            extent.nbytes,
            delta.nbytes,
            base_is_resident=True,
            plain_bytes_per_s=bytes_per_s,
            read_bytes_per_s=bytes_per_s,
            decode_bytes_per_s=self._decoding.bytes_per_s,
        )

    def decode(self, extent: ExtentRef, place: Place, stages: StageClock) -> None:
        """Make the extent from its delta, in `place`. Raises ExtentCorrupt naming the file that is damaged."""
        resident = self._resident_bases(extent)
        try:
            self._decode_with(extent, resident, place, stages)
        except ExtentCorrupt:
            if not resident:
                raise
            self._decode_with(extent, {}, place, stages)  # damaged in memory, perhaps

    def decode_sent(
        self, extent: ExtentRef, fetch: Callable[[ByteArray], None], place: Place, stages: StageClock
    ) -> None:
        """Fill what `place` gives: from the delta, with which `fetch` fills what it gets, and bases that are resident.

        Raises ExtentCorrupt when these give other bytes, and what `fetch` and `place` do.
        """
        assert extent.delta
        bases = Bases(extent.delta, self._resident_bases(extent), _not_resident)
        with self._plain.staging(extent.delta.nbytes) as staging:
            fetch(staging)
            begin_s = stages.now_s()
            try:
                found = self._plain.take_in(decoded(extent, ByteSource([staging.data]), bases, stages), place, stages)
            except DeltaDamaged as error:
                raise ExtentCorrupt(f"the delta of extent {extent.id} is damaged: {error}", extent.id) from None
            if self._plain.verify and found != extent.checksum:
                raise ExtentCorrupt(
                    f"the delta of extent {extent.id} gives checksum {found}, expected {extent.checksum}", extent.id
                )
            self._decoding.add(extent.nbytes, stages.now_s() - begin_s)

    def _decode_with(
        self, extent: ExtentRef, resident: Mapping[int, ByteArray], place: Place, stages: StageClock
    ) -> None:
        delta = extent.delta
        assert delta
        passed, begin_s = Passed(), stages.now_s()
        with self._plain.open(delta.stored(extent.id), stages) as (pack, strategy), contextlib.ExitStack() as stack:
            staging = stack.enter_context(self._plain.staging(min(strategy.block_bytes, pack.span.nbytes)))
            bases = stack.enter_context(
                contextlib.closing(Bases(delta, resident, lambda part: self._plain.open_part(part, stages)))
            )
            source = ByteSource(self._plain.measured(pack.blocks(staging, staging.nbytes), stages, passed))
            where = f"{self._plain.path_of(delta.pack)}: bytes {delta.offset}..{delta.offset + delta.nbytes}"
            what = f"{where} (delta of extent {extent.id})"
            try:
                found = self._plain.take_in(decoded(extent, source, bases, stages), place, stages)
            except DeltaDamaged as error:
                raise ExtentCorrupt(f"{what} are damaged: {error}", extent.id) from None
            except ExtentCorrupt as error:  # of the base, perhaps
                raise ExtentCorrupt(str(error), extent.id) from error
        if self._plain.verify and found != extent.checksum:
            if passed.digest.hexdigest() == delta.checksum:
                self._blame_bases(extent, resident)
                raise ExtentCorrupt(f"{what} give checksum {found}, expected {extent.checksum}", extent.id)
            raise ExtentCorrupt(
                f"{what} have checksum {passed.digest.hexdigest()}, expected {delta.checksum}", extent.id
            )
        if len(resident) == len(delta.bases):
            self._reading.add(delta.nbytes, passed.read_s)
            self._decoding.add(extent.nbytes, stages.now_s() - begin_s - passed.read_s)

    def _blame_bases(self, extent: ExtentRef, resident: Mapping[int, ByteArray]) -> None:
        """Raise ExtentCorrupt naming the file of a base on disk that is damaged, if one is."""
        for number, base in enumerate(extent.delta.bases if extent.delta else ()):
            if number not in resident:
                try:
                    self._plain.read(base, StageClock())
                except ExtentCorrupt as error:
                    raise ExtentCorrupt(f"{error}; the delta of extent {extent.id} needs it", extent.id) from None

    def _resident_bases(self, extent: ExtentRef) -> dict[int, ByteArray]:
        """Return the bases that are in memory, by number. Whoever has these arrays keeps the bytes there."""
        found = {}
        for number, base in enumerate(extent.delta.bases if extent.delta else ()):
            view = self._resident(base)
            if view is not None and view.nbytes == base.nbytes:
                found[number] = view
        return found


def _not_resident(base: ExtentRef) -> contextlib.AbstractContextManager[Iterator[memoryview]]:
    raise ExtentCorrupt(f"extent {base.id}, the base of a delta, is not in memory any more", base.id)
