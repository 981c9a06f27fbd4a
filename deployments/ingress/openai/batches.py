"""/v1/batches: jobs in OpenAI's form of batches. A batch's file has a request in each line, and so has its output."""

from __future__ import annotations

import json
import re
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from cluster.jobs.file_book import COMPLETED, ERRORS, FAILED, INPUT, KEEP_OUTPUT, OUTPUT, TOTAL
from cluster.jobs.records import BATCHES, Job, JobFilter
from cluster.registry.actor import WeightRegistry
from deployments.ingress.access.callers import current_key
from deployments.ingress.jobs.batch_run import PROBLEMS
from deployments.ingress.jobs.desk import JobDesk
from deployments.ingress.jobs.routes import check_endpoint
from deployments.ingress.messages.bodies import ClientPart, JsonRoute
from deployments.ingress.messages.responses import Answer, Failure, documented, failure_response, json_response
from deployments.ingress.openai.files import BATCH
from deployments.records import Name
from deployments.records.errors import InvalidRequest

_GONE: Final = {"_404": "no such batch: it was deleted, has ended, or is another key's", "_503": "no batch is kept now"}
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,3})([mhd])")
_UNIT_S: Final = {"m": 60.0, "h": 3600.0, "d": 86_400.0}
_MAX_WINDOW_S: Final = 30 * 86_400.0
BatchStatus = Literal["validating", "failed", "in_progress", "completed", "expired", "cancelled"]


class ExpiresAfter(ClientPart):
    """The time for which the files of a batch are kept, from when they began."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class BatchBody(ClientPart):
    """OpenAI's request for a batch."""

    input_file_id: str = Field(max_length=100, description="a file of /v1/files, with the purpose `batch`")
    endpoint: str = Field(max_length=512, description="of all its lines: a path such as /v1/chat/completions")
    completion_window: str = Field("24h", description="such as 24h, 30m or 7d: requests without a result then expire")
    metadata: dict[Name, Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=16)
    output_expires_after: ExpiresAfter | None = None

    @property
    def window_s(self) -> float:
        """The completion window in seconds. Raises InvalidRequest."""
        found = _WINDOW.fullmatch(self.completion_window)
        window_s = int(found[1]) * _UNIT_S[found[2]] if found else 0.0
        if not 0 < window_s <= _MAX_WINDOW_S:
            why = f"completion_window: {self.completion_window[:80]!r}, expected a time such as 24h, 30m or 7d, to 30d"
            raise InvalidRequest(why, "completion_window")
        return window_s


class BatchProblem(Answer):
    """A mistake of the batch's file."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchProblems(Answer):
    """The mistakes of the batch's file."""

    object: Literal["list"]
    data: list[BatchProblem]


class RequestCounts(Answer):
    """The number of requests, by what became of them."""

    total: int
    completed: int
    failed: int


