"""The owner of webhooks: it says who is to be told of a job's end, and the ingresses tell them."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from cluster.jobs.disk import JobDisk
from cluster.jobs.files import Clocks
from cluster.jobs.records import DueHook

logger = logging.getLogger("atelier.jobs")


class HookOwner:
    """The webhooks of one folder. Lives on one event loop. All methods raise JobsUnavailable where it fails."""

    def __init__(self, disk: JobDisk, clocks: Clocks) -> None:
        self._disk = disk
        self._clocks = clocks
        self._ended = asyncio.Event()  # replaced whenever a job has ended

    def note_end(self) -> None:
        """Note that a job has ended, so that its webhook may be due."""
        self._ended.set()
        self._ended = asyncio.Event()

    async def take_hooks(self, count: int, wait_s: float) -> list[DueHook]:
        """Return up to `count` webhooks for an ingress to tell now; none after `wait_s`."""
        deadline_s = self._clocks.steady_s() + wait_s
        while True:
            ended, now_s = self._ended, self._clocks.unix_s()
            taken = await self._disk.run(self._disk.take_hooks, count, now_s)
            left_s = deadline_s - self._clocks.steady_s()
            if taken or left_s <= 0:
                return taken
            next_s = await self._disk.run(self._disk.next_hook_s)
            until_due_s = left_s if next_s is None else max(0.0, next_s - now_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, until_due_s)):
                    await ended.wait()

    async def end_hook(self, job: str, num_tries: int, is_over: bool) -> None:
        """Note that a webhook was told, or refuses for good (`is_over`), or could not be told this time."""
        now_s = self._clocks.unix_s()
        if not await self._disk.run(lambda: self._disk.book.hooks.end(job, num_tries, now_s, is_over=is_over)):
            logger.warning("the webhook of job %s is given up after %d tries", job, num_tries)
