"""Plain extents read from packs into memory. Every byte passes the checksum on its way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from xxhash import xxh3_128

from weights.memory.host_pool import ByteArray, HostBufferPool, allocate_pages
from weights.reading.blocks import PackReader, resolve_pack
from weights.reading.measured_rate import MeasuredRate
from weights.reading.planning import ReadPlanner
from weights.reading.report import StageClock
from weights.reading.strategy import ReadStrategy
from weights.records.errors import ExtentCorrupt
from weights.records.manifest import ExtentRef

Place = Callable[[], ByteArray]

# Measured: below it, the kernel's readahead, which joins neighbours, is faster than direct reads one by one.
MIN_DIRECT_BYTES: Final = 4 * 2**20
# Hashed and copied at once: it fits into a core's cache, and is long enough for copies that pass the cache by.
PIECE_BYTES: Final = 2**20
_PART_BLOCK_BYTES: Final = 2 * 2**20


@dataclass(slots=True)
class Passed:
    """Blocks that passed by: their digest, and what reading them took."""

    digest: xxh3_128 = field(default_factory=xxh3_128)
    read_s: float = 0.0


class PlainReader:
    """Reads the plain bytes of extents. Thread-safe.

    What is read directly on its way to a place goes through a buffer of `pool`, block by block. `rate` is that of plain
    extents, from storage to their place.
    """

    def __init__(
        self,
        packs: Path,
        pool: HostBufferPool | None,
        planner: ReadPlanner,
        *,
        verify: bool = True,
    ) -> None:
        self.verify = verify
        self.rate = MeasuredRate()
        self._packs = packs
        self._pool = pool
        self._planner = planner
        self._places: dict[str, tuple[Path, ReadStrategy]] = {}

    def read(self, extent: ExtentRef, stages: StageClock) -> ByteArray:
        """Read an extent into memory that is the caller's. Raises what `read_into` does."""
        with self._timed(extent, stages), self.open(extent, stages) as (pack, strategy):
            buffer = allocate_pages(pack.span.nbytes)
            self._verified(extent, self.measured(pack.blocks(buffer, strategy.block_bytes), stages), None, stages)
            return buffer[pack.span.lead : pack.span.lead + extent.nbytes]

    def read_into(self, extent: ExtentRef, place: Place, stages: StageClock) -> None:
        """Fill what `place` gives. Raises ExtentCorrupt naming the pack, StoreError when it leads out of the store."""
        with self._timed(extent, stages), self.open(extent, stages) as (pack, strategy):
            if not pack.is_direct:
                blocks = pack.blocks(place(), strategy.block_bytes)
                self._verified(extent, self.measured(blocks, stages), None, stages)
                return
            with self.staging(min(strategy.block_bytes, pack.span.nbytes)) as staging:
                blocks = pack.blocks(staging, staging.nbytes)
                self._verified(extent, self.measured(blocks, stages), place, stages)

    @contextlib.contextmanager
    def open(self, extent: ExtentRef, stages: StageClock) -> Iterator[tuple[PackReader, ReadStrategy]]:
        """Yield the open pack of an extent, and how it is read."""
        with stages.measure("open"):
            path, strategy = self._places.get(extent.pack) or self._find(extent.pack)
            pack = PackReader(path, extent, direct=strategy.direct and extent.nbytes >= MIN_DIRECT_BYTES)
            # Found once: a published pack never changes, and looking takes longer than opening a small one.
            self._places[extent.pack] = path, strategy
        with pack:
            yield pack, strategy

    @contextlib.contextmanager
    def open_part(self, part: ExtentRef, stages: StageClock) -> Iterator[Iterator[memoryview]]:
        """Yield the blocks of a part of an extent, through the page cache: it is a piece here and a piece there."""
        with stages.measure("open"):
            path, _ = self._places.get(part.pack) or self._find(part.pack)
            pack = PackReader(path, part, direct=False)
        with pack:
            buffer = allocate_pages(min(_PART_BLOCK_BYTES, part.nbytes))
            yield self.measured(pack.blocks(buffer, buffer.nbytes), stages)

    def staging(self, nbytes: int) -> contextlib.AbstractContextManager[ByteArray]:
        """Return memory to read through, of the pool if there is one."""
        if self._pool:
            # HAZARD: one buffer for each reader and no more, or readers wait for each other.
            return self._pool.acquire(min(nbytes, self._pool.max_bytes))
        return contextlib.nullcontext(allocate_pages(nbytes))

    def measured(
        self, blocks: Iterator[memoryview], stages: StageClock, passed: Passed | None = None
    ) -> Iterator[memoryview]:
        """Pass blocks on as they are read."""
        while True:
            begin_s = stages.now_s()
            with stages.measure("read"):
                block = next(blocks, None)
            if block is None:
                return
            stages.add_bytes("read", block.nbytes)
            if passed:
                passed.read_s += stages.now_s() - begin_s
                passed.digest.update(block)
            yield block

    def take_in(self, blocks: Iterator[memoryview], place: Place | None, stages: StageClock) -> str:
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
            elif self.verify:
                with stages.measure("verify", block.nbytes):
                    digest.update(block)
            position += block.nbytes
        return digest.hexdigest()

    def path_of(self, pack: str) -> Path:
        """Return the file of a pack that was opened."""
        return self._places[pack][0]

    def _find(self, pack: str) -> tuple[Path, ReadStrategy]:
        path = resolve_pack(self._packs, pack)
        return path, self._planner.plan(path).strategy

    @contextlib.contextmanager
    def _timed(self, extent: ExtentRef, stages: StageClock) -> Iterator[None]:
        begin_s = stages.now_s()
        yield
        self.rate.add(extent.nbytes, stages.now_s() - begin_s)

    def _verified(
        self, extent: ExtentRef, blocks: Iterator[memoryview], place: Place | None, stages: StageClock
    ) -> None:
        """Take the blocks in, and copy them to `place` if there is one. Raises ExtentCorrupt."""
        found = self.take_in(blocks, place, stages)
        if self.verify and found != extent.checksum:
            raise ExtentCorrupt(
                f"{self._places[extent.pack][0]}: bytes {extent.offset}..{extent.offset + extent.nbytes} "
                f"(extent {extent.id}) have checksum {found}, expected {extent.checksum}",
                extent.id,
            )

    def _pass(self, block: memoryview, out: ByteArray, digest: xxh3_128) -> None:
        """Hash and copy in one pass: what the checksum has brought into the cache is copied from there."""
        array = np.frombuffer(block, np.uint8)
        for start in range(0, array.nbytes, PIECE_BYTES):
            piece = array[start : start + PIECE_BYTES]
            if self.verify:
                digest.update(piece.data)
            out[start : start + PIECE_BYTES] = piece
