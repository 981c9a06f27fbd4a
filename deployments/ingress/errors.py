"""The one table from errors to HTTP, in the OpenAI error envelope.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.exceptions import HTTPException

from deployments.errors import (
    Conflict,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    ModelUnavailable,
    NoReplica,
    Overloaded,
    QueueFull,
    ReplicaLost,
    RequestTooLarge,
    ServiceError,
    UnknownModel,
    Unprocessable,
)

logger = logging.getLogger("atelier.ingress")

RETRY_AFTER_S = "1"
# error class -> HTTP status, OpenAI type, OpenAI code; the first class that fits wins
TABLE: tuple[tuple[type[Exception], int, str, str], ...] = (
    (InvalidRequest, 400, "invalid_request_error", "invalid_value"),
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (Conflict, 409, "invalid_request_error", "conflict"),
    (Unprocessable, 422, "invalid_request_error", "unusable_checkpoint"),
    (RequestTooLarge, 413, "invalid_request_error", "request_too_large"),
    (Overloaded, 503, "server_error", "overloaded"),
    (QueueFull, 429, "rate_limit_error", "queue_full"),
    (DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (ModelUnavailable, 503, "server_error", "model_unavailable"),
    (NoReplica, 503, "server_error", "no_replica"),
    (ReplicaLost, 503, "server_error", "replica_unavailable"),
    (GenerationFailed, 500, "server_error", "generation_failed"),
    (BackPressureError, 503, "server_error", "overloaded"),
    (RayActorError, 503, "server_error", "replica_unavailable"),
    (RayServeException, 503, "server_error", "replica_unavailable"),
)
_HTTP_CODES = {404: "unknown_url", 405: "method_not_allowed"}


def envelope(message: str, type_: str, code: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def unwrap(error: Exception) -> Exception:
    """The exception that a replica raised, out of Ray's wrapper."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return error


def error_response(error: Exception) -> JSONResponse:
    """Any exception as an answer. What the table does not know is a 500 whose details go to the log only."""
    error = unwrap(error)
    for class_, status, type_, code in TABLE:
        if isinstance(error, class_):
            known = isinstance(error, ServiceError)
            message = str(error) if known else "the replica that worked on this request is gone; try again"
            headers = {"retry-after": RETRY_AFTER_S} if status in (429, 503) else None
            param = error.param if isinstance(error, ServiceError) else None
            return JSONResponse(envelope(message, type_, code, param), status, headers)
    logger.error("unexpected error", exc_info=error)
    return JSONResponse(envelope("internal error; the server's log has the details", "server_error", "internal"), 500)


def validation_response(error: RequestValidationError) -> JSONResponse:
    """A body that is not JSON, or not of the documented form."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        message = f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}"
        return JSONResponse(envelope(message, "invalid_request_error", "invalid_json"), 400)
    place, *path = first["loc"]
    if place == "body":
        param = _field(error.body, tuple(path), missing=first["type"] == "missing") or None
    else:  # of the path, the query or a header
        param = str(path[0]) if path else None
    text = "unknown field" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    got = first.get("input")
    shown = f", got {got!r}" if isinstance(got, str | int | float | bool) and len(repr(got)) < 80 else ""
    message = f"{param}: {text}{shown}" if param else f"{text}{shown}"
    return JSONResponse(envelope(message, "invalid_request_error", "invalid_value", param), 400)


def _field(body: Any, location: tuple[str | int, ...], *, missing: bool) -> str:
    """The dotted path of a field. Members of a union are in the location too, by type name: those are left out."""
    path = []
    for part in location:
        if isinstance(body, dict) and (part in body or (missing and part == location[-1])):
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        else:
            continue
        path.append(str(part))
    return ".".join(path)


def install(app: FastAPI) -> None:
    """Make every error of `app` leave in the envelope."""

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return validation_response(error)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error.__cause__, ServiceError):  # what `BodyLimit` raises, in FastAPI's wrapper
            return error_response(error.__cause__)
        code = _HTTP_CODES.get(error.status_code, "http_error")
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(envelope(message, "invalid_request_error", code), error.status_code)

    @app.exception_handler(ServiceError)
    @app.exception_handler(RayTaskError)
    @app.exception_handler(RayActorError)
    @app.exception_handler(RayServeException)
    async def _known(_: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(Exception)
    async def _unexpected(_: Request, error: Exception) -> JSONResponse:
        return error_response(error)
