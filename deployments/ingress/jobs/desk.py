"""The desk of one ingress: requests become jobs of the caller's key, and the jobs' owner keeps them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Final, ParamSpec, TypeVar

from ray.exceptions import RayActorError
from starlette.requests import Request

from cluster.admission.fair_slots import release_read_slot
from cluster.jobs.records import Headers, Job, JobError, JobFilter, JobState, NewJob, Order, Webhook
from cluster.records.errors import FileInUse, JobConflict, JobsFull, JobsUnavailable
from cluster.registry.actor import Method, WeightRegistry
from configs.jobs import JobsConfig
from deployments.ingress.access.callers import current_key, end_current_request
from deployments.ingress.jobs.asking import asked_again
from deployments.ingress.jobs.signing import checked_secret
from deployments.ingress.messages.outer_hosts import OuterHosts
from deployments.ingress.messages.responses import event_of
from deployments.ingress.messages.running_job import current_job
from deployments.ingress.messages.terms import PRIORITY, TENANT, TIMEOUT, current_terms
from deployments.ingress.service.service import Service
from deployments.records.errors import Conflict, InvalidRequest, Overloaded, QueueFull

IDEMPOTENCY_KEY: Final = "idempotency-key"
WEBHOOK_URL: Final = "x-webhook-url"
SIGNED_BY: Final = "x-webhook-secret"
_MAX_KEY_CHARS: Final = 255
_MAX_URL_CHARS: Final = 2048
# Headers that a job's request takes from the one that began it.
_KEPT_HEADERS: Final = ("host", "content-type", "accept", "anthropic-version", PRIORITY, TENANT, TIMEOUT)
PIECE_BYTES: Final = 2**22
_WATCH_S: Final = 15.0
_AWAY_S: Final = 20.0  # a registry that died is back within seconds; clients wait no longer for it

P = ParamSpec("P")
R = TypeVar("R")


class JobDesk:
    """The jobs of the current task's key. `changed` is set when a job should end here.

    All methods raise ServiceErrors: Overloaded where the folder of jobs cannot be used.
    """

    def __init__(self, service: Service, config: JobsConfig) -> None:
        self.config = config
        self.changed = asyncio.Event()
        self._service = service
        hooks = config.webhooks
        self.webhook_hosts = OuterHosts(
            hooks.hosts, "jobs.webhooks.hosts", "webhooks go to", may_be_inner=hooks.may_be_inner
        )

    @property
    def lowest_priority(self) -> int:
        """The priority of what everything else goes before."""
        return self._service.queue.config.priority_levels

    async def begin(self, request: Request, facts: Mapping[str, Any] | None = None, prefix: str = "job") -> Job:
        """Keep the current request, to run it unchanged in the background. Raises Conflict, QueueFull."""
        return await self.add(request, request.url.path, await request.body(), facts=facts, prefix=prefix)

    async def add(
        self,
        request: Request,
        endpoint: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        facts: Mapping[str, Any] | None = None,
        prefix: str = "job",
        priority: int | None = None,
    ) -> Job:
        """Keep a request to `endpoint` on the terms of the current one, but for another `priority`.

        `headers` are in place of its own.
        """
        terms, config = current_terms.get(), self._service.queue.config
        terms = terms.within_rights(config)
        terms.checked(config)
        key = idempotency_key or request.headers.get(IDEMPOTENCY_KEY)
        if key is not None and len(key) > _MAX_KEY_CHARS:
            raise InvalidRequest(f"idempotency_key: {len(key)} characters, at most {_MAX_KEY_CHARS}", "idempotency_key")
        given = dict(request.headers) | dict(headers or {})
        kept: Headers = tuple((name, given[name]) for name in _KEPT_HEADERS if name in given)
        priority = priority or terms.priority or config.default_priority
        new = NewJob(
            current_key(), endpoint, body, kept, priority, dict(facts or {}), key, prefix, self._webhook_of(request)
        )
        job = await self.call(WeightRegistry.add_job, new)
        release_read_slot()  # the place in the queue is the job's
        return job

    def _webhook_of(self, request: Request) -> Webhook | None:
        """Return the webhook that a request wants for its job. Raises InvalidRequest."""
        url, secret = request.headers.get(WEBHOOK_URL), request.headers.get(SIGNED_BY)
        if url is None:
            if secret is not None:
                raise InvalidRequest(f"{SIGNED_BY}: there is no {WEBHOOK_URL}", WEBHOOK_URL)
            return None
        if len(url) > _MAX_URL_CHARS:
            raise InvalidRequest(f"{WEBHOOK_URL}: {len(url)} characters, at most {_MAX_URL_CHARS}", WEBHOOK_URL)
        self.webhook_hosts.checked(url, WEBHOOK_URL)
        return Webhook(url, checked_secret(secret, SIGNED_BY))

    async def find(self, id_: str) -> Job | None:
        """Return a job, None where there is none."""
        return await self.call(WeightRegistry.find_job, current_key(), id_)

    async def page(self, wanted: JobFilter, after: str | None, limit: int, order: Order) -> list[Job] | None:
        """Return a page of jobs, None where there is none `after`."""
        return await self.call(WeightRegistry.list_jobs, current_key(), wanted, after, limit, order)

    async def body(self, id_: str) -> bytes | None:
        """Return the body of an unfinished job's request; None for another job."""
        return await self.call(WeightRegistry.read_body, current_key(), id_)

    async def cancel(self, id_: str) -> Job | None:
        """End a job unless it has ended, and return it; None where there is none."""
        job = await self.call(WeightRegistry.cancel_job, current_key(), id_)
        self.changed.set()
        return job

    async def forget(self, id_: str) -> bool:
        """Remove a job and its result, and return whether there was one."""
        was_there = await self.find(id_) is not None  # a removal that is heard twice does not know it any more
        if was_there:
            await self.call(WeightRegistry.forget_job, current_key(), id_)
        self.changed.set()
        return was_there

    async def changes(self, job: Job) -> AsyncGenerator[Job]:
        """Yield a job, and again after each change or a while, until it has ended."""
        end_current_request()
        key, id_ = current_key(), job.id
        while True:
            yield job
            if job.has_ended:
                return
            seen = JobState(job.status, job.progress, job.num_starts)
            found = await self.call(WeightRegistry.watch_job, key, id_, seen, _WATCH_S)
            if found is None:
                return
            job = found

    async def result(self, job: Job, span: range) -> AsyncIterator[bytes] | None:
        """Return the pieces of a span of a job's result, None where there is none any more."""
        key = current_key()
        first = await self.call(WeightRegistry.read_result, key, job.id, span.start, min(PIECE_BYTES, len(span)))
        return None if first is None else self._pieces(key, job.id, span, first)

    async def answer_of(self, job: Job) -> AsyncGenerator[bytes]:
        """Yield the answer of a job that is a stream of events, as it comes; at last, where it has none, an error.

        While nothing comes there is a comment now and then. A job that begins again has another answer: then this one
        ends with the error `job_restarted`.
        """
        end_current_request()
        key, offset, start, piece = current_key(), 0, None if job.num_starts == 0 else job.num_starts, b""
        while True:
            found = await self.call(WeightRegistry.follow_result, key, job.id, start, offset, _WATCH_S)
            if found is None:
                yield _error_event("job_not_found", "the job was deleted")
                return
            job, more = found
            if start not in (None, job.num_starts) and offset:
                yield _error_event("job_restarted", "the process that answered has ended, and the job begins again")
                return
            start = job.num_starts or None
            if job.has_ended:
                is_good = job.answer is not None and job.answer.is_good
                rest = await self.result(job, range(offset, job.num_bytes)) if is_good else None
                if rest is not None:
                    async for piece in rest:
                        yield piece
                else:
                    error = job.error or JobError(f"job_{job.status}", f"the job is {job.status}")
                    yield _error_event(error.code, error.message)
                return
            if more:
                yield more
                offset, piece = offset + len(more), more
            elif not offset or piece.endswith(b"\n\n"):
                yield b": waiting\n\n"

    async def _pieces(self, key: str, id_: str, span: range, piece: bytes | None) -> AsyncIterator[bytes]:
        while piece:
            yield piece
            span = span[len(piece) :]
            if not span:
                return
            piece = await self.call(WeightRegistry.read_result, key, id_, span.start, min(PIECE_BYTES, len(span)))

    async def call(self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the owner, again while it comes back from its death: what it hears twice must do nothing more.

        Raises ServiceErrors, and RayActorError where it stays away.
        """
        until_s = asyncio.get_running_loop().time() + _AWAY_S
        return await asked_again(lambda: self._call_once(method, *args, **kwargs), RayActorError, until_s)

    async def _call_once(self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await self._service.snapshot.call_registry(method, *args, **kwargs)
        except JobConflict as error:
            raise Conflict(str(error), "idempotency_key") from None
        except FileInUse as error:
            raise Conflict(str(error), "file_id") from None
        except JobsFull as error:
            raise QueueFull(str(error)) from None
        except JobsUnavailable as error:
            raise Overloaded(str(error)) from None


def is_for_later(background: object, *, is_stream: bool = False) -> bool:
    """Return whether to keep a request as a job; never a job's own request. Raises InvalidRequest."""
    if background not in (True, "true") or current_job.get() is not None:
        return False
    if is_stream:
        raise InvalidRequest("background: a stream has nobody who reads it; follow the job's events", "background")
    return True


def _error_event(code: str, message: str) -> bytes:
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    return event_of(json.dumps({"error": error}), "error").encode()
