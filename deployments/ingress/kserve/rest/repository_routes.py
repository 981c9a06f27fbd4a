"""Triton's model repository and statistics extensions over REST.

Sources: Triton, "Model Repository Extension" and "Statistics Extension". This router goes before that of `routes.py`,
in whose paths `stats` would be a model's name.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import InvalidRequest
from deployments.ingress.kserve.records import Parameters
from deployments.ingress.kserve.repository import ModelIndex, Repository
from deployments.ingress.kserve.rest.routing import (
    PREFIX,
    ModelName,
    add_model_route,
    create_protocol_router,
    documented,
    request_body,
)
from deployments.ingress.kserve.statistics import ModelStatistics, Statistics, statistics_of
from deployments.ingress.responses import Answer, json_response


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
