"""No power fails while tests run: what they write need not reach the disk, for which a test would wait longer than for
all else that it does. A pytest plugin. Tests of what is synced, and when, put an `os.fsync` of their own in its place.
Where there is room in memory, the folders of unit tests and device tests lie there; those of clusters are on the disk.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

_MEMORY: Final = Path("/dev/shm")
_ROOM_BYTES: Final = 4 * 2**30  # several times as much as the folders of all copies have at once


def keep_folders_in_memory() -> None:
    """Have pytest make the folders of tests in memory: to remove a file takes some disks two milliseconds.

    It does nothing where memory has too little room for files.
    """
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _ROOM_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


class _Unsynced(sqlite3.Connection):
    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if sql.startswith("PRAGMA journal_mode"):  # it is synced before the store says how
            super().execute("PRAGMA synchronous = OFF")
        for kept in ("NORMAL", "FULL"):
            sql = sql.replace(f"synchronous = {kept}", "synchronous = OFF")
        return super().execute(sql, *parameters)


@pytest.fixture(autouse=True, scope="session")
def no_power_fails() -> Iterator[None]:
    """Let files, and the databases of stores, stay in the kernel's memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=_Unsynced))
        yield
