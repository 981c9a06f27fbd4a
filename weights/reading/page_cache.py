"""How much of a file the kernel has in memory already: what was just written or read need not come from the disk."""

from __future__ import annotations

import ctypes
import functools
from typing import Final

_CACHESTAT: Final = 451  # cachestat(2), the same number on every architecture, since Linux 6.5


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
    """Pages of that range of the open file that are in the page cache; 0 where the kernel cannot or will not tell.

    `nbytes` > 0 (the kernel takes 0 for "to the end").
    """
    pages = _Pages()
    status = _libc().syscall(_CACHESTAT, fd, ctypes.byref(_Range(offset, nbytes)), ctypes.byref(pages), 0)
    return int(pages.cached) if status == 0 else 0
