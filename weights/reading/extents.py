"""Extents read from packs into memory, several at once. Every byte passes the checksum on its way."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from xxhash import xxh3_128

from weights.errors import ExtentCorrupt
from weights.manifest import ExtentRef
from weights.memory.host_pool import HostBufferPool
from weights.memory.pages import ByteArray, allocate_pages
from weights.reading.blocks import PackReader, resolve_pack
from weights.reading.planning import ReadPlanner
from weights.reading.report import LoadReport, StageClock
from weights.reading.strategy import ReadStrategy

__all__ = ["ByteArray", "ExtentReader", "Place", "Progress", "read_extent", "reading_order"]

Progress = Callable[[int, int], None]  # bytes done, bytes in all
Place = Callable[[], ByteArray]

# Measured: below it, the kernel's readahead, which joins neighbours, is faster than direct reads one by one.
MIN_DIRECT_BYTES: Final = 4 * 2**20
# Hashed and copied at once: it fits into a core's cache, and is long enough for copies that pass the cache by.
PIECE_BYTES: Final = 2**20
# One extent in one thread: blocks small enough to be in cache still when the checksum comes to them.
_SINGLE: Final = ReadStrategy(direct=False, num_threads=1, block_bytes=8 * 2**20)


class ExtentReader:
    """Reads extents into memory of their own, or into a place that is given. Thread-safe.

    What is read directly on its way to such a place goes through a buffer of `pool`, block by block.
    """

    def __init__(
        self,
        packs: Path,
        pool: HostBufferPool | None,
        planner: ReadPlanner,
        *,
        verify: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._packs = packs
        self._pool = pool
        self._planner = planner
        self._verify = verify
        self._clock = clock
        self._places: dict[str, tuple[Path, ReadStrategy]] = {}

    def read(self, extent: ExtentRef, stages: StageClock) -> ByteArray:
        """Read an extent into memory that is the caller's. Raises what `read_into` does."""
        with self._open(extent, stages) as (pack, strategy):
            buffer = allocate_pages(pack.span.nbytes)
            self._verified(extent, pack.blocks(buffer, strategy.block_bytes), None, stages)
            return buffer[pack.span.lead : pack.span.lead + extent.nbytes]

    def read_into(self, extent: ExtentRef, place: Place, stages: StageClock) -> None:
        """Fill what `place` gives: memory, writable, contiguous and as long as the extent. It is asked once.

        Raises ExtentCorrupt naming the pack: missing, shorter than the manifest says, unreadable, or other bytes
        than were written; StoreError when its name leads out of the store; and what `place` does. After an error
        the place holds nothing of worth.
        """
        with self._open(extent, stages) as (pack, strategy):
            if not pack.is_direct:
                self._verified(extent, pack.blocks(place(), strategy.block_bytes), None, stages)
                return
            with self._staging(min(strategy.block_bytes, pack.span.nbytes)) as staging:
                self._verified(extent, pack.blocks(staging, staging.nbytes), place, stages)

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

    def _verified(
        self, extent: ExtentRef, blocks: Iterator[memoryview], place: Place | None, stages: StageClock
    ) -> None:
        """Take the blocks in, and copy them to `place` if there is one. Raises ExtentCorrupt."""
        digest = xxh3_128()
        out: ByteArray | None = None
        position = 0
        while True:
            with stages.measure("read"):
                block = next(blocks, None)
            if block is None:
                break
            stages.add_bytes("read", block.nbytes)
            if place is not None:
                # Not before: to make the place takes time in which something can be read already.
                out = place() if out is None else out
                with stages.measure("copy", block.nbytes):
                    self._pass(block, out[position : position + block.nbytes], digest)
            elif self._verify:
                with stages.measure("verify", block.nbytes):
                    digest.update(block)
            position += block.nbytes
        if self._verify and digest.hexdigest() != extent.checksum:
            raise ExtentCorrupt(
                f"{self._places[extent.pack][0]}: bytes {extent.offset}..{extent.offset + extent.nbytes} "
                f"(extent {extent.id}) have checksum {digest.hexdigest()}, expected {extent.checksum}",
                extent.id,
            )

    def _pass(self, block: memoryview, out: ByteArray, digest: xxh3_128) -> None:
        """Hash and copy in one pass: what the checksum has brought into the cache is copied from there."""
        array = np.frombuffer(block, np.uint8)
        for start in range(0, array.nbytes, PIECE_BYTES):
            piece = array[start : start + PIECE_BYTES]
            if self._verify:
                digest.update(piece.data)
            out[start : start + PIECE_BYTES] = piece


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
