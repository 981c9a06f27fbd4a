"""Routes of operators and probes: health and metrics; register, replace, remove, prefetch and pin models; batch policy.

`GET /admin/cluster` shows the residency of models. The controller's last decisions come with their reasons, and orders
by hand override it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Annotated, Any, Concatenate, Final, Literal, ParamSpec, TypeVar

from fastapi import APIRouter, Body, Query
from fastapi.responses import PlainTextResponse
from pydantic import Discriminator, Field, Tag
from ray.exceptions import RayActorError, RayTaskError
from starlette.responses import Response
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from cluster.placement.serving.actor import Controller
from cluster.placement.serving.link import QueuesAway
from cluster.process.ray_calls import NamedActor, call_actor
from cluster.process.telemetry import node_exporters
from cluster.records.errors import NotKept, OverrideRefused
from cluster.records.overrides import OverrideChange, Overrides
from configs.batching import BatchingConfig
from configs.model import AdapterConfig, ModelConfig, ModelId
from deployments.ingress.admin.metrics import NodeMetrics, ResidencyMetrics, add_admission_routes, admission_metrics
from deployments.ingress.admin.vllm_metrics import vllm_metrics
from deployments.ingress.messages.bodies import JsonRoute
from deployments.ingress.messages.responses import Answer, call_aside, documented, json_response
from deployments.ingress.service.answers import (
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
from deployments.ingress.service.catalog import Health
from deployments.ingress.service.model_answers import ModelAnswer
from deployments.ingress.service.operations import MAX_MODELS, MAX_NODES, Operations, Page
from deployments.ingress.service.service import PROBE_TIMEOUT_S, Service
from deployments.records import RequestModel
from deployments.records.errors import Conflict, InvalidRequest, ModelUnavailable, NoReplica

MAX_DECISIONS: Final = 500
_CALL_S: Final = 10.0
_AWAY = "the controller is restarting; try again"
_OFF = "the controller is off in the cluster config (`controller.enabled`)"

P = ParamSpec("P")
R = TypeVar("R")
_ORDERED: Final = documented(400, _409=_OFF, _503=_AWAY)


class DecisionStatus(TypedDict):
    """A decision of the controller with its place, reason and outcome. `at_s` is Unix time."""

    at_s: float
    action: str
    worker: str
    model: str
    evict: list[str]
    reason: str
    expected_s: float
    took_s: float | None
    state: str


class WorkerStatus(TypedDict):
    """A worker as the controller sees it. `address` is its node's. Bytes are of its budget."""

    name: str
    node: str
    address: str
    models: list[str]
    running: dict[str, int]
    switching_to: str | None
    resident_bytes: int
    budget_bytes: int
    attach_bytes_per_s: float
    load_bytes_per_s: float
    fixed_switch_s: float


class OverridesAnswer(Answer):
    """The orders by hand. `pins` are models by worker."""

    is_frozen: bool = False
    frozen: list[str] = Field([])
    draining: list[str] = Field([])
    pins: dict[str, list[str]] = Field({})


class BackoffStatus(TypedDict):
    """A model whose load failed, with the reason and the time of the next try."""

    retry_in_s: float
    error: str


class ScalingStatus(TypedDict):
    """The number of workers requested from Serve, the leaving and spare ones, and the reason."""

    target: int
    leaving: list[str]
    spares: list[str]
    reason: str


class DecisionsAnswer(Answer):
    """The last decisions, newest first, and the state for the next one. `planned` has the workers of each model.

    Workers switch to models in `free` without an order, for the given reason.
    `notes` list unmet needs and ignored figures. `age_s` is the age of the newest plan, null before the first one.
    """

    enabled: bool
    policy: str = ""
    age_s: float | None = None
    num_ticks: int = 0
    longest_tick_s: float = 0.0
    overrides: OverridesAnswer = OverridesAnswer()
    decisions: list[DecisionStatus] = Field([])
    notes: list[str] = Field([])
    backoffs: dict[str, BackoffStatus] = Field({})
    workers: list[WorkerStatus] = Field([])
    planned: dict[str, list[str]] = Field({})
    free: dict[str, str] = Field({})
    scaling: ScalingStatus | None = None


