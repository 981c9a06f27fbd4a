"""The bounded channel from the task that produces a request's outputs to the task that reads them.

The producer is a plain coroutine that puts outputs into a channel. The reader makes the channel: the streaming method
of a replica, or the answer of the ingress.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

T = TypeVar("T")

CAPACITY: Final = 64

# An output that nobody has read yet and a newer one -> one output that tells what both do; None: there is none.
Merge = Callable[[T, T], T | None]


def _no_merge(older: T, newer: T) -> T | None:
    return None


class OutputChannel(Generic[T]):
    """The outputs of one request, an asynchronous iterator of them. Lives on one event loop, and has one reader.

    `produce(channel)` makes them, in a task that begins with the first reading, in the context of that: it puts what
    it has with `put` or `send`. Its error comes after its outputs. The task runs until it is done, or the channel is
    closed; it is the channel's only task, so that whatever it leases is given back when it ends.

    `capacity` outputs may wait for the reader. Beyond it `send` waits, and `put`, for those who cannot, merges an
    output into one that waits. HAZARD: what `merge` has nothing to merge with is kept all the same: there may be one
    of such for each completion of a text, and an image's result.
    """

    def __init__(
        self,
        produce: Callable[[OutputChannel[T]], Coroutine[Any, Any, None]],
        *,
        capacity: int = CAPACITY,
        merge: Merge[T] = _no_merge,
    ) -> None:
        self._produce = produce
        self._capacity = capacity
        self._merge = merge
        self._waiting: deque[T] = deque()
        self._changed = asyncio.Event()  # replaced by whoever waits for a change
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def put(self, output: T) -> None:
        """Take an output in at once. One for a closed channel is dropped."""
        if self._is_closed:
            return
        if len(self._waiting) >= self._capacity:
            for at in reversed(range(len(self._waiting))):
                if (merged := self._merge(self._waiting[at], output)) is not None:
                    self._waiting[at] = merged
                    return
        self._waiting.append(output)
        self._changed.set()

    async def send(self, output: T) -> None:
        """Take an output in once there is room for it."""
        while len(self._waiting) >= self._capacity and not self._is_closed:
            await self._change()
        self.put(output)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Return the next output. Raises what `produce` raised once its outputs are read.

        A reader who is cancelled while it waits closes the channel.
        """
        if self._task is None and not self._is_closed:
            self._task = asyncio.get_running_loop().create_task(self._produce(self))
            self._task.add_done_callback(lambda _: self._changed.set())
        while not self._waiting:
            if self._task is None or self._is_closed:
                raise StopAsyncIteration
            if self._task.done():
                self.close()
                await self._task  # which may have failed
                raise StopAsyncIteration
            try:
                await self._change()
            except asyncio.CancelledError:
                await self.aclose()
                raise
        self._changed.set()
        return self._waiting.popleft()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def close(self) -> None:
        """End reading and producing: nothing waits here any more. Anyone on the event loop may call it, at any time."""
        self._is_closed = True
        self._waiting.clear()
        self._changed.set()
        if self._task is not None:
            self._task.cancel()

    async def aclose(self) -> None:
        """Close the channel, and return when nothing runs for it any more: then its weights may go."""
        self.close()
        if self._task is None:
            return
        cancelled: asyncio.CancelledError | None = None
        while not self._task.done():
            try:
                await asyncio.wait([self._task])
            except asyncio.CancelledError as error:
                cancelled = error
        if not self._task.cancelled():
            self._task.exception()  # nobody will ask for it
        if cancelled is not None:
            raise cancelled

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.aclose()
