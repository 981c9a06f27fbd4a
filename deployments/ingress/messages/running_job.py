"""The job whose request this task works on: what it was given, and how far it is."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field

from deployments.records import ImageProgress


@dataclass(eq=False, slots=True)
class RunningJob:
    """A start of a job in this process. `changed` is set whenever it is further, for all jobs of the process.

    `content` is what has come of an answer that is a stream; `grown` is set whenever that is more.
    """

    id: str
    start: int
    timeout_s: float
    changed: asyncio.Event = field(repr=False)
    progress: int | None = None
    content: bytearray = field(default_factory=bytearray, repr=False)
    grown: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    async def note_progress(self, progress: ImageProgress) -> None:
        """Take in that a step is done."""
        self.progress = min(99, 100 * progress.step // max(1, progress.num_steps))
        self.changed.set()


# None where the request came over a connection.
current_job: ContextVar[RunningJob | None] = ContextVar("current_job", default=None)
