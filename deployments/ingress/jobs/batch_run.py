"""A start of a batch: its lines are requests, and each has its result in a file, once.

The owner of jobs keeps which lines have ended, so that another start goes on with the others. Lines that end together
are kept together: each group costs the owner's disk one wait.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec, TypeVar

from pydantic_core import from_json, to_json

from cluster.jobs.files import Clocks
from cluster.jobs.records import JobAnswer, JobError, LineResult, TakenJob
from cluster.registry.actor import Method, WeightRegistry
from deployments.ingress.jobs.asking import OwnApplication, asked_again, error_of
from deployments.ingress.jobs.desk import PIECE_BYTES, JobDesk
from deployments.ingress.messages.bodies import check_json_size
from deployments.ingress.messages.responses import call_aside
from deployments.ingress.messages.running_job import RunningJob, current_job
from deployments.ingress.messages.terms import PRIORITY
from deployments.records.errors import InvalidRequest, ServiceError

MAX_LINES: Final = 50_000
MAX_LINE_BYTES: Final = 2**26
PROBLEMS: Final = "x-atelier-job-problems"  # of the answer of a batch whose file is wrong
_MAX_ID_CHARS: Final = 512
_MAX_PROBLEMS: Final = 10
_SHOWN: Final = 80
_EXPIRED: Final = "batch_expired"
_WHY_EXPIRED: Final = "the batch's completion window ended before this request did"

logger = logging.getLogger("atelier.ingress")

P = ParamSpec("P")
R = TypeVar("R")
Lines = list[tuple[int, bytes]]


class _BadFile(Exception):
    """The file of a batch cannot be run. `problems` are as OpenAI's batches tell them."""

    def __init__(self, problems: Sequence[dict[str, Any]]) -> None:
        super().__init__(problems[0]["message"])
        self.problems = problems


@dataclass(slots=True)
class _Check:
    """The check of a batch's lines, piece by piece. Blocks."""

    endpoint: str
    ids: set[str] = field(default_factory=set)
    problems: list[dict[str, Any]] = field(default_factory=list)

    def add(self, lines: Lines) -> None:
        """Check further lines. Raises _BadFile for more lines than may be, or many wrong ones."""
        for number, line in lines:
            if len(self.ids) == MAX_LINES:
                raise _BadFile([_problem("too_many_requests", f"more than {MAX_LINES} lines", None, number)])
            try:
                id_ = _request_of(line, self.endpoint)[0]
            except ServiceError as error:
                self.problems.append(_problem("invalid_request", str(error), error.param, number))
            else:
                if id_ in self.ids:
                    why = f"custom_id: {id_[:_SHOWN]!r} is that of an earlier line"
                    self.problems.append(_problem("duplicate_custom_id", why, "custom_id", number))
                self.ids.add(id_)
            if len(self.problems) >= _MAX_PROBLEMS:
                raise _BadFile(self.problems)

    def end(self) -> int:
        """Return the number of lines. Raises _BadFile if one is wrong, or there is none."""
        if self.problems:
            raise _BadFile(self.problems)
        if not self.ids:
            raise _BadFile([_problem("empty_file", "the file has no requests, expected one a line", None, None)])
        return len(self.ids)


