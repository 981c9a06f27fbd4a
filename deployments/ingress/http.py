"""The ingress: its deployment, and its HTTP application over a Service. The gRPC server starts and stops with it.

Light on purpose: no torch, so that this replica starts fast and stays small.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from starlette.middleware.cors import CORSMiddleware

from cluster.control.dispatcher import Dispatcher
from cluster.control.lanes import Ask
from cluster.control.shared_queue import connect_shared_queue
from cluster.control.shared_queue_client import SharedQueueClient
from cluster.controller.actor import connect_controller
from cluster.controller.link import link_queue
from cluster.door.door_plan import HTTP_ADDRESS
from cluster.loopback import replica_calls_on_loopback
from cluster.registry.actor import connect_registry
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig
from configs.errors import ConfigError
from deployments.errors import ServiceError
from deployments.ingress import errors
from deployments.ingress.access.callers import Callers
from deployments.ingress.access.http import HttpAccess, describe_keys
from deployments.ingress.admin.controller import create_controller_router
from deployments.ingress.admin.routes import create_admin_router
from deployments.ingress.admitted import RequestQueue, refusal_error
from deployments.ingress.asking import ENCODER, WORKER
from deployments.ingress.gate import Gate, put_gate_before_serve
from deployments.ingress.known_forms import KnownForms
from deployments.ingress.kserve.grpc.server import start_grpc_server
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.repository import Repository
from deployments.ingress.kserve.rest import routing
from deployments.ingress.kserve.rest.repository_routes import create_repository_router
from deployments.ingress.kserve.rest.routes import create_inference_router
from deployments.ingress.kserve.statistics import Statistics
from deployments.ingress.openai.embeddings import create_embeddings_router
from deployments.ingress.openai.image_links import ImageLinks, create_links_router
from deployments.ingress.openai.images import create_images_router
from deployments.ingress.openai.models import create_models_router
from deployments.ingress.openai.resumable_streams import ResumableStreams, create_streams_router
from deployments.ingress.openai.text import create_text_router
from deployments.ingress.openai.text_responses import create_responses_router
from deployments.ingress.service import Service
from deployments.ingress.turns import Turns
from deployments.records import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    EmbeddingResult,
    ImageProgress,
    ImageRequest,
    ImageResult,
    TextChunk,
    TextResult,
)
from deployments.services.replica_calls import ReplicaStates, WhyNone
from deployments.services.replica_watch import watch_replicas
from deployments.tasks import shared_task

__all__ = ["Ingress", "create_http_app"]

_DESCRIPTION = """Images, text and embeddings from one cluster, in the OpenAI protocol (`/v1`) and in the Open Inference
Protocol of KServe and Triton (`/v2`). Every answer says how long each phase took: in the `Server-Timing` header, and
under `/v1` in the field `timings_ms`."""


def create_http_app(
    service: Service,
    config: ClusterConfig,
    http_host: str | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> FastAPI:
    """Return the application. It needs no Ray: a test gives it a Service over fakes.

    `http_host` is the address that Serve listens on, where that is not the config's. `on_start` is called on the event
    loop of its requests, before the first one.
    """
    callers = Callers(config.access, config.ingress.num_replicas)
    statistics, repository = Statistics(), Repository(service)
    inference = Inference(service, config.ingress.limits, statistics)
    app = FastAPI(
        title="Atelier",
        version="1",
        description=_DESCRIPTION,
        docs_url="/docs",
        redoc_url=None,
        lifespan=_lifespan(config, callers, inference, repository, statistics, on_start),
    )
    errors.install_error_handlers(app)
    routing.install_error_handlers(app)
    for router in _openai_routers(service, config):
        app.include_router(router)
    app.include_router(create_repository_router(repository, statistics))  # `/v2/models/stats` is no model
    app.include_router(create_inference_router(inference, config.ingress.limits))
    app.include_router(create_admin_router(service))
    connect = partial(connect_controller, config) if config.controller.enabled else None
    app.include_router(create_controller_router(connect))
    if callers.need_keys:
        describe_keys(app)
    access = HttpAccess(callers, config.access, config.http.host if http_host is None else http_host)
    turns = Turns(lambda: service.queue.config.max_waiting)
    app.add_middleware(Gate, turns=turns, access=access, limits=config.ingress.limits)
    if config.access.cors_origins:  # around all else: browsers show a page no refusal without its headers
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.access.cors_origins,
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=["Content-Location", "Retry-After", "Server-Timing"],
        )
    return app


def _openai_routers(service: Service, config: ClusterConfig) -> Iterator[APIRouter]:
    """Yield the routes under /v1."""
    links = ImageLinks(config.ingress.image_links, config.name)
    streams = ResumableStreams(config.ingress.image_streams, config.ingress.num_replicas)
    yield create_images_router(service, links, streams, config.ingress.limits)
    yield create_streams_router(streams)
    yield create_links_router(links)
    yield create_embeddings_router(service)
    yield create_text_router(service)
    yield create_responses_router(service)
    yield create_models_router(service)


def _lifespan(
    config: ClusterConfig,
    callers: Callers,
    inference: Inference,
    repository: Repository,
    statistics: Statistics,
    on_start: Callable[[], None],
) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    """Return what calls `on_start`, and runs the gRPC server beside the application."""

    @contextlib.asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        on_start()
        if config.grpc is None:
            yield
            return
        server = await start_grpc_server(
            inference,
            repository,
            statistics,
            host=config.grpc.host,
            port=config.grpc.port,
            max_message_bytes=config.ingress.limits.max_body_bytes,
            callers=callers,
        )
        try:
            yield
        finally:
            await server.stop()

    return running


@serve.ingress()
class Ingress:
    """The HTTP edge, and the methods of `serve.get_app_handle("atelier")`: those of `Service`."""

    def __init__(self, config: ClusterConfig, encoder: DeploymentHandle, worker: DeploymentHandle) -> None:
        replica_calls_on_loopback()
        self._http_host = _checked_host(config)
        snapshot = RegistrySnapshot(lambda: connect_registry(config))
        self._config = config
        self._handles = {ENCODER: encoder, WORKER: worker}
        self._queue: RequestQueue = Dispatcher(config.admission)
        if config.ingress.num_replicas > 1:
            self._queue = SharedQueueClient(lambda: connect_shared_queue(config), config.admission)
        self._service = Service(config, snapshot, encoder, worker, self._why_none, self._queue)

    def __serve_build_asgi_app__(self) -> Any:
        from ray.serve._private import replica

        # Serve too obeys x-request-timeout-seconds: it would cut the request off in plain text, a moment before the
        # ingress says what was not done in time.
        replica.parse_request_timeout_header = lambda _, default_timeout_s: default_timeout_s
        has_cors = bool(self._config.access.cors_origins)
        # A shared queue is another process: to ask it would take as long as to read the request.
        forms = KnownForms(partial(_why_refused, self._queue)) if isinstance(self._queue, Dispatcher) else None
        turns = Turns(lambda: self._queue.config.max_waiting, forms)
        put_gate_before_serve(turns, refuses=not has_cors)
        return create_http_app(self._service, self._config, self._http_host, self._watch_replicas)

    async def generate(self, request: ImageRequest | Mapping[str, Any]) -> ImageResult:
        return await self._service.generate(request)

    async def generate_stream(
        self, request: ImageRequest | Mapping[str, Any]
    ) -> AsyncGenerator[ImageProgress | ImageResult]:
        """Yield progress and the result, over a handle: `handle.options(stream=True).generate_stream.remote(...)`."""
        async with aclosing(self._service.generate_stream(request)) as pieces:
            async for piece in pieces:
                yield piece

    async def embed(self, request: EmbeddingRequest | Mapping[str, Any]) -> EmbeddingResult:
        return await self._service.embed(request)

    async def chat(self, request: ChatRequest | Mapping[str, Any]) -> TextResult:
        return await self._service.chat(request)

    async def complete(self, request: CompletionRequest | Mapping[str, Any]) -> TextResult:
        return await self._service.complete(request)

    async def chat_stream(self, request: ChatRequest | Mapping[str, Any]) -> AsyncGenerator[TextChunk]:
        """Yield the pieces of a chat, over a handle: `handle.options(stream=True).chat_stream.remote(...)`."""
        async with aclosing(self._service.chat_stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _watch_replicas(self) -> None:
        """Follow the replicas from now on: Serve's thread tells, and this event loop listens."""
        if isinstance(self._queue, SharedQueueClient):
            self._queue.start()
        else:
            if self._config.controller.enabled:
                connect = partial(connect_controller, self._config)
                self._link = link_queue(uuid.uuid4().hex, self._queue, connect, self._config.controller.tick_s)
                self._link.start()
            self._restoring = shared_task(self._service.operations.restore_admission())
        loop = asyncio.get_running_loop()
        for pool, handle in self._handles.items():

            def on_replicas(names: Collection[str], pool: str = pool) -> None:
                loop.call_soon_threadsafe(self._queue.set_replicas, pool, names)

            watch_replicas(handle, on_replicas)

    def _why_none(self, pool: str) -> WhyNone:
        """Return what tells why no replica can answer. Serve's controller is asked when the queue knows none."""
        states = ReplicaStates(pool)

        async def why_none_can() -> str | None:
            return None if self._queue.num_replicas(pool) else await states.why_none_can()

        return why_none_can


def _why_refused(queue: Dispatcher, ask: Ask) -> ServiceError | None:
    """Return why the queue refuses what a request asks for."""
    refusal = queue.refuse_unread(ask)
    return refusal_error(refusal, ask) if refusal else None


def _checked_host(config: ClusterConfig) -> str:
    """Return the address that clients reach: HAProxy's, or that of Serve, which may have been told another than this
    config.

    Raises ConfigError when other machines reach it and nobody needs a key. `serve run` and `serve deploy` end here.
    """
    door = os.environ.get(HTTP_ADDRESS, "").rpartition(":")[0]
    host = door or str(_get_global_client().http_config.host or config.http.host)
    for key, problem in config.open_hosts(host).items():
        raise ConfigError(f"{key}: {problem}")
    return host
