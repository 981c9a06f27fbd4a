"""How many extents a node sends to others at once. Ray-free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

# Few at once are finished sooner and can be passed on; one alone may not fill a fast link.
MAX_TRANSFERS: Final = 4
# Of a transfer between two ranges. One that asked for nothing for so long has ended without a word.
LINGER_S: Final = 0.5


@dataclass(slots=True)
class _Transfer:
    left_bytes: int
    num_ranges: int
    last_s: float


class TransferSlots:
    """Thread-safe. A transfer is one extent to one peer: ranges over several connections, under one number.

    It keeps its slot until all bytes are sent, or until it has asked for nothing for `linger_s`.
    """

    def __init__(
        self, max_transfers: int, linger_s: float = LINGER_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_transfers = max_transfers
        self._linger_s = linger_s
        self._clock = clock
        self._lock = threading.Lock()
        self._transfers: dict[int, _Transfer] = {}

    @property
    def num_active(self) -> int:
        with self._lock:
            self._forget_silent()
            return len(self._transfers)

    def begin(self, transfer: int, nbytes: int) -> bool:
        """One range of it, of `nbytes` in all, is about to be sent; False when every slot is taken by others."""
        with self._lock:
            self._forget_silent()
            if transfer not in self._transfers and len(self._transfers) >= self._max_transfers:
                return False
            found = self._transfers.setdefault(transfer, _Transfer(nbytes, 0, 0.0))
            found.num_ranges += 1
            return True

    def end(self, transfer: int, sent_bytes: int) -> None:
        """That range is sent, or the peer is gone: then `sent_bytes` is 0."""
        with self._lock:
            found = self._transfers[transfer]
            found.num_ranges -= 1
            found.left_bytes -= sent_bytes
            found.last_s = self._clock()
            if found.left_bytes <= 0 and not found.num_ranges:
                del self._transfers[transfer]

    def _forget_silent(self) -> None:
        since_s = self._clock() - self._linger_s
        self._transfers = {
            number: found for number, found in self._transfers.items() if found.num_ranges or found.last_s >= since_s
        }
