"""Serve's access log, bounded: a line for each request and each call would be gigabytes a day."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

_LINES_PER_S: Final = 10.0
_BURST: Final = 100.0  # lines
_LOGGER: Final = "ray.serve"


def bound_access_log() -> None:
    """Bound the access log of this process. A second time does nothing."""
    logger = logging.getLogger(_LOGGER)
    if not any(isinstance(known, AccessLogFilter) for known in logger.filters):
        logger.addFilter(AccessLogFilter())


class AccessLogFilter(logging.Filter):
    """Lets lines about requests pass up to a rate; the next line that passes says how many did not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen_s = clock()
        self._lines = _BURST
        self._num_left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        if not getattr(record, "serve_access_log", False):
            return True
        now_s = self._clock()
        self._lines = min(_BURST, self._lines + (now_s - self._seen_s) * _LINES_PER_S)
        self._seen_s = now_s
        if self._lines < 1:
            self._num_left_out += 1
            return False
        self._lines -= 1
        if self._num_left_out:
            record.msg, record.args = f"{record.getMessage()} (after {self._num_left_out} that are left out)", ()
            self._num_left_out = 0
        return True
