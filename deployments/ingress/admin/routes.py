"""Routes of operators and probes: health and metrics; register, replace, remove, prefetch and pin models; batch policy.

`GET /admin/cluster` shows what is resident where.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query
from fastapi.responses import PlainTextResponse
from pydantic import Discriminator, Tag
from starlette.responses import Response

from cluster.placement.link import QueuesAway
from cluster.telemetry import node_exporters
from configs.batching import BatchingConfig
from configs.model import AdapterConfig, ModelConfig
from deployments.ingress.admin.admission import add_admission_routes, admission_metrics
from deployments.ingress.admin.answers import (
    BatchingAnswer,
    ClusterAnswer,
    HealthAnswer,
    ImportAnswer,
    ImportsAnswer,
    PinAnswer,
    PrefetchAnswer,
    RetunedAnswer,
    Tier,
    UnregisteredAnswer,
)
from deployments.ingress.admin.metrics import NodeMetrics, ResidencyMetrics
from deployments.ingress.admin.operations import MAX_MODELS, MAX_NODES, Operations, Page
from deployments.ingress.bodies import JsonRoute
from deployments.ingress.catalog import Health
from deployments.ingress.errors import documented
from deployments.ingress.openai.models import ModelAnswer
from deployments.ingress.responses import json_response
from deployments.ingress.service import PROBE_TIMEOUT_S, Service
from deployments.records import RequestModel


class PrefetchBody(RequestModel):
    """The tier: `host` is the memory of every node, `device` every worker as well."""

    tier: Tier = "host"


def _sort_of(body: Any) -> str:
    """Tell adapters from models: only an adapter has a base, and it must have one."""
    return "adapter" if isinstance(body, AdapterConfig) or (isinstance(body, dict) and "base" in body) else "model"


_EntryBody = Annotated[
    Annotated[ModelConfig, Tag("model")] | Annotated[AdapterConfig, Tag("adapter")], Discriminator(_sort_of)
]
_Wait = Annotated[bool, Query(description="answer when the model is ready, or is known to be unusable")]
_Purge = Annotated[bool, Query(description="take it out of the store, too; its bytes go with the next gc")]
_Offset = Annotated[int, Query(ge=0, le=2**31)]
_RESTARTING = "the directory of models is restarting; try again"


def _status_of(health: Health) -> Literal["starting", "loading", "ok", "degraded"]:
    if health.is_starting:
        return "loading" if health.num_ready else "starting"
    return "ok" if health.num_ready == health.num_models else "degraded"


def create_admin_router(service: Service) -> APIRouter:
    """Return the routes of operators and probes."""
    router = APIRouter(tags=["operations"], route_class=JsonRoute)
    _add_probe_routes(router, service)
    _add_cluster_route(router, service.operations)
    _add_model_routes(router, service.operations)
    _add_residency_routes(router, service.operations)
    _add_batching_routes(router, service.operations)
    add_admission_routes(router, service.queues, service.operations.retune_admission)
    return router


def _add_probe_routes(router: APIRouter, service: Service) -> None:
    @router.get("/healthz", response_model=HealthAnswer, responses={503: {"model": HealthAnswer}})
    async def healthz() -> Response:
        """Answer 200 from the first model on that can be asked, 503 as long as there is none."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                health = await service.health()
        except TimeoutError:
            return json_response(HealthAnswer(status="starting", models_ready=0, models=0), 503)
        answer = HealthAnswer(
            status=_status_of(health),
            models_ready=health.num_ready,
            models=health.num_models,
        )
        return json_response(answer, 200 if health.num_ready else 503)

    nodes = NodeMetrics(node_exporters)
    residency = ResidencyMetrics(partial(_without_models, service.operations))

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus text of the admission queue, of what is where, and of every node, as Ray exports it.

        `atelier_node_metrics_up` is 0 for a node whose exporter did not answer, and whose part is missing.
        """
        pages = await asyncio.gather(_queue_page(service), residency.page(), nodes.page())
        return PlainTextResponse("".join(pages), media_type="text/plain; version=0.0.4")


async def _queue_page(service: Service) -> str:
    try:
        return admission_metrics(await service.queues.snapshot())
    except QueuesAway:
        return ""


async def _without_models(operations: Operations) -> dict[str, Any]:
    cluster = await operations.describe_cluster(Page(max_models=0))
    return cluster.model_dump(mode="json", exclude_unset=True)


def _add_cluster_route(router: APIRouter, operations: Operations) -> None:
    @router.get("/admin/cluster", response_model=ClusterAnswer, responses=documented(400))
    async def cluster(
        model_offset: _Offset = 0,
        max_models: Annotated[int, Query(ge=0, le=MAX_MODELS)] = MAX_MODELS,
        node_offset: _Offset = 0,
        max_nodes: Annotated[int, Query(ge=0, le=MAX_NODES)] = MAX_NODES,
    ) -> Response:
        """Show what is resident where, and who holds it; what does not answer is shown as `unreachable`.

        A page of `num_models` models, in the order in which they came, and of `num_nodes` nodes, by id.
        """
        answer = await operations.describe_cluster(Page(model_offset, max_models, node_offset, max_nodes))
        return json_response(answer)


def _add_model_routes(router: APIRouter, operations: Operations) -> None:
    @router.post(
        "/admin/models",
        status_code=201,
        response_model=ModelAnswer,
        responses={
            200: {"model": ModelAnswer, "description": "the model was there: this version of it is served now"},
            202: {"model": ModelAnswer, "description": "not waited for: the model's `state` tells how it goes on"},
            **documented(
                400,
                _409="the id belongs to another sort of model",
                _422="the checkpoint cannot be used; a version before goes on serving",
                _503=_RESTARTING,
            ),
        },
    )
    async def register(entry: Annotated[_EntryBody, Body()], wait: _Wait = True) -> Response:
        """Register a model or adapter, or another version of one. Fields as in a cluster config.

        `path` is absolute, on a disk that the cluster's head sees and inside of the config's `model_roots`, or an
        s3:// or hf:// URL. Requests go on with the version before until the new one is in the store.
        """
        registered = await operations.register_model(entry, wait=wait)
        status = (201 if registered.is_new else 200) if wait else 202
        return json_response(ModelAnswer.of(registered.card), status)

    @router.get("/admin/imports", response_model=ImportsAnswer, responses=documented(_503=_RESTARTING))
    async def imports() -> Response:
        """Show how far the models are that enter the store."""
        running = [ImportAnswer(**asdict(one)) for one in await operations.imports()]
        return json_response(ImportsAnswer(imports=running))

    @router.delete(
        "/admin/models/{model}",
        response_model=UnregisteredAnswer,
        responses=documented(400, 404, _409="a model of the cluster config", _503=_RESTARTING),
    )
    async def unregister(model: str, purge: _Purge = False) -> Response:
        """Remove a model; running requests finish. `orphans` are adapters that have lost a base."""
        orphans = await operations.unregister_model(model, purge=purge)
        return json_response(UnregisteredAnswer(id=model, deleted=True, orphans=orphans))


def _add_residency_routes(router: APIRouter, operations: Operations) -> None:
    @router.post("/admin/models/{model}/prefetch", response_model=PrefetchAnswer, responses=documented(400, 404, 503))
    async def prefetch(model: str, body: PrefetchBody | None = None) -> Response:
        """Bring the model nearer, into room that nothing leased or pinned needs; says by node what went wrong."""
        return json_response(await operations.prefetch_model(model, (body or PrefetchBody()).tier))

    @router.post("/admin/models/{model}/pin", response_model=PinAnswer, responses=documented(404, 503))
    async def pin(model: str) -> Response:
        """Keep the model where it is resident."""
        return json_response(await operations.pin_model(model, pinned=True))

    @router.delete("/admin/models/{model}/pin", response_model=PinAnswer, responses=documented(404, 503))
    async def unpin(model: str) -> Response:
        """Let the model be evicted again."""
        return json_response(await operations.pin_model(model, pinned=False))


def _add_batching_routes(router: APIRouter, operations: Operations) -> None:
    @router.get("/admin/text-encoders/batching", response_model=BatchingAnswer)
    async def batching() -> Response:
        """Show the batch policy of the text encoders, and figures by replica."""
        return json_response(await operations.describe_batching())

    @router.put(
        "/admin/text-encoders/batching", response_model=RetunedAnswer, responses=documented(400, _503=_RESTARTING)
    )
    async def retune(body: BatchingConfig) -> Response:
        """Set the batch policy of the text encoders, also for waiting requests; says by replica what went wrong.

        Fields as in a cluster config (`text_encoder.batching`); what is left out has its default. Replicas that start
        later begin with it, until the cluster or its registry ends: write it into the config to keep it.
        """
        return json_response(await operations.retune(body))
