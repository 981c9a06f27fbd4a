"""Notices that somebody who has leases has died. Ray-free.

Holders map a keeper's memory, so they run on its machine: the operating system says which of them live, at once and
whatever they are busy with.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psutil

from cluster.processes import ProcessMark, is_alive

INTERVAL_S: Final = 1.0
# Of one whose process cannot be seen, in a container of its own for example. All of them beat every second.
SILENCE_S: Final = 60.0
# A round that comes later than so many intervals after the one before: this process stood still.
MAX_PAUSE: Final = 5

MAX_ENDED: Final = 10_000  # holders that are known to be dead

logger = logging.getLogger("atelier.keeper")


@dataclass(slots=True)
class _Heard:
    process: psutil.Process | None
    at_s: float

    def lives(self, silent_since_s: float) -> bool:
        if self.process is None:
            return self.at_s >= silent_since_s
        return is_alive(self.process)  # one that is not reaped yet gives nothing back


class HolderWatch:
    """A watch over holders, every `interval_s`: `on_death` is called once for each that has died. Thread-safe.

    One whose process can be seen lives as long as that; another has died when it was silent for `silence_s`. Time in
    which nothing was checked, because this process or its machine stood still, is nobody's silence.
    """

    def __init__(
        self,
        on_death: Callable[[str], None],
        interval_s: float = INTERVAL_S,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_death = on_death
        self._interval_s = interval_s
        self._silence_s = silence_s
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: dict[str, _Heard] = {}
        self._checked_s = clock()
        self._stood_still_s = 0.0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def heard(self, holder: str, process: ProcessMark | None = None) -> None:
        """Note a heartbeat, of `process` if that is known. The watch's thread starts with the first."""
        with self._lock:
            known = self._heard.get(holder)
            if known is None or known.process is None:
                self._heard[holder] = _Heard(process and process.seen(), self._clock() - self._stood_still_s)
            if self._thread is None:
                self._checked_s = self._clock()
                self._thread = threading.Thread(target=self._run, name="holder-watch", daemon=True)
                self._thread.start()

    @property
    def num_holders(self) -> int:
        """The number of holders that were heard and are not known to have died."""
        with self._lock:
            return len(self._heard)

    def check(self) -> None:
        """Look at every holder once, and tell of those that have died."""
        with self._lock:
            now_s = self._clock()
            self._stood_still_s += max(0.0, now_s - self._checked_s - MAX_PAUSE * self._interval_s)
            self._checked_s = now_s
            silent_since_s = now_s - self._stood_still_s - self._silence_s
            dead = [holder for holder, heard in self._heard.items() if not heard.lives(silent_since_s)]
        for holder in dead:
            logger.warning("%s has died; its leases end", holder)
            with self._lock:
                self._heard.pop(holder, None)
            self._on_death(holder)

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                self.check()
            except Exception:
                logger.exception("holders could not be checked")


class HolderLives:
    """The lives of holders: one that was dead and is heard of again has another life, and other leases."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lives: dict[str, int] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def number(self, holder: str) -> int:
        """Return the number that the holder's leases have; 0 for one that is dead."""
        if holder in self._ended:
            return 0
        if holder not in self._lives:
            self._lives[holder] = next(self._numbers)
        return self._lives[holder]

    def is_of(self, life: int, holder: str) -> bool:
        """Return whether leases of that life are those that `holder` has now."""
        return self._lives.get(holder) == life

    def revive(self, holder: str) -> int:
        """Note that the holder was heard of, and return its life."""
        self._ended.pop(holder, None)
        return self.number(holder)

    def end_life(self, holder: str) -> None:
        """Count the holder as dead until it is heard of again."""
        self._lives.pop(holder, None)
        self._ended[holder] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
