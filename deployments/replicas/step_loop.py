"""The device loop of a replica: engines step on one thread, and requests join and leave between steps.

All model code runs on that thread, so engines never meet each other, and the event loop stays free for those who
arrive, leave or cancel meanwhile.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, ParamSpec, TypeVar

from cluster.process.tracing import NO_SPAN, TraceSpan, link, span
from deployments.engines.ranks.group import RankLost
from deployments.engines.records.protocol import ComputationFailed, Engine, EngineOutput, EngineRequest
from deployments.records.tasks import outcome_of
from deployments.replicas.replica_end import ReplicaEnd
from weights.platform.panics import panics_as_errors, telling

_NEW: Final = 0.3  # weight of the last step in what steps take

P = ParamSpec("P")
T = TypeVar("T")
RequestT = TypeVar("RequestT", bound=EngineRequest)
OutputT = TypeVar("OutputT", bound=EngineOutput)


@dataclass(slots=True, eq=False)
class StepTime:
    """The time that an engine's steps have taken of late; 0 before the first."""

    seconds: float = 0.0

    def note_step(self, seconds: float) -> None:
        """Take in what a step took."""
        self.seconds += (seconds - self.seconds) * (_NEW if self.seconds else 1.0)


class DeviceThread:
    """The one thread that touches the device. Lives on one event loop. `clock` measures the steps of engines.

    When another rank of the replica is lost, it ends the replica by `end`, before anybody hears of the failed step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, end: ReplicaEnd | None = None) -> None:
        self.clock = clock
        self._end = end
        self.steps: dict[str, tuple[int, int]] = {}  # how many there were, and their outputs, by kind of engine
        self._working: tuple[StepTime, ...] = ()  # of the engines with work; replaced, for the device thread reads it
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="device")
        # Two counts, since two threads write them: this loop the first, the device thread the second.
        self._num_begun = self._num_started = 0

    @property
    def is_wanted(self) -> bool:
        """Return whether a call waits for the one that runs. May be asked from any thread."""
        return self._num_begun > self._num_started

    @contextlib.contextmanager
    def working(self, steps: StepTime) -> Iterator[None]:
        """Count an engine with such steps as one that has work, for as long as the context lasts."""
        self._working = (*self._working, steps)
        try:
            yield
        finally:
            self._working = tuple(other for other in self._working if other is not steps)

    def others_step_s(self, steps: StepTime) -> float | None:
        """Return the seconds of the shortest step of another engine with work; None if unknown."""
        known = (other.seconds for other in self._working if other is not steps and other.seconds)
        return min(known, default=None)

    def begin_work(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Return the future of what `work` returns. Calls run in the order in which they came; none is cancelled."""

        def call() -> T:
            self._num_started += 1
            try:
                with panics_as_errors():
                    return work(*args, **kwargs)
            except RankLost as lost:
                if self._end is not None:
                    self._end.now(str(lost))
                raise

        self._num_begun += 1
        return asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def run_work(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work`, or raise its error.

        A caller who is cancelled meanwhile goes on when the work is done: its weights may go then, and not before.
        """
        return await outcome_of(self.begin_work(work, *args, **kwargs))


@dataclass(slots=True, eq=False)
class _Caller(Generic[OutputT]):
    """The caller of one request. One who `coalesces` gets the outputs between the first and the last with the last."""

    on_output: Callable[[OutputT], None]
    coalesces: bool
    last: asyncio.Future[OutputT]
    span: TraceSpan = NO_SPAN
    is_begun: bool = False  # there was an output
    num_outputs: int = 0

    def can_wait(self, outcome: OutputT | Exception) -> bool:
        """Return whether the outcome, which is next, may be delivered later."""
        is_first, self.is_begun = not self.is_begun, True
        return self.coalesces and not (is_first or isinstance(outcome, BaseException) or outcome.is_last)

    def take(self, outcome: OutputT | Exception) -> None:
        """Take the next outcome in. What comes after a failure is dropped."""
        self.num_outputs += 1
        if self.last.done():
            return
        try:
            with panics_as_errors():
                if isinstance(outcome, BaseException):
                    raise outcome
                self.on_output(outcome)
        except Exception as error:  # the caller's own as well: no other caller may have it
            self.last.set_exception(error)
        else:
            if outcome.is_last:
                self.last.set_result(outcome)


class EngineLoop(Generic[RequestT, OutputT]):
    """Steps one engine while it has work, and delivers to each request its own outputs. Lives on one event loop.

    The loops of several engines share the device thread: their steps alternate. Steps are counted as those of a `kind`.
    """

    def __init__(
        self,
        device: DeviceThread,
        engine: Engine[RequestT, OutputT],
        kind: str = "",
    ) -> None:
        self._device = device
        self._engine = engine
        self._callers: dict[str, _Caller[OutputT]] = {}
        self._joining: deque[RequestT] = deque()  # this loop appends, the device thread takes out
        self._undelivered: list[tuple[str, OutputT | Exception]] = []  # of the device thread
        self._task: asyncio.Task[None] | None = None
        self._kind = kind
        self._steps = StepTime()

    @property
    def num_running(self) -> int:
        """The number of requests under way."""
        return len(self._callers)

    @property
    def is_wanted(self) -> bool:
        """Return whether somebody waits for the end of the step that runs. May be asked from any thread."""
        return bool(self._joining) or self._device.is_wanted

    @property
    def others_step_s(self) -> float | None:
        """Return the seconds of the shortest step of another engine with work; None where no such one is known."""
        return self._device.others_step_s(self._steps)

    async def run_request(
        self, request: RequestT, on_output: Callable[[OutputT], None], *, coalesces: bool = False
    ) -> OutputT:
        """Return the last output of one request. `on_output` gets each, the last one too, on the event loop.

        A caller who is cancelled aborts the request. With `coalesces`, the outputs between the first and the last come
        with the last: to tell of each costs this thread, and so the device thread, a part of a small step.

        This ends, however it ends, only when no step of the request runs any more: then its weights may go.

        Raises:
            EngineError: the engine cannot run the request.
            ComputationFailed: the engine failed as a whole; other errors are the request's own (`Engine.failures`), or
                those of `on_output`.
        """
        with span(f"steps {self._kind}", {"atelier.request_id": request.request_id}) as own:
            caller = _Caller[OutputT](on_output, coalesces, asyncio.get_running_loop().create_future(), own)
            link(own, (other.span for other in self._callers.values()))
            try:
                return await self._run_caller(request, caller)
            finally:
                own.set_attribute("atelier.outputs", caller.num_outputs)

    async def _run_caller(self, request: RequestT, caller: _Caller[OutputT]) -> OutputT:
        """Return the last output of the request of a caller, who gets each."""
        self._callers[request.request_id] = caller
        self._joining.append(request)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run_steps())
        is_running = True
        try:
            last = await caller.last
            is_running = False
        finally:
            del self._callers[request.request_id]
            if is_running:
                self._engine.request_cancel(request.request_id)
                await self._between_steps(self._engine.abort, request.request_id)
        return last

    async def end_early(self, request_id: str, end: Callable[[str], OutputT | None]) -> None:
        """Call `end` for a request between two steps: it returns the request's last output, None if that goes on."""
        output = await self._between_steps(end, request_id)
        if output is not None:
            self._deliver([(request_id, output)])

    async def _between_steps(self, work: Callable[[str], T], request_id: str) -> T:
        """Return the result of `work` on a request that has joined, or never will."""
        loop = asyncio.get_running_loop()

        def call() -> T:
            self._take_in(loop)
            return work(request_id)

        return await self._device.run_work(call)

    async def _run_steps(self) -> None:
        with telling(self._fail_all), self._device.working(self._steps):  # nobody may be left waiting
            while self._callers and (self._joining or self._engine.has_work):
                await self._device.begin_work(self._step_on, asyncio.get_running_loop())

    def _fail_all(self, error: Exception) -> None:
        self._undelivered = []
        for caller in self._callers.values():
            caller.take(ComputationFailed(f"the engine failed: {error}"))

    def _step_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Step as long as nobody else wants the device thread: going through the event loop costs more than some steps.

        Who joins does so between two steps. Who leaves wants the thread, and so do other engines.
        """
        self._take_in(loop)
        while self._engine.has_work:
            outcomes: list[tuple[str, OutputT | Exception]] = [
                (output.request_id, output) for output in self._timed_step()
            ]
            outcomes += self._engine.failures.items()
            self._undelivered += outcomes
            can_wait = [self._can_wait(request_id, outcome) for request_id, outcome in outcomes]
            if not all(can_wait):
                loop.call_soon_threadsafe(self._deliver, self._undelivered)
                self._undelivered = []
            if self._device.is_wanted:
                return
            self._take_in(loop)

    def _timed_step(self) -> Sequence[OutputT]:
        """Step once, and learn what that takes."""
        self._engine.yield_device(self)
        begun_s = self._device.clock()
        outputs = self._engine.step()
        self._steps.note_step(self._device.clock() - begun_s)
        num_steps, num_outputs = self._device.steps.get(self._kind, (0, 0))
        self._device.steps[self._kind] = num_steps + 1, num_outputs + len(outputs)
        return outputs

    def _take_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Add joining requests to the engine, skip cancelled ones, and report refusals to their callers."""
        while self._joining:
            request = self._joining.popleft()
            if request.request_id in self._callers:
                try:
                    with panics_as_errors():
                        self._engine.add_request(request)
                except Exception as error:
                    loop.call_soon_threadsafe(self._deliver, [(request.request_id, error)])

    def _can_wait(self, request_id: str, outcome: OutputT | Exception) -> bool:
        """Return whether the caller of a request can be answered later, if it has not left during the step."""
        caller = self._callers.get(request_id)
        return caller is None or caller.can_wait(outcome)

    def _deliver(self, outcomes: Sequence[tuple[str, OutputT | Exception]]) -> None:
        for request_id, outcome in outcomes:
            if (caller := self._callers.get(request_id)) is not None:  # it may have left during the step
                caller.take(outcome)
