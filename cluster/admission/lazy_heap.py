"""A heap of items whose keys change: an entry is corrected when it comes up, so a change costs O(log n). Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any, Final, Generic, Protocol, TypeVar

_MOST_STALE: Final = 64  # entries, beside one for each item

ItemT = TypeVar("ItemT")
KeyedT = TypeVar("KeyedT", contravariant=True)


class Keys(Protocol[KeyedT]):
    """The present keys of items."""

    def key_of(self, item: KeyedT, /) -> Any:
        """Return the key of an item, None for one that is gone."""


class LazyHeap(Generic[ItemT]):
    """Items, those with the least of their `keys` first.

    A key may grow at any time; an item whose key is less than before has to be pushed again.
    """

    def __init__(self, keys: Keys[ItemT], items: Iterable[ItemT] = ()) -> None:
        self._key_of = keys.key_of
        self._keys: dict[ItemT, Any] = dict.fromkeys(items)  # of the entries that count
        self.rebuild()

    def rebuild(self) -> None:
        """Look at the keys of all items anew."""
        keys = {item: self._key_of(item) for item in self._keys}
        self._keys = {item: key for item, key in keys.items() if key is not None}
        self._heap = [(key, item) for item, key in self._keys.items()]
        heapq.heapify(self._heap)
        self._most = 2 * len(self._heap) + _MOST_STALE

    def push(self, item: ItemT) -> None:
        """Put an item in, or again."""
        key = self._key_of(item)
        if item not in self._keys or key < self._keys[item]:
            self._keys[item] = key
            heapq.heappush(self._heap, (key, item))
            if len(self._heap) > self._most:
                self.rebuild()

    def first(self) -> ItemT | None:
        """Return the item with the least key; None without one."""
        while self._heap:
            key, item = self._heap[0]
            if self._keys.get(item) != key:
                heapq.heappop(self._heap)
            elif (now := self._key_of(item)) == key:
                return item
            elif now is None:
                del self._keys[item]
            else:
                self._keys[item] = now
                heapq.heapreplace(self._heap, (now, item))
        return None

    def pop(self) -> ItemT | None:
        """Take out the item with the least key; None without one."""
        if (item := self.first()) is not None:
            del self._keys[item]
        return item
