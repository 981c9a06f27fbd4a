"""The device loop of a replica: every turn, one step for all requests of each engine that has work.

Requests join and leave between turns. All model code runs on one thread, so engines never meet each other, and the
event loop stays free for those who arrive, leave or cancel meanwhile.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from deployments.engines.memory_limits import is_out_of_memory
from deployments.engines.protocol import TextDelta, TextRequest
from deployments.errors import GenerationFailed, forget_frames
from deployments.services.turns import Runner, choose
from deployments.threads import outcome_of

T = TypeVar("T")
OnStep = Callable[[int, int], None]  # steps done, steps in all


class DeviceThread:
    """The one thread that touches the device."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="device")

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """What `work` gives or raises. A caller who is cancelled meanwhile goes on when it is done: then its weights
        may go, and not before.
        """
        return await outcome_of(asyncio.get_running_loop().run_in_executor(self._pool, work, *args))


@dataclass
class DenoiseTimes:
    """Seconds that one request waited, denoised and decoded."""

    queue_s: float = 0.0
    denoise_s: float = 0.0
    decode_s: float = 0.0


@dataclass(eq=False)
class _Job:
    state: Any
    submitted: float
    done: asyncio.Future[npt.NDArray[np.uint8]]
    on_step: OnStep | None = None
    times: DenoiseTimes = field(default_factory=DenoiseTimes)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    started: float | None = None
    last_turn: int = 0


class DenoiseLoop:
    """Steps and decodes diffusion requests; those of one pipeline together, as many in one turn as it has room for."""

    def __init__(self, device: DeviceThread) -> None:
        self._device = device
        self._turn_number = 0
        self._jobs: dict[Any, list[_Job]] = {}
        self._task: asyncio.Task[None] | None = None

    async def run(
        self, pipeline: Any, state: Any, on_step: OnStep | None = None
    ) -> tuple[npt.NDArray[np.uint8], DenoiseTimes]:
        """Images (n, height, width, 3) of one started request. Cancelling frees its place at the next step.

        Returns, or raises, only when no step of it runs any more: then its weights may go.
        """
        job = _Job(state, time.perf_counter(), asyncio.get_running_loop().create_future(), on_step)
        job.last_turn = self._turn_number
        self._jobs.setdefault(pipeline, []).append(job)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._turns())
        try:
            return await job.done, job.times
        except asyncio.CancelledError:
            while not job.left.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await job.left.wait()
            raise

    @property
    def num_running(self) -> int:
        """Requests between their start and their pictures."""
        return sum(len(jobs) for jobs in self._jobs.values())

    async def _turns(self) -> None:
        try:
            while self._jobs:
                for pipeline in list(self._jobs):
                    jobs = [job for job in self._jobs[pipeline] if not job.done.done()]
                    try:
                        await self._turn(pipeline, self._choose(pipeline, jobs))
                    except Exception as error:  # whatever happens here, nobody may be left waiting
                        _fail(jobs, error)
                    self._dismiss(pipeline)
        finally:  # the event loop itself may be ending
            for job in [job for jobs in self._jobs.values() for job in jobs]:
                job.left.set()

    def _dismiss(self, pipeline: Any) -> None:
        for job in self._jobs[pipeline]:
            if job.done.done():
                job.left.set()
        self._jobs[pipeline] = [job for job in self._jobs[pipeline] if not job.left.is_set()]
        if not self._jobs[pipeline]:
            del self._jobs[pipeline]

    def _choose(self, pipeline: Any, jobs: list[_Job]) -> list[_Job]:
        self._turn_number += 1
        runners = [Runner(pipeline.share_of_turn(job.state), job.state.num_steps_left, job.last_turn) for job in jobs]
        chosen = [jobs[place] for place in choose(runners, self._turn_number)]
        for job in chosen:
            job.last_turn = self._turn_number
        return chosen

    async def _turn(self, pipeline: Any, jobs: list[_Job]) -> None:
        now = time.perf_counter()
        for job in jobs:
            if job.started is None:
                job.started = now
                job.times.queue_s = now - job.submitted
        await self._merged(pipeline.step, jobs)
        for job in jobs:
            if job.state.failure is not None:
                _fail([job], job.state.failure)
            elif job.on_step:
                job.on_step(job.state.step_index, job.state.num_steps)
        finished = [job for job in jobs if job.state.done and not job.done.done()]
        denoised = time.perf_counter()
        outcomes = await self._merged(pipeline.decode, finished)
        for job, outcome in list(zip(finished, outcomes, strict=True)):  # one too few is nobody's, so count first
            job.times.denoise_s = denoised - (job.started or denoised)
            job.times.decode_s = time.perf_counter() - denoised
            if isinstance(outcome, Exception):
                _fail([job], outcome)
            elif not job.done.done():
                job.done.set_result(outcome)

    async def _merged(self, work: Callable[[list[Any]], Any], jobs: list[_Job]) -> list[Any]:
        """One call for all. If it fails, each alone, so that a bad request fails by itself and leaves `jobs`."""
        if not jobs:
            return []
        try:
            return await self._device.run(work, [job.state for job in jobs]) or []
        except Exception as error:
            if len(jobs) > 1 or is_out_of_memory(error):
                forget_frames(error)  # they know the tensors of the call that failed, whose memory the next ones need
            if len(jobs) == 1:
                _fail(jobs, error)
                jobs.clear()
                return []
        results = []
        for job in list(jobs):
            alone = [job]
            results += await self._merged(work, alone)
            if not alone:
                jobs.remove(job)
        return results


def _fail(jobs: list[_Job], error: Exception) -> None:
    for job in jobs:
        if not job.done.done():
            job.done.set_exception(error)


class TextLoop:
    """Steps one LLM engine and hands each request its own deltas."""

    def __init__(self, device: DeviceThread, engine: Any) -> None:
        self._device = device
        self._engine = engine
        self._queues: dict[str, asyncio.Queue[TextDelta | Exception]] = {}
        self._task: asyncio.Task[None] | None = None

    async def run(self, request: TextRequest) -> AsyncGenerator[TextDelta, None]:
        """Deltas until the one with a finish_reason. Closing the generator early aborts the request.

        HAZARD: leaving an `async for` does not close it; `contextlib.aclosing` does. It ends, however it ends, only
        when no step of the request runs any more: then its weights may go.
        """
        queue: asyncio.Queue[TextDelta | Exception] = asyncio.Queue()
        self._queues[request.request_id] = queue  # before `add`: a step may run between the two
        is_running = True
        try:
            await self._device.run(self._engine.add, request)
            if self._task is None or self._task.done():
                self._task = asyncio.ensure_future(self._steps())
            while True:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                is_running = not item.finish_reason
                yield item
                if not is_running:
                    return
        finally:
            del self._queues[request.request_id]
            if is_running:
                await outcome_of(asyncio.ensure_future(self._device.run(self._engine.abort, request.request_id)))

    async def _steps(self) -> None:
        while self._queues and self._engine.has_work:
            try:
                for delta in await self._device.run(self._engine.step):
                    if delta.request_id in self._queues:
                        self._queues[delta.request_id].put_nowait(self._outcome(delta))
            except Exception as error:
                for queue in self._queues.values():
                    queue.put_nowait(GenerationFailed(f"the engine failed: {error}"))
                return

    def _outcome(self, delta: TextDelta) -> TextDelta | GenerationFailed:
        """A request that the engine gave up is an error, not a short answer."""
        if delta.finish_reason != "abort":
            return delta
        reason = self._engine.failures.get(delta.request_id, "no reason given")
        return GenerationFailed(f"the model failed after {delta.num_completion_tokens} tokens: {reason}")
