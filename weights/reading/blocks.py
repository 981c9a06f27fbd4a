"""A byte range of a pack, read in blocks, in order: with O_DIRECT where file system and place allow it.

O_DIRECT wants address, file offset and length aligned to the device's blocks (open(2)), so the aligned *span*
around a range is read: the range lies in the buffer as many bytes after a block's start as it does in the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from weights.memory.host_pool import PAGE_BYTES, ByteArray
from weights.reading.strategy import BLOCK_ALIGNMENT
from weights.records.errors import ExtentCorrupt, StoreError
from weights.records.manifest import ExtentRef

_CACHESTAT: Final = 451  # cachestat(2), the same number on every architecture, since Linux 6.5
CACHED_BLOCK_BYTES: Final = 2 * 2**20  # what is copied should be in the processor's cache when it is verified
_WORD_BYTES: Final = 8  # of the widest element type: memory that begins elsewhere could not be viewed as one


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def cached_pages(fd: int, offset: int, nbytes: int) -> int:
    """Count the pages of a range of the open file in the page cache; 0 where the kernel cannot or will not tell.

    `nbytes` > 0 (the kernel takes 0 for "to the end").
    """
    pages = _Pages()
    status = _libc().syscall(_CACHESTAT, fd, ctypes.byref(_Range(offset, nbytes)), ctypes.byref(pages), 0)
    return int(pages.cached) if status == 0 else 0


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A range of a file, `nbytes` from `start`; the range that is wanted begins `lead` bytes in."""

    start: int
    nbytes: int
    lead: int

    @classmethod
    def around(cls, extent: ExtentRef) -> FileSpan:
        """Return the span for direct reading: `start` and `nbytes` are multiples of 4096.

        Only an extent at an odd place begins there: a lead would misalign its tensors in memory.
        """
        lead = 0 if extent.offset % _WORD_BYTES else extent.offset % BLOCK_ALIGNMENT
        nbytes = lead + extent.nbytes
        return cls(extent.offset - lead, nbytes + -nbytes % BLOCK_ALIGNMENT, lead)

    @classmethod
    def exact(cls, extent: ExtentRef) -> FileSpan:
        """Return the extent alone, for reading through the page cache."""
        return cls(extent.offset, extent.nbytes, 0)

    @property
    def is_aligned(self) -> bool:
        """Return whether the span begins at a border of `BLOCK_ALIGNMENT` bytes."""
        return self.start % BLOCK_ALIGNMENT == 0


def resolve_pack(packs: Path, pack: str) -> Path:
    """Return the file behind a pack's name, symlinks followed. Raises StoreError when it is not inside `packs`."""
    root, path = os.path.realpath(packs), os.path.realpath(packs / pack)
    if os.path.commonpath((root, path)) != root:
        raise StoreError(f"{packs / pack}: leads out of the store, to {path}")
    return Path(path)


class PackReader:
    """A pack, open for reading one extent. Context manager; not for several threads at once.

    `span` is what a buffer for all of it must hold.
    Raises ExtentCorrupt naming pack and extent when there is no such pack or the extent lies beyond its end.
    """

    def __init__(
        self,
        path: Path,
        extent: ExtentRef,
        *,
        direct: bool,
        cached_pages: Callable[[int, int, int], int] = cached_pages,
    ) -> None:
        self._path, self._extent = path, extent
        span = FileSpan.around(extent)
        self._direct = direct and span.is_aligned
        # O_NONBLOCK: opening a FIFO would wait for its writer; regular files do not care. O_NOFOLLOW: the path is
        # resolved, so a symlink there has been put in its place since.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        with self._named_errors():
            try:
                self._fd = os.open(path, flags | (os.O_DIRECT if self._direct else 0))
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                self._direct = False
                self._fd = os.open(path, flags)
        try:
            self._refuse_what_cannot_hold_it()
        except BaseException:
            os.close(self._fd)
            raise
        # What is in the page cache is copied from there, faster than a disk gives it.
        self._is_cached = (
            self._direct and cached_pages(self._fd, span.start, max(1, span.nbytes)) * PAGE_BYTES >= extent.nbytes
        )
        if self._is_cached:
            self._leave_direct()
        self.span = span if self._direct else FileSpan.exact(extent)

    @property
    def is_direct(self) -> bool:
        """Return whether a buffer must begin at a page and hold whole blocks."""
        return self._direct

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def blocks(self, buffer: ByteArray, block_bytes: int) -> Iterator[memoryview]:
        """Fill `buffer` and give the extent's own bytes, block by block in order.

        One that holds the span gets all of it in one piece. A shorter one is filled anew for every block, which is
        gone when the next is asked for. A direct reader's begins at a page and has whole pages.
        Raises ExtentCorrupt naming pack and extent when the pack ends too early or reading fails.
        """
        begin, end = self.span.lead, self.span.lead + self._extent.nbytes
        position = 0 if self._direct else begin
        view = buffer.data
        is_whole = len(view) >= self.span.nbytes
        if self._is_cached:
            block_bytes = min(block_bytes, CACHED_BLOCK_BYTES)
        while position < end:
            place = (view[position:] if is_whole else view)[:block_bytes]
            with self._named_errors():
                num_read = self._read(place, position, end)
            if num_read:
                yield place[max(begin - position, 0) : min(num_read, end - position)]
            position += num_read

    def _refuse_what_cannot_hold_it(self) -> None:
        """Check the length before memory is allocated: a manifest may claim any."""
        with self._named_errors():
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError("not a regular file")
        if status.st_size < self._extent.offset + self._extent.nbytes:
            raise self._too_short(status.st_size)

    def _too_short(self, end: int) -> ExtentCorrupt:
        return ExtentCorrupt(
            f"{self._path}: ends at byte {end}, extent {self._extent.id} needs bytes up to "
            f"{self._extent.offset + self._extent.nbytes}",
            self._extent.id,
        )

    def _read(self, block: memoryview, position: int, end: int) -> int:
        """Read into `block`; returns bytes, or 0 when direct reading was refused or ended: buffered reading follows."""
        # No further than the span: a whole block at each end would read a quarter more than is wanted.
        block = block[: (self.span.nbytes if self._direct else end) - position]
        try:
            num_read = os.preadv(self._fd, [block], self.span.start + position)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
            self._leave_direct()
            return 0
        if self._direct and num_read % BLOCK_ALIGNMENT and position + num_read < end:
            self._leave_direct()  # a short read: what follows is no longer at a block's start, or there is nothing
        elif num_read == 0:
            raise self._too_short(self.span.start + position)
        return num_read

    def _leave_direct(self) -> None:
        self._direct = False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            id_ = self._extent.id
            raise ExtentCorrupt(f"{self._path}: missing; extent {id_} was in it", id_) from None
        except OSError as error:
            id_ = self._extent.id
            raise ExtentCorrupt(f"{self._path}: reading extent {id_} failed: {error}", id_) from error
