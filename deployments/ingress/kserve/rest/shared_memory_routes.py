"""Triton's system shared memory extension over REST: regions of the caller are listed, registered and forgotten.

Source: Triton, "Shared Memory Extension". Where it is switched off, its paths answer 501.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from cluster.door.haproxy_rules import CLIENT
from deployments.ingress.access.callers import current_tenant
from deployments.ingress.kserve.loopback_peers import uid_of_client
from deployments.ingress.kserve.rest.messages import read_json
from deployments.ingress.kserve.rest.routing import (
    PREFIX,
    ProtocolError,
    create_protocol_router,
    documented,
    request_body,
)
from deployments.ingress.kserve.shared_memory import Owner, RegionStatus, SharedMemory
from deployments.ingress.responses import json_response

_PATH = f"{PREFIX}/systemsharedmemory"
_RegionName = Annotated[str, Path(description="the name that the client gave the region")]


class RegisterBody(BaseModel):
    """A region: `byte_size` bytes from `offset` on of the file `key` in /dev/shm, which is the client's own."""

    model_config = ConfigDict(strict=True)

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
    _add_list_routes(router, memory)
    _add_region_routes(router, memory)
    return router


def _add_list_routes(router: APIRouter, memory: SharedMemory) -> None:
    errors = documented(400, 403, 503)

    @router.get(f"{_PATH}/status", response_model=list[RegionAnswer], responses=errors)
    async def list_all(request: Request) -> Response:
        """The regions of the caller."""
        found = memory.list_regions(await owner_of(request))
        return json_response([one._asdict() for one in found])

    @router.get(f"{_PATH}/region/{{region}}/status", response_model=list[RegionAnswer], responses=errors)
    async def list_one(request: Request, region: _RegionName) -> Response:
        """One region of the caller."""
        found = memory.list_regions(await owner_of(request), region)
        return json_response([one._asdict() for one in found])


def _add_region_routes(router: APIRouter, memory: SharedMemory) -> None:
    errors = documented(400, 403, 503)

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


async def _switched_off() -> Response:
    return json_response(ProtocolError(error="shared memory is not supported by this server"), 501)
