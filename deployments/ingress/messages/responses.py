"""Responses of every protocol: JSON written beside the event loop, phase times in a header, server-sent events.

An answer is an instance of the class that describes it on the OpenAPI page. Lists with many numbers or images in them
are the exception: their parts are written one by one and joined, so that Python's lock is free between the parts.
Measured with 2,048 vectors of 1,024 numbers: the standard library's encoder takes ten times as long as pydantic's.

Errors come from one table, in the OpenAI envelope, which the OpenAPI page shows:

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Other protocols put the same `Failure` into their own forms (`error_forms.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic_core import to_json
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.door.haproxy_rules import CROWDED
from deployments.records.errors import (
    Conflict,
    ContextExceeded,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    ModelUnavailable,
    NoReplica,
    NotAllowed,
    NotAuthenticated,
    Overloaded,
    QueueFull,
    RateLimited,
    ReplicaLost,
    RequestTooLarge,
    RequestTooSlow,
    ServiceError,
    UnknownFile,
    UnknownModel,
    Unprocessable,
)
from deployments.records.requests import field_path, most_telling
from deployments.replicas.output_channel import OutputChannel

# Larger bodies are read and written in a thread: the event loop has other requests to pass on.
_MAX_INLINE_BYTES: Final = 2**16
ResultT = TypeVar("ResultT")
PieceT = TypeVar("PieceT")


TimesMs = dict[str, float]  # by phase
_logger = logging.getLogger("atelier.ingress")

_QUEUE_FULL: Final = "queue_full"
_RETRY_AFTER_S: Final = 1.0  # where no better estimate is known
# error class -> HTTP status, OpenAI type, OpenAI code; the first class that fits wins
_TABLE: Final[tuple[tuple[type[Exception], int, str, str], ...]] = (
    (ContextExceeded, 400, "invalid_request_error", "context_length_exceeded"),
    (UnknownFile, 404, "invalid_request_error", "file_not_found"),
    (InvalidRequest, 400, "invalid_request_error", "invalid_value"),
    (NotAuthenticated, 401, "invalid_request_error", "invalid_api_key"),
    (NotAllowed, 403, "permission_error", "not_allowed"),
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (Conflict, 409, "invalid_request_error", "conflict"),
    (Unprocessable, 422, "invalid_request_error", "unusable_checkpoint"),
    (RequestTooSlow, 408, "invalid_request_error", "request_timeout"),
    (RequestTooLarge, 413, "invalid_request_error", "request_too_large"),
    (Overloaded, 503, "server_error", "overloaded"),
    (RateLimited, 429, "rate_limit_error", "rate_limit_exceeded"),
    (QueueFull, 429, "rate_limit_error", _QUEUE_FULL),
    (DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (ModelUnavailable, 503, "server_error", "model_unavailable"),
    (NoReplica, 503, "server_error", "no_replica"),
    (ReplicaLost, 503, "server_error", "replica_unavailable"),
    (GenerationFailed, 500, "server_error", "generation_failed"),
    (BackPressureError, 503, "server_error", "overloaded"),
    (RayActorError, 503, "server_error", "replica_unavailable"),
    (RayServeException, 503, "server_error", "replica_unavailable"),
)
_UNSERVED: Final = ("/v1/audio", "/v1/realtime")
_SERVED: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank"),
    *("/v1/classify", "/v1/score", "/v1/pooling", "/v1/images/generations", "/v1/videos", "/v1/models"),
)
_HTTP_CODES: Final = {404: "unknown_url", 405: "method_not_allowed"}
_MEANINGS: Final = {
    400: "a field that is wrong; `param` names it",
    403: "shared memory is for clients on this machine, and for their own files",
    404: "no such model",
    408: "the body did not arrive in time",
    409: "running requests or pins hold the model",
    413: "larger than the server allows",
    429: "the queue is full, or the request would not be done in time; `Retry-After` says when to try again",
    500: "the model failed on this request",
    503: "the model or its replica is unavailable; try again",
    504: "the request timed out",
}
# Statuses of a request for a model that fails.
INFERENCE_ERRORS: Final = (400, 404, 408, 413, 429, 500, 503, 504)
_REFERENCE: Final = "#/components/schemas/{model}"
_UNUSED_SCHEMAS: Final = ("HTTPValidationError", "ValidationError")


class Answer(BaseModel, extra="forbid", protected_namespaces=()):
    """A JSON object for the wire and the OpenAPI page. Unset members are left out."""


def json_text(answer: object) -> str:
    """Return the JSON of an `Answer`, a record or a list of records, on one line."""
    return answer.model_dump_json(exclude_unset=True) if isinstance(answer, Answer) else to_json(answer).decode()


def json_with_list(answer: Answer, name: str, parts: Iterable[bytes]) -> bytes:
    """Return the JSON of `answer` with `parts`, which are JSON already, as the items of its member `name`.

    `answer` needs at least one more member that is set.
    """
    head = answer.model_dump_json(exclude_unset=True, exclude={name}).encode()
    return b"".join((head[:-1], b',"', name.encode(), b'":[', b",".join(parts), b"]}"))


def json_response(answer: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with the JSON of `answer`, which may be written already."""
    content = answer if isinstance(answer, bytes) else json_text(answer)
    return Response(content, status, headers, media_type="application/json")


