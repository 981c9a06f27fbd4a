"""A watch that notices the death of lease holders. Ray-free.

Holders map a keeper's memory, so they run on its machine: the operating system tells at once which of them live,
however busy they are.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import psutil

from cluster.process.processes import ProcessMark, is_alive
from weights.residency.recent import Recent

INTERVAL_S: Final = 1.0
# Of one whose process cannot be seen, in a container of its own for example. All of them beat every second.
SILENCE_S: Final = 60.0
# A round later than so many intervals after the last one: this process stood still.
MAX_PAUSE: Final = 5

MAX_ENDED: Final = 10_000  # dead holders that are remembered

logger = logging.getLogger("atelier.keeper")


@dataclass(slots=True)
class _HolderSign:
    process: psutil.Process | None
    at_s: float

    def lives(self, silent_since_s: float) -> bool:
        if self.process is None:
            return self.at_s >= silent_since_s
        return is_alive(self.process)  # an unreaped process gives nothing back


class Leases(Protocol):
    """The leases of holders, by the holder's name."""

    def end(self, holder: str) -> None:
        """End those of a holder that has died."""


class HolderWatch:
    """A watch over holders, every `interval_s`: the leases of each that has died end, once. Thread-safe.

    A holder with a visible process lives as long as that; another has died when it was silent for `silence_s`. Time in
    which nothing was checked, because this process or its machine stood still, does not count as silence.
    """

    def __init__(
        self,
        leases: Leases,
        interval_s: float = INTERVAL_S,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = leases
        self._interval_s = interval_s
        self._silence_s = silence_s
        self._clock = clock
        self._lock = threading.Lock()
        self._last_signs: dict[str, _HolderSign] = {}
        self._gone: Recent[str, None] = Recent(MAX_ENDED)  # their visible processes have ended
        self._checked_s = clock()
        self._stood_still_s = 0.0
        self._closed = threading.Event()

    def start(self) -> None:
        """Check from now on, in a thread, until `close`."""
        threading.Thread(target=self._run, name="holder-watch", daemon=True).start()

    def on_heartbeat(self, holder: str, process: ProcessMark | None = None) -> bool:
        """Note a heartbeat, of `process` if that is known. Return False where it comes late: of a process that ended.

        HAZARD: what a process sent before it was killed may be read after its death was told.
        """
        seen = process and process.seen()
        with self._lock:
            if holder in self._gone and seen is None:
                return False
            self._gone.pop(holder, None)
            known = self._last_signs.get(holder)
            if known is None or known.process is None:
                self._last_signs[holder] = _HolderSign(seen, self._clock() - self._stood_still_s)
            return True

    def lives(self, holder: str) -> bool:
        """Return whether the holder seems to live; one that never gave a sign does not."""
        with self._lock:
            sign = self._last_signs.get(holder)
            return sign is not None and sign.lives(self._clock() - self._stood_still_s - self._silence_s)

    @property
    def num_holders(self) -> int:
        """The number of holders that gave a sign and have not died since."""
        with self._lock:
            return len(self._last_signs)

    def check(self) -> None:
        """Look at every holder once, and report the dead ones."""
        with self._lock:
            now_s = self._clock()
            self._stood_still_s += max(0.0, now_s - self._checked_s - MAX_PAUSE * self._interval_s)
            self._checked_s = now_s
            silent_since_s = now_s - self._stood_still_s - self._silence_s
            dead = [holder for holder, sign in self._last_signs.items() if not sign.lives(silent_since_s)]
        for holder in dead:
            logger.warning("%s has died; its leases end", holder)
            with self._lock:
                sign = self._last_signs.pop(holder, None)
                if sign is not None and sign.process is not None:
                    self._gone.note(holder, None)
            self._leases.end(holder)

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                self.check()
            except Exception:
                logger.exception("holders could not be checked")


class HolderEpochs:
    """The epochs of holders: one that counted as dead and gives a sign again has a new epoch, and new leases."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._epochs: dict[str, int] = {}
        self._ended: Recent[str, None] = Recent(MAX_ENDED)

    def number(self, holder: str) -> int:
        """Return the epoch of the holder's leases; 0 for a dead one."""
        if holder in self._ended:
            return 0
        if holder not in self._epochs:
            self._epochs[holder] = next(self._numbers)
        return self._epochs[holder]

    def is_of(self, epoch: int, holder: str) -> bool:
        """Return whether that epoch is the present one of `holder`."""
        return self._epochs.get(holder) == epoch

    def renew(self, holder: str) -> int:
        """Note a sign of the holder, and return its epoch."""
        self._ended.pop(holder, None)
        return self.number(holder)

    def expire(self, holder: str) -> None:
        """Count the holder as dead until it gives a sign again."""
        self._epochs.pop(holder, None)
        self._ended.note(holder, None)
