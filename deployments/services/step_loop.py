"""The device loop of a replica: engines step on one thread, and requests join and leave between steps.

All model code runs on that thread, so engines never meet each other, and the event loop stays free for those who
arrive, leave or cancel meanwhile.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, ParamSpec, TypeVar

from deployments.engines.protocol import ComputationFailed, Engine, EngineOutput, EngineRequest
from deployments.tasks import outcome_of

P = ParamSpec("P")
T = TypeVar("T")
RequestT = TypeVar("RequestT", bound=EngineRequest)
OutputT = TypeVar("OutputT", bound=EngineOutput)


class DeviceThread:
    """The one thread that touches the device. Lives on one event loop."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="device")
        # Two counts, since two threads write them: this loop the first, the device thread the second.
        self._num_begun = self._num_started = 0

    @property
    def is_wanted(self) -> bool:
        """Return whether a call waits for the one that runs. May be asked from any thread."""
        return self._num_begun > self._num_started

    def begin_work(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Return the future of what `work` returns. Calls run in the order in which they came; none is cancelled."""

        def call() -> T:
            self._num_started += 1
            return work(*args, **kwargs)

        self._num_begun += 1
        return asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def run_work(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what `work` returns, or raise what it raises.

        A caller who is cancelled meanwhile goes on when the work is done: its weights may go then, and not before.
        """
        return await outcome_of(self.begin_work(work, *args, **kwargs))


@dataclass(slots=True, eq=False)
class _Caller(Generic[OutputT]):
    """The caller of one request, who may be patient: after the first output, all others can wait for the last."""

    is_patient: bool
    outputs: asyncio.Queue[OutputT | Exception] = field(default_factory=asyncio.Queue)
    is_begun: bool = False  # there was an output

    def can_wait(self, outcome: OutputT | Exception) -> bool:
        """Return whether the outcome, which is told next, may be told later."""
        is_first, self.is_begun = not self.is_begun, True
        return self.is_patient and not (is_first or isinstance(outcome, Exception) or outcome.is_last)


class EngineLoop(Generic[RequestT, OutputT]):
    """Steps one engine while it has work, and hands each request its own outputs. Lives on one event loop.

    The loops of several engines share the device thread: their steps alternate.
    """

    def __init__(self, device: DeviceThread, engine: Engine[RequestT, OutputT]) -> None:
        self._device = device
        self._engine = engine
        self._callers: dict[str, _Caller[OutputT]] = {}
        self._joining: deque[RequestT] = deque()  # this loop appends, the device thread takes out
        self._untold: list[tuple[str, OutputT | Exception]] = []  # of the device thread
        self._task: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        """The number of requests under way."""
        return len(self._callers)

    async def stream_outputs(self, request: RequestT, *, is_patient: bool = False) -> AsyncGenerator[OutputT, None]:
        """Yield the outputs of one request until its last. Closing the generator early aborts the request.

        With `is_patient`, those between the first and the last come with the last: to tell of each costs this thread,
        and so the device thread, a part of a small step.

        HAZARD: leaving an `async for` does not close it; `contextlib.aclosing` does. It ends, however it ends, only
        when no step of the request runs any more: then its weights may go.

        Raises:
            EngineError: the engine cannot run the request.
            ComputationFailed: the engine failed as a whole; other errors are the request's own (`Engine.failures`).
        """
        caller = _Caller[OutputT](is_patient)
        self._callers[request.request_id] = caller
        self._joining.append(request)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run_steps())
        is_running = True
        try:
            while is_running:
                output = await caller.outputs.get()
                if isinstance(output, Exception):
                    raise output
                is_running = not output.is_last
                yield output
        finally:
            del self._callers[request.request_id]
            if is_running:
                self._engine.forsake(request.request_id)
                await self._between_steps(self._engine.abort, request.request_id)

    async def end_early(self, request_id: str, end: Callable[[str], OutputT | None]) -> None:
        """Call `end` for a request between two steps: it returns the request's last output, None if that goes on."""
        output = await self._between_steps(end, request_id)
        if output is not None:
            self._hand_over([(request_id, output)])

    async def _between_steps(self, work: Callable[[str], T], request_id: str) -> T:
        """Return what `work` does with a request, which has joined before that, or never will."""
        loop = asyncio.get_running_loop()

        def call() -> T:
            self._take_in(loop)
            return work(request_id)

        return await self._device.run_work(call)

    async def _run_steps(self) -> None:
        while self._callers and (self._joining or self._engine.has_work):
            try:
                await self._device.begin_work(self._step_on, asyncio.get_running_loop())
            except Exception as error:  # whatever happens here, nobody may be left waiting
                self._untold = []
                for caller in self._callers.values():
                    caller.outputs.put_nowait(ComputationFailed(f"the engine failed: {error}"))
                return

    def _step_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Step as long as nobody else wants the device thread: going through the event loop costs more than some steps.

        Who joins does so between two steps. Who leaves wants the thread, and so do other engines.
        """
        self._take_in(loop)
        while self._engine.has_work:
            outcomes: list[tuple[str, OutputT | Exception]] = [
                (output.request_id, output) for output in self._engine.step()
            ]
            outcomes += self._engine.failures.items()
            self._untold += outcomes
            can_wait = [self._can_wait(request_id, outcome) for request_id, outcome in outcomes]
            if not all(can_wait):
                loop.call_soon_threadsafe(self._hand_over, self._untold)
                self._untold = []
            if self._device.is_wanted:
                return
            self._take_in(loop)

    def _take_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Add those who join to the engine, but for those who have left, and tell whom it refuses."""
        while self._joining:
            request = self._joining.popleft()
            if request.request_id in self._callers:
                try:
                    self._engine.add_request(request)
                except Exception as error:
                    loop.call_soon_threadsafe(self._hand_over, [(request.request_id, error)])

    def _can_wait(self, request_id: str, outcome: OutputT | Exception) -> bool:
        """Return whether the caller of a request can be told later, if it has not left during the step."""
        caller = self._callers.get(request_id)
        return caller is None or caller.can_wait(outcome)

    def _hand_over(self, outcomes: Sequence[tuple[str, OutputT | Exception]]) -> None:
        for request_id, outcome in outcomes:
            if request_id in self._callers:  # its caller may have left during the step
                self._callers[request_id].outputs.put_nowait(outcome)
