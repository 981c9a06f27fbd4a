"""Sizes of entries, which may share parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

# Bytes; or the bytes of each part, where entries may share parts: a part that several have counts once.
Size = int | Mapping[str, int]


class RemotePart(str):
    """The name of a part in the memory of another `place`, which has a budget of its own."""

    place: str

    def __new__(cls, place: str, name: str) -> RemotePart:
        found = super().__new__(cls, f"{name} on {place}")
        found.place = place
        return found


class DistinctBytes:
    """Bytes in use, where what several entries share counts once. With a `base`, a draft that leaves that as it is.

    `total` is of the table's own memory, `elsewhere` of each other place.
    """

    def __init__(self, base: DistinctBytes | None = None) -> None:
        self.total: int = base.total if base else 0
        self.elsewhere: Counter[str] = Counter(base.elsewhere if base else ())
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
            if before + base.get(part, 0):
                continue
            if isinstance(part, RemotePart):
                self.elsewhere[part.place] += nbytes
            else:
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
            if left + base.get(part, 0):
                continue
            if isinstance(part, RemotePart):
                self.elsewhere[part.place] -= nbytes
            else:
                self.total -= nbytes

    def over(self, budget_bytes: int, elsewhere: Mapping[str, int]) -> int:
        """Return the bytes beyond the budgets, each place's own; where all fit, 0 or less."""
        found = self.total - budget_bytes
        if not self.elsewhere:
            return found
        beyond = (nbytes - elsewhere.get(place, 0) for place, nbytes in self.elsewhere.items())
        return max(0, found) + sum(max(0, one) for one in beyond)


def unshared(size: Size, owner: str) -> Size:
    """Return as many bytes in each place, of parts that are the owner's alone."""
    if isinstance(size, int):
        return size
    found = DistinctBytes()
    found.add(size)
    elsewhere: dict[str, int] = {RemotePart(place, owner): nbytes for place, nbytes in found.elsewhere.items()}
    return {owner: found.total, **elsewhere} if elsewhere else found.total


def bytes_of(size: Size) -> int:
    """Return the bytes of a size in the table's own memory."""
    if isinstance(size, int):
        return size
    return sum(nbytes for part, nbytes in size.items() if not isinstance(part, RemotePart))


def shown_bytes(nbytes: int) -> str:
    """Return a size as a message says it: `"300 bytes"`, `"2 GiB"`, `"3.2 GiB"`."""
    value, unit = float(nbytes), ""
    for unit in ("", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.1f}".removesuffix(".0") + f" {unit}" if unit else f"{nbytes} bytes"
