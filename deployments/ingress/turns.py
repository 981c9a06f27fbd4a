"""Turns: few requests are read at once, so that the event loop has time for probes and answers while thousands come.

A request has its turn from its whole body to its place in the admission queue, where `admitted` ends it, or to its
answer. `gate.py` gives them out. Where others wait for their turns, the queue is asked there about requests of a known
form (`known_forms.py`): most of an overload is refused so, without Serve, validation and records.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Final

from starlette.types import Scope

from cluster.control.lanes import Ask
from deployments.errors import DeadlineExceeded, QueueFull, ServiceError
from deployments.ingress.known_forms import Form, KnownForms

# Who has a turn hardly pauses, and all of them take theirs between two looks of the event loop at its sockets.
MAX_TURNS: Final = 3
_REFUSED: Final = 429
_NEW: Final = 0.05  # weight of a new turn in the time that turns take
# Who has spent more of its time on waiting to be read is refused unread, while most of those that are read are refused.
# Not sooner: the queue has room again when something ends, and those that wait here fill it.
_MOST_SHARE: Final = 0.5
_MOSTLY: Final = 0.5
_SHORT_S: Final = 0.25  # a wait for which nobody is refused who has more time than that


class Turn:
    """The turn of one request. `on_ask` is told what it needs, once that is known."""

    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free: asyncio.Semaphore | None = free
        self.on_ask: Callable[[Ask], None] | None = None

    def end(self, ask: Ask | None = None) -> None:
        """Let the next one begin. A second time does nothing."""
        if self._free is not None:
            self._free.release()
            self._free = None
            if ask is not None and self.on_ask is not None:
                self.on_ask(ask)


_current_turn: ContextVar[Turn | None] = ContextVar("_current_turn", default=None)


def end_turn(ask: Ask | None = None) -> None:
    """End the turn of the current request, if it has one: it waits from now on, for the place that it asks for."""
    if (turn := _current_turn.get()) is not None:
        turn.end(ask)


def takes_turns(scope: Scope) -> bool:
    """Return whether it is a request for inference. Probes, lists and the admin API never wait behind those."""
    path: str = scope.get("path", "")
    return scope["type"] == "http" and scope["method"] == "POST" and path.startswith(("/v1/", "/v2/models/"))


class Turns:
    """The turns at one gate. No more than `max_waiting()` requests wait for theirs, and only those that can be in time.

    `forms` tell whether the queue refuses a request that has not been read.
    """

    def __init__(
        self,
        max_waiting: Callable[[], int],
        forms: KnownForms | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_waiting = max_waiting
        self._forms = forms
        self.clock = clock
        self._free = asyncio.Semaphore(MAX_TURNS)
        self.num_waiting = 0
        self._turn_s = 0.0  # from one turn to the next, while requests wait for theirs
        self._begun_s = 0.0  # when the last one began
        self._refused_share = 0.0  # of those that were read of late while others waited

    @property
    def are_taken(self) -> bool:
        """Return whether a request that comes now has to wait."""
        return self._free.locked()

    def why_not_wait(self, left_s: float) -> QueueFull | None:
        """Return why a request that has so much time left cannot wait for its turn; None if it can."""
        if self.num_waiting >= self._max_waiting():
            return QueueFull(f"{self.num_waiting} requests wait to be read, as many as may; try again in a moment")
        longest_s = self._longest_s(left_s)
        return self._too_many(longest_s) if self._wait_s > longest_s > 0 else None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[asyncio.Semaphore]:
        """Count one who waits, while the context lasts, for what it yields. Whoever has it begins its turn."""
        self.num_waiting += 1
        try:
            yield self._free
        finally:
            self.num_waiting -= 1

    @contextlib.contextmanager
    def begin_turn(self) -> Iterator[Turn]:
        """Let the current request have its turn, no longer than the context lasts."""
        turn = Turn(self._free)
        _current_turn.set(turn)
        try:
            yield turn
        finally:
            turn.end()

    def note_begin(self, is_crowded: bool) -> float:
        """Take in that a turn begins now, for which others waited or not, and return the time."""
        now_s = self.clock()
        if is_crowded:
            self._turn_s += _NEW * (now_s - self._begun_s - self._turn_s)
        self._begun_s = now_s
        return now_s

    def why_late(self, waited_s: float, timeout_s: float) -> ServiceError | None:
        """Return why a request whose turn comes now is not read; None if it has time enough left."""
        if waited_s >= timeout_s:
            return DeadlineExceeded("the request's timeout was over before the request could be read", "timeout")
        longest_s = self._longest_s(timeout_s)
        return self._too_many(longest_s) if waited_s > longest_s else None

    def ask_unread(self, turn: Turn, scope: Scope, body: bytes, waited_s: float) -> ServiceError | None:
        """Return why the queue refuses a request, where that can be told by its form.

        Where it cannot, what the request turns out to need is remembered with its form.
        """
        form = Form.of(scope["path"], dict(scope["headers"]), body) if self._forms else None
        if self._forms is None or form is None:
            return None
        if (error := self._forms.why_refused(form, waited_s)) is None:
            turn.on_ask = partial(self._forms.note_ask, form, waited_s=waited_s)
        return error

    def note_status(self, status: int) -> None:
        """Take in how a request was answered that was read while others waited."""
        self._refused_share += _NEW * ((status == _REFUSED) - self._refused_share)

    @property
    def _wait_s(self) -> float:
        """Return how long one who comes now waits for its turn, by the pace of the last ones."""
        return self.num_waiting * self._turn_s

    def _longest_s(self, timeout_s: float) -> float:
        """Return how long a request with so much time may wait to be read."""
        is_hard = self._refused_share > _MOSTLY
        return min(timeout_s, max(_SHORT_S, _MOST_SHARE * timeout_s)) if is_hard else timeout_s

    def _too_many(self, longest_s: float) -> QueueFull:
        """Return the refusal of a request that would spend too much of its time on waiting to be read.

        It may come again as soon as those before it leave it less than `longest_s` to wait: they are read meanwhile.
        """
        after_s = max(0.0, self._wait_s - longest_s)
        text = "so many requests wait to be read that little time of this one would be left"
        return QueueFull(f"{text}; try again in {after_s:.3g} s", retry_after_s=after_s)
