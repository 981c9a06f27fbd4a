"""Triton's model repository, statistics and system shared memory extensions over REST.

Sources: Triton, "Model Repository Extension", "Statistics Extension" and "Shared Memory Extension". The repository's
router goes before that of `routes.py`, in whose paths `stats` would be a model's name. Where shared memory is switched
off, its paths answer 501.
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from cluster.door.haproxy_rules import CLIENT
from deployments.errors import InvalidRequest
from deployments.ingress.access.callers import current_tenant
from deployments.ingress.kserve.records import Parameters
from deployments.ingress.kserve.repository import ModelIndex, Repository
from deployments.ingress.kserve.rest.messages import read_json
from deployments.ingress.kserve.rest.routing import (
    PREFIX,
    ModelName,
    ProtocolError,
    add_model_route,
    create_protocol_router,
    documented,
    request_body,
)
from deployments.ingress.kserve.shared_memory import Owner, RegionStatus, SharedMemory, uid_of_client
from deployments.ingress.kserve.statistics import ModelStatistics, Statistics, statistics_of
from deployments.ingress.responses import Answer, json_response

_PATH = f"{PREFIX}/systemsharedmemory"
_RegionName = Annotated[str, Path(description="the name that the client gave the region")]


class IndexBody(BaseModel):
    """The request for the index."""

    ready: bool = Field(False, description="only models that are")


class LoadBody(BaseModel):
    """The request to load or unload a model."""

    parameters: dict[str, Any] = {}


class StatisticsAnswer(Answer):
    """The statistics of this ingress replica since it started. Durations are cumulative, in nanoseconds."""

    model_stats: list[ModelStatistics]


def create_repository_router(repository: Repository, statistics: Statistics) -> APIRouter:
    """Return the routes that list, load and unload models, and tell their statistics."""
    router = create_protocol_router()
    _add_repository_routes(router, repository)
    _add_statistics_routes(router, repository, statistics)
    return router


def _add_repository_routes(router: APIRouter, repository: Repository) -> None:
    @router.post(
        f"{PREFIX}/repository/index",
        response_model=list[ModelIndex],
        responses=documented(400, 503),
        openapi_extra=request_body(IndexBody, required=False),
    )
    async def index(request: Request) -> Response:
        """Every model and pipeline with its state."""
        body = await _object(request)
        ready = body.get("ready", False)
        if not isinstance(ready, bool):
            raise InvalidRequest(f"ready: expected true or false, got {ready!r}", "ready")
        return json_response(await repository.index(ready=ready))

    @router.post(
        f"{PREFIX}/repository/models/{{model}}/load",
        response_class=Response,  # empty, as Triton's
        responses=documented(400, 404, 503),
        openapi_extra=request_body(LoadBody, required=False),
    )
    async def load(request: Request, model: ModelName) -> Response:
        """Bring the model to the replicas that run it; answers when it is usable."""
        await repository.load(model, _parameters(await _object(request)))
        return Response()

    @router.post(
        f"{PREFIX}/repository/models/{{model}}/unload",
        response_class=Response,
        responses=documented(400, 404, 409, 503),
        openapi_extra=request_body(LoadBody, required=False),
    )
    async def unload(request: Request, model: ModelName) -> Response:
        """Take the model out of memory; the next request for it, or `load`, brings it back."""
        await repository.unload(model, _parameters(await _object(request)))
        return Response()


def _add_statistics_routes(router: APIRouter, repository: Repository, statistics: Statistics) -> None:
    async def stats(_: Request, model: str, version: str) -> Response:
        """Return the statistics of a model: counts and cumulative durations of this ingress replica."""
        found = await statistics_of(repository, statistics, model, version)
        return json_response(StatisticsAnswer(model_stats=found))

    @router.get(f"{PREFIX}/models/stats", response_model=StatisticsAnswer, responses=documented(503))
    async def all_stats(request: Request) -> Response:
        """Return the statistics of every model and pipeline."""
        return await stats(request, "", "")

    errors = documented(400, 404, 503)
    add_model_route(router, "GET", "/stats", stats, response_model=StatisticsAnswer, responses=errors)


async def _object(request: Request) -> dict[str, Any]:
    """Return the body as a JSON object; clients send none at all where nothing is to be said."""
    text = await request.body()
    try:
        body = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body is a JSON {type(body).__name__}, expected an object")
    return body


def _parameters(body: dict[str, Any]) -> Parameters:
    parameters = body.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidRequest("parameters: expected an object", "parameters")
    return parameters


class RegisterBody(BaseModel, strict=True):
    """A region: `byte_size` bytes from `offset` on of the file `key` in /dev/shm, which is the client's own."""

    key: str
    offset: int = Field(0, ge=0)
    byte_size: int = Field(ge=1)


class RegionAnswer(TypedDict):
    """A registered region."""

    name: str
    key: str
    offset: int
    byte_size: int


async def owner_of(request: Request) -> Owner:
    """Return the user and the tenant who ask. Raises NotAllowed for a client that is not on this machine."""
    peer = (request.client.host, request.client.port) if request.client else None
    uid = await asyncio.to_thread(uid_of_client, peer, request.headers.get(CLIENT))
    return Owner(uid, current_tenant.get())


def create_shared_memory_router(memory: SharedMemory) -> APIRouter:
    """Return the routes."""
    router = create_protocol_router()
    if not memory.is_on:
        for path in (_PATH, f"{_PATH}/{{rest:path}}"):
            router.add_api_route(path, _switched_off, methods=["GET", "POST"], include_in_schema=False)
        return router
    errors = documented(400, 403, 503)

    @router.get(f"{_PATH}/status", response_model=list[RegionAnswer], responses=errors)
    async def list_all(request: Request) -> Response:
        """The regions of the caller."""
        return json_response([one._asdict() for one in memory.list_regions(await owner_of(request))])

    @router.get(f"{_PATH}/region/{{region}}/status", response_model=list[RegionAnswer], responses=errors)
    async def list_one(request: Request, region: _RegionName) -> Response:
        """One region of the caller."""
        return json_response([one._asdict() for one in memory.list_regions(await owner_of(request), region)])

    @router.post(
        f"{_PATH}/region/{{region}}/register",
        response_class=Response,  # empty, as Triton's
        responses=errors,
        openapi_extra=request_body(RegisterBody),
    )
    async def register(request: Request, region: _RegionName) -> Response:
        """Register a region of a file that the user who runs the client has."""
        owner, body = await owner_of(request), read_json(RegisterBody, await request.body())
        await memory.register(owner, RegionStatus(region, body.key, body.offset, body.byte_size))
        return Response()

    @router.post(f"{_PATH}/region/{{region}}/unregister", response_class=Response, responses=errors)
    async def unregister(request: Request, region: _RegionName) -> Response:
        """Forget a region of the caller."""
        await memory.unregister(await owner_of(request), region)
        return Response()

    @router.post(f"{_PATH}/unregister", response_class=Response, responses=errors)
    async def unregister_all(request: Request) -> Response:
        """Forget all regions of the caller."""
        await memory.unregister(await owner_of(request))
        return Response()

    return router


async def _switched_off() -> Response:
    return json_response(ProtocolError(error="shared memory is not supported by this server"), 501)
