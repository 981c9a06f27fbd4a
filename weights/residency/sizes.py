"""Sizes of entries, which may share parts."""

from __future__ import annotations

from collections.abc import Mapping

# Bytes; or the bytes of each part, where entries may share parts: a part that several have counts once.
Size = int | Mapping[str, int]


class DistinctBytes:
    """Bytes in use, where what several entries share counts once. With a `base`, a draft that leaves that as it is."""

    def __init__(self, base: DistinctBytes | None = None) -> None:
        self.total: int = base.total if base else 0
        self._base: Mapping[str, int] = base._uses if base else {}
        self._uses: dict[str, int] = {}  # by part, on top of those of the base

    @property
    def has_parts(self) -> bool:
        """Return whether anything is counted by its parts."""
        return bool(self._uses or self._base)

    def add(self, size: Size) -> None:
        """Count one user more of these bytes."""
        if isinstance(size, int):
            self.total += size
            return
        uses, base = self._uses, self._base
        for part, nbytes in size.items():
            before = uses.get(part, 0)
            uses[part] = before + 1
            if not before + base.get(part, 0):
                self.total += nbytes

    def remove(self, size: Size) -> None:
        """Undo one `add` of the same size."""
        if isinstance(size, int):
            self.total -= size
            return
        uses, base = self._uses, self._base
        for part, nbytes in size.items():
            left = uses.pop(part, 0) - 1
            if left:
                uses[part] = left
            if not left + base.get(part, 0):
                self.total -= nbytes


def bytes_of(size: Size) -> int:
    """Return all bytes of a size."""
    return size if isinstance(size, int) else sum(size.values())


def shown_bytes(nbytes: int) -> str:
    """Return a size as a message says it: `"300 bytes"`, `"2 GiB"`, `"3.2 GiB"`."""
    value, unit = float(nbytes), ""
    for unit in ("", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.1f}".removesuffix(".0") + f" {unit}" if unit else f"{nbytes} bytes"
