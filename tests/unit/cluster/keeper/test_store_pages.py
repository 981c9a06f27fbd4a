"""Pages of the object store: found among a process's mappings, there and mapped before anybody touches them."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.keeper.object_store import (
    STEP_BYTES,
    _populate_mapping,
    _populate_store,
    _SharedMapping,
    _store_mappings,
)

NBYTES = 3 * 2**20


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[tuple[mmap.mmap, Path]]:
    """A sparse file in shared memory that is named and mapped as Ray does it."""
    path = Path(f"/dev/shm/plasma-test-{os.getpid()}")
    try:
        with path.open("w+b") as file:
            file.truncate(NBYTES)
            with mmap.mmap(file.fileno(), NBYTES) as mapped:
                yield mapped, path
    finally:
        path.unlink()


def test_only_the_object_store_is_found() -> None:
    maps = """\
7f36458ba000-7f37458ba000 rw-s 00000000 00:1b 45                         /dev/shm/plasmayIK6BF (deleted)
7f36458ba000-7f37458bb000 r--s 00000000 00:1b 45                         /dev/shm/plasmaReadOnly
7f3745000000-7f3745001000 rw-p 00000000 00:1b 45                         /lib/plasma.so
7f3745100000-7f3745101000 rw-s 00000000 00:1b 45                         /dev/shm/other
7f3745200000-7f3745201000 rw-p 00000000 00:00 0
"""
    assert list(_store_mappings(maps)) == [_SharedMapping(0x7F36458BA000, 2**32, "/dev/shm/plasmayIK6BF")]


def test_pages_are_made_and_keep_their_contents(shared: tuple[mmap.mmap, Path]) -> None:
    mapped, path = shared
    mapped[5000:5005] = b"bytes"
    assert path.stat().st_blocks * 512 < NBYTES
    assert _populate_store() >= NBYTES
    assert path.stat().st_blocks * 512 == NBYTES
    assert mapped[5000:5005] == b"bytes"
    assert not any(mapped[:5000])


def test_it_can_be_stopped(shared: tuple[mmap.mmap, Path]) -> None:
    mapped, path = shared
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    assert _populate_mapping(_SharedMapping(address, NBYTES, str(path)), stop=lambda: True) == 0
    assert path.stat().st_blocks == 0


def test_memory_that_is_not_there_is_no_error() -> None:
    assert _populate_mapping(_SharedMapping(0, STEP_BYTES, "nothing")) == 0
