"""Giving dead ranges of a file back to the file system, without moving what is alive. Linux; source: fallocate(2)."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_BLOCK_BYTES: Final = 4096  # smaller holes would be zeros written, not space freed
_REFUSALS: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def dead_ranges(live: Iterable[tuple[int, int]], size_bytes: int) -> Iterator[tuple[int, int]]:
    """Whole blocks of a file of `size_bytes` that none of the `live` ranges touches; ranges as (begin, end)."""
    position = 0
    file_end = size_bytes + -size_bytes % _BLOCK_BYTES
    occupied = sorted((begin, end) for begin, end in live if end > begin)
    for begin, end in [*occupied, (file_end, file_end)]:
        first, last = position + -position % _BLOCK_BYTES, begin - begin % _BLOCK_BYTES
        if last > first:
            yield first, last
        position = max(position, end)


def punch(path: Path, ranges: Iterable[tuple[int, int]]) -> bool:
    """Make the (begin, end) ranges holes; the file keeps its size. False: the file system cannot.

    Raises OSError for anything else that goes wrong.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        for begin, end in ranges:
            if libc.fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, begin, end - begin):
                code = ctypes.get_errno()
                if code in _REFUSALS:
                    return False
                raise OSError(code, os.strerror(code), str(path))
        os.fsync(descriptor)
        return True
    finally:
        os.close(descriptor)


def allocated_bytes(path: Path) -> int:
    """What a file or folder takes on disk, holes left out. Symlinks are not followed."""
    files = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    return sum(file.lstat().st_blocks * 512 for file in files)
