"""Responses in the background: each is a job whose id is the response's, and whose result is the response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from starlette.requests import Request

from cluster.jobs.records import Job
from deployments.ingress.jobs.desk import JobDesk
from deployments.ingress.messages.running_job import current_job
from deployments.ingress.openai.response_answers import ResponseAnswer, ResponseError, unfinished_answer

_PATH: Final = "/v1/responses"
_PREFIX: Final = "resp"
_ASKED: Final = "asked"  # of the job's facts
_STATUSES: Final[Mapping[str, Literal["queued", "in_progress", "failed", "cancelled"]]] = {
    "queued": "queued",
    "running": "in_progress",
    "done": "failed",  # its result is gone
    "failed": "failed",
    "cancelled": "cancelled",
}


def running_id() -> str | None:
    """Return the id of the response that this task makes in the background; None for another one."""
    job = current_job.get()
    return job.id if job is not None and job.id.startswith(f"{_PREFIX}_") else None


async def begin(desk: JobDesk, request: Request, asked: Mapping[str, Any]) -> ResponseAnswer:
    """Keep the current request as a response in the background, and return that."""
    job = await desk.begin(request, {"model": asked["model"], _ASKED: dict(asked)}, prefix=_PREFIX)
    return _unfinished(job)


async def find_answer(desk: JobDesk, id_: str) -> ResponseAnswer | bytes | None:
    """Return a response in the background, which may be JSON already; None where there is none."""
    job = await _found(desk, id_)
    return None if job is None else await _answer_of(desk, job)


async def cancel_answer(desk: JobDesk, id_: str) -> ResponseAnswer | bytes | None:
    """End a response in the background unless it has ended, and return it; None where there is none."""
    if await _found(desk, id_) is None or (job := await desk.cancel(id_)) is None:
        return None
    return await _answer_of(desk, job)


async def forget_answer(desk: JobDesk, id_: str) -> bool:
    """Remove a response in the background, and return whether there was one."""
    return await _found(desk, id_) is not None and await desk.forget(id_)


async def _found(desk: JobDesk, id_: str) -> Job | None:
    job = await desk.find(id_) if id_.startswith(f"{_PREFIX}_") else None
    return job if job is not None and job.endpoint == _PATH else None


async def _answer_of(desk: JobDesk, job: Job) -> ResponseAnswer | bytes:
    if job.status == "done" and (pieces := await desk.result(job, range(job.num_bytes))) is not None:
        return b"".join([piece async for piece in pieces])
    return _unfinished(job)


def _unfinished(job: Job) -> ResponseAnswer:
    error = None if job.error is None else ResponseError(code=job.error.code, message=job.error.message)
    return unfinished_answer(job.facts[_ASKED], job.id, int(job.created_s), _STATUSES[job.status], error)
