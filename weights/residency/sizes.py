"""Sizes of entries, which may share parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

# Bytes; or the bytes of each part, where entries may share parts: a part that several have counts once.
Size = int | Mapping[str, int]


class DistinctBytes:
    """Bytes in use, where what several entries share counts once."""

    def __init__(self) -> None:
        self.total = 0
        self._uses: Counter[str] = Counter()

    def add(self, size: Size) -> None:
        """Count one user more of these bytes."""
        if isinstance(size, int):
            self.total += size
            return
        for part, nbytes in size.items():
            if not self._uses[part]:
                self.total += nbytes
            self._uses[part] += 1

    def remove(self, size: Size) -> None:
        """Undo one `add` of the same size."""
        if isinstance(size, int):
            self.total -= size
            return
        for part, nbytes in size.items():
            self._uses[part] -= 1
            if not self._uses[part]:
                self.total -= nbytes
                del self._uses[part]


def bytes_of(size: Size) -> int:
    """Return all bytes of a size."""
    return size if isinstance(size, int) else sum(size.values())
