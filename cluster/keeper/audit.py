"""The audit of the extents in memory, again and again, and the log of those that were found damaged.

Shared memory cannot be made read-only for the processes that map it: one wrong in-place operation in one replica
changes the weights of all.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from xxhash import xxh3_128

from cluster.keeper.records import HeldExtent, copy_name

AUDIT_BYTES_PER_S: Final = 64 * 2**20
BLOCK_BYTES: Final = 4 * 2**20
IDLE_S: Final = 1.0
MAX_NAMED_CORRUPT: Final = 20
MAX_INVALIDATED: Final = 1000  # copies that are told to replicas, which ask every second

logger = logging.getLogger("atelier.keeper")


class DamageLog:
    """The copies of extents whose shared bytes somebody changed; only the last ones by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._corrupt: deque[str] = deque(maxlen=MAX_NAMED_CORRUPT)
        self._invalidated: deque[str] = deque(maxlen=MAX_INVALIDATED)
        self.num_corrupt = 0

    @property
    def corrupt(self) -> tuple[str, ...]:
        """The ids of the extents."""
        with self._lock:
            return tuple(self._corrupt)

    @property
    def invalidated(self) -> tuple[str, ...]:
        """The names of the copies, by `copy_name`."""
        with self._lock:
            return tuple(self._invalidated)

    def note_damage(self, id_: str, ref: Any, where: str) -> None:
        """Log that the copy `ref` of an extent is damaged, and `where` it was found."""
        logger.error("extent %s was written to (%s): whoever asks next gets a fresh copy", id_, where)
        with self._lock:
            self.num_corrupt += 1
            self._corrupt.append(id_)
            self._invalidated.append(copy_name(ref))


class Audit:
    """A thread that hashes one extent after the other, at most `bytes_per_s`. `damaged` gets wrong checksums.

    `ids` and `held` say what is in memory. Between two blocks nothing is kept, so that what is evicted goes at once.
    """

    def __init__(
        self,
        ids: Callable[[], list[str]],
        held: Callable[[str], HeldExtent | None],
        damaged: Callable[[HeldExtent], None],
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ids = ids
        self._held = held
        self._damaged = damaged
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._closed = threading.Event()
        self.audited_bytes = 0

    def start(self) -> None:
        threading.Thread(target=self._run, name="audit", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def round(self) -> None:
        """Check every extent that is here now, once."""
        for id_ in self._ids():
            if self._closed.is_set():
                return
            self._check(id_)

    def _run(self) -> None:
        while not self._closed.wait(IDLE_S):
            try:
                self.round()
            except Exception:
                logger.exception("the audit of shared weights failed")

    def _check(self, id_: str) -> None:
        digest, offset = xxh3_128(), 0
        first = self._held(id_)
        while first is not None and offset < first.extent.nbytes:
            start_s = self._clock()
            block = first.view[offset : offset + BLOCK_BYTES]
            digest.update(block.data)
            offset += block.nbytes
            self.audited_bytes += block.nbytes
            same = weakref.ref(first)
            rest_s = block.nbytes / self._bytes_per_s - (self._clock() - start_s)
            del first, block
            if self._closed.wait(max(rest_s, 0.0)):
                return
            first = self._held(id_)
            if first is not same():
                return  # evicted and loaded again meanwhile
        if first is not None and digest.hexdigest() != first.extent.checksum:
            self._damaged(first)
