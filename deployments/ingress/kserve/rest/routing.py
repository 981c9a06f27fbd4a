"""Routers of the REST side: routes with and without a version, and errors as `{"error": "what is wrong"}`.

Statuses and texts are those of the one table in `deployments/ingress/errors.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from deployments.ingress.errors import Failure, documented_as
from deployments.ingress.kserve.records import VERSION
from deployments.ingress.responses import Answer, json_response

PREFIX: Final = "/v2"
Handler = Callable[[Request, str, str], Awaitable[Response]]
ModelName = Annotated[str, Path(description="a name of GET /v1/models, or of a pipeline")]
_ModelVersion = Annotated[str, Path(description=f"{VERSION!r}, the one that is served", examples=[VERSION])]


class ProtocolError(Answer):
    """The form of every error under /v2."""

    error: str


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route."""
    return documented_as(ProtocolError, *statuses)


def protocol_failure_response(failure: Failure) -> Response:
    """Return `failure` in the protocol's form."""
    return json_response(ProtocolError(error=failure.message), failure.status, failure.headers)


def create_protocol_router() -> APIRouter:
    """Return a router of the protocol's routes, whose errors `error_forms.py` puts into its form."""
    return APIRouter(tags=["open inference protocol"])


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
