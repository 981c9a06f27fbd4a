"""Responses in the background: each is a job whose id is the response's, and whose result is the response."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, Literal

from pydantic_core import from_json, to_json
from starlette.requests import Request

from cluster.jobs.records import Job
from deployments.ingress.jobs.desk import JobDesk
from deployments.ingress.jobs.routes import STREAM
from deployments.ingress.messages.responses import EventStream, call_aside
from deployments.ingress.messages.running_job import current_job
from deployments.ingress.openai.response_answers import ResponseAnswer, ResponseError, unfinished_answer
from deployments.records.errors import InvalidRequest

_PATH: Final = "/v1/responses"
_PREFIX: Final = "resp"
_ASKED: Final = "asked"  # of the job's facts
_BETWEEN: Final = b"\n\n"  # events
_NUMBER: Final = re.compile(rb'"sequence_number": ?([0-9]{1,12})\b')
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


async def begin_stream(
    desk: JobDesk, request: Request, asked: Mapping[str, Any], headers: Mapping[str, str]
) -> EventStream:
    """Keep the current request as a response in the background, and return its events as they come."""
    facts = {"model": asked["model"], _ASKED: dict(asked), STREAM: True}
    return _stream_of(desk, await desk.begin(request, facts, prefix=_PREFIX), -1, headers)


async def find_stream(desk: JobDesk, id_: str, after: int) -> EventStream | None:
    """Return the events of a response in the background behind number `after`; None where there is none.

    Raises InvalidRequest for a response that was not begun as a stream.
    """
    if (job := await _found(desk, id_)) is None:
        return None
    if not job.facts.get(STREAM):
        raise InvalidRequest("stream: this response was not begun with `stream: true`", "stream")
    return _stream_of(desk, job, after)


def _stream_of(desk: JobDesk, job: Job, after: int, headers: Mapping[str, str] | None = None) -> EventStream:
    pieces = desk.answer_of(job)
    return EventStream(_events_behind(pieces, after), pieces, headers=headers)


async def _events_behind(pieces: AsyncIterator[bytes], after: int) -> AsyncIterator[bytes]:
    """Yield the events whose `sequence_number` is higher than `after`, and all that have none."""
    kept = b""
    async for piece in pieces:
        *events, kept = (kept + piece).split(_BETWEEN)
        wanted = [event for event in events if after < 0 or _number_of(event) > after]
        if wanted:
            yield _BETWEEN.join([*wanted, b""])


def _number_of(event: bytes) -> float:
    found = _NUMBER.search(event)
    return int(found[1]) if found else math.inf


def _last_answer(events: bytes) -> bytes | None:
    """Return the response with which a stream of events ends; None for one that ended early."""
    last = events.removesuffix(_BETWEEN).rpartition(_BETWEEN)[2]
    _, _, data = last.partition(b"data: ")
    with contextlib.suppress(ValueError):
        if isinstance(found := from_json(data).get("response"), dict):
            return to_json(found)
    return None


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
        whole = b"".join([piece async for piece in pieces])
        if not job.facts.get(STREAM):
            return whole
        if (answer := await call_aside(len(whole), _last_answer, whole)) is not None:
            return answer
    return _unfinished(job)


def _unfinished(job: Job) -> ResponseAnswer:
    error = None if job.error is None else ResponseError(code=job.error.code, message=job.error.message)
    return unfinished_answer(job.facts[_ASKED], job.id, int(job.created_s), _STATUSES[job.status], error)
