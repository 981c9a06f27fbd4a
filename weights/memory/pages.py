"""Anonymous memory that begins at a page: what direct I/O and page-locking want."""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import numpy as np
import numpy.typing as npt

from weights.errors import BudgetExceeded

PAGE_BYTES: Final = 4096

ByteArray = npt.NDArray[np.uint8]


def allocate_pages(nbytes: int) -> ByteArray:
    """Return zeroed, page-aligned, writable memory; it is freed with the last reference to it or to a view of it.

    Raises BudgetExceeded when the system has none.
    """
    try:
        mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise BudgetExceeded(f"the system has no memory for {nbytes} bytes: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages refuses the advice
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8, nbytes)
