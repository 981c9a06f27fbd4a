"""A short measurement of a medium: the first part of a large file, cold, with O_DIRECT and through the page cache."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from weights.memory.pages import ByteArray, allocate_pages
from weights.reading.page_cache import cached_pages
from weights.reading.strategy import Probe

MIN_PROBED_BYTES: Final = 256 * 2**20  # smaller packs are read in the time that a probe takes
PROBE_BYTES: Final = 64 * 2**20  # each way
_BLOCK_BYTES: Final = 16 * 2**20  # one read per thread, all in flight at once: smaller ones miss the peak
_NUM_THREADS: Final = 4


def probe_file(path: Path, clock: Callable[[], float] = time.perf_counter) -> Probe | None:
    """Bandwidths of the medium that `path` lies on, from its first 128 MiB. None when they cannot be measured."""
    buffers = [allocate_pages(_BLOCK_BYTES) for _ in range(_NUM_THREADS)]
    for buffer in buffers:
        buffer.fill(1)  # the first touch of memory can take longer than the reading
    direct_gbps = None
    with contextlib.suppress(OSError):  # O_DIRECT refused, at open or at the first read
        direct_gbps = _measure(path, 0, os.O_DIRECT, buffers, clock)
    try:
        # Not the same part: what lies below a virtual disk may have cached it.
        buffered_gbps = _measure(path, PROBE_BYTES, 0, buffers, clock)
    except OSError:
        return None
    return Probe(direct_gbps=direct_gbps, buffered_gbps=buffered_gbps) if buffered_gbps else None


def _measure(path: Path, start: int, flags: int, buffers: list[ByteArray], clock: Callable[[], float]) -> float | None:
    """GB/s of reading PROBE_BYTES from `start`, None when that part is not cold or nothing comes of it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.posix_fadvise(fd, start, PROBE_BYTES, os.POSIX_FADV_DONTNEED)
        if not flags & os.O_DIRECT and cached_pages(fd, start, PROBE_BYTES):
            return None  # somebody has it mapped or just wrote it, and the speed of memory would pass for the disk's

        def read(lane: int) -> int:
            offsets = range(start + lane * _BLOCK_BYTES, start + PROBE_BYTES, _BLOCK_BYTES * len(buffers))
            return sum(os.preadv(fd, [buffers[lane].data], offset) for offset in offsets)

        with concurrent.futures.ThreadPoolExecutor(len(buffers)) as threads:
            begin_s = clock()
            nbytes = sum(threads.map(read, range(len(buffers))))
            elapsed_s = clock() - begin_s
    finally:
        os.close(fd)
    return nbytes / elapsed_s / 1e9 if nbytes and elapsed_s > 0 else None