class BatchAnswer(Answer):
    """A batch in OpenAI's form."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchesAnswer(Answer):
    """A page of batches."""

    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


def create_batches_router(desk: JobDesk) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["batches"], route_class=JsonRoute)

    async def found(batch_id: str) -> Job | None:
        job = await desk.find(batch_id)
        return job if job is not None and job.endpoint == BATCHES else None

    @router.post(
        BATCHES,
        response_model=BatchAnswer,
        responses=documented(400, 408, 413, 429, 503, 504, _409="the idempotency key is that of another request"),
    )
    async def create(body: BatchBody, request: Request) -> Response:
        """Begin a batch: the requests of its file run when nothing else waits, each once."""
        check_endpoint(body.endpoint, request.app.routes)
        window_s = body.window_s
        file = await desk.call(WeightRegistry.find_file, current_key(), body.input_file_id)
        if file is None or file.purpose != BATCH:
            why = "is not kept here for this key" if file is None else f"has the purpose {file.purpose!r}, not 'batch'"
            raise InvalidRequest(f"input_file_id: {body.input_file_id!r} {why}", "input_file_id")
        asked = {INPUT: file.id, "endpoint": body.endpoint, "window_s": window_s}
        facts = asked | {"completion_window": body.completion_window, "metadata": body.metadata}
        if body.output_expires_after is not None:
            facts[KEEP_OUTPUT] = body.output_expires_after.seconds
        job = await desk.add(
            request,
            BATCHES,
            json.dumps(asked).encode(),
            headers={"content-type": "application/json"},
            facts=facts,
            prefix="batch",
            priority=desk.lowest_priority,
        )
        return json_response(_answer_of(job))

    @router.get(BATCHES, response_model=BatchesAnswer, responses=documented(400, **_GONE))
    async def page(after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> Response:
        """The batches of this key, the newest first."""
        jobs = await desk.page(JobFilter(endpoint=BATCHES), after, limit + 1, "desc")
        if jobs is None:
            return _not_found(after or "", "after")
        batches = [_answer_of(job) for job in jobs[:limit]]
        ends = (batches[0].id, batches[-1].id) if batches else (None, None)
        has_more = len(jobs) > limit
        answer = BatchesAnswer(object="list", data=batches, first_id=ends[0], last_id=ends[1], has_more=has_more)
        return json_response(answer)

    @router.get(BATCHES + "/{batch_id}", response_model=BatchAnswer, responses=documented(**_GONE))
    async def retrieve(batch_id: str) -> Response:
        """The progress of a batch, and its files once it has ended."""
        job = await found(batch_id)
        return _not_found(batch_id) if job is None else json_response(_answer_of(job))

    @router.post(BATCHES + "/{batch_id}/cancel", response_model=BatchAnswer, responses=documented(**_GONE))
    async def cancel(batch_id: str) -> Response:
        """End a batch. What it has so far is in its files."""
        job = await desk.cancel(batch_id) if await found(batch_id) is not None else None
        return _not_found(batch_id) if job is None else json_response(_answer_of(job))

    return router


def _status_of(job: Job) -> BatchStatus:
    match job.status:
        case "done":
            return "completed"
        case "cancelled":
            return "cancelled"
        case "failed":
            return "expired" if job.error is not None and job.error.code == "batch_expired" else "failed"
        case _:
            return "in_progress" if TOTAL in job.facts else "validating"


def _answer_of(job: Job) -> BatchAnswer:
    facts, status = job.facts, _status_of(job)

    def ended_at(*wanted: BatchStatus) -> int | None:
        return int(job.ended_s) if job.ended_s is not None and status in wanted else None

    return BatchAnswer(
        id=job.id,
        object="batch",
        endpoint=facts["endpoint"],
        errors=_problems_of(job) if status == "failed" else None,
        input_file_id=facts[INPUT],
        completion_window=facts["completion_window"],
        status=status,
        output_file_id=facts.get(OUTPUT) if job.has_ended else None,
        error_file_id=facts.get(ERRORS) if job.has_ended else None,
        created_at=int(job.created_s),
        in_progress_at=int(job.started_s) if job.started_s is not None and TOTAL in facts else None,
        expires_at=int(job.created_s + facts["window_s"]),
        finalizing_at=None,
        completed_at=ended_at("completed"),
        failed_at=ended_at("failed"),
        expired_at=ended_at("expired"),
        cancelling_at=ended_at("cancelled"),
        cancelled_at=ended_at("cancelled"),
        request_counts=RequestCounts(
            total=facts.get(TOTAL, 0), completed=facts.get(COMPLETED, 0), failed=facts.get(FAILED, 0)
        ),
        metadata=facts["metadata"],
    )


def _problems_of(job: Job) -> BatchProblems:
    told = dict(job.answer.headers).get(PROBLEMS) if job.answer is not None else None
    if told is not None:
        found = [BatchProblem(**problem) for problem in json.loads(told)]
    else:
        code, message = (job.error.code, job.error.message) if job.error else ("failed", "the batch failed")
        found = [BatchProblem(code=code, message=message, param=None, line=None)]
    return BatchProblems(object="list", data=found)


def _not_found(batch_id: str, param: str = "batch_id") -> Response:
    message = f"no batch {batch_id[:80]!r} is kept here for this key: they end some time after they are done"
    return failure_response(Failure(404, message, "invalid_request_error", "batch_not_found", param))