async def call_aside(num_bytes: int, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Call `function`, in a thread when it works on more than `_MAX_INLINE_BYTES`, and return its result."""
    return function(*arguments) if num_bytes <= _MAX_INLINE_BYTES else await asyncio.to_thread(function, *arguments)


def server_timing(timings_ms: Mapping[str, float]) -> dict[str, str]:
    """Return the header `Server-Timing` (W3C Server Timing, section 3), which browsers show beside the request.

    `{"Server-Timing": "queue;dur=0.4, denoise;dur=212.0"}`
    """
    return {"Server-Timing": ", ".join(f"{phase};dur={ms:.2f}" for phase, ms in timings_ms.items())}


def rounded(timings_ms: Mapping[str, float]) -> dict[str, float]:
    """Return the times with two decimals."""
    return {phase: round(ms, 2) for phase, ms in timings_ms.items()}


class Closable(Protocol):
    """The parts of a response while it goes out."""

    async def aclose(self) -> None:
        """End it."""


EventsOf = Callable[[AsyncIterator[PieceT]], AsyncIterator[str]]


class EventStream(StreamingResponse):
    """Server-sent events, or lines of another type, made of `source`, which is closed when the client is gone.

    Starlette leaves that to the garbage collector, and until then a replica would go on writing in vain.
    """

    def __init__(
        self,
        events: AsyncIterator[str] | AsyncIterator[bytes],
        source: Closable,
        *,
        media_type: str = "text/event-stream",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(events, media_type=media_type, headers={"Cache-Control": "no-cache", **(headers or {})})
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


async def stream_events(
    pieces: OutputChannel[PieceT], events_of: EventsOf[PieceT], error_event: Callable[[Exception], str], **options: Any
) -> EventStream:
    """Answer with the events that `events_of` makes of pieces, once the first of them is there.

    So a refused request is a 4xx, and not an event in a 200. `options` are those of `EventStream`.
    """
    first = await anext(pieces)
    return EventStream(begun_events(first, pieces, events_of, error_event), pieces, **options)


async def begun_events(
    first: PieceT, rest: AsyncIterator[PieceT], events_of: EventsOf[PieceT], error_event: Callable[[Exception], str]
) -> AsyncIterator[str]:
    """Yield the events of pieces. An error from here on is an event, since the status is sent."""

    async def pieces() -> AsyncIterator[PieceT]:
        yield first
        async for piece in rest:
            yield piece

    try:
        async for event in events_of(pieces()):
            yield event
    except Exception as error:
        yield error_event(error)


def event_of(data: str, name: str = "") -> str:
    """Return one server-sent event with `data`, a single line, and a name where it has one."""
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"


class ErrorBody(Answer):
    """The message for a person, and the type and code for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Answer):
    """The envelope of every error under /v1 and /admin."""

    error: ErrorBody


@dataclass(frozen=True, slots=True)
class Failure:
    """An error for clients, before it takes the form of a protocol. `status` is HTTP's."""

    status: int
    message: str
    type: str = "server_error"
    code: str = "internal"
    param: str | None = None
    retry_after_s: float = _RETRY_AFTER_S

    @property
    def headers(self) -> dict[str, str] | None:
        """`Retry-After` in whole seconds, if another try may help, and for HAProxy whether it counts for all clients;
        with 401, the scheme of authentication.
        """
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.status not in (429, 503):
            return None
        after = {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}
        return after | {CROWDED: "1"} if self.code == _QUEUE_FULL else after


def status_of(error: Exception) -> int:
    """Return the HTTP status of an exception that ended a request for a model."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    return next((status for class_, status, *_ in _TABLE if isinstance(error, class_)), 500)


def failure_of(error: Exception) -> Failure:
    """Return the failure of any exception. One missing from the table is a 500 with its details in the log only.

    A replica's exception is taken out of Ray's wrapper.
    """
    if isinstance(error, RequestValidationError):
        return _malformed(error)
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    for class_, status, type_, code in _TABLE:
        if isinstance(error, class_):
            if isinstance(error, ServiceError):
                retry_after_s = getattr(error, "retry_after_s", None) or _RETRY_AFTER_S
                return Failure(status, str(error), type_, code, error.param, retry_after_s)
            return Failure(status, "the replica that worked on this request is gone; try again", type_, code)
    _logger.error("unexpected error", exc_info=error)
    return Failure(500, "internal error; the server's log has the details")


def failure_response(failure: Failure) -> Response:
    """Return `failure` in OpenAI's envelope."""
    body = ErrorBody(message=failure.message, type=failure.type, param=failure.param, code=failure.code)
    return json_response(ErrorAnswer(error=body), failure.status, failure.headers)


