"""The form in which an extent is read where storage has it twice: plain, or as its delta from a base."""

from __future__ import annotations

import threading
from typing import Final

# Of the latest measurement in the mean: a medium that others use as well changes within seconds.
_NEWEST_SHARE: Final = 0.2
MIN_MEASURED_BYTES: Final = 2**20
# Of one core, until it is measured.
ASSUMED_DECODE_BYTES_PER_S: Final = 1e9


class MeasuredRate:
    """Bytes per second of one thread at some work, lately. Thread-safe. None: nothing measured."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._s_per_byte: float | None = None

    @property
    def bytes_per_s(self) -> float | None:
        s_per_byte = self._s_per_byte
        return 1 / s_per_byte if s_per_byte else None

    def add(self, nbytes: int, seconds: float) -> None:
        """Count work that was done; little of it says more about its beginning and end than about the rate."""
        if nbytes < MIN_MEASURED_BYTES or seconds <= 0:
            return
        with self._lock:
            new, mean = seconds / nbytes, self._s_per_byte
            self._s_per_byte = new if mean is None else mean + _NEWEST_SHARE * (new - mean)


def prefers_delta(
    plain_bytes: int,
    delta_bytes: int,
    *,
    base_is_resident: bool,
    plain_bytes_per_s: float | None,
    read_bytes_per_s: float | None,
    decode_bytes_per_s: float | None,
) -> bool:
    """Return whether an extent is here sooner from its delta.

    Rates are of one thread beside the others: of plain extents from storage to their place; of reading deltas; and of
    all else that these take, decoding most of all, in plain bytes. Without a resident base, as many bytes as the extent
    has are read of that. A medium that nobody has measured is no reason to leave the plain bytes.
    """
    if plain_bytes_per_s is None:
        return False
    read_bytes = delta_bytes + (0 if base_is_resident else plain_bytes)
    decode_s = plain_bytes / (decode_bytes_per_s or ASSUMED_DECODE_BYTES_PER_S)
    return read_bytes / (read_bytes_per_s or plain_bytes_per_s) + decode_s < plain_bytes / plain_bytes_per_s
