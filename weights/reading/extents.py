"""Extents read from packs into memory, several at once. Every byte passes the checksum on its way.

Of an extent that is stored as a delta too, that is read where it is sooner than the plain bytes, and decoded with the
base's bytes from wherever these are.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from xxhash import xxh3_128

from weights.memory.host_pool import ByteArray, HostBufferPool, allocate_pages
from weights.reading.blocks import PackReader, resolve_pack
from weights.reading.delta_codec import ByteSource, ChunkDecoder, DeltaDamaged, chunk_sizes, read_header
from weights.reading.planning import ReadPlanner
from weights.reading.report import LoadReport, StageClock
from weights.reading.strategy import ReadStrategy
from weights.records.errors import ExtentCorrupt
from weights.records.manifest import DeltaRef, ExtentRef

__all__ = [
    "ASSUMED_DECODE_BYTES_PER_S",
    "MIN_MEASURED_BYTES",
    "Bases",
    "ByteArray",
    "ExtentReader",
    "MeasuredRate",
    "OpenPart",
    "Place",
    "Progress",
    "Resident",
    "decoded",
    "prefers_delta",
    "read_extent",
    "reading_order",
]

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


_Result = TypeVar("_Result")
Progress = Callable[[int, int], None]  # bytes done, bytes in all
Place = Callable[[], ByteArray]

# Measured: below it, the kernel's readahead, which joins neighbours, is faster than direct reads one by one.
MIN_DIRECT_BYTES: Final = 4 * 2**20
# Hashed and copied at once: it fits into a core's cache, and is long enough for copies that pass the cache by.
PIECE_BYTES: Final = 2**20
_BASE_BLOCK_BYTES: Final = 2 * 2**20
# One extent in one thread: blocks small enough to be in cache still when the checksum comes to them.
_SINGLE: Final = ReadStrategy(direct=False, num_threads=1, block_bytes=8 * 2**20)


@dataclass(slots=True)
class _Passed:
    """Blocks of a delta that passed by: their digest, which says whether it is the delta or a base that is damaged."""

    digest: xxh3_128 = field(default_factory=xxh3_128)
    read_s: float = 0.0


class ExtentReader:
    """Reads extents into memory of their own, or into a place that is given. Thread-safe.

    What is read directly on its way to such a place goes through a buffer of `pool`, block by block. An extent that has
    a delta is read in the form that is here sooner, and in the other one when that is damaged; `resident` gives the
    bases that are in memory.
    """

    def __init__(
        self,
        packs: Path,
        pool: HostBufferPool | None,
        planner: ReadPlanner,
        *,
        verify: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        resident: Resident = lambda base: None,
    ) -> None:
        self._packs = packs
        self._pool = pool
        self._planner = planner
        self._verify = verify
        self._clock = clock
        self._resident = resident
        self._places: dict[str, tuple[Path, ReadStrategy]] = {}
        # Of plain extents; of deltas, and of all but the reading that these take, in plain bytes.
        self._plain, self._delta, self._decoding = MeasuredRate(), MeasuredRate(), MeasuredRate()

    def read(self, extent: ExtentRef, stages: StageClock) -> ByteArray:
        """Read an extent into memory that is the caller's. Raises what `read_into` does."""

        def plain() -> ByteArray:
            with self._plain_timed(extent), self._open(extent, stages) as (pack, strategy):
                buffer = allocate_pages(pack.span.nbytes)
                self._verified(extent, self._measured(pack.blocks(buffer, strategy.block_bytes), stages), None, stages)
                return buffer[pack.span.lead : pack.span.lead + extent.nbytes]

        def delta() -> ByteArray:
            with _placed_once(lambda: allocate_pages(extent.nbytes)) as place:
                self._decode(extent, place, stages)
                return place()

        return self._in_either_form(extent, plain, delta)

    def read_into(self, extent: ExtentRef, place: Place, stages: StageClock) -> None:
        """Fill what `place` gives: memory, writable, contiguous and as long as the extent. It is asked once.

        Raises ExtentCorrupt naming the pack: missing, shorter than the manifest says, unreadable, or other bytes
        than were written, of the extent or of the base of its delta; StoreError when its name leads out of the store;
        and what `place` does. After an error the place holds nothing of worth.
        """
        with _placed_once(place) as once:
            self._in_either_form(
                extent,
                functools.partial(self._read_plain, extent, once, stages),
                functools.partial(self._decode, extent, once, stages),
            )

    def prefers_sent_delta(self, extent: ExtentRef, bytes_per_s: float | None) -> bool:
        """Return whether an extent is here sooner when its delta comes over a link of this rate: see `from_delta`.

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

    def from_delta(
        self, extent: ExtentRef, fetch: Callable[[ByteArray], None], place: Place, stages: StageClock
    ) -> None:
        """Fill what `place` gives: from the delta, with which `fetch` fills what it gets, and bases that are resident.

        Raises ExtentCorrupt when these give other bytes, and what `fetch` and `place` do.
        """
        assert extent.delta
        bases = Bases(extent.delta, self._resident_bases(extent), _not_resident)
        with self._staging(extent.delta.nbytes) as staging, _placed_once(place) as once:
            fetch(staging)
            begin_s = self._clock()
            try:
                found = self._take_in(decoded(extent, ByteSource([staging.data]), bases, stages), once, stages)
            except DeltaDamaged as error:
                raise ExtentCorrupt(f"the delta of extent {extent.id} is damaged: {error}", extent.id) from None
            if self._verify and found != extent.checksum:
                raise ExtentCorrupt(
                    f"the delta of extent {extent.id} gives checksum {found}, expected {extent.checksum}", extent.id
                )
            self._decoding.add(extent.nbytes, self._clock() - begin_s)

    def read_all(
        self, extents: Sequence[ExtentRef], progress: Progress | None = None, *, what: str = ""
    ) -> tuple[dict[str, ByteArray], LoadReport]:
        """Read extents into memory that is the caller's; returned by id.

        While one extent is verified, others are read. The first error ends the load and is raised, after the reads
        in flight.
        """
        stages, start_s = StageClock(self._clock), self._clock()
        total_bytes = sum(extent.nbytes for extent in extents)
        # By the largest, which is the one worth a probe.
        packs = [
            resolve_pack(self._packs, extent.pack) for extent in sorted(extents, key=lambda found: -found.nbytes)[:1]
        ]
        plan = self._planner.plan(packs[0] if packs else self._packs)
        arrays: dict[str, ByteArray] = {}
        done_bytes, lock = 0, threading.Lock()

        def read(extent: ExtentRef) -> None:
            nonlocal done_bytes
            array = self.read(extent, stages)
            with lock:  # held while it is told, so that its counts never go down
                arrays[extent.id] = array
                done_bytes += extent.nbytes
                if progress:
                    progress(done_bytes, total_bytes)

        with concurrent.futures.ThreadPoolExecutor(plan.strategy.num_threads, thread_name_prefix="read") as threads:
            futures = [threads.submit(read, extent) for extent in reading_order(extents, plan.strategy)]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return {extent.id: arrays[extent.id] for extent in extents}, LoadReport(
            what=what,
            nbytes=total_bytes,
            wall_s=self._clock() - start_s,
            stages=stages.figures(),
            medium=plan.medium,
            strategy=plan.strategy,
            verified=self._verify,
            peak_gbps=plan.probe.peak_gbps if plan.probe else None,
            advice=plan.advice,
        )

    @contextlib.contextmanager
    def _open(self, extent: ExtentRef, stages: StageClock) -> Iterator[tuple[PackReader, ReadStrategy]]:
        with stages.measure("open"):
            path, strategy = self._places.get(extent.pack) or self._find(extent.pack)
            pack = PackReader(path, extent, direct=strategy.direct and extent.nbytes >= MIN_DIRECT_BYTES)
            # Found once: a published pack never changes, and looking takes longer than opening a small one.
            self._places[extent.pack] = path, strategy
        with pack:
            yield pack, strategy

    def _find(self, pack: str) -> tuple[Path, ReadStrategy]:
        path = resolve_pack(self._packs, pack)
        return path, self._planner.plan(path).strategy

    def _staging(self, nbytes: int) -> contextlib.AbstractContextManager[ByteArray]:
        if self._pool:
            # HAZARD: one buffer for each reader and no more, or readers wait for each other.
            return self._pool.acquire(min(nbytes, self._pool.max_bytes))
        return contextlib.nullcontext(allocate_pages(nbytes))

    def _in_either_form(self, extent: ExtentRef, plain: Callable[[], _Result], delta: Callable[[], _Result]) -> _Result:
        if extent.delta is None:
            return plain()
        if not extent.has_plain:
            return delta()
        first, second = (delta, plain) if self._prefers_delta(extent) else (plain, delta)
        try:
            return first()
        except ExtentCorrupt:
            return second()

    @contextlib.contextmanager
    def _plain_timed(self, extent: ExtentRef) -> Iterator[None]:
        begin_s = self._clock()
        yield
        self._plain.add(extent.nbytes, self._clock() - begin_s)

    def _read_plain(self, extent: ExtentRef, place: Place, stages: StageClock) -> None:
        with self._plain_timed(extent), self._open(extent, stages) as (pack, strategy):
            if not pack.is_direct:
                blocks = pack.blocks(place(), strategy.block_bytes)
                self._verified(extent, self._measured(blocks, stages), None, stages)
                return
            with self._staging(min(strategy.block_bytes, pack.span.nbytes)) as staging:
                blocks = pack.blocks(staging, staging.nbytes)
                self._verified(extent, self._measured(blocks, stages), place, stages)

    def _prefers_delta(self, extent: ExtentRef) -> bool:
        assert extent.delta
        return prefers_delta(
            extent.nbytes,
            extent.delta.nbytes,
            base_is_resident=len(self._resident_bases(extent)) == len(extent.delta.bases),
            plain_bytes_per_s=self._plain.bytes_per_s,
            read_bytes_per_s=self._delta.bytes_per_s,
            decode_bytes_per_s=self._decoding.bytes_per_s,
        )

    def _resident_bases(self, extent: ExtentRef) -> dict[int, ByteArray]:
        """Return the bases that are in memory, by number. Whoever has these arrays keeps the bytes there."""
        found = {}
        for number, base in enumerate(extent.delta.bases if extent.delta else ()):
            view = self._resident(base)
            if view is not None and view.nbytes == base.nbytes:
                found[number] = view
        return found

    def _decode(self, extent: ExtentRef, place: Place, stages: StageClock) -> None:
        """Make the extent from its delta, in `place`. Raises ExtentCorrupt naming the file that is damaged."""
        resident = self._resident_bases(extent)
        try:
            self._decode_with(extent, resident, place, stages)
        except ExtentCorrupt:
            if not resident:
                raise
            self._decode_with(extent, {}, place, stages)  # damaged in memory, perhaps

    def _decode_with(
        self, extent: ExtentRef, resident: Mapping[int, ByteArray], place: Place, stages: StageClock
    ) -> None:
        delta = extent.delta
        assert delta
        passed, begin_s = _Passed(), self._clock()
        with self._open(delta.stored(extent.id), stages) as (pack, strategy), contextlib.ExitStack() as stack:
            staging = stack.enter_context(self._staging(min(strategy.block_bytes, pack.span.nbytes)))
            bases = stack.enter_context(
                contextlib.closing(Bases(delta, resident, lambda part: self._open_base(part, stages)))
            )
            source = ByteSource(self._measured(pack.blocks(staging, staging.nbytes), stages, passed))
            where = f"{self._places[delta.pack][0]}: bytes {delta.offset}..{delta.offset + delta.nbytes}"
            what = f"{where} (delta of extent {extent.id})"
            try:
                found = self._take_in(decoded(extent, source, bases, stages), place, stages)
            except DeltaDamaged as error:
                raise ExtentCorrupt(f"{what} are damaged: {error}", extent.id) from None
            except ExtentCorrupt as error:  # of the base, perhaps
                raise ExtentCorrupt(str(error), extent.id) from error
        if self._verify and found != extent.checksum:
            if passed.digest.hexdigest() == delta.checksum:
                self._blame_bases(extent, resident)
                raise ExtentCorrupt(f"{what} give checksum {found}, expected {extent.checksum}", extent.id)
            raise ExtentCorrupt(
                f"{what} have checksum {passed.digest.hexdigest()}, expected {delta.checksum}", extent.id
            )
        if len(resident) == len(delta.bases):
            self._delta.add(delta.nbytes, passed.read_s)
            self._decoding.add(extent.nbytes, self._clock() - begin_s - passed.read_s)

    def _blame_bases(self, extent: ExtentRef, resident: Mapping[int, ByteArray]) -> None:
        """Raise ExtentCorrupt naming the file of a base on disk that is damaged, if one is."""
        for number, base in enumerate(extent.delta.bases if extent.delta else ()):
            if number not in resident:
                try:
                    self.read(base, StageClock(self._clock))
                except ExtentCorrupt as error:
                    raise ExtentCorrupt(f"{error}; the delta of extent {extent.id} needs it", extent.id) from None

    @contextlib.contextmanager
    def _open_base(self, part: ExtentRef, stages: StageClock) -> Iterator[Iterator[memoryview]]:
        """Yield the blocks of a part of a base. Read through the page cache: it is a piece here and a piece there."""
        with stages.measure("open"):
            path, _ = self._places.get(part.pack) or self._find(part.pack)
            pack = PackReader(path, part, direct=False)
        with pack:
            buffer = allocate_pages(min(_BASE_BLOCK_BYTES, part.nbytes))
            yield self._measured(pack.blocks(buffer, buffer.nbytes), stages)

    def _measured(
        self, blocks: Iterator[memoryview], stages: StageClock, passed: _Passed | None = None
    ) -> Iterator[memoryview]:
        """Pass blocks on as they are read."""
        while True:
            begin_s = self._clock()
            with stages.measure("read"):
                block = next(blocks, None)
            if block is None:
                return
            stages.add_bytes("read", block.nbytes)
            if passed:
                passed.read_s += self._clock() - begin_s
                passed.digest.update(block)
            yield block

    def _verified(
        self, extent: ExtentRef, blocks: Iterator[memoryview], place: Place | None, stages: StageClock
    ) -> None:
        """Take the blocks in, and copy them to `place` if there is one. Raises ExtentCorrupt."""
        found = self._take_in(blocks, place, stages)
        if self._verify and found != extent.checksum:
            raise ExtentCorrupt(
                f"{self._places[extent.pack][0]}: bytes {extent.offset}..{extent.offset + extent.nbytes} "
                f"(extent {extent.id}) have checksum {found}, expected {extent.checksum}",
                extent.id,
            )

    def _take_in(self, blocks: Iterator[memoryview], place: Place | None, stages: StageClock) -> str:
        """Take the blocks in, copied to `place` if there is one; returns their checksum if that is wanted."""
        digest = xxh3_128()
        out: ByteArray | None = None
        position = 0
        for block in blocks:
            if place is not None:
                # Not before: to make the place takes time in which something can be read already.
                out = place() if out is None else out
                with stages.measure("copy", block.nbytes):
                    self._pass(block, out[position : position + block.nbytes], digest)
            elif self._verify:
                with stages.measure("verify", block.nbytes):
                    digest.update(block)
            position += block.nbytes
        return digest.hexdigest()

    def _pass(self, block: memoryview, out: ByteArray, digest: xxh3_128) -> None:
        """Hash and copy in one pass: what the checksum has brought into the cache is copied from there."""
        array = np.frombuffer(block, np.uint8)
        for start in range(0, array.nbytes, PIECE_BYTES):
            piece = array[start : start + PIECE_BYTES]
            if self._verify:
                digest.update(piece.data)
            out[start : start + PIECE_BYTES] = piece


def _not_resident(base: ExtentRef) -> contextlib.AbstractContextManager[Iterator[memoryview]]:
    raise ExtentCorrupt(f"extent {base.id}, the base of a delta, is not in memory any more", base.id)


@contextlib.contextmanager
def _placed_once(place: Place) -> Iterator[Place]:
    """Yield `place` as one that is asked once: a second form is read into what the first one got."""
    once = functools.cache(place)
    try:
        yield once
    finally:
        once.cache_clear()  # HAZARD: the frames of an error keep their functions, which would keep this memory


def reading_order(extents: Sequence[ExtentRef], strategy: ReadStrategy) -> list[ExtentRef]:
    """Sort by place in the files, but the largest first: one of them last would be read with nothing beside it."""
    giant_bytes = 2 * strategy.block_bytes
    giants = sorted((extent for extent in extents if extent.nbytes > giant_bytes), key=lambda giant: -giant.nbytes)
    others = sorted(
        (extent for extent in extents if extent.nbytes <= giant_bytes), key=lambda found: (found.pack, found.offset)
    )
    return [*giants, *others]


def read_extent(packs: Path, extent: ExtentRef) -> ByteArray:
    """Read one extent into memory of its own, verified while it arrives. Raises what `read_into` does."""
    return ExtentReader(packs, None, ReadPlanner(override=_SINGLE)).read(extent, StageClock())
