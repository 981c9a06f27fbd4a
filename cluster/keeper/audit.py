"""Looks again and again whether the extents in memory are still what was loaded.

Shared memory cannot be made read-only for the processes that map it: one wrong in-place operation in one replica
changes the weights of all.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

from xxhash import xxh3_128

from cluster.keeper.records import Held

AUDIT_BYTES_PER_S: Final = 64 * 2**20
BLOCK_BYTES: Final = 4 * 2**20
IDLE_S: Final = 1.0

logger = logging.getLogger("atelier.keeper")


class Audit:
    """One extent after the other, at most `bytes_per_s`. `damaged` hears of each whose checksum is another.

    `ids` and `held` say what is in memory. Between two blocks nothing is kept, so that what is evicted goes at once.
    """

    def __init__(
        self,
        ids: Callable[[], list[str]],
        held: Callable[[str], Held | None],
        damaged: Callable[[Held, str], None],
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
        """Every extent that is here now, once."""
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
            self._damaged(first, digest.hexdigest())
