"""The plan of how each pack is read: measured once per device by a short probe, remembered across processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from weights.memory.host_pool import ByteArray, allocate_pages
from weights.platform.private_folder import cache_folder, recall, remember
from weights.reading.blocks import cached_pages
from weights.reading.strategy import (
    DIRECT,
    MOUNTINFO,
    UNKNOWN,
    Medium,
    Probe,
    ReadStrategy,
    choose_strategy,
    medium_of,
    nfs_advice,
    parse_strategy,
)

MIN_PROBED_BYTES: Final = 256 * 2**20  # smaller packs are read in the time that a probe takes
PROBE_BYTES: Final = 64 * 2**20  # each way
_BLOCK_BYTES: Final = 16 * 2**20  # one read per thread, all in flight at once: smaller ones miss the peak
_NUM_THREADS: Final = 4
_READ_VARIABLE: Final = "ATELIER_READ"


def _probe_file(path: Path, clock: Callable[[], float] = time.perf_counter) -> Probe | None:
    """Measure the medium that `path` lies on, from its first 128 MiB. None when it cannot be measured."""
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
    """Measure GB/s of reading PROBE_BYTES from `start`; None when that part is not cold or cannot be read."""
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


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """A strategy and what it rests on. `advice`: what would make the medium faster."""

    strategy: ReadStrategy
    medium: Medium = UNKNOWN
    probe: Probe | None = None
    advice: str | None = None


class Disks:
    """The storage of this machine: what is mounted, and how fast a file can be read."""

    def mounts(self) -> str:
        """Return the kernel's list of mounts. Raises OSError where it has none."""
        return MOUNTINFO.read_text(errors="surrogateescape")

    def probe(self, file: Path) -> Probe | None:
        """Measure reads of a file; None where that tells nothing of its disk."""
        return _probe_file(file)


class ReadPlanner:
    """Plans reads, once per device. `override`, or `ATELIER_READ` in `environ`, wins over what is found. Thread-safe.

    Raises WeightsError when `ATELIER_READ` is malformed.
    """

    def __init__(
        self,
        *,
        override: ReadStrategy | None = None,
        cache: Path | None = None,
        environ: Mapping[str, str] = os.environ,
        disks: Disks | None = None,
    ) -> None:
        text = environ.get(_READ_VARIABLE)
        self._override = override or (parse_strategy(text) if text else None)
        self._cache = _ProbeCache(cache or cache_folder(environ))
        self._disks = disks or Disks()
        self._plans: dict[tuple[int, bool], ReadPlan] = {}
        self._lock = threading.Lock()  # held during a probe: a second one beside it would measure half

    def plan(self, pack: Path) -> ReadPlan:
        """Plan for a pack without symlinks in its path. A missing one gets a default: opening it will tell."""
        try:
            status = pack.stat()
        except OSError:
            return ReadPlan(choose_strategy(UNKNOWN, None, self._override))
        # A small pack is not worth a probe, but a large one on the same device is when it comes.
        key = (status.st_dev, status.st_size >= MIN_PROBED_BYTES)
        with self._lock:
            if key not in self._plans:
                self._plans[key] = self._find(pack, may_probe=key[1])
            return self._plans[key]

    def _find(self, pack: Path, *, may_probe: bool) -> ReadPlan:
        try:
            medium = medium_of(pack, self._disks.mounts())
        except OSError:  # no /proc here
            medium = UNKNOWN
        probe = self._cache.get_probe(medium)
        if probe is None and may_probe and self._override is None and medium.kind in DIRECT:
            probe = self._disks.probe(pack)
            if probe is not None:
                self._cache.put_probe(medium, probe)
        return ReadPlan(choose_strategy(medium, probe, self._override), medium, probe, nfs_advice(medium))


class _CacheFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: Literal[1] = 1
    probes: dict[str, Probe] = {}


class _ProbeCache:
    """Probes by device and file system type, in one JSON file. It saves time only: whatever is wrong, it is empty."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "probes.json"

    def get_probe(self, medium: Medium) -> Probe | None:
        return self._read().probes.get(_key(medium))

    def put_probe(self, medium: Medium, probe: Probe) -> None:
        contents = self._read()
        contents.probes[_key(medium)] = probe
        remember(self._file, contents.model_dump_json().encode())

    def _read(self) -> _CacheFile:
        try:
            return _CacheFile.model_validate_json(recall(self._file))
        except ValidationError:
            return _CacheFile()


def _key(medium: Medium) -> str:
    return f"{medium.device} {medium.fs_type}"
