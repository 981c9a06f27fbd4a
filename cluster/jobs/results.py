"""Files of results and of clients: each byte is on the disk before the book has it. Blocks; raises OSError."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from weights.platform.durable import make_folder, replaced, sync


class ResultFiles:
    """The files of one folder, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, content: bytes) -> None:
        """Write a file, durably."""
        make_folder(self._folder)
        with replaced(self._folder / name) as staged:
            staged.write_bytes(content)
            sync(staged)
        sync(self._folder)

    def append(self, name: str, offset: int, content: bytes) -> None:
        """Write content behind the first `offset` bytes of a file, durably. What was behind them is gone."""
        make_folder(self._folder)
        file = self._folder / name
        with file.open("r+b" if offset else "wb") as written:
            if (size := written.seek(0, os.SEEK_END)) < offset:
                raise OSError(f"{file} has {size} bytes, {offset} were written")
            written.truncate(offset)
            written.seek(offset)
            written.write(content)
            written.flush()
            os.fsync(written.fileno())
        if not offset:
            sync(self._folder)

    def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Return a part of a file."""
        with (self._folder / name).open("rb") as file:
            file.seek(offset)
            return file.read(num_bytes)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; a missing one is no error."""
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    def strays(self, known: Collection[str]) -> list[str]:
        """Return the names of files without a job: a process ended between file and book."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(path.name for path in self._folder.iterdir() if path.name not in known)
        return []
