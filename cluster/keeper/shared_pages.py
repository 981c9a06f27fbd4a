"""The pages of Ray's object store, made and mapped before the first load needs them.

Two costs hide in the first put of a process: the kernel makes the pages of shared memory when they are touched first
(0.5 GiB/s on a virtual machine), and every process maps each 4 KiB page by a fault of its own (4 GiB/s). Afterwards a
put runs at the speed of memory, 11 to 14 GiB/s here. MADV_POPULATE_READ (Linux 5.14, madvise(2)) does both in bulk.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MADV_POPULATE_READ: Final = 22
STEP_BYTES: Final = 64 * 2**20  # a step holds the address space's lock: short enough for others to get on
_MAPPING: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-s \S+ \S+ \S+ +(/\S*plasma\S*)", re.MULTILINE)

logger = logging.getLogger("atelier.keeper")


@dataclass(frozen=True, slots=True)
class Mapping:
    """A shared mapping of this process."""

    address: int
    nbytes: int
    file: str


def store_mappings(maps: str) -> Iterator[Mapping]:
    """Ray's object store in the text of /proc/self/maps; it is there once the process has put something large."""
    for begin, end, file in _MAPPING.findall(maps):
        yield Mapping(int(begin, 16), int(end, 16) - int(begin, 16), file)


def populate(mapping: Mapping, stop: Callable[[], bool] = lambda: False) -> int:
    """Make and map the pages of `mapping`, step by step until `stop()`; returns the bytes that are done.

    Contents stay as they are. Fewer bytes than asked for mean that memory is short or the kernel does not know how:
    nothing is lost then but speed.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    done = 0
    while done < mapping.nbytes and not stop():
        step = min(STEP_BYTES, mapping.nbytes - done)
        if madvise(ctypes.c_void_p(mapping.address + done), ctypes.c_size_t(step), MADV_POPULATE_READ):
            logger.info("pages of %s stay as they are: errno %s", mapping.file, ctypes.get_errno())
            break
        done += step
    return done


def populate_store(stop: Callable[[], bool] = lambda: False) -> int:
    """All of the object store that this process has mapped; returns the bytes that are done."""
    return sum(populate(mapping, stop) for mapping in store_mappings(Path("/proc/self/maps").read_text()))
