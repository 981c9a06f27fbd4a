"""The one way to the replicas of a deployment: every call of a handle, awaited or streamed, goes through here.

Serve's responses are not cancelled with who awaits them, a router without replicas keeps calls for ever, and what a
replica raises comes in Ray's wrapper. Here a call ends when its caller is cancelled, when its deadline is over, and
when there is no replica that could answer, and whatever ends it also ends the work in the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, Final

from ray.exceptions import RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.errors import NoReplica, ReplicaLost
from deployments.services.deadlines import Deadline
from deployments.shared_work import shared_task

PATIENCE_S: Final = 2.0  # without any answer of the deployment before it is asked whether there is a replica

WhyNone = Callable[[], Awaitable[str | None]]


async def nobody_knows() -> str | None:
    """For deployments whose replicas are nobody's business: calls wait for their deadline."""
    return None


class ReplicaCalls:
    """Calls of one deployment; lives on one event loop.

    `why_none` says why no replica can answer, None while one can. It is asked out of band, by one task for all calls,
    and only when nothing was answered for `patience_s`: a replica that is busy answers somebody.
    """

    def __init__(
        self,
        handle: Any,
        why_none: WhyNone = nobody_knows,
        *,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handle = handle
        self._why_none = why_none
        self._patience_s = patience_s
        self._clock = clock
        self._answered_s = clock()
        self._open: dict[asyncio.Timeout, str | None] = {}  # with the reason why it was given up
        self._watching: asyncio.Task[None] | None = None

    def begin(self, method: str, *arguments: Any) -> Any:
        """Serve's response, which may be handed on to other calls; the caller gives it to `answer` or cancels it."""
        return getattr(self._handle, method).remote(*arguments)

    async def call(self, method: str, *arguments: Any, deadline: Deadline) -> Any:
        """Raises what the replica raises, as itself; DeadlineExceeded, NoReplica; Ray's errors when a replica dies."""
        return await self.answer(self.begin(method, *arguments), deadline)

    async def answer(self, response: Any, deadline: Deadline) -> Any:
        """Of a call that was begun. Raises as `call` does."""
        with _ended_with_its_caller(response):
            return await self._within(deadline, response)

    async def stream(self, method: str, *arguments: Any, deadline: Deadline) -> AsyncGenerator[Any]:
        """The pieces of a generator method. Whoever stops early closes this one (`contextlib.aclosing`), and with it
        the replica's. Raises as `call` does.
        """
        response = getattr(self._handle.options(stream=True), method).remote(*arguments)
        with _ended_with_its_caller(response):
            while True:
                try:
                    piece = await self._within(deadline, anext(response))
                except StopAsyncIteration:
                    return
                yield piece

    async def _within(self, deadline: Deadline, answer: Awaitable[Any]) -> Any:
        timeout = asyncio.timeout_at(deadline.at)
        try:
            async with timeout:
                self._open[timeout] = None
                if self._watching is None or self._watching.done():
                    self._watching = shared_task(self._watch())
                found = await answer
        except TimeoutError:
            if not timeout.expired():  # the replica's own
                raise
            reason = self._open[timeout]
            raise (NoReplica(reason) if reason else deadline.exceeded()) from None
        finally:
            self._open.pop(timeout, None)
        self._answered_s = self._clock()
        return found

    async def _watch(self) -> None:
        """As long as calls wait. A call that began just now fails with the others: there is nobody for it either."""
        while self._open:
            await asyncio.sleep(self._patience_s)
            if self._clock() - self._answered_s < self._patience_s:
                continue
            if (reason := await self._why_none()) is None:
                continue
            for timeout in self._open:
                if not timeout.expired():
                    self._open[timeout] = reason
                    timeout.reschedule(0.0)


@contextlib.contextmanager
def _ended_with_its_caller(response: Any) -> Iterator[None]:
    """Cancels the call whenever its caller does not get to its end, and takes Ray's wrapper from errors."""
    try:
        yield
    except asyncio.CancelledError:
        response.cancel()
        task = asyncio.current_task()
        if task is not None and not task.cancelling():  # not this caller, but the replica's work was cancelled
            raise ReplicaLost("the replica gave up this request; try again") from None
        raise
    except DeploymentUnavailableError as error:
        raise NoReplica(str(error)) from None
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except BaseException:  # a deadline, a replica that is out of reach, a stream that is closed early
        response.cancel()
        raise
