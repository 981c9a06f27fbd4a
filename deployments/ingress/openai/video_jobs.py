"""The making of videos beside the requests that began it. Each runs in the ingress replica that was asked for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from cluster.admission.read_limiter import release_read_slot
from configs.cluster import VideosConfig
from deployments.errors import Overloaded
from deployments.ingress.access.callers import current_max_concurrent, current_tenant
from deployments.ingress.errors import failure_of
from deployments.ingress.openai.kept_videos import KeptVideo, KeptVideos
from deployments.ingress.service import Service
from deployments.ingress.terms import Terms, current_terms
from deployments.records import ClipRequest, ClipResult, ImageProgress
from deployments.tasks import shared_task

BEAT_S: Final = 4.0  # well below `LOST_S`

logger = logging.getLogger("atelier.ingress")


@dataclass(slots=True)
class _VideoJob:
    """The progress of a video. `changed` is set whenever it is further."""

    request: ClipRequest
    facts: Mapping[str, Any]
    progress: int = 0
    has_begun: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class VideoJobs:
    """The videos that one ingress replica has made. Lives on one event loop."""

    def __init__(self, service: Service, kept: KeptVideos, config: VideosConfig) -> None:
        self._service = service
        self._kept = kept
        self._config = config
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, request: ClipRequest, facts: Mapping[str, Any]) -> KeptVideo:
        """Begin a video, and return it. `facts` are what its answer says; `request` is checked.

        It has the terms of the current request, and its key no more unfinished ones than it may have requests in
        progress. Raises QueueFull; Overloaded where no video can be kept.
        """
        most = min(self._config.max_unfinished, current_max_concurrent() or self._config.max_unfinished)
        try:
            video = await asyncio.to_thread(self._kept.add, current_tenant.get(), facts, most)
        except OSError as error:
            raise Overloaded(f"no video can be kept now: {error}") from None
        task = shared_task(self._run(video.id, _VideoJob(request, facts), current_terms.get()))
        self._tasks[video.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(video.id, None))
        release_read_slot()  # the place in the queue is that task's
        return video

    def end_job(self, id_: str) -> None:
        """Make a video no further, if it is made here. Elsewhere its replica finds that nobody wants it any more."""
        if task := self._tasks.get(id_):
            task.cancel()

    async def _run(self, id_: str, job: _VideoJob, terms: Terms) -> None:
        current_terms.set(replace(terms, waited_s=0.0))
        making = asyncio.ensure_future(self._make(job))
        noting = asyncio.ensure_future(self._note(id_, job, making))
        try:
            result = await making
            facts = {**job.facts, **_facts_of(result)}
            suffix = result.media_type.partition("/")[2]
            await asyncio.to_thread(self._kept.complete, id_, result.file, suffix, facts)
        except Exception as error:
            failure = failure_of(error if not isinstance(error, OSError) else Overloaded(f"it cannot be kept: {error}"))
            with contextlib.suppress(OSError):  # it is found lost
                await asyncio.to_thread(self._kept.fail, id_, failure.code, failure.message)
        finally:
            noting.cancel()
            making.cancel()
            await asyncio.wait([making])  # its request has ended when this has

    async def _make(self, job: _VideoJob) -> ClipResult:
        async def on_progress(progress: ImageProgress) -> None:
            job.progress = min(99, 100 * progress.step // max(1, progress.num_steps))
            job.has_begun = True
            job.changed.set()

        return await self._service.make_clip(job.request, on_progress, max_timeout_s=self._config.timeout_s)

    async def _note(self, id_: str, job: _VideoJob, making: asyncio.Future[ClipResult]) -> None:
        """Say that the video is being made, at each of its steps and now and then; end it once nobody wants it."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await job.changed.wait()
            job.changed.clear()
            with contextlib.suppress(OSError):  # next time, perhaps
                if not await asyncio.to_thread(self._kept.note_progress, id_, job.progress, has_begun=job.has_begun):
                    making.cancel()
                    return


def _facts_of(result: ClipResult) -> dict[str, Any]:
    """Return what the answer of a finished video says of it."""
    return {
        "size": f"{result.width}x{result.height}",
        "seconds": f"{result.seconds:.6g}",
        "fps": result.rate,
        "num_frames": result.length,
        "seed": result.seed,
        "num_inference_steps": result.num_inference_steps,
        "timings_ms": {phase: round(ms, 2) for phase, ms in result.timings_ms.items()},
        "warnings": list(result.warnings),
    }
