"""Errors of the REST side in the protocol's form, `{"error": "what is wrong"}`, with the status of the one table."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.ingress.errors import error_response, validation_response

PREFIX: Final = "/v2"
_STATUSES: Final = {
    400: "the request is not of the documented form, or asks for what the model does not do",
    404: "no such model or version",
    413: "larger than the server allows",
    429: "too many requests wait already",
    500: "the model broke down on this request",
    501: "an extension that this server does not have",
    503: "the model or its replica is not available now",
    504: "the request's own timeout is over",
}


class ErrorBody(BaseModel):
    error: str


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the `responses` of a route."""
    return {status: {"model": ErrorBody, "description": _STATUSES[status]} for status in statuses}


def protocol_error(error: Exception) -> JSONResponse:
    """Any exception as an answer: status, headers and text are those of the one table."""
    known = validation_response(error) if isinstance(error, RequestValidationError) else error_response(error)
    headers = {"retry-after": known.headers["retry-after"]} if "retry-after" in known.headers else None
    text = json.loads(bytes(known.body))["error"]["message"]
    return JSONResponse({"error": text}, known.status_code, headers)


class ProtocolRoute(APIRoute):
    """A route whose errors leave in the protocol's form; the OpenAI routes beside it keep theirs."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await handler(request)
            except HTTPException as error:
                return JSONResponse({"error": error.detail}, error.status_code, error.headers)
            except Exception as error:
                return protocol_error(error)

        return answered


def install(app: FastAPI) -> None:
    """Give unknown paths and methods under /v2 the protocol's form too. After `deployments.ingress.errors.install`."""
    others: Any = app.exception_handlers[HTTPException]

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if not is_protocol_path(request.url.path):
            answer: Response = await others(request, error)
            return answer
        text = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse({"error": text}, error.status_code, error.headers)


def is_protocol_path(path: str) -> bool:
    return path == PREFIX or path.startswith(f"{PREFIX}/")
