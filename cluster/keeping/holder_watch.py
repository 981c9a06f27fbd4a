"""Notices that somebody who has leases has died. Ray-free but for the ping."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import ray

INTERVAL_S: Final = 2.0
# Of one that nobody can ask: a driver, a task, or a replica that has not sent its handle yet. They beat every second.
SILENCE_S: Final = 60.0

logger = logging.getLogger("atelier.keeper")


class HolderWatch:
    """Calls `on_death` once for each holder that is not alive: checked every `interval_s`.

    One that is watched is asked. One that was only heard of has died when it is silent for `silence_s`.
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
        self._watched: dict[str, Callable[[], bool]] = {}
        self._heard_s: dict[str, float] = {}  # of those that are not watched
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, holder: str, is_alive: Callable[[], bool]) -> None:
        """`is_alive` must not block."""
        with self._lock:
            self._watched[holder] = is_alive
            self._heard_s.pop(holder, None)
            self._start()

    def heard(self, holder: str) -> None:
        """A sign of life."""
        with self._lock:
            if holder not in self._watched:
                self._heard_s[holder] = self._clock()
                self._start()

    def check(self) -> None:
        """One round."""
        with self._lock:
            watched = dict(self._watched)
        dead = [holder for holder, is_alive in watched.items() if not is_alive()]
        with self._lock:
            silent_since_s = self._clock() - self._silence_s
            dead += [holder for holder, heard_s in self._heard_s.items() if heard_s < silent_since_s]
            for holder in dead:
                self._watched.pop(holder, None)
                self._heard_s.pop(holder, None)
        for holder in dead:
            logger.warning("%s has died; its leases end", holder)
            self._on_death(holder)

    def close(self) -> None:
        self._closed.set()

    def _start(self) -> None:
        """The thread starts with the first holder."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holder-watch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                self.check()
            except Exception:
                logger.exception("holders could not be checked")


class ActorPing:
    """Whether an actor lives. A busy one answers late: as long as an answer may come, it lives.

    HAZARD: it keeps a handle, so an actor that only ends when nobody has a handle does not end. Those of Serve do.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._asked: Any = None

    def __call__(self) -> bool:
        self._asked = self._asked or self._handle.__ray_ready__.remote()
        ready, _ = ray.wait([self._asked], timeout=0)
        if not ready:
            return True
        asked, self._asked = self._asked, None
        try:
            ray.get(asked)
        except ray.exceptions.ActorUnavailableError:  # a connection was lost; the actor may well live
            return True
        except ray.exceptions.RayActorError:
            return False
        except ray.exceptions.RayError:
            return True
        return True
