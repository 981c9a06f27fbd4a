"""Routes of one model: the protocol has each twice, with a version in the path and without."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from deployments.ingress.kserve.records import VERSION
from deployments.ingress.kserve.rest.errors import PREFIX, ProtocolRoute

Handler = Callable[[Request, str, str], Awaitable[Response]]
ModelName = Annotated[str, Path(description="a name of GET /v1/models, or of a pipeline")]
ModelVersion = Annotated[str, Path(description=f"{VERSION!r}, the one that is served", examples=[VERSION])]


def create_protocol_router() -> APIRouter:
    """Every error of its routes has the protocol's form."""
    return APIRouter(tags=["open inference protocol"], route_class=ProtocolRoute)


def add_model_route(router: APIRouter, method: str, suffix: str, handler: Handler, **docs: Any) -> None:
    """`handler` gets the request, the model's name and the version, "" where the path has none."""

    async def unversioned(request: Request, model: ModelName) -> Response:
        return await handler(request, model, "")

    async def versioned(request: Request, model: ModelName, version: ModelVersion) -> Response:
        return await handler(request, model, version)

    name = handler.__name__.strip("_")
    docs = {"summary": name.replace("_", " "), "description": handler.__doc__} | docs
    path = f"{PREFIX}/models/{{model}}"
    router.add_api_route(path + suffix, unversioned, methods=[method], name=name, **docs)
    router.add_api_route(
        f"{path}/versions/{{version}}{suffix}", versioned, methods=[method], name=f"{name}_of_version", **docs
    )