def error_response(error: Exception) -> Response:
    """Return any exception in OpenAI's envelope."""
    return failure_response(failure_of(error))


def error_event(error: Exception) -> str:
    """Return any exception as the event `error` of a stream, in OpenAI's envelope."""
    return event_of(bytes(error_response(error).body).decode(), "error")


def _malformed(error: RequestValidationError) -> Failure:
    """Return the failure of a request that is no JSON, or of another form than documented."""
    first = most_telling(error.errors(), start=1)
    if first["type"] == "json_invalid":
        message = f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}"
        return Failure(400, message, "invalid_request_error", "invalid_json")
    place, *path = first["loc"]
    if place == "body":
        param = field_path(error.body, tuple(path), missing=first["type"] == "missing") or None
    else:  # of the path, the query or a header
        param = str(path[0]) if path else None
    text = "unknown field" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    got = first.get("input")
    shown = f", got {got!r}" if isinstance(got, str | int | float | bool) and len(repr(got)) < 80 else ""
    message = f"{param}: {text}{shown}" if param else f"{text}{shown}"
    return Failure(400, message, "invalid_request_error", "invalid_value", param)


def install_error_handlers(app: FastAPI, respond: Callable[[str, Failure], Response]) -> None:
    """Make every error of `app` leave in the form that `respond` gives it at a path."""

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        if isinstance(error.__cause__, ServiceError):  # a gate raised it while FastAPI read the body
            return respond(path, failure_of(error.__cause__))
        code = _HTTP_CODES.get(error.status_code, "http_error")
        message = f"{request.method} {path}: {error.detail}"
        if error.status_code == 404 and path.startswith(_UNSERVED):
            message += f"; nothing is heard or spoken here, served are {', '.join(_SERVED)}"
        response = respond(path, Failure(error.status_code, message, "invalid_request_error", code))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ServiceError)
    @app.exception_handler(RayTaskError)
    @app.exception_handler(RayActorError)
    @app.exception_handler(RayServeException)
    @app.exception_handler(Exception)
    async def _any(request: Request, error: Exception) -> Response:
        return respond(request.url.path, failure_of(error))

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _without_validation_errors(
                get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            )
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]  # FastAPI's documented way


def describe_errors(app: FastAPI, class_: type[Answer]) -> None:
    """Put the form of errors that routes refer to by `error_content` on the OpenAPI page."""
    describe = app.openapi

    def schema() -> dict[str, Any]:
        page = describe()
        form = class_.model_json_schema(ref_template=_REFERENCE)
        page.setdefault("components", {}).setdefault("schemas", {}).update(
            form.pop("$defs", {}) | {class_.__name__: form}
        )
        return page

    app.openapi = schema  # type: ignore[method-assign]  # FastAPI's documented way


def error_content(class_: type[Answer]) -> dict[str, Any]:
    """Return the `content` of an error of that form, as OpenAPI has it.

    A reference, because FastAPI makes validators of each `model`, for every status of every route: they took a third of
    the time in which the application is built.
    """
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(model=class_.__name__)}}}


def documented(*statuses: int, **reasons: str) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route with OpenAI's envelope. `_409="why"` is the meaning of a status there."""
    return documented_as(ErrorAnswer, *statuses, **reasons)


def documented_as(form: type[Answer], *statuses: int, **reasons: str) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route with errors of another form."""
    texts = {status: _MEANINGS[status] for status in statuses}
    texts |= {int(status[1:]): text for status, text in reasons.items()}
    content = error_content(form)
    return {status: {"content": content, "description": texts[status]} for status in sorted(texts)}


def _without_validation_errors(schema: dict[str, Any]) -> dict[str, Any]:
    """Take out FastAPI's own answer to a malformed request: its 422 is a 400 here."""
    for operations in schema["paths"].values():
        for operation in operations.values():
            answer = operation["responses"].get("422", {})
            if _UNUSED_SCHEMAS[0] in str(answer.get("content")):
                del operation["responses"]["422"]
    for name in _UNUSED_SCHEMAS:
        schema.get("components", {}).get("schemas", {}).pop(name, None)
    return schema
