"""Result files: each is whole and on the disk before the book says so. Blocks; raises OSError."""

from __future__ import annotations

import contextlib
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

    def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Return a part of a file."""
        with (self._folder / name).open("rb") as file:
            file.seek(offset)
            return file.read(num_bytes)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; one that is not there is fine."""
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    def strays(self, known: Collection[str]) -> list[str]:
        """Return the names of files that no job is of: a process ended between file and book."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(path.name for path in self._folder.iterdir() if path.name not in known)
        return []
