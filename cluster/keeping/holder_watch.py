"""Notices that somebody who has leases has died. Ray-free but for the ping."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import ray

INTERVAL_S: Final = 2.0

logger = logging.getLogger("atelier.keeper")


class HolderWatch:
    """Asks for each holder, every `interval_s`, whether it is alive; calls `on_death` once for one that is not."""

    def __init__(self, on_death: Callable[[str], None], interval_s: float = INTERVAL_S) -> None:
        self._on_death = on_death
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._holders: dict[str, Callable[[], bool]] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, holder: str, is_alive: Callable[[], bool]) -> None:
        """`is_alive` must not block. The thread starts with the first holder."""
        with self._lock:
            self._holders[holder] = is_alive
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="holder-watch", daemon=True)
                self._thread.start()

    def check(self) -> None:
        """One round."""
        with self._lock:
            holders = dict(self._holders)
        for holder, is_alive in holders.items():
            if is_alive():
                continue
            logger.warning("%s has died; its leases end", holder)
            with self._lock:
                self._holders.pop(holder, None)
            self._on_death(holder)

    def close(self) -> None:
        self._closed.set()

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
