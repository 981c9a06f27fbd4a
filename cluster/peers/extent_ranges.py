"""One extent on its way in ranges: who fetches which, what is still missing, and the checksum of it all."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import xxhash


@dataclass(frozen=True, slots=True)
class ExtentRange:
    """`view` is where its bytes belong, `offset` bytes into the extent."""

    index: int
    offset: int
    view: memoryview


class ExtentRanges:
    """What is still missing of one extent. Each byte is hashed once, in order, by whoever closes the gap before it.

    Thread-safe. Whoever takes a range must give it back or say that it arrived.
    """

    def __init__(self, view: memoryview, range_bytes: int) -> None:
        self._parts = [
            ExtentRange(index, offset, view[offset : offset + range_bytes])
            for index, offset in enumerate(range(0, view.nbytes, range_bytes))
        ]
        self._waiting = self._parts[::-1]
        self._has_arrived = [False] * len(self._parts)
        self._num_hashed = 0
        self._is_hashing = False
        self._digest = xxhash.xxh3_128()
        self._num_taken = 0
        self._changed = threading.Condition()
        self.missing_bytes = view.nbytes

    @property
    def num_missing(self) -> int:
        return self._has_arrived.count(False)

    def take(self) -> ExtentRange | None:
        """None when there is nothing left to do; while others are at the last parts, waits for one of them to fail."""
        with self._changed:
            while not self._waiting and self._num_taken:
                self._changed.wait()
            if not self._waiting:
                return None
            self._num_taken += 1
            return self._waiting.pop()

    def give_back(self, part: ExtentRange) -> None:
        """It could not be got: somebody else may take it."""
        with self._changed:
            self._num_taken -= 1
            self._waiting.append(part)
            self._changed.notify_all()

    def arrived(self, part: ExtentRange) -> None:
        """Its bytes are in its view, and stay as they are."""
        with self._changed:
            self._num_taken -= 1
            self._changed.notify_all()
            self._has_arrived[part.index] = True
            self.missing_bytes -= part.view.nbytes
            if self._is_hashing:
                return
            self._is_hashing = True
        while (following := self._next_to_hash()) is not None:
            self._digest.update(following.view)  # outside of the lock: others go on receiving

    def checksum(self) -> str:
        """Of all bytes, once every part has arrived."""
        return self._digest.hexdigest()

    def _next_to_hash(self) -> ExtentRange | None:
        with self._changed:
            index = self._num_hashed
            if index == len(self._parts) or not self._has_arrived[index]:
                self._is_hashing = False
                return None
            self._num_hashed += 1
            return self._parts[index]
