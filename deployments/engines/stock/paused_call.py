"""A call in a thread of its own that runs only while another thread waits for it: the two take turns.

So code that cannot be cut into steps can be ended, and leave the device to others, at places of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Cancelled(BaseException):
    """Raised out of `PausedCall.pause` when nobody wants the outcome; `except Exception` does not stop it."""


class PausedCall(Generic[T]):
    """A call that begins with the first `resume`, and gives the turn back wherever it calls `pause`.

    `resume` and `close` are called by one thread at a time, `pause` by the call itself, `cancel` by any thread.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call = call
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_its_turn, self._is_ours = threading.Semaphore(0), threading.Semaphore(0)
        self._is_begun = self.is_cancelled = False
        self._outcome: T
        self._error: BaseException | None = None
        self.has_ended = False

    @property
    def is_here(self) -> bool:
        """Return whether it is the call that asks."""
        return threading.current_thread() is self._thread

    def resume(self) -> bool:
        """Let it run until it pauses or ends; return whether it has ended."""
        if not self._is_begun:
            self._is_begun = True
            self._thread.start()
        self._is_its_turn.release()
        self._is_ours.acquire()
        if self.has_ended:
            self._thread.join()
        return self.has_ended

    def pause(self) -> None:
        """Give the turn back until the next `resume`. Raises Cancelled once the call is cancelled."""
        if not self.is_cancelled:
            self._is_ours.release()
            self._is_its_turn.acquire()
        if self.is_cancelled:
            raise Cancelled

    def outcome(self) -> T:
        """Return the result of the ended call, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._outcome

    def cancel(self) -> None:
        """Let it end where it would pause next."""
        self.is_cancelled = True

    def close(self) -> None:
        """Cancel it, and wait until it has ended: as long as it takes to the place where it would pause next."""
        self.cancel()
        while self._is_begun and not self.has_ended:
            self.resume()

    def _run(self) -> None:
        self._is_its_turn.acquire()
        try:
            if not self.is_cancelled:
                self._outcome = self._call()
        except BaseException as error:  # also Cancelled: whoever resumes is told, and decides
            self._error = error
        self.has_ended = True
        self._is_ours.release()
