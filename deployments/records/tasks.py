"""Background tasks, and deadlines of requests."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from deployments.records.errors import DeadlineExceeded
from weights.platform.panics import panics_as_errors

ResultT = TypeVar("ResultT")


def shared_task(work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
    """Start a task of the running loop that belongs to no request. The caller keeps it: the loop holds tasks weakly.

    HAZARD: when Serve cancels a request, Ray cancels all actor calls that were made in its context as well, and tasks
    inherit the context of who created them. Here it is an empty one.
    """
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())


class Tasks:
    """The shared tasks of one owner, kept until they are done."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Start one more."""
        self._running.add(task := shared_task(work))
        task.add_done_callback(self._running.discard)


async def in_thread(function: Callable[..., ResultT], *arguments: object) -> ResultT:
    """Call a function as `asyncio.to_thread` does, but a caller who is cancelled goes on only when the thread is done.

    HAZARD: a thread cannot be cancelled. What it works on (a lease, a place in an arena, a tokenizer) must not be
    somebody else's before it is done.
    """

    def call() -> ResultT:
        with panics_as_errors():
            return function(*arguments)

    return await outcome_of(asyncio.ensure_future(asyncio.to_thread(call)))


async def outcome_of(work: asyncio.Future[ResultT]) -> ResultT:
    """Return what `work` gives, or raise as it does. A caller who is cancelled goes on when it is done, uncancelled."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # nobody will ask for it
        raise


class Deadline:
    """A point in the time of the running event loop, `timeout_s` from now; None is for ever."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.at = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    def left_s(self) -> float | None:
        """Return the time that is left, at least a little: zero is refused where the deadline itself says it better."""
        return None if self.at is None else max(1e-3, self.at - asyncio.get_running_loop().time())

    def exceeded(self) -> DeadlineExceeded:
        """Return the error that is raised when the time is over."""
        return DeadlineExceeded(f"the request exceeded its timeout of {self.timeout_s:g} s", "timeout")

    @asynccontextmanager
    async def bounding(self) -> AsyncIterator[None]:
        """Cancel the block when the time is over, and raise DeadlineExceeded."""
        try:
            async with asyncio.timeout_at(self.at) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():  # somebody else's
                raise
            raise self.exceeded() from None
