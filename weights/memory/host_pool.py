"""A pool of staging memory: buffers in size classes, each with its free list, under one bound.

Its memory is anonymous and begins at a page, as direct I/O and page-locking want.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from weights.records.errors import BudgetExceeded, StoreError

PAGE_BYTES: Final = 4096

ByteArray = npt.NDArray[np.uint8]


def allocate_pages(nbytes: int) -> ByteArray:
    """Return zeroed, page-aligned, writable memory; it is freed with the last reference to it or to a view of it.

    Raises BudgetExceeded when the system has none.
    """
    try:
        mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise BudgetExceeded(f"the system has no memory for {nbytes} bytes: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages refuses the advice
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8, nbytes)


_CLASSES_PER_OCTAVE: Final = 8  # a buffer is at most an eighth larger than asked for


class Pinning(Protocol):
    """Something that page-locks memory for a device's copy engine, like cudaHostRegister."""

    def register(self, address: int, nbytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A snapshot. `hits` found a free buffer of their class, `waits` had to wait for somebody to give back."""

    max_bytes: int
    held_bytes: int
    used_bytes: int
    hits: int
    misses: int
    waits: int

    @property
    def hit_rate(self) -> float:
        """Share of the requests that found a free buffer."""
        return self.hits / (self.hits + self.misses) if self.hits else 0.0


class HostBufferPool:
    """A pool of host buffers of at most `max_bytes`. Thread-safe; waiters are served FIFO, whatever their size.

    HAZARD: a thread that asks for a second buffer while it has one may wait for itself.
    """

    def __init__(self, max_bytes: int, pin: Pinning | None = None) -> None:
        self.max_bytes = max_bytes - max_bytes % PAGE_BYTES
        self._pin = pin
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._free: dict[int, list[ByteArray]] = {}
        self._held_bytes = self._used_bytes = 0
        self._hits = self._misses = self._waits = 0
        self._closed = False

    @contextlib.contextmanager
    def acquire(self, nbytes: int) -> Iterator[ByteArray]:
        """Yield a writable, page-aligned uint8 array of `nbytes`, its contents arbitrary, for the length of the block.

        Waits until there is room. Raises BudgetExceeded when there never will be, StoreError when the pool closes.
        """
        buffer = self._take(nbytes)
        try:
            yield buffer[:nbytes]
        finally:
            self._give_back(buffer)

    def stats(self) -> PoolStats:
        """Return a snapshot."""
        with self._changed:
            return PoolStats(self.max_bytes, self._held_bytes, self._used_bytes, self._hits, self._misses, self._waits)

    def close(self) -> None:
        """Free what is not in use; the rest goes as it is given back. Waiters get StoreError."""
        with self._changed:
            self._closed = True
            self._free_until(0)
            self._changed.notify_all()

    def _take(self, nbytes: int) -> ByteArray:
        if nbytes > self.max_bytes:
            raise BudgetExceeded(f"a buffer of {nbytes} bytes is more than the pool's bound of {self.max_bytes} bytes")
        size = min(_size_class(nbytes), self.max_bytes)
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                if not self._is_turn(ticket, size):
                    self._waits += 1
                    self._changed.wait_for(lambda: self._is_turn(ticket, size))
                if self._closed:
                    raise StoreError("the buffer pool is closed")
                buffer = self._reuse_or_allocate(size)
                self._used_bytes += size
                return buffer
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()  # the next in line may fit as well

    def _is_turn(self, ticket: object, size: int) -> bool:
        return self._closed or (self._waiting[0] is ticket and self._used_bytes + size <= self.max_bytes)

    def _reuse_or_allocate(self, size: int) -> ByteArray:
        # Under the lock also while pages are locked, which takes long: it happens once per buffer, not per load.
        if free := self._free.get(size):
            self._hits += 1
            return free.pop()
        self._misses += 1
        self._free_until(self.max_bytes - size)
        buffer = allocate_pages(size)
        if self._pin:
            self._pin.register(buffer.ctypes.data, size)
        self._held_bytes += size
        return buffer

    def _give_back(self, buffer: ByteArray) -> None:
        with self._changed:
            self._used_bytes -= buffer.nbytes
            self._free.setdefault(buffer.nbytes, []).append(buffer)
            if self._closed:
                self._free_until(0)
            self._changed.notify_all()

    def _free_until(self, held_bytes: int) -> None:
        """Free unused buffers, the largest class first, until no more than `held_bytes` are held."""
        for size in sorted(self._free, reverse=True):
            while self._held_bytes > held_bytes and self._free[size]:
                buffer = self._free[size].pop()
                if self._pin:
                    self._pin.unregister(buffer.ctypes.data)
                self._held_bytes -= size


def _size_class(nbytes: int) -> int:
    """Return the smallest class that holds `nbytes`: at least a page; eight classes per octave."""
    pages = max(1, -(-nbytes // PAGE_BYTES))
    step = max(1, 2 ** (pages - 1).bit_length() // (2 * _CLASSES_PER_OCTAVE))
    return -(-pages // step) * step * PAGE_BYTES
