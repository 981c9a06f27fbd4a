"""The owner of a cluster's jobs: the only process with their book and their result files open.

It is a part of the registry, so it is back after a crash with all its jobs: its memory alone has only
the runners of jobs, which the ingresses report again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from cluster.jobs.disk import JobDisk
from cluster.jobs.files import Clocks, FileOwner
from cluster.jobs.hooks import HookOwner
from cluster.jobs.leases import LOST_S, JobLeases
from cluster.jobs.parts import PartOwner, wait_for
from cluster.jobs.records import BATCHES, Job, JobAnswer, JobError, JobFilter, JobState, NewJob, Order, TakenJob
from configs.jobs import JobsConfig

logger = logging.getLogger("atelier.jobs")

_MAX_ENDED: Final = 1000  # ingresses that are known to have ended: one asks no more after some seconds
_LOOK_S: Final = LOST_S / 4  # between two looks of waiting calls for jobs of silent ingresses


class JobOwner:
    """The jobs of one folder. Lives on one event loop.

    `was_restarted`: ingresses of before may run on, with jobs that are theirs. `registrations`: see `JobDisk`. All
    methods raise JobsUnavailable where the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        config: JobsConfig,
        *,
        was_restarted: bool = False,
        clocks: Clocks | None = None,
        registrations: Path | None = None,
    ) -> None:
        self.config = config  # a new one counts from the next call on
        self._clocks = clocks or Clocks()
        self._was_restarted = was_restarted
        self._is_known = False  # who runs what
        self._knowing = asyncio.Lock()
        self._disk = JobDisk(folder, registrations)
        self.files = FileOwner(self._disk, config, self._clocks)
        self.hooks = HookOwner(self._disk, self._clocks)
        self.parts = PartOwner(self._disk, self._clocks)
        self._leases = JobLeases()
        self._ended_runners: deque[str] = deque(maxlen=_MAX_ENDED)
        self._queued = asyncio.Event()  # replaced whenever there may be work
        self._changed: dict[str, asyncio.Event] = {}  # of watched jobs

    # clients

    async def add_job(self, new: NewJob) -> Job:
        """Take in a job. Raises JobConflict, JobsFull."""
        await self._know_running()
        job = await self._disk.run(self._disk.add, new, self.config, self._clocks.unix_s())
        self._wake_runners()
        return job

    async def find_job(self, key: str, id_: str) -> Job | None:
        """Return a job of a key; None where there is none."""
        await self._requeue_lost()
        job = await self._disk.run(lambda: self._disk.book.find(key, id_, self._clocks.unix_s()))
        return self._with_progress(job) if job is not None else None

    async def list_jobs(
        self, key: str, wanted: JobFilter, after: str | None, limit: int, order: Order
    ) -> list[Job] | None:
        """Return a page of a key's jobs, None where there is no job `after`."""
        await self._requeue_lost()
        jobs = await self._disk.run(
            lambda: self._disk.book.page(key, wanted, after, limit, order, self._clocks.unix_s())
        )
        return None if jobs is None else [self._with_progress(job) for job in jobs]

    async def watch_job(self, key: str, id_: str, seen: JobState | None, wait_s: float) -> Job | None:
        """Return a job once it differs from `seen`, or its state after `wait_s`; None for an unknown one."""
        deadline_s = self._clocks.steady_s() + wait_s
        while True:
            changed = self._changed.setdefault(id_, asyncio.Event())
            job = await self.find_job(key, id_)
            if job is None or job.has_ended:
                self._tell(id_)
                return job
            left_s = deadline_s - self._clocks.steady_s()
            if left_s <= 0 or JobState(job.status, job.progress, job.num_starts) != seen:
                return job
            await wait_for(changed, min(left_s, _LOOK_S))

    async def cancel_job(self, key: str, id_: str) -> Job | None:
        """End a job unless it has ended, and return it; None for an unknown one."""
        await self._know_running()
        job = await self._disk.run(lambda: self._disk.book.cancel(key, id_, self.config.keep_s, self._clocks.unix_s()))
        self._let_go(id_, is_gone=job is not None)
        return job

    async def forget_job(self, key: str, id_: str) -> bool:
        """Remove a job and its result, and return whether there was one."""
        await self._know_running()
        was_there = await self._disk.run(self._disk.forget, key, id_)
        self._let_go(id_, is_gone=was_there)
        return was_there

    # ingresses

    async def take_jobs(
        self, runner: str, count: int, max_of_key: int, wait_s: float, are_batches: bool = False
    ) -> list[TakenJob]:
        """Return up to `count` jobs for the ingress `runner` to run now; none after `wait_s` without work.

        Batches are taken apart from other jobs.
        """
        deadline_s = self._clocks.steady_s() + wait_s
        while True:
            queued = self._queued
            await self._requeue_lost()
            # It completes even if the caller leaves: a begun job has a lease, which ends.
            taken = await asyncio.shield(asyncio.ensure_future(self._take(runner, count, max_of_key, are_batches)))
            left_s = deadline_s - self._clocks.steady_s()
            if taken or left_s <= 0:
                return taken
            await wait_for(queued, min(left_s, _LOOK_S))

    async def _take(self, runner: str, count: int, max_of_key: int, are_batches: bool) -> list[TakenJob]:
        if runner in self._ended_runners:  # it has asked before it ended
            return []
        held = self._leases.held_by(runner, are_batches=are_batches)
        taken = await self._disk.run(
            lambda: self._disk.book.take(count, held, max_of_key, self._clocks.unix_s(), are_batches=are_batches)
        )
        for job in taken:
            self._leases.add(job.id, job.start, job.key, runner, self._clocks.steady_s(), is_batch=are_batches)
            self._tell(job.id)
        return taken

    async def beat_jobs(self, runner: str, progress: Mapping[str, tuple[int, int | None]]) -> list[str]:
        """Take in an ingress's heartbeat for these starts, with their progress. Return the unwanted ones."""
        await self._know_running()
        for id_ in self._leases.renew(runner, progress, self._clocks.steady_s()):
            self._tell(id_)
        starts = self._leases.starts()
        return [id_ for id_, (start, _) in progress.items() if starts.get(id_) != start]

    async def release_jobs(self, runner: str) -> None:
        """Queue the jobs of an ingress again, which ends; it takes no more."""
        await self._know_running()
        self._ended_runners.append(runner)
        if given_back := self._leases.of(runner):
            await self._requeue(given_back, were_given_back=True)

    async def end_job(self, id_: str, start: int, end: JobAnswer | JobError, body: bytes) -> bool:
        """Keep the end of a start, and return whether anybody wanted it. The same again changes nothing."""
        await self._know_running()
        is_kept = await self._disk.run(self._disk.end, id_, start, end, body, self.config, self._clocks.unix_s())
        self._let_go(id_, is_gone=is_kept)
        self._wake_runners()
        return is_kept

    def close(self) -> None:
        """Let another process have the folder. Blocks."""
        self._disk.close()

    async def _know_running(self) -> None:
        """Learn which jobs run. Who runs them says so again; after a new start of everything nobody does."""
        async with self._knowing:
            if self._is_known:
                return
            running = await self._disk.run(lambda: self._disk.book.running())
            for id_, start, key, endpoint in running:
                self._leases.add(id_, start, key, "", self._clocks.steady_s(), is_batch=endpoint == BATCHES)
            self._is_known = True
            if not self._was_restarted:
                await self._requeue([(id_, start) for id_, start, *_ in running])

    async def _requeue_lost(self) -> None:
        """Queue the jobs of silent ingresses again."""
        await self._know_running()
        if lost := self._leases.lost(self._clocks.steady_s()):
            await self._requeue(lost)

    async def _requeue(self, lost: list[tuple[str, int]], *, were_given_back: bool = False) -> None:
        await self._disk.run(
            lambda: self._disk.book.requeue(lost, self.config, self._clocks.unix_s(), were_given_back=were_given_back)
        )
        self._leases.drop_starts(lost)
        for id_, _ in lost:
            self._tell(id_, is_gone=True)
        if lost:
            why = "has ended" if were_given_back else "is gone"
            logger.warning("%d jobs begin again: the ingress that ran them %s", len(lost), why)
            self._wake_runners()

    def _with_progress(self, job: Job) -> Job:
        return replace(job, progress=self._leases.progress(job.id))

    def _let_go(self, id_: str, *, is_gone: bool) -> None:
        """Drop the lease of a job, if it runs no more, and tell who watches it."""
        self._leases.drop([id_] if is_gone else [])
        self._tell(id_, is_gone=is_gone)
        self.hooks.note_end()

    def _wake_runners(self) -> None:
        self._queued.set()
        self._queued = asyncio.Event()

    def _tell(self, id_: str, *, is_gone: bool = False) -> None:
        """Wake all watchers of a job, and the followers of its result, which runs no more if it `is_gone`."""
        self.parts.note_change(id_, is_gone=is_gone)
        if changed := self._changed.pop(id_, None):
            changed.set()
