"""Extents read from packs into memory, several at once. Every byte passes the checksum on its way.

Of an extent that is stored as a delta too, that is read where it is sooner than the plain bytes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from weights.memory.host_pool import ByteArray, HostBufferPool, allocate_pages
from weights.reading.blocks import resolve_pack
from weights.reading.delta_extents import DeltaReader, Resident
from weights.reading.plain_extents import Place, PlainReader
from weights.reading.planning import ReadPlanner
from weights.reading.report import LoadReport, StageClock
from weights.reading.strategy import ReadStrategy
from weights.records.errors import ExtentCorrupt
from weights.records.manifest import ExtentRef

__all__ = ["ByteArray", "ExtentReader", "Place", "Progress", "Resident", "read_extent", "reading_order"]

_Result = TypeVar("_Result")
Progress = Callable[[int, int], None]  # bytes done, bytes in all

# One extent in one thread: blocks small enough to be in cache still when the checksum comes to them.
_SINGLE: Final = ReadStrategy(direct=False, num_threads=1, block_bytes=8 * 2**20)


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
        resident: Resident = lambda base: None,
    ) -> None:
        self._packs = packs
        self._planner = planner
        self._plain = PlainReader(packs, pool, planner, verify=verify)
        self._deltas = DeltaReader(self._plain, pool, resident)

    def read(self, extent: ExtentRef, stages: StageClock) -> ByteArray:
        """Read an extent into memory that is the caller's. Raises what `read_into` does."""

        def delta() -> ByteArray:
            with _placed_once(lambda: allocate_pages(extent.nbytes)) as place:
                self._deltas.decode(extent, place, stages)
                return place()

        return self._in_either_form(extent, lambda: self._plain.read(extent, stages), delta)

    def read_into(self, extent: ExtentRef, place: Place, stages: StageClock) -> None:
        """Fill what `place` gives: memory, writable, contiguous and as long as the extent. It is asked once.

        Raises ExtentCorrupt naming the pack: missing, shorter than the manifest says, unreadable, or other bytes
        than were written, of the extent or of the base of its delta; StoreError when its name leads out of the store;
        and what `place` does. After an error the place holds nothing of worth.
        """
        with _placed_once(place) as once:
            self._in_either_form(
                extent,
                functools.partial(self._plain.read_into, extent, once, stages),
                functools.partial(self._deltas.decode, extent, once, stages),
            )

    def prefers_sent_delta(self, extent: ExtentRef, bytes_per_s: float | None) -> bool:
        """Return whether an extent is here sooner when its delta comes over a link of this rate: see `from_delta`."""
        return self._deltas.prefers_sent(extent, bytes_per_s)

    def from_delta(
        self, extent: ExtentRef, fetch: Callable[[ByteArray], None], place: Place, stages: StageClock
    ) -> None:
        """Fill what `place` gives: from the delta, with which `fetch` fills what it gets, and bases that are resident.

        Raises ExtentCorrupt when these give other bytes, and what `fetch` and `place` do.
        """
        with _placed_once(place) as once:
            self._deltas.decode_sent(extent, fetch, once, stages)

    def read_all(
        self, extents: Sequence[ExtentRef], progress: Progress | None = None, *, what: str = ""
    ) -> tuple[dict[str, ByteArray], LoadReport]:
        """Read extents into memory that is the caller's; returned by id.

        While one extent is verified, others are read. The first error ends the load and is raised, after the reads
        in flight.
        """
        stages = StageClock()
        start_s = stages.now_s()
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
            wall_s=stages.now_s() - start_s,
            stages=stages.figures(),
            medium=plan.medium,
            strategy=plan.strategy,
            verified=self._plain.verify,
            peak_gbps=plan.probe.peak_gbps if plan.probe else None,
            advice=plan.advice,
        )

    def _in_either_form(self, extent: ExtentRef, plain: Callable[[], _Result], delta: Callable[[], _Result]) -> _Result:
        if extent.delta is None:
            return plain()
        if not extent.has_plain:
            return delta()
        first, second = (delta, plain) if self._deltas.prefers(extent) else (plain, delta)
        try:
            return first()
        except ExtentCorrupt:
            return second()


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

    def turn(extent: ExtentRef) -> tuple[int, str, int]:
        is_giant = extent.nbytes > 2 * strategy.block_bytes
        return -extent.nbytes * is_giant, extent.pack, extent.offset

    return sorted(extents, key=turn)


def read_extent(packs: Path, extent: ExtentRef) -> ByteArray:
    """Read one extent into memory of its own, verified while it arrives. Raises what `read_into` does."""
    return ExtentReader(packs, None, ReadPlanner(override=_SINGLE)).read(extent, StageClock())
