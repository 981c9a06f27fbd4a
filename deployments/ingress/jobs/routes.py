"""/v1/jobs: any request, begun by one request and followed, fetched and cancelled by others."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Match

from cluster.jobs.records import BATCHES, Job, JobFilter, Order, Status
from configs.http import FILE_PATHS, INFERENCE_PATHS
from deployments.ingress.jobs.desk import JobDesk
from deployments.ingress.messages.bodies import ClientPart, JsonRoute, body_bytes, warning_header
from deployments.ingress.messages.responses import (
    Answer,
    EventStream,
    Failure,
    call_aside,
    documented,
    event_of,
    failure_response,
    json_response,
    json_text,
)
from deployments.records.errors import InvalidRequest

PATH: Final = "/v1/jobs"
INNER: Final = "x-atelier-job-"  # of a result's headers: facts of an answer for its job alone
_GONE: Final = {"_404": "no such job: it was deleted, has ended, or is another key's"}
_AWAY: Final = {"_503": "no job is kept now"}
_MAX_ENDPOINT: Final = 512
_JSON: Final = "application/json"
_RANGE: Final = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})")
STREAM: Final = "stream"  # of a job's facts: its answer is a stream of events
_FACTS: Final = ("model", "prompt")  # of a body, as the lists of jobs and videos show them


BACKGROUND: Final = "true: answer at once with a job, as of POST /v1/jobs; its result is this answer"


class JobBody(ClientPart):
    """A request to run in the background: its path, and its usual body."""

    endpoint: str = Field(max_length=_MAX_ENDPOINT, description="a path that takes POST, such as /v1/chat/completions")
    body: dict[str, Any]
    idempotency_key: str | None = Field(
        None, description="the same key again is the same job; the header Idempotency-Key is as good"
    )


class JobErrorAnswer(Answer):
    """The reason why a job failed."""

    code: str
    message: str


class JobResultAnswer(Answer):
    """The result of a job, which `GET .../result` returns in the endpoint's form."""

    status: int
    content_type: str
    bytes: int


class JobAnswerBody(Answer):
    """A job. `progress` is in percent if the model reports it, `num_starts` more than 1 after a crash."""

    id: str
    object: Literal["job"]
    endpoint: str
    status: Status
    progress: int | None
    created_at: int
    started_at: int | None
    ended_at: int | None
    expires_at: int | None
    num_starts: int
    model: str | None
    error: JobErrorAnswer | None
    result: JobResultAnswer | None


class JobsAnswer(Answer):
    """A page of jobs."""

    object: Literal["list"]
    data: list[JobAnswerBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class JobDeleted(Answer):
    """The deletion of a job."""

    id: str
    object: Literal["job.deleted"]
    deleted: Literal[True]


# Of routes that take `background: true`.
BEGUN: Final[dict[int | str, dict[str, Any]]] = {202: {"model": JobAnswerBody, "description": "the job, in background"}}


def create_jobs_router(desk: JobDesk) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["jobs"], route_class=JsonRoute)

    @router.post(
        PATH,
        status_code=202,
        response_model=JobAnswerBody,
        responses=documented(400, 408, 413, 429, 503, 504, _409="the idempotency key is that of another request"),
    )
    async def create(body: JobBody, request: Request) -> Response:
        """Begin a job: its request runs once, also if the server ends meanwhile. Fetch it by its id."""
        check_endpoint(body.endpoint, request.app.routes)
        content = await call_aside(body_bytes.get(), to_json, body.body)
        job = await desk.add(
            request,
            body.endpoint,
            content,
            headers={"content-type": _JSON},
            idempotency_key=body.idempotency_key,
            facts={name: value for name in _FACTS if isinstance(value := body.body.get(name), str)}
            | ({STREAM: True} if body.body.get("stream") is True else {}),
        )
        return begun_response(job, body.warnings())

    @router.get(PATH, response_model=JobsAnswer, responses=documented(400, 404, **_AWAY))
    async def page(
        status: Status | None = None,
        endpoint: Annotated[str | None, Query(max_length=_MAX_ENDPOINT)] = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Order = "desc",
    ) -> Response:
        """The jobs of this key, the newest first."""
        found = await desk.page(JobFilter(status, endpoint), after, limit + 1, order)
        if found is None:
            return _not_found(after or "", "after")
        jobs = [_answer_of(job) for job in found[:limit]]
        ends = (jobs[0].id, jobs[-1].id) if jobs else (None, None)
        has_more = len(found) > limit
        return json_response(JobsAnswer(object="list", data=jobs, first_id=ends[0], last_id=ends[1], has_more=has_more))

    @router.get(PATH + "/{job_id}", response_model=JobAnswerBody, responses=documented(**_GONE, **_AWAY))
    async def retrieve(job_id: str) -> Response:
        """A job's progress, and its result or error."""
        job = await desk.find(job_id)
        return _not_found(job_id) if job is None else json_response(_answer_of(job))

    @router.get(
        PATH + "/{job_id}/result",
        response_class=Response,
        responses=documented(_409="the job has no result: it has not ended, or ended without one", **_GONE, **_AWAY)
        | {"default": {"content": {"*/*": {}}, "description": "the answer of the job's endpoint, with its status"}},
    )
    async def result(job_id: str, request: Request) -> Response:
        """The answer of the job's endpoint, as it would have given it."""
        job = await desk.find(job_id)
        return _not_found(job_id) if job is None else await result_response(desk, job, request)

    @router.get(
        PATH + "/{job_id}/stream",
        response_class=Response,
        responses=documented(400, **_GONE, **_AWAY) | {200: {"content": {"text/event-stream": {}}}},
    )
    async def stream(job_id: str) -> Response:
        """The answer of a job whose request has `stream: true`, from its beginning, as it comes."""
        job = await desk.find(job_id)
        if job is None:
            return _not_found(job_id)
        if not job.facts.get(STREAM):
            raise InvalidRequest(f"job {job.id!r} has no stream: its request did not ask for one", "job_id")
        pieces = desk.answer_of(job)
        return EventStream(pieces, pieces)

    @router.get(
        PATH + "/{job_id}/events",
        response_class=Response,
        responses=documented(**_GONE, **_AWAY) | {200: {"content": {"text/event-stream": {}}}},
    )
    async def events(job_id: str) -> Response:
        """The job after each change, as server-sent events, until it has ended."""
        job = await desk.find(job_id)
        if job is None:
            return _not_found(job_id)
        changes = desk.changes(job)
        return EventStream(_events_of(changes), changes)

    @router.post(PATH + "/{job_id}/cancel", response_model=JobAnswerBody, responses=documented(**_GONE, **_AWAY))
    async def cancel(job_id: str) -> Response:
        """End an unfinished job; its result is lost."""
        job = await desk.cancel(job_id)
        return _not_found(job_id) if job is None else json_response(_answer_of(job))

    @router.delete(PATH + "/{job_id}", response_model=JobDeleted, responses=documented(**_GONE, **_AWAY))
    async def delete(job_id: str) -> Response:
        """Delete a job and its result; a running one is ended."""
        if not await desk.forget(job_id):
            return _not_found(job_id)
        return json_response(JobDeleted(id=job_id, object="job.deleted", deleted=True))

    return router


