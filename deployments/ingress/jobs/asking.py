"""Questions of jobs to their own ingress: the application answers them as it would over a connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, TypeVar

from starlette.types import ASGIApp, Message

from cluster.jobs.records import Headers, JobAnswer, JobError, TakenJob
from deployments.ingress.access.callers import CALLER, Caller, Callers
from deployments.ingress.messages.running_job import current_job
from deployments.records.errors import NotAuthenticated

FIRST_PAUSE_S: Final = 1.0  # before the next try of a temporarily refused job
LONGEST_PAUSE_S: Final = 30.0
GRACE_S: Final = 30.0  # beyond the request's own time, so that its endpoint reports the timeout in its own form
_FOR_NOW: Final = (429, 503)
_STREAM: Final = b"text/event-stream"
_MAX_ERROR_BYTES: Final = 2**16
# Headers of an answer's connection, not of its content.
_UNKEPT: Final = frozenset({"content-length", "connection", "transfer-encoding", "date", "server", "x-request-id"})

logger = logging.getLogger("atelier.ingress")

R = TypeVar("R")


class TooLargeResult(Exception):
    """A result has too many bytes to be kept."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"the result has more than {max_bytes} bytes, the maximum")


def growing_pauses() -> Iterator[float]:
    """Yield the pauses between tries, each twice the one before, up to the longest."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def asked_again(
    ask: Callable[[], Awaitable[R]],
    failures: type[Exception],
    until_s: float = math.inf,
    note: Callable[[Exception], None] = lambda _: None,
) -> R:
    """Return what `ask` returns, after further tries while it fails so; each failure is noted.

    It raises the failure after which the next try would be later than `until_s`, of the running loop's time.
    """
    loop = asyncio.get_running_loop()
    for pause_s in growing_pauses():
        try:
            return await ask()
        except failures as error:
            note(error)
            if loop.time() + pause_s > until_s:
                raise
        await asyncio.sleep(pause_s)
    raise AssertionError("pauses have no end")


class OwnApplication:
    """The application of an ingress, as its jobs ask it. A result has at most `max_bytes`."""

    def __init__(self, app: ASGIApp, callers: Callers, max_bytes: int) -> None:
        self._app = app
        self._callers = callers
        self._max_bytes = max_bytes

    async def answer_of(self, taken: TakenJob, deadline_s: float, timeout_s: float) -> tuple[JobAnswer, bytes]:
        """Return the endpoint's answer, after further tries while it refuses the job temporarily.

        `deadline_s` is of the running loop's time. Raises NotAuthenticated for a revoked key, TooLargeResult, and
        TimeoutError for a try that takes much longer than `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        for pause_s in growing_pauses():
            caller = self._callers.named(taken.key)
            async with asyncio.timeout(timeout_s + GRACE_S):
                answer, body = await self._ask(taken, caller)
            wait_s = max(pause_s, _retry_after_s(answer)) * random.uniform(1.0, 1.25)  # apart from others
            if answer.status not in _FOR_NOW or loop.time() + wait_s > deadline_s:
                return answer, body
            await asyncio.sleep(wait_s)
        raise AssertionError("pauses have no end")

    async def _ask(self, taken: TakenJob, caller: Caller | None) -> tuple[JobAnswer, bytes]:
        """Return the application's answer to the job's request. Raises TooLargeResult."""
        status, headers, body = 500, list[tuple[bytes, bytes]](), bytearray()
        most, messages, job = self._max_bytes, iter([taken.body]), current_job.get()

        async def receive() -> Message:
            for part in messages:
                return {"type": "http.request", "body": part, "more_body": False}
            await asyncio.Event().wait()  # the client never leaves: an unwanted job is cancelled
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], list(message.get("headers", ()))
                if job is not None and dict(headers).get(b"content-type", b"").startswith(_STREAM):
                    job.content = body
            elif message["type"] == "http.response.body":
                body.extend(message.get("body", b""))
                if len(body) > most:
                    raise TooLargeResult(most)
                if job is not None and job.content is body:
                    job.grown.set()

        try:
            await self._app(_scope_of(taken, caller), receive, send)
        except TooLargeResult:
            raise
        except Exception:  # the application has answered, and raises for its server
            if len(body) > most:
                raise TooLargeResult(most) from None
        kept = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]
        error = _error_of_answer(status, bytes(body)) if status >= 400 else None
        return JobAnswer(status, tuple(pair for pair in kept if pair[0] not in _UNKEPT), error), bytes(body)


def error_of(error: Exception, id_: str, timeout_s: float) -> JobError:
    """Return the reason why a job has no answer. What is not expected is logged."""
    if isinstance(error, NotAuthenticated):
        return JobError("invalid_api_key", str(error))
    if isinstance(error, TooLargeResult):
        return JobError("result_too_large", str(error))
    if isinstance(error, TimeoutError):
        return JobError("deadline_exceeded", f"the job exceeded its timeout of {timeout_s:g} s")
    logger.error("job %s", id_, exc_info=error)
    return JobError("internal", "internal error; the server's log has the details")


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


def _error_of_answer(status: int, body: bytes) -> JobError:
    """Return the error of a failed answer, in any protocol's form."""
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
