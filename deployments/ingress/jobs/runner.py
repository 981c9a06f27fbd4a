"""The runner of one ingress: it takes jobs from their owner, calls its own application, and returns the answer.

So a job goes the way of any request: its key's rights and limits hold, it waits in the admission queue on its terms,
and the endpoint's answer is its result. A temporary refusal (429, 503) is tried again, as long as the job's
time lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from starlette.types import ASGIApp

from cluster.jobs.records import BATCHES, JobAnswer, JobError, TakenJob
from cluster.registry.actor import WeightRegistry
from deployments.ingress.access.callers import Callers
from deployments.ingress.jobs.asking import GRACE_S, OwnApplication, asked_again, error_of, growing_pauses
from deployments.ingress.jobs.batch_run import BatchRun
from deployments.ingress.jobs.desk import PIECE_BYTES, JobDesk
from deployments.ingress.jobs.webhooks import Teller
from deployments.ingress.messages.running_job import RunningJob, current_job
from deployments.records.tasks import shared_task

BEAT_S: Final = 4.0  # well below `cluster.jobs.leases.LOST_S`
PROGRESS_S: Final = 0.1  # between two reports of progress
PART_S: Final = 0.03  # between two pieces of an answer that is a stream
PART_PAUSE_S: Final = 1.0
GIVE_BACK_S: Final = 2.0  # at the end, for the owner's answer
TAKE_S: Final = 10.0  # that the owner waits for work
MAX_BATCHES: Final = 16  # in one ingress; their lines share half of its places for jobs

logger = logging.getLogger("atelier.ingress")


@dataclass(slots=True)
class _Start:
    """A start of a job, running here."""

    job: RunningJob
    task: asyncio.Task[None]


@dataclass(slots=True)
class _Lane:
    """The batches, or the other jobs, that run here. `has_room` is set when one of them ends."""

    num_running: int = 0
    has_room: asyncio.Event = field(default_factory=asyncio.Event)


class JobRunner:
    """The jobs that run in one ingress. Lives on one event loop."""

    def __init__(self, app: ASGIApp, desk: JobDesk, callers: Callers) -> None:
        self._desk = desk
        self._application = OwnApplication(app, callers, desk.config.max_result_bytes)
        self._line_places = asyncio.Semaphore(max(1, desk.config.max_running // 2))
        self._name = uuid.uuid4().hex
        self._starts: dict[str, _Start] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run jobs while the context lasts. Those running at its end are given back, and begin again elsewhere."""
        most = self._desk.config.max_running
        taking = (self._take_on(most, are_batches=False), self._take_on(MAX_BATCHES, are_batches=True))
        tasks = [*map(shared_task, taking), shared_task(self._beat_on())]
        if self._desk.webhook_hosts:
            tasks.append(shared_task(Teller(self._desk).tell_on()))
        try:
            yield
        finally:
            tasks += [start.task for start in self._starts.values()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._give_back()

    async def _give_back(self) -> None:
        """Tell the owner that this ingress ends. It finds out by itself after a while."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(GIVE_BACK_S):
                await self._desk.call(WeightRegistry.release_jobs, self._name)

    async def _take_on(self, most: int, *, are_batches: bool) -> None:
        """Take batches, or other jobs, as long as fewer than `most` of them run."""
        pauses, said, lane = growing_pauses(), "", _Lane()
        while True:
            lane.has_room.clear()
            if (room := most - lane.num_running) <= 0:
                await lane.has_room.wait()
                continue
            try:
                taken = await self._desk.call(
                    WeightRegistry.take_jobs, self._name, room, max(1, most // 2), TAKE_S, are_batches
                )
            except Exception as error:  # whatever it is, the next time may do better
                if (reason := str(error).partition("\n")[0]) != said:
                    logger.warning("no jobs can be taken now: %s", reason)
                    said = reason
                await asyncio.sleep(next(pauses))
                continue
            pauses, said = growing_pauses(), ""
            for job in taken:
                self._begin(job, lane)

    def _begin(self, taken: TakenJob, lane: _Lane) -> None:
        if (before := self._starts.get(taken.id)) is not None:  # the owner had no heartbeat of it for long
            before.task.cancel()
        job = RunningJob(taken.id, taken.start, self._desk.config.timeout_s, self._desk.changed)
        start = _Start(job, shared_task(self._run(taken, job)))
        self._starts[taken.id] = start
        lane.num_running += 1

        def forget(_: object) -> None:
            lane.num_running -= 1
            lane.has_room.set()
            if self._starts.get(taken.id) is start:
                del self._starts[taken.id]

        start.task.add_done_callback(forget)

    async def _beat_on(self) -> None:
        """Send heartbeats of the running jobs, at each change and now and then, and end unwanted jobs."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._desk.changed.wait()
            self._desk.changed.clear()
            if self._starts:
                progress = {id_: (one.job.start, one.job.progress) for id_, one in self._starts.items()}
                try:
                    async with asyncio.timeout(2 * BEAT_S):
                        unwanted = await self._desk.call(WeightRegistry.beat_jobs, self._name, progress)
                except Exception as error:  # next time, perhaps
                    logger.warning("the owner of jobs does not hear: %s", str(error).partition("\n")[0])
                    unwanted = []
                for id_ in unwanted:
                    if (one := self._starts.get(id_)) is not None and one.job.start == progress[id_][0]:
                        one.task.cancel()
            await asyncio.sleep(PROGRESS_S)

    async def _run(self, taken: TakenJob, job: RunningJob) -> None:
        current_job.set(job)
        deadline_s = asyncio.get_running_loop().time() + job.timeout_s
        end: JobAnswer | JobError
        telling = shared_task(self._tell_parts(taken, job))
        try:
            if taken.endpoint == BATCHES:
                end, body = await BatchRun(self._desk, self._application, taken, job, self._line_places).run()
                deadline_s = asyncio.get_running_loop().time() + job.timeout_s
            else:
                async with asyncio.timeout(job.timeout_s + GRACE_S):
                    end, body = await self._application.answer_of(taken, deadline_s, job.timeout_s)
        except Exception as error:
            end, body = error_of(error, taken.id, job.timeout_s), b""
        finally:
            telling.cancel()
        await self._tell(taken, end, body, deadline_s)

    async def _tell_parts(self, taken: TakenJob, job: RunningJob) -> None:
        """Tell the owner what has come of an answer that is a stream, for those who follow it."""
        size: int | None = 0
        while True:
            await job.grown.wait()
            job.grown.clear()
            while size is not None and size < len(job.content):
                piece = bytes(job.content[size : size + PIECE_BYTES])
                try:
                    size = await self._desk.call(WeightRegistry.add_part, taken.id, taken.start, size, piece)
                except Exception:  # the owner is away: it has nothing when it is back, and says so
                    await asyncio.sleep(PART_PAUSE_S)
            if size is None:
                return
            await asyncio.sleep(PART_S)

    async def _tell(self, taken: TakenJob, end: JobAnswer | JobError, body: bytes, deadline_s: float) -> None:
        """Report the end to the owner until it has it. After the job's time it has no room: it is begun again."""

        def note(error: Exception) -> None:
            logger.warning("the end of job %s is not kept yet: %s", taken.id, str(error).partition("\n")[0])

        with contextlib.suppress(Exception):  # noted
            await asked_again(
                lambda: self._desk.call(WeightRegistry.end_job, taken.id, taken.start, end, body),
                Exception,
                deadline_s + GRACE_S,
                note,
            )