class ControllerCalls:
    """Calls of the controller, which is None if it is off."""

    def __init__(self, controller: NamedActor | None) -> None:
        self._controller = controller

    @property
    def is_off(self) -> bool:
        return self._controller is None

    async def call(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a method of the actor.

        Raises Conflict when it is off, NoReplica while it is away, InvalidRequest, ModelUnavailable for a full disk.
        """
        if self._controller is None:
            raise Conflict(_OFF)
        try:
            async with asyncio.timeout(_CALL_S):
                return await call_actor(await self._controller.handle(), method, *args, **kwargs)
        except (RayActorError, TimeoutError) as error:
            self._controller.note_failure(error)
            raise NoReplica(_AWAY) from None
        except (OverrideRefused, RayTaskError) as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if not isinstance(cause, OverrideRefused):
                raise NoReplica(_AWAY) from error
            if isinstance(cause, NotKept):
                raise ModelUnavailable(str(cause)) from None
            field, _, text = str(cause).partition(": ")
            raise InvalidRequest(text or field, field if text else None) from None

    async def decisions(self, max_decisions: int) -> dict[str, Any]:
        """Return the fields of a DecisionsAnswer without `enabled`; none if the controller is off."""
        return {} if self.is_off else await self.call(Controller.describe, max_decisions)

    async def change(self, change: OverrideChange) -> Response:
        """Change the orders by hand and answer with all of them."""
        return json_response(_overrides(await self.call(Controller.change, change)))


def create_controller_router(controller: ControllerCalls) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["operations"])

    @router.get("/admin/decisions", response_model=DecisionsAnswer, responses=documented(400, _503=_AWAY))
    async def decisions(max_decisions: Annotated[int, Query(ge=0, le=MAX_DECISIONS)] = 50) -> Response:
        """Show the last orders with their reasons, and the models that are planned, frozen, pinned and backed off.

        Workers have the names of their replicas, which change when a replica is replaced.
        """
        found = await controller.decisions(max_decisions)
        return json_response(DecisionsAnswer(enabled=not controller.is_off, **found))

    @router.post("/admin/freeze", response_model=OverridesAnswer, responses=_ORDERED)
    async def freeze() -> Response:
        """Stop ordering switches. Models that no worker has ready are refused until `thaw`."""
        return await controller.change(OverrideChange("freeze", is_on=True))

    @router.delete("/admin/freeze", response_model=OverridesAnswer, responses=_ORDERED)
    async def thaw() -> Response:
        """Order switches again."""
        return await controller.change(OverrideChange("freeze", is_on=False))

    _add_worker_routes(router, controller)
    return router


def _add_worker_routes(router: APIRouter, controller: ControllerCalls) -> None:
    @router.post("/admin/workers/{worker}/freeze", response_model=OverridesAnswer, responses=_ORDERED)
    async def freeze_worker(worker: str) -> Response:
        """Let a worker keep the models that it has. Its name may be shortened."""
        return await controller.change(OverrideChange("freeze", is_on=True, worker=worker))

    @router.delete("/admin/workers/{worker}/freeze", response_model=OverridesAnswer, responses=_ORDERED)
    async def thaw_worker(worker: str) -> Response:
        """Let a worker switch again."""
        return await controller.change(OverrideChange("freeze", is_on=False, worker=worker))

    @router.post("/admin/workers/{worker}/drain", response_model=OverridesAnswer, responses=_ORDERED)
    async def drain_worker(worker: str) -> Response:
        """Let a worker finish its running requests and start none that another worker can take: it hands over first.

        It has nothing left once `running` in `/admin/decisions` is empty.
        """
        return await controller.change(OverrideChange("drain", is_on=True, worker=worker))

    @router.delete("/admin/workers/{worker}/drain", response_model=OverridesAnswer, responses=_ORDERED)
    async def undrain_worker(worker: str) -> Response:
        """Give a draining worker work again."""
        return await controller.change(OverrideChange("drain", is_on=False, worker=worker))

    @router.post("/admin/workers/{worker}/models/{model}/pin", response_model=OverridesAnswer, responses=_ORDERED)
    async def pin_to_worker(worker: str, model: ModelId) -> Response:
        """Bring a model to a worker as soon as its running requests allow it, and keep it there."""
        return await controller.change(OverrideChange("pin", is_on=True, worker=worker, model=model))

    @router.delete("/admin/workers/{worker}/models/{model}/pin", response_model=OverridesAnswer, responses=_ORDERED)
    async def unpin_from_worker(worker: str, model: ModelId) -> Response:
        """Let the worker switch away from the model again."""
        return await controller.change(OverrideChange("pin", is_on=False, worker=worker, model=model))


def _overrides(overrides: Overrides) -> OverridesAnswer:
    return OverridesAnswer(**overrides.model_dump(mode="json"))


class PrefetchBody(RequestModel):
    """The tier: `host` means the memory of every node, `device` every worker as well."""

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
        """Answer 200 once a model can be used, 503 before."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                health = await service.listing.health()
        except TimeoutError:
            return json_response(HealthAnswer(status="starting", models_ready=0, models=0), 503)
        answer = HealthAnswer(
            status=_status_of(health),
            models_ready=health.num_ready,
            models=health.num_models,
        )
        return json_response(answer, 200 if health.num_ready else 503)

    nodes = NodeMetrics(node_exporters)
    residency = ResidencyMetrics(service.operations)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus text of the admission queue, of residency, and of every node, as Ray exports it.

        `atelier_node_metrics_up` is 0 for a node whose exporter did not answer: its part is missing. `vllm:*`
        repeats some figures under vLLM's names.
        """
        page = "".join(await asyncio.gather(_queue_page(service), residency.page(), nodes.page()))
        page += await call_aside(len(page), vllm_metrics, page)
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")


async def _queue_page(service: Service) -> str:
    try:
        return admission_metrics(await service.queues.snapshot())
    except QueuesAway:
        return ""


def _add_cluster_route(router: APIRouter, operations: Operations) -> None:
    @router.get("/admin/cluster", response_model=ClusterAnswer, responses=documented(400))
    async def cluster(
        model_offset: _Offset = 0,
        max_models: Annotated[int, Query(ge=0, le=MAX_MODELS)] = MAX_MODELS,
        node_offset: _Offset = 0,
        max_nodes: Annotated[int, Query(ge=0, le=MAX_NODES)] = MAX_NODES,
    ) -> Response:
        """Show the resident components of each place and their holders. A place that does not answer is `unreachable`.

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
        s3:// or hf:// URL. Requests go on with the old version until the new one is in the store.
        """
        registered = await operations.register_model(entry, wait=wait)
        status = (201 if registered.is_new else 200) if wait else 202
        return json_response(ModelAnswer.of(registered.card), status)

    @router.get("/admin/imports", response_model=ImportsAnswer, responses=documented(_503=_RESTARTING))
    async def imports() -> Response:
        """Show the progress of imports into the store."""
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
        """Bring the model nearer, into room that nothing leased or pinned needs; return problems by node."""
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
        """Set the batch policy of the text encoders, also for waiting requests; return problems by replica.

        Fields as in a cluster config (`text_encoder.batching`); omitted ones have their defaults. Replicas that start
        later begin with it, until the cluster or its registry ends: write it into the config to keep it.
        """
        return json_response(await operations.retune(body))
