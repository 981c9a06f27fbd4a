"""The entries that were used last, of which so many are kept: what a long life must not make grow. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TypeVar

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class Recent(OrderedDict[KeyT, ValueT]):
    """A dict of at most `most` entries, the one that was used last at its end. Only `note` and `used` count as uses."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __reduce__(self) -> tuple[type[Recent[KeyT, ValueT]], tuple[int], None, None, Iterator[tuple[KeyT, ValueT]]]:
        """Return the class, the bound and the entries of a copy."""
        return type(self), (self.most,), None, None, iter(self.items())

    def note(self, key: KeyT, value: ValueT) -> None:
        """Put an entry in, or another value in its place; the one that was used longest ago goes for it."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)

    def used(self, key: KeyT, make: Callable[[], ValueT]) -> ValueT:
        """Return the value of a key, made where there is none."""
        found = self[key] if key in self else make()
        self.note(key, found)
        return found