class BatchRun:
    """One start of a batch. `places` are for the lines of all batches of this ingress."""

    def __init__(
        self,
        desk: JobDesk,
        application: OwnApplication,
        taken: TakenJob,
        job: RunningJob,
        places: asyncio.Semaphore,
        clocks: Clocks | None = None,
    ) -> None:
        self._desk, self._application, self._taken, self._job, self._places = desk, application, taken, job, places
        self._clocks = clocks or Clocks()
        asked = json.loads(taken.body)
        self._file, self._endpoint = asked["input_file_id"], asked["endpoint"]
        self._deadline_s = taken.created_s + asked["window_s"]
        self._ended: set[int] = set()
        self._total = 0
        self._unkept: dict[int, LineResult] = {}
        self._keeping = asyncio.Lock()

    async def run(self) -> tuple[JobAnswer | JobError, bytes]:
        """Run the lines that have no result yet, and return the end of the batch."""
        try:
            async with asyncio.timeout(self._deadline_s - self._clocks.unix_s()) as window:
                await self._check_lines()
                await self._run_lines()
        except _BadFile as error:
            problems = json.dumps(error.problems)
            told = JobError("invalid_batch", str(error))
            return JobAnswer(400, ((PROBLEMS, problems), ("content-type", "application/json")), told), problems.encode()
        except TimeoutError:
            if not window.expired():
                raise
            await self._expire_lines()
            return JobError(_EXPIRED, "the completion window ended before all requests did"), b""
        return JobAnswer(200), b""

    async def _check_lines(self) -> None:
        """Check the whole file before anything runs, and learn which lines have ended. Raises _BadFile."""
        check = _Check(self._endpoint)
        async for lines in self._pieces():
            await asyncio.to_thread(check.add, lines)
        self._total = check.end()
        ended = await self._call(WeightRegistry.begin_lines, self._taken.id, self._taken.start, self._total)
        self._ended = set(ended or ())

    async def _run_lines(self) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._deadline_s - self._clocks.unix_s()
        async with asyncio.TaskGroup() as group:
            async for lines in self._pieces():
                for number, line in lines:
                    if number not in self._ended:
                        await self._places.acquire()
                        try:
                            task = group.create_task(self._run_line(number, line, deadline_s))
                        except BaseException:  # the group ends
                            self._places.release()
                            raise
                        task.add_done_callback(lambda _: self._places.release())

    async def _run_line(self, number: int, line: bytes, deadline_s: float) -> None:
        taken, id_ = self._taken, f"{self._taken.id}_{number}"
        custom_id, body = await call_aside(len(line), _request_of, line, self._endpoint)
        current_job.set(RunningJob(id_, taken.start, self._job.timeout_s, asyncio.Event()))
        headers = dict(taken.headers) | {"content-type": "application/json", PRIORITY: str(self._desk.lowest_priority)}
        request = TakenJob(id_, taken.start, taken.key, self._endpoint, tuple(headers.items()), body)
        end: JobAnswer | JobError
        try:
            end, answer = await self._application.answer_of(request, deadline_s, self._job.timeout_s)
        except Exception as error:
            end, answer = error_of(error, id_, self._job.timeout_s), b""
        content = await call_aside(len(answer), _result_line, id_, custom_id, end, answer)
        await self._keep(LineResult(number, content, isinstance(end, JobAnswer) and end.is_good))

    async def _keep(self, result: LineResult) -> None:
        """Keep a line's result, together with those of lines that end meanwhile."""
        self._unkept[result.number] = result
        async with self._keeping:
            while result.number in self._unkept:
                await self._keep_all(self._next_group())

    def _next_group(self) -> list[LineResult]:
        """Take results to be kept together, the first ones, as many as one call of the owner may bring."""
        group, num_bytes = list[LineResult](), 0
        for number, one in list(self._unkept.items()):
            num_bytes += len(one.content)
            if group and num_bytes > PIECE_BYTES:
                break
            group.append(self._unkept.pop(number))
        return group

    async def _keep_all(self, results: Sequence[LineResult]) -> None:
        taken = self._taken
        await self._call(WeightRegistry.end_lines, taken.id, taken.start, taken.key, results)
        self._ended.update(result.number for result in results)
        self._job.progress = min(99, 100 * len(self._ended) // max(1, self._total))
        self._job.changed.set()

    async def _expire_lines(self) -> None:
        """Give the lines without a result the error that their time is over."""
        with contextlib.suppress(_BadFile):
            await self._give_error(JobError(_EXPIRED, _WHY_EXPIRED))

    async def _give_error(self, error: JobError) -> None:
        async for lines in self._pieces():
            left = [(number, line) for number, line in lines if number not in self._ended]
            results = await asyncio.to_thread(_failed_lines, self._taken.id, left, self._endpoint, error)
            if results:
                await self._keep_all(results)

    async def _pieces(self) -> AsyncIterator[Lines]:
        """Yield the lines of the file with their numbers, some at a time; empty ones count. Raises _BadFile."""
        rest, number, offset = b"", 0, 0
        while piece := await self._call(WeightRegistry.read_file, self._taken.key, self._file, offset, PIECE_BYTES):
            offset += len(piece)
            lines, rest, number = await asyncio.to_thread(_split, rest + piece, number)
            if len(rest) > MAX_LINE_BYTES:
                why = f"more than {MAX_LINE_BYTES} bytes without the end of a line"
                raise _BadFile([_problem("invalid_json_line", why, None, number)])
            yield lines
        if piece is None:
            raise _BadFile(
                [_problem("file_not_found", f"input_file_id: {self._file!r} is gone", "input_file_id", None)]
            )
        if rest.strip():
            yield [(number, rest)]

    async def _call(self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the owner, however long it takes until it answers."""

        def note(error: Exception) -> None:
            logger.warning("batch %s waits: %s", self._taken.id, str(error).partition("\n")[0])

        return await asked_again(lambda: self._desk.call(method, *args, **kwargs), Exception, note=note)


def _split(content: bytes, number: int) -> tuple[Lines, bytes, int]:
    """Return the lines of a content from a number on, the rest behind the last one, and the rest's number."""
    *whole, rest = content.split(b"\n")
    lines = [(number + place, line) for place, line in enumerate(whole) if line.strip()]
    return lines, rest, number + len(whole)


def _request_of(line: bytes, endpoint: str) -> tuple[str, bytes]:
    """Return the client's id of a line, and the body of its request. Raises InvalidRequest, RequestTooLarge."""
    check_json_size(line)
    try:
        found = from_json(line)
    except ValueError as error:
        raise InvalidRequest(f"the line is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest("the line is no object with custom_id, method, url and body")
    custom_id, body = found.get("custom_id"), found.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS:
        raise InvalidRequest(f"custom_id: expected a text of 1 to {_MAX_ID_CHARS} characters", "custom_id")
    if found.get("method", "POST") != "POST":
        raise InvalidRequest(f"method: {str(found['method'])[:_SHOWN]!r}, expected 'POST'", "method")
    if found.get("url") != endpoint:
        why = f"url: {str(found.get('url'))[:_SHOWN]!r}, expected the endpoint of the batch, {endpoint!r}"
        raise InvalidRequest(why, "url")
    if not isinstance(body, dict):
        raise InvalidRequest("body: expected an object, the body of the request", "body")
    if body.get("stream"):
        raise InvalidRequest("body.stream: a batch has nobody who reads a stream", "body.stream")
    return custom_id, to_json(body)


def _result_line(id_: str, custom_id: str, end: JobAnswer | JobError, body: bytes) -> bytes:
    """Return a line's result in OpenAI's form."""
    response, error = None, None
    if isinstance(end, JobAnswer):
        response = {"status_code": end.status, "request_id": id_, "body": _as_json(end, body)}
    else:
        error = {"code": end.code, "message": end.message}
    line = {"id": f"batch_req_{id_.removeprefix('batch_')}", "custom_id": custom_id}
    return to_json(line | {"response": response, "error": error}) + b"\n"


def _as_json(end: JobAnswer, body: bytes) -> Any:
    """Return an answer's body as a value of JSON: what is no JSON is a text, or base64 of a file with its type."""
    type_ = dict(end.headers).get("content-type", "")
    try:
        if "json" in type_:
            return from_json(body)
        if type_.startswith("text/"):
            return body.decode()
    except ValueError:
        pass
    return {"content_type": type_, "b64_json": base64.b64encode(body).decode()}


def _failed_lines(batch: str, lines: Lines, endpoint: str, error: JobError) -> list[LineResult]:
    found = []
    for number, line in lines:
        try:
            custom_id = _request_of(line, endpoint)[0]
        except ServiceError:  # the time was over before the file was checked
            custom_id = ""
        found.append(LineResult(number, _result_line(f"{batch}_{number}", custom_id, error, b""), is_good=False))
    return found


def _problem(code: str, message: str, param: str | None, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": None if line is None else line + 1}
