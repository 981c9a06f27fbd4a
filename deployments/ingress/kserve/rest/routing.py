"""Routers of the REST side: routes with and without a version, and errors as `{"error": "what is wrong"}`.

Statuses and texts are those of the one table in `deployments/ingress/errors.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from deployments.ingress.errors import Failure, error_content, failure_of
from deployments.ingress.kserve.records import VERSION
from deployments.ingress.responses import Answer, json_response

PREFIX: Final = "/v2"
_MEANINGS: Final = {
    400: "the request is not of the documented form, or asks for what the model does not do",
    403: "shared memory is for clients on this machine, and for their own files",
    404: "no such model or version",
    408: "the body did not come in time",
    409: "running requests or pins hold the model",
    413: "larger than the server allows",
    429: "the queue is full",
    500: "the model broke down on this request",
    501: "an extension that this server does not have",
    503: "the model or its replica is not available now",
    504: "the request timed out",
}
INFERENCE_ERRORS: Final = (400, 404, 408, 413, 429, 500, 503, 504)
Handler = Callable[[Request, str, str], Awaitable[Response]]
ModelName = Annotated[str, Path(description="a name of GET /v1/models, or of a pipeline")]
_ModelVersion = Annotated[str, Path(description=f"{VERSION!r}, the one that is served", examples=[VERSION])]


class ProtocolError(Answer):
    """The form of every error under /v2."""

    error: str


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route."""
    content = error_content(ProtocolError)
    return {status: {"content": content, "description": _MEANINGS[status]} for status in statuses}


def protocol_failure_response(failure: Failure) -> Response:
    """Return `failure` in the protocol's form."""
    return json_response(ProtocolError(error=failure.message), failure.status, failure.headers)


def protocol_error_response(error: Exception) -> Response:
    """Return any exception in the protocol's form."""
    return protocol_failure_response(failure_of(error))


class _ProtocolRoute(APIRoute):
    """A route whose errors leave in the protocol's form; the OpenAI routes beside it keep theirs."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await handler(request)
            except HTTPException as error:
                return json_response(ProtocolError(error=error.detail), error.status_code, error.headers)
            except Exception as error:
                return protocol_error_response(error)

        return answered


def create_protocol_router() -> APIRouter:
    """Return a router whose routes answer errors in the protocol's form."""
    return APIRouter(tags=["open inference protocol"], route_class=_ProtocolRoute)


def add_model_route(router: APIRouter, method: str, suffix: str, handler: Handler, **docs: Any) -> None:
    """Add a route of one model twice, as the protocol has it: with a version in the path and without.

    `handler` gets the request, the model's name and the version, "" where the path has none.
    """

    async def unversioned(request: Request, model: ModelName) -> Response:
        return await handler(request, model, "")

    async def versioned(request: Request, model: ModelName, version: _ModelVersion) -> Response:
        return await handler(request, model, version)

    name = handler.__name__.strip("_")
    docs = {"summary": name.replace("_", " "), "description": handler.__doc__} | docs
    path = f"{PREFIX}/models/{{model}}"
    router.add_api_route(path + suffix, unversioned, methods=[method], name=name, **docs)
    router.add_api_route(
        f"{path}/versions/{{version}}{suffix}", versioned, methods=[method], name=f"{name}_of_version", **docs
    )


def request_body(class_: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads its body itself: the schema with its parts written out."""
    schema = class_.model_json_schema()
    parts = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, dict):
            part = node.get("$ref", "").removeprefix("#/$defs/") if isinstance(node.get("$ref"), str) else ""
            return inlined(parts[part]) if part else {key: inlined(value) for key, value in node.items()}
        return [inlined(item) for item in node] if isinstance(node, list) else node

    content = {"application/json": {"schema": inlined(schema)}}
    return {"requestBody": {"required": required, "content": content}}
