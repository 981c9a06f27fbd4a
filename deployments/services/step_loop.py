"""The device loop of a replica: engines step on one thread, and requests join and leave between steps.

All model code runs on that thread, so engines never meet each other, and the event loop stays free for those who
arrive, leave or cancel meanwhile.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable
from typing import Generic, ParamSpec, TypeVar

from deployments.engines.protocol import ComputationFailed, Engine, EngineOutput, EngineRequest
from deployments.tasks import outcome_of

P = ParamSpec("P")
T = TypeVar("T")
RequestT = TypeVar("RequestT", bound=EngineRequest)
OutputT = TypeVar("OutputT", bound=EngineOutput)


class DeviceThread:
    """The one thread that touches the device."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="device")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what `work` returns, or raise what it raises. Calls run in the order in which they came.

        A caller who is cancelled meanwhile goes on when the work is done: its weights may go then, and not before.
        """
        call = functools.partial(work, *args, **kwargs)
        return await outcome_of(asyncio.get_running_loop().run_in_executor(self._pool, call))


class EngineLoop(Generic[RequestT, OutputT]):
    """Steps one engine while it has work, and hands each request its own outputs. Lives on one event loop.

    The loops of several engines share the device thread: their steps alternate.
    """

    def __init__(self, device: DeviceThread, engine: Engine[RequestT, OutputT]) -> None:
        self._device = device
        self._engine = engine
        self._queues: dict[str, asyncio.Queue[OutputT | Exception]] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        """The number of requests under way."""
        return len(self._queues)

    async def stream_outputs(self, request: RequestT) -> AsyncGenerator[OutputT, None]:
        """Yield the outputs of one request until its last. Closing the generator early aborts the request.

        HAZARD: leaving an `async for` does not close it; `contextlib.aclosing` does. It ends, however it ends, only
        when no step of the request runs any more: then its weights may go.

        Raises:
            EngineError: the engine cannot run the request.
            ComputationFailed: the engine failed as a whole; other errors are the request's own (`Engine.failures`).
        """
        queue: asyncio.Queue[OutputT | Exception] = asyncio.Queue()
        self._queues[request.request_id] = queue  # before `add_request`: a step may run between the two
        is_running = True
        try:
            await self._device.run(self._engine.add_request, request)
            if self._task is None or self._task.done():
                self._task = asyncio.ensure_future(self._run_steps())
            while is_running:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                is_running = not output.is_last
                yield output
        finally:
            del self._queues[request.request_id]
            if is_running:
                await outcome_of(asyncio.ensure_future(self._device.run(self._engine.abort, request.request_id)))

    async def last_output(self, request: RequestT, on_output: Callable[[OutputT], None] | None = None) -> OutputT:
        """Return the last output of one request; `on_output` sees every one. Raises as `stream_outputs` does."""
        async with contextlib.aclosing(self.stream_outputs(request)) as outputs:
            async for output in outputs:
                if on_output is not None:
                    on_output(output)
        return output

    async def _run_steps(self) -> None:
        while self._queues and self._engine.has_work:
            try:
                for output in await self._device.run(self._engine.step):
                    self._hand_over(output.request_id, output)
                for request_id, error in self._engine.failures.items():
                    self._hand_over(request_id, error)
            except Exception as error:  # whatever happens here, nobody may be left waiting
                for queue in self._queues.values():
                    queue.put_nowait(ComputationFailed(f"the engine failed: {error}"))
                return

    def _hand_over(self, request_id: str, outcome: OutputT | Exception) -> None:
        if request_id in self._queues:  # its caller may have left during the step
            self._queues[request_id].put_nowait(outcome)
