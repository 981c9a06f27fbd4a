"""Handles that behave like Serve's, without Ray.

What a handle call begins runs in the replica whatever becomes of who asked: only `cancel()` of the response ends it.
Errors come in Ray's wrapper, and a generator's pieces are made whether they are read or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Generator
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException, RequestCancelledError

END = object()


class FakeResponse:
    """As `ray.serve.handle.DeploymentResponse`."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self.num_cancels = 0
        self.task = asyncio.ensure_future(_as_ray_raises(work))
        self.task.add_done_callback(_nobody_has_to_ask)

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from asyncio.shield(self.task).__await__())
        except asyncio.CancelledError:
            if self.num_cancels:
                raise RequestCancelledError("the request") from None
            raise

    def cancel(self) -> None:
        self.num_cancels += 1
        self.task.cancel()


class FakeGenerator:
    """As `ray.serve.handle.DeploymentResponseGenerator`."""

    def __init__(self, pieces: AsyncIterator[Any]) -> None:
        self.num_cancels = 0
        self._made: asyncio.Queue[Any] = asyncio.Queue()
        self.task = asyncio.ensure_future(_as_ray_raises(self._make(pieces)))
        self.task.add_done_callback(lambda task: self._made.put_nowait(END))
        self.task.add_done_callback(_nobody_has_to_ask)

    def __aiter__(self) -> FakeGenerator:
        return self

    async def __anext__(self) -> Any:
        piece = await self._made.get()
        if piece is not END:
            return piece
        self._made.put_nowait(END)
        if self.task.cancelled():
            raise RequestCancelledError("the request")
        if error := self.task.exception():
            raise error
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.num_cancels += 1
        self.task.cancel()

    async def _make(self, pieces: AsyncIterator[Any]) -> None:
        async for piece in pieces:
            self._made.put_nowait(piece)


class FakeHandle:
    """Calls the methods `on_<method>` of `replica`. `responses` are all that there were."""

    def __init__(self, replica: Any, *, _stream: bool = False) -> None:
        self._replica = replica
        self._stream = _stream
        self.responses: list[FakeResponse | FakeGenerator] = []

    def options(self, *, stream: bool, session_id: str = "") -> FakeHandle:
        handle = FakeHandle(self._replica, _stream=stream)
        handle.responses = self.responses
        return handle

    def broadcast(self, method: str, *arguments: Any) -> Any:
        return self._replica.broadcast(method, *arguments)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._call(method, arguments))

    def _call(self, method: str, arguments: tuple[Any, ...]) -> FakeResponse | FakeGenerator:
        work = getattr(self._replica, f"on_{method}")(*arguments)
        self.responses.append(FakeGenerator(work) if self._stream else FakeResponse(work))
        return self.responses[-1]


async def _as_ray_raises(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await work
    except (RayError, RayServeException):
        raise
    except Exception as error:
        raise RayTaskError("method", "Traceback of the replica", error).as_instanceof_cause() from None


def _nobody_has_to_ask(task: asyncio.Task[Any]) -> None:
    """An error of a replica that nobody waits for is lost, in Ray, too; asyncio would tell the log."""
    if not task.cancelled():
        task.exception()
