"""Extents from packs into memory, several at once. Every byte passes the checksum on its way."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from xxhash import xxh3_128

from weights.errors import ExtentCorrupt
from weights.manifest import ExtentRef
from weights.memory.host_pool import HostBufferPool
from weights.memory.pages import ByteArray, allocate_pages
from weights.reading.blocks import PackReader, Span, resolve_pack
from weights.reading.planning import ReadPlanner
from weights.reading.report import LoadReport, StageClock
from weights.reading.strategy import ReadStrategy

__all__ = ["ByteArray", "ExtentReader", "Progress", "read_extent"]

Result = TypeVar("Result")
Progress = Callable[[int, int], None]  # bytes done, bytes in all

# Measured: below it, the kernel's readahead, which joins neighbours, is faster than direct reads one by one.
MIN_DIRECT_BYTES: Final = 4 * 2**20
# One extent in one thread: blocks small enough to be in cache still when the checksum comes to them.
SINGLE: Final = ReadStrategy(direct=False, num_threads=1, block_bytes=8 * 2**20)


class ExtentReader:
    """Reads extents through the staging buffers of `pool`, or each into memory of its own when there is no pool.

    An extent too large for the pool's bound gets memory of its own for that one time. Thread-safe.
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

    def load(self, extent: ExtentRef, sink: Callable[[ExtentRef, ByteArray], Result], stages: StageClock) -> Result:
        """What `sink` makes of the extent's bytes. With a pool, they are valid only until `sink` returns.

        Raises ExtentCorrupt naming the pack: missing, shorter than the manifest says, unreadable, or other bytes
        than were written; StoreError when its name leads out of the store.
        """
        with stages.measure("open"):
            path, strategy = self._places.get(extent.pack) or self._find(extent.pack)
            span = Span.around(extent)
            pack = PackReader(path, extent, span, direct=strategy.direct and extent.nbytes >= MIN_DIRECT_BYTES)
            # Found once: a published pack never changes, and looking takes longer than opening a small one.
            self._places[extent.pack] = path, strategy
        with pack, self._buffer(span.nbytes) as buffer:
            checksum = self._fill(pack, buffer, strategy.block_bytes, stages)
            if checksum is not None and checksum != extent.checksum:
                raise ExtentCorrupt(
                    f"{path}: bytes {extent.offset}..{extent.offset + extent.nbytes} (extent {extent.id}) have "
                    f"checksum {checksum}, expected {extent.checksum}"
                )
            with stages.measure("put", extent.nbytes):
                return sink(extent, buffer[span.lead : span.lead + extent.nbytes])

    def stream(
        self,
        extents: Sequence[ExtentRef],
        sink: Callable[[ExtentRef, ByteArray], object],
        progress: Progress | None = None,
        *,
        what: str = "",
    ) -> LoadReport:
        """Give every extent to `sink`, which is called from several threads and in any order.

        While one extent is verified and put away, others are read. The first error ends the load and is raised,
        after the reads in flight.
        """
        stages, start_s = StageClock(self._clock), self._clock()
        total_bytes = sum(extent.nbytes for extent in extents)
        # By the largest, which is the one worth a probe.
        packs = [
            resolve_pack(self._packs, extent.pack) for extent in sorted(extents, key=lambda found: -found.nbytes)[:1]
        ]
        plan = self._planner.plan(packs[0] if packs else self._packs)
        done_bytes, lock = 0, threading.Lock()

        def load(extent: ExtentRef) -> None:
            nonlocal done_bytes
            self.load(extent, sink, stages)
            with lock:  # held while it is told, so that it never hears of less than before
                done_bytes += extent.nbytes
                if progress:
                    progress(done_bytes, total_bytes)

        # In the order of the files, but the giants first: one of them last would be read with nothing beside it.
        giant_bytes = 2 * plan.strategy.block_bytes
        ordered = sorted(extents, key=lambda extent: (extent.nbytes <= giant_bytes, extent.pack, extent.offset))
        with concurrent.futures.ThreadPoolExecutor(plan.strategy.num_threads, thread_name_prefix="read") as threads:
            futures = [threads.submit(load, extent) for extent in ordered]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return LoadReport(
            what=what,
            nbytes=total_bytes,
            wall_s=self._clock() - start_s,
            stages=stages.figures(),
            medium=plan.medium,
            strategy=plan.strategy,
            verified=self._verify,
            peak_gbps=plan.probe.peak_gbps if plan.probe else None,
            pool=self._pool.stats() if self._pool else None,
            advice=plan.advice,
        )

    def _find(self, pack: str) -> tuple[Path, ReadStrategy]:
        path = resolve_pack(self._packs, pack)
        return path, self._planner.plan(path).strategy

    def _buffer(self, nbytes: int) -> contextlib.AbstractContextManager[ByteArray]:
        if self._pool and nbytes <= self._pool.max_bytes:
            return self._pool.acquire(nbytes)
        return contextlib.nullcontext(allocate_pages(nbytes))

    def _fill(self, pack: PackReader, buffer: ByteArray, block_bytes: int, stages: StageClock) -> str | None:
        """The checksum of what was read, None when nothing is verified."""
        digest = xxh3_128()
        blocks = pack.blocks(buffer, block_bytes)
        while True:
            with stages.measure("read"):
                block = next(blocks, None)
            if block is None:
                return digest.hexdigest() if self._verify else None
            stages.add_bytes("read", block.nbytes)
            if self._verify:
                with stages.measure("verify", block.nbytes):
                    digest.update(block)


def read_extent(packs: Path, extent: ExtentRef) -> ByteArray:
    """The bytes of one extent in memory of their own, verified while they arrive. Raises what `load` does."""
    reader = ExtentReader(packs, None, ReadPlanner(override=SINGLE))
    return reader.load(extent, lambda _, array: array, StageClock())