def begun_response(job: Job, warnings: Sequence[str] = ()) -> Response:
    """Return a job that has begun, with the warnings of its request."""
    return json_response(_answer_of(job), 202, {"Location": f"{PATH}/{job.id}"} | warning_header(warnings))


async def result_response(desk: JobDesk, job: Job, request: Request) -> Response:
    """Return the answer of a job's endpoint, the range of it that the request wants; or why there is none."""
    is_good = job.answer is not None and job.answer.status == 200
    span = _span_of(request.headers.get("range", "") if is_good else "", job.num_bytes)
    if span is None:
        return Response(status_code=416, headers={"Content-Range": f"bytes */{job.num_bytes}"})
    pieces = await desk.result(job, span) if job.answer is not None else None
    if job.answer is None or pieces is None:
        return _not_completed(job)
    is_part = len(span) < job.num_bytes
    response = StreamingResponse(pieces, 206 if is_part else job.answer.status)
    own = [("content-length", str(len(span))), *([("accept-ranges", "bytes")] if is_good else [])]
    if is_part:
        own.append(("content-range", f"bytes {span.start}-{span.stop - 1}/{job.num_bytes}"))
    response.raw_headers = [
        (name.encode("latin-1"), value.encode("latin-1"))
        for name, value in (*job.answer.headers, *own)
        if not name.startswith(INNER)
    ]
    return response


def _span_of(header: str, num_bytes: int) -> range | None:
    """Return the bytes that a header `Range` asks for: all for one that is not of one range, None outside of them."""
    found = _RANGE.fullmatch(header.strip())
    if found is None or found.groups() == ("", ""):
        return range(num_bytes)
    first, last = found.groups()
    if not first:
        return range(num_bytes)[-int(last) :] if int(last) else None
    span = range(num_bytes)[int(first) : int(last) + 1 if last else None]
    return span or None


def _not_completed(job: Job) -> Response:
    why = f": {job.error.message}" if job.error is not None else ""
    message = f"job {job.id!r} has no result: it is {job.status}{why}"
    return failure_response(Failure(409, message, "invalid_request_error", "job_not_completed", "job_id"))


def _not_found(id_: str, param: str = "job_id") -> Response:
    message = f"no job {id_[:80]!r} is kept here for this key: they end some time after they are done"
    return failure_response(Failure(404, message, "invalid_request_error", "job_not_found", param))


async def _events_of(changes: AsyncIterator[Job]) -> AsyncIterator[str]:
    async for job in changes:
        yield event_of(json_text(_answer_of(job)), f"job.{job.status}")


def check_endpoint(endpoint: str, routes: Iterable[BaseRoute]) -> None:
    """Raise InvalidRequest for a path that takes no job."""
    scope = {"type": "http", "method": "POST", "path": endpoint}
    is_known = endpoint.startswith(INFERENCE_PATHS) and any(route.matches(scope)[0] == Match.FULL for route in routes)
    if not is_known or endpoint.startswith((PATH, *FILE_PATHS, BATCHES)):
        raise InvalidRequest(
            f"endpoint: {endpoint[:80]!r} takes no POST that asks a model; expected a path such as "
            "/v1/chat/completions or /v1/images/generations",
            "endpoint",
        )


def _answer_of(job: Job) -> JobAnswerBody:
    error = None if job.error is None else JobErrorAnswer(code=job.error.code, message=job.error.message)
    result = None
    if job.answer is not None:
        type_ = dict(job.answer.headers).get("content-type", "")
        result = JobResultAnswer(status=job.answer.status, content_type=type_, bytes=job.num_bytes)
    return JobAnswerBody(
        id=job.id,
        object="job",
        endpoint=job.endpoint,
        status=job.status,
        progress=100 if job.status == "done" else job.progress,
        created_at=int(job.created_s),
        started_at=_whole(job.started_s),
        ended_at=_whole(job.ended_s),
        expires_at=_whole(job.expires_s),
        num_starts=job.num_starts,
        model=job.facts.get("model"),
        error=error,
        result=result,
    )


def _whole(moment_s: float | None) -> int | None:
    return None if moment_s is None else int(moment_s)
