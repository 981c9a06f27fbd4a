"""Sizes of entries, which may share parts."""

from __future__ import annotations

from collections.abc import Mapping

# Bytes; or the bytes of each part, where entries may share parts: a part that several have counts once.
Size = int | Mapping[str, int]


class DistinctBytes:
    """Bytes in use, where what several entries share counts once."""

    def __init__(self) -> None:
        self.total = 0
        self._uses: dict[str, int] = {}

    def add(self, size: Size) -> None:
        """Count one user more of these bytes."""
        if isinstance(size, int):
            self.total += size
            return
        # A model has a thousand parts and is counted several times for one switch: no call for each of them.
        uses, fresh = self._uses, size.keys() - self._uses.keys()
        self.total += sum(map(size.__getitem__, fresh))
        for part in size.keys() - fresh:
            uses[part] += 1
        uses.update(dict.fromkeys(fresh, 1))

    def remove(self, size: Size) -> None:
        """Undo one `add` of the same size."""
        if isinstance(size, int):
            self.total -= size
            return
        uses, freed = self._uses, 0
        for part, nbytes in size.items():
            if uses[part] == 1:
                del uses[part]
                freed += nbytes
            else:
                uses[part] -= 1
        self.total -= freed


def bytes_of(size: Size) -> int:
    """Return all bytes of a size."""
    return size if isinstance(size, int) else sum(size.values())
