"""The recent speed of one thread at some work."""

from __future__ import annotations

import threading
from typing import Final

# Of the latest measurement in the mean: a medium that others use as well changes within seconds.
_NEWEST_SHARE: Final = 0.2
MIN_MEASURED_BYTES: Final = 2**20


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
