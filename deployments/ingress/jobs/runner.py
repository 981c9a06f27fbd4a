"""The runner of one ingress: it takes jobs from their owner, asks the ingress's own application, and tells the answer.

So a job goes the way of any request: its key's rights and limits hold, it waits in the admission queue on its terms,
and what the endpoint answers is its result. What is refused for now (429, 503) is asked again, as long as the job's
time lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import ASGIApp, Message

from cluster.jobs.records import Headers, JobAnswer, JobError, TakenJob
from cluster.registry.actor import WeightRegistry
from deployments.ingress.access.callers import CALLER, Caller, Callers
from deployments.ingress.jobs.desk import JobDesk
from deployments.ingress.messages.running_job import RunningJob, current_job
from deployments.records.errors import NotAuthenticated
from deployments.records.tasks import shared_task

BEAT_S: Final = 4.0  # well below `cluster.jobs.leases.LOST_S`
PROGRESS_S: Final = 0.1  # between two words of progress
TAKE_S: Final = 10.0  # that the owner is asked to wait for work
FIRST_PAUSE_S: Final = 1.0  # before a job that was refused for now is asked for again
LONGEST_PAUSE_S: Final = 30.0
_GRACE_S: Final = 30.0  # the request itself says that its time is over, in the words of its endpoint
_FOR_NOW: Final = (429, 503)
_MAX_ERROR_BYTES: Final = 2**16
# Of an answer, what is of its connection and not of its content.
_UNKEPT: Final = frozenset({"content-length", "connection", "transfer-encoding", "date", "server", "x-request-id"})

logger = logging.getLogger("atelier.ingress")


class _TooLarge(Exception):
    """A result has more bytes than may be kept."""


@dataclass(slots=True)
class _Start:
    """A start of a job that runs here."""

    job: RunningJob
    task: asyncio.Task[None]


class JobRunner:
    """The jobs that run in one ingress. Lives on one event loop."""

    def __init__(self, app: ASGIApp, desk: JobDesk, callers: Callers) -> None:
        self._app = app
        self._desk = desk
        self._callers = callers
        self._name = uuid.uuid4().hex
        self._starts: dict[str, _Start] = {}
        self._has_room = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run jobs while the context lasts. Those that run at its end are begun again elsewhere."""
        tasks = [shared_task(self._take_on()), shared_task(self._beat_on())]
        try:
            yield
        finally:
            tasks += [start.task for start in self._starts.values()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _take_on(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            most = self._desk.config.max_running
            self._has_room.clear()
            if (room := most - len(self._starts)) <= 0:
                await self._has_room.wait()
                continue
            try:
                taken = await self._desk.call(WeightRegistry.take_jobs, self._name, room, max(1, most // 2), TAKE_S)
            except Exception as error:  # whatever it is, the next time may do better
                logger.warning("no jobs can be taken now: %s", str(error).partition("\n")[0])
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            pause_s = FIRST_PAUSE_S
            for job in taken:
                self._begin(job)

    def _begin(self, taken: TakenJob) -> None:
        if (before := self._starts.get(taken.id)) is not None:  # the owner did not hear of it for long
            before.task.cancel()
        job = RunningJob(taken.id, taken.start, self._desk.config.timeout_s, self._desk.changed)
        start = _Start(job, shared_task(self._run(taken, job)))
        self._starts[taken.id] = start

        def forget(_: object) -> None:
            if self._starts.get(taken.id) is start:
                del self._starts[taken.id]
            self._has_room.set()

        start.task.add_done_callback(forget)

    async def _beat_on(self) -> None:
        """Say that the jobs run, at each change and now and then, and end those that nobody wants."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._desk.changed.wait()
            self._desk.changed.clear()
            if self._starts:
                progress = {id_: (one.job.start, one.job.progress) for id_, one in self._starts.items()}
                try:
                    async with asyncio.timeout(2 * BEAT_S):
                        unwanted = await self._desk.call(WeightRegistry.beat_jobs, self._name, progress)
                except Exception as error:  # next time, perhaps
                    logger.warning("the owner of jobs does not hear: %s", str(error).partition("\n")[0])
                    unwanted = []
                for id_ in unwanted:
                    if (one := self._starts.get(id_)) is not None and one.job.start == progress[id_][0]:
                        one.task.cancel()
            await asyncio.sleep(PROGRESS_S)

    async def _run(self, taken: TakenJob, job: RunningJob) -> None:
        current_job.set(job)
        deadline_s = asyncio.get_running_loop().time() + job.timeout_s
        end: JobAnswer | JobError
        try:
            async with asyncio.timeout(job.timeout_s + _GRACE_S):
                end, body = await self._answer_of(taken, deadline_s)
        except NotAuthenticated as error:
            end, body = JobError("invalid_api_key", str(error)), b""
        except _TooLarge:
            most = self._desk.config.max_result_bytes
            end, body = JobError("result_too_large", f"the result has more than {most} bytes, the maximum"), b""
        except TimeoutError:
            end, body = JobError("deadline_exceeded", f"the job exceeded its timeout of {job.timeout_s:g} s"), b""
        except Exception:
            logger.exception("job %s", taken.id)
            end, body = JobError("internal", "internal error; the server's log has the details"), b""
        await self._tell(taken, end, body, deadline_s)

    async def _answer_of(self, taken: TakenJob, deadline_s: float) -> tuple[JobAnswer, bytes]:
        """Return the endpoint's answer, which is asked again while it refuses the job for now."""
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        while True:
            caller = self._callers.named(taken.key)
            answer, body = await self._ask(taken, caller)
            wait_s = max(pause_s, _retry_after_s(answer)) * random.uniform(1.0, 1.25)  # apart from others
            if answer.status not in _FOR_NOW or loop.time() + wait_s > deadline_s:
                return answer, body
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _ask(self, taken: TakenJob, caller: Caller | None) -> tuple[JobAnswer, bytes]:
        """Return what the application answers to the job's request. Raises _TooLarge."""
        status, headers, body = 500, list[tuple[bytes, bytes]](), bytearray()
        most, messages = self._desk.config.max_result_bytes, iter([taken.body])

        async def receive() -> Message:
            for part in messages:
                return {"type": "http.request", "body": part, "more_body": False}
            await asyncio.Event().wait()  # nobody leaves: a job that nobody wants is cancelled
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], list(message.get("headers", ()))
            elif message["type"] == "http.response.body":
                body.extend(message.get("body", b""))
                if len(body) > most:
                    raise _TooLarge

        try:
            await self._app(_scope_of(taken, caller), receive, send)
        except _TooLarge:
            raise
        except Exception:  # the application has answered, and tells its server
            if len(body) > most:
                raise _TooLarge from None
        kept = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]
        error = _error_of(status, bytes(body)) if status >= 400 else None
        return JobAnswer(status, tuple(pair for pair in kept if pair[0] not in _UNKEPT), error), bytes(body)

    async def _tell(self, taken: TakenJob, end: JobAnswer | JobError, body: bytes, deadline_s: float) -> None:
        """Tell the owner of the end until it has heard. Beyond the job's time it has no room: it is begun again."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._desk.call(WeightRegistry.end_job, taken.id, taken.start, end, body)
                return
            except Exception as error:
                logger.warning("the end of job %s is not kept yet: %s", taken.id, str(error).partition("\n")[0])
                if asyncio.get_running_loop().time() + pause_s > deadline_s + _GRACE_S:
                    return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _scope_of(taken: TakenJob, caller: Caller | None) -> dict[str, Any]:
    headers: Headers = (*taken.headers, ("content-length", str(len(taken.body))))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": taken.endpoint,
        "raw_path": taken.endpoint.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers],
        "client": None,
        "server": None,
        CALLER: caller,
    }


def _retry_after_s(answer: JobAnswer) -> float:
    after = dict(answer.headers).get("retry-after", "")
    return min(float(after), LONGEST_PAUSE_S) if after.isascii() and after.isdigit() and len(after) < 9 else 0.0


def _error_of(status: int, body: bytes) -> JobError:
    """Return what an answer says of its failure, in whatever form."""
    message, code = f"the endpoint answered {status}; that is the job's result", f"http_{status}"
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(body[:_MAX_ERROR_BYTES])
        error = found.get("error") if isinstance(found, dict) else None
        if isinstance(error, dict):
            message = str(error.get("message") or message)
            code = str(error.get("code") or error.get("type") or code)
        elif isinstance(error, str):
            message = error
    return JobError(code, message)
