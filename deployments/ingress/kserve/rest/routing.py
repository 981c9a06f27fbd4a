"""Routers of the REST side: routes with and without a version, and errors as `{"error": "what is wrong"}`.

Statuses and texts are those of the one table in `deployments/ingress/errors.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, Final

from fastapi import APIRouter, FastAPI, Path
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from deployments.ingress.errors import describe_errors, error_content, error_response, failure_of
from deployments.ingress.kserve.records import VERSION
from deployments.ingress.responses import Answer, json_response

PREFIX: Final = "/v2"
_MEANINGS: Final = {
    400: "the request is not of the documented form, or asks for what the model does not do",
    404: "no such model or version",
    409: "running requests or pins hold the model",
    413: "larger than the server allows",
    429: "too many requests wait already",
    500: "the model broke down on this request",
    501: "an extension that this server does not have",
    503: "the model or its replica is not available now",
    504: "the request's own timeout is over",
}
INFERENCE_ERRORS: Final = (400, 404, 413, 429, 500, 503, 504)
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


def protocol_error_response(error: Exception) -> Response:
    """Return any exception in the protocol's form."""
    failure = failure_of(error)
    return json_response(ProtocolError(error=failure.message), failure.status, failure.headers)


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


def install_error_handlers(app: FastAPI) -> None:
    """Give unknown paths and methods under /v2 the protocol's form.

    Comes after `install_error_handlers` of `deployments/ingress/errors.py`, whose handler goes on for other paths.
    """
    describe_errors(app, ProtocolError)
    others: Any = app.exception_handlers[HTTPException]

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if not is_protocol_path(request.url.path):
            answer: Response = await others(request, error)
            return answer
        text = f"{request.method} {request.url.path}: {error.detail}"
        return json_response(ProtocolError(error=text), error.status_code, error.headers)


def is_protocol_path(path: str) -> bool:
    """Return whether a request for `path` is answered in this protocol."""
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def error_response_at(path: str, error: Exception) -> Response:
    """Return any exception in the form of the protocol that `path` belongs to: this one's or OpenAI's."""
    return protocol_error_response(error) if is_protocol_path(path) else error_response(error)


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
