"""The beginnings of results: what has come of the answers of running jobs, for those who follow them.

In memory alone: who runs a job tells it again after a restart of its owner, and the whole result is a file.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Final

from cluster.jobs.disk import JobDisk
from cluster.jobs.files import Clocks
from cluster.jobs.records import Job

MAX_BYTES: Final = 2**26  # of all jobs; of one that comes when they are there, followers have the end alone
PIECE_BYTES: Final = 2**20  # for a follower at once


@dataclass(slots=True)
class _Part:
    start: int
    content: bytearray = field(default_factory=bytearray)


class PartOwner:
    """The beginnings of results. Lives on one event loop. All methods raise JobsUnavailable where the folder fails."""

    def __init__(self, disk: JobDisk, clocks: Clocks) -> None:
        self._disk = disk
        self._clocks = clocks
        self._parts: dict[str, _Part] = {}
        self._num_bytes = 0
        self._changed: dict[str, asyncio.Event] = {}  # of followed jobs

    async def add_part(self, id_: str, start: int, offset: int, piece: bytes) -> int | None:
        """Take in a piece of a start's result, and return how many bytes of it are here; None: no more is wanted.

        A piece that does not begin at their end changes nothing.
        """
        part = self._parts.get(id_)
        if part is None or part.start != start:
            if await self._disk.run(lambda: self._disk.book.is_wanted(id_, start)) != "open":
                return None
            self._forget(id_)
            part = self._parts[id_] = _Part(start)
        if offset == len(part.content):
            if self._num_bytes + len(piece) > MAX_BYTES:
                return None
            part.content += piece
            self._num_bytes += len(piece)
            self.note_change(id_)
        return len(part.content)

    async def follow_result(
        self, key: str, id_: str, start: int | None, offset: int, wait_s: float
    ) -> tuple[Job, bytes] | None:
        """Return a job, and what has come of its result behind `offset`; None for an unknown one.

        Waits, up to `wait_s`, until something has come, the job has ended, or another start than `start` has begun.
        """
        deadline_s = self._clocks.steady_s() + wait_s
        while True:
            changed = self._changed.setdefault(id_, asyncio.Event())
            job = await self._disk.run(lambda: self._disk.book.find(key, id_, self._clocks.unix_s()))
            if job is None or job.has_ended:
                self.note_change(id_)
                return None if job is None else (job, b"")
            part = self._parts.get(id_)
            has_come = part is not None and part.start == job.num_starts and len(part.content) > offset
            left_s = deadline_s - self._clocks.steady_s()
            if has_come or left_s <= 0 or start not in (None, job.num_starts):
                return job, bytes(part.content[offset : offset + PIECE_BYTES]) if part is not None and has_come else b""
            await wait_for(changed, left_s)

    def note_change(self, id_: str, *, is_gone: bool = False) -> None:
        """Wake the followers of a job, and forget the beginning of its result if it runs no more."""
        if is_gone:
            self._forget(id_)
        if changed := self._changed.pop(id_, None):
            changed.set()

    def _forget(self, id_: str) -> None:
        if part := self._parts.pop(id_, None):
            self._num_bytes -= len(part.content)


async def wait_for(event: asyncio.Event, wait_s: float) -> None:
    """Wait until an event is set, or the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await event.wait()
