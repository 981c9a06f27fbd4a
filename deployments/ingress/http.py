"""The ingress: its deployment, and its HTTP application over a Service. The gRPC server starts and stops with it.

Light on purpose: no torch, so that this replica starts fast and stays small.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import ray
from fastapi import APIRouter, FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from cluster.admission.dispatcher import Dispatcher
from cluster.admission.fair_slots import FairSlots, ReadLimiter
from cluster.door.deadlines import ShowDeadline
from cluster.door.places import HTTP_ADDRESS
from cluster.placement.serving.actor import connect_controller
from cluster.placement.serving.link import Link, SlotLink, link_queue
from cluster.process.logs import configure_logs
from cluster.process.ray_calls import NamedActor
from cluster.process.telemetry import EdgeMetrics
from cluster.process.tracing import begin_tracing
from cluster.ray_seam.handles import watch_replicas
from cluster.ray_seam.loopback import replica_calls_on_loopback
from cluster.ray_seam.request_ids import RequestIds
from cluster.ray_seam.serve_control import proxy_host
from cluster.registry.actor import connect_registry
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig
from configs.errors import ConfigError
from deployments.ingress.access.callers import Callers
from deployments.ingress.admin.live import ClusterView, create_live_router
from deployments.ingress.admin.routes import ControllerCalls, create_admin_router, create_controller_router
from deployments.ingress.admin.uploads import create_uploads_router
from deployments.ingress.comfy.files import WorkflowFiles
from deployments.ingress.comfy.prompts import Prompts
from deployments.ingress.comfy.registered import (
    MAX_RUNNING,
    MAX_WAITING,
    RegisteredWorkflows,
    create_workflows_router,
)
from deployments.ingress.comfy.routes import ComfyParts, create_comfy_files_router, create_comfy_router, features_of
from deployments.ingress.comfy.socket_route import create_socket_router
from deployments.ingress.comfy.sockets import Sockets
from deployments.ingress.comfy.watching import Watches
from deployments.ingress.compat.a1111 import create_a1111_router
from deployments.ingress.compat.anthropic import create_messages_router
from deployments.ingress.compat.ollama import RUNNING, create_ollama_router
from deployments.ingress.compat.vllm import create_vllm_router
from deployments.ingress.error_forms import install_error_handlers
from deployments.ingress.gate import (
    BodyGate,
    HeadRequests,
    HttpAccess,
    ReadGate,
    describe_keys,
    put_gate_before_serve,
)
from deployments.ingress.jobs.desk import JobDesk
from deployments.ingress.jobs.routes import create_jobs_router
from deployments.ingress.jobs.runner import JobRunner
from deployments.ingress.kserve.grpc.server import start_grpc_server
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.repository import Repository, Statistics
from deployments.ingress.kserve.rest.routes import (
    create_inference_router,
    create_repository_router,
    create_server_router,
    create_shared_memory_router,
)
from deployments.ingress.kserve.shared_memory import SharedMemory
from deployments.ingress.messages.terms import ENCODER, WORKER
from deployments.ingress.openai.batches import create_batches_router
from deployments.ingress.openai.chat_images import ChatImages, ImageFetcher, image_hosts
from deployments.ingress.openai.embeddings import create_embeddings_router, create_scores_router
from deployments.ingress.openai.files import create_files_router
from deployments.ingress.openai.image_decoders import ImageReaders
from deployments.ingress.openai.image_files import ImageLinks, create_links_router
from deployments.ingress.openai.image_stream import ResumableStreams, create_streams_router
from deployments.ingress.openai.images import create_images_router
from deployments.ingress.openai.kept import StoredResponses
from deployments.ingress.openai.models import create_models_router
from deployments.ingress.openai.pipeline_runs import create_pipelines_router
from deployments.ingress.openai.text import create_text_router
from deployments.ingress.openai.text_responses import create_responses_router
from deployments.ingress.openai.videos import create_audio_router, create_videos_router
from deployments.ingress.paths import OtherPaths, other_paths
from deployments.ingress.service.service import Service
from deployments.ingress.web_pages import create_docs_router, create_web_router
from deployments.pipelines.items import request_of
from deployments.pipelines.records import PipelineRequest, PipelineResult
from deployments.records import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    EmbeddingResult,
    ImageProgress,
    ImageRequest,
    ImageResult,
    ScoringRequest,
    TextChunk,
    TextResult,
    as_record,
)
from deployments.records.tasks import shared_task
from deployments.replicas.replica_calls import ReplicaStates, WhyNone
from weights.platform.syntax_trees import parse_in_turn

__all__ = ["Ingress", "create_http_app"]

_DESCRIPTION = """Images, text and embeddings from one cluster, in the OpenAI protocol (`/v1`) and in the Open Inference
Protocol of KServe and Triton (`/v2`). Every answer says how long each phase took: in the `Server-Timing` header, and
under `/v1` in the field `timings_ms`."""


def create_http_app(
    service: Service,
    config: ClusterConfig,
    http_host: str | None = None,
    on_start: Callable[[], None] = lambda: None,
    callers: Callers | None = None,
    limiter: ReadLimiter | None = None,
) -> FastAPI:
    """Return the application. It needs no Ray: tests give it a Service over fakes.

    `http_host` is the address that Serve listens on, where that is not the config's. `on_start` is called on the event
    loop of its requests, before the first one. A gate before this one has `callers` and `limiter`, too.
    """
    callers = callers or Callers(config.access, config.ingress.num_replicas)
    statistics, repository, desk = Statistics(), Repository(service), JobDesk(service, config.jobs)
    inference = Inference(service, config.ingress.limits, statistics, SharedMemory(config.ingress.shared_memory))
    app = FastAPI(
        title="Atelier",
        version="1",
        description=_DESCRIPTION,
        docs_url=None,  # FastAPI's page comes from servers of others
        redoc_url=None,
        lifespan=_lifespan(config, callers, inference, repository, statistics, desk, on_start),
    )
    install_error_handlers(app)
    readers = ImageReaders()
    fetcher = ImageFetcher(image_hosts(config.ingress.image_hosts), config.ingress.limits.max_upload_bytes)
    images = ChatImages(service, readers, config.ingress.limits, fetcher)
    controller = ControllerCalls(_controller_of(config) if config.controller.enabled else None)
    view = ClusterView(service.operations, service.queues, controller)
    workflow_slots = FairSlots(MAX_RUNNING, MAX_WAITING)
    service.workflows = RegisteredWorkflows(service, workflow_slots)
    for router in (
        create_server_router(inference),  # probes ask all the time: they are found first
        *_client_routers(service, config, readers, images, view, desk, workflow_slots),
        create_repository_router(repository, statistics),  # `/v2/models/stats` is no model
        create_inference_router(inference, config.ingress.limits),
        create_shared_memory_router(inference.shared_memory),
        create_docs_router(app.title),
        create_admin_router(service),
        create_uploads_router(desk, config),
        create_workflows_router(service),
        create_controller_router(controller),
    ):
        # Included, each router is matched before its routes, and the first request makes all of them a second time.
        app.router.routes.extend(router.routes)
    if callers.need_keys:
        describe_keys(app)
    limiter = limiter or ReadLimiter(service.queue)
    _add_gates(app, config, limiter, _http_access(callers, config, http_host, app))
    return app


def _add_gates(app: FastAPI, config: ClusterConfig, limiter: ReadLimiter, access: HttpAccess) -> None:
    """Add the layers that a request passes on its way in; the last one comes first."""
    app.add_middleware(BodyGate, limits=config.ingress.limits, max_file_bytes=config.jobs.max_file_bytes)
    app.add_middleware(ReadGate, limiter=limiter, access=access)
    app.add_middleware(ShowDeadline)
    app.add_middleware(HeadRequests)
    if config.access.cors_origins:  # around all else: browsers show a page no refusal without its headers
        app.add_middleware(CORSMiddleware, **_cors_options(config))
    app.add_middleware(OtherPaths, table=other_paths(config.http))
    app.add_middleware(RequestIds)


def _client_routers(
    service: Service,
    config: ClusterConfig,
    readers: ImageReaders,
    images: ChatImages,
    view: ClusterView,
    desk: JobDesk,
    slots: FairSlots,
) -> Iterator[APIRouter]:
    """Yield the routes for people, and for programs that call models. Routes are tried in turn, so what is called most
    often comes first."""
    yield create_text_router(service, images, desk)
    if config.http.web:  # before the clients that look for another answer at /
        yield create_web_router(config.http.route_prefix, RUNNING if config.http.compat.ollama else "")
    yield create_jobs_router(desk)
    yield create_files_router(desk)
    yield create_batches_router(desk)
    yield from _openai_routers(service, config, readers, images, view, desk)
    yield from _compat_routers(service, config, readers, images)
    if config.http.compat.comfyui:
        yield from _comfy_routers(service, config, readers, desk, slots)
    yield create_live_router(view)


def _cors_options(config: ClusterConfig) -> dict[str, Any]:
    return {
        "allow_origins": config.access.cors_origins,
        "allow_methods": ["GET", "POST", "PUT", "DELETE"],
        "allow_headers": ["*"],
        "allow_private_network": True,
        "expose_headers": ["Content-Location", "Retry-After", "Server-Timing", "X-Request-Id"],
    }


def _around_gate(config: ClusterConfig, gate: ASGIApp) -> ASGIApp:
    """Return the gate before Serve with the layers around it: its refusals need the headers of CORS, too."""
    if config.access.cors_origins:
        gate = CORSMiddleware(gate, **_cors_options(config))
    return OtherPaths(gate, other_paths(config.http))


def _http_access(callers: Callers, config: ClusterConfig, http_host: str | None, app: FastAPI) -> HttpAccess:
    host = config.http.host if http_host is None else http_host
    return HttpAccess(callers, config.access, host, app)


def _openai_routers(
    service: Service, config: ClusterConfig, readers: ImageReaders, images: ChatImages, view: ClusterView, desk: JobDesk
) -> Iterator[APIRouter]:
    """Yield the routes under /v1."""
    links = ImageLinks(config.ingress.image_links, config.name)
    streams = ResumableStreams(config.ingress.image_streams, config.ingress.num_replicas)
    yield create_images_router(service, links, streams, readers, config.ingress.limits, desk)
    yield create_streams_router(streams)
    yield create_links_router(links)
    yield create_videos_router(service, desk, readers, config.ingress.limits)
    yield create_audio_router(service, readers, config.ingress.limits)
    yield create_embeddings_router(service)
    yield create_scores_router(service)
    kept = config.ingress.stored_responses
    stored = StoredResponses(kept, config.name) if kept.enabled else None
    yield create_responses_router(service, stored, config.ingress.limits, images, desk)
    yield create_models_router(service, view.nearness)
    yield create_pipelines_router(service, readers, config.ingress.limits, desk)


def _compat_routers(
    service: Service, config: ClusterConfig, readers: ImageReaders, images: ChatImages
) -> Iterator[APIRouter]:
    """Yield the routes for other servers' clients that the config enables."""
    compat = config.http.compat
    if compat.vllm:
        yield create_vllm_router(service, images)
    if compat.anthropic:
        yield create_messages_router(service, images)
    if compat.ollama:
        yield create_ollama_router(service, images)
    if compat.a1111:
        yield create_a1111_router(service, config, readers)


def _comfy_routers(
    service: Service, config: ClusterConfig, readers: ImageReaders, desk: JobDesk, slots: FairSlots
) -> Iterator[APIRouter]:
    """Yield ComfyUI's routes."""
    prompts = Prompts(desk)
    watches = Watches(prompts, Sockets(), is_alone=config.ingress.num_replicas == 1)
    files = WorkflowFiles(config.ingress.workflow_files, config.store.path, config.name)
    parts = ComfyParts(service, config, prompts, watches, files, readers, slots)
    yield create_comfy_router(parts)
    yield create_comfy_files_router(parts)
    yield create_socket_router(watches, features_of(config.ingress.limits))


def _lifespan(
    config: ClusterConfig,
    callers: Callers,
    inference: Inference,
    repository: Repository,
    statistics: Statistics,
    desk: JobDesk,
    on_start: Callable[[], None],
) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    """Return the application's lifespan, which calls `on_start` and runs jobs and the gRPC server."""

    @contextlib.asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        on_start()
        async with JobRunner(app, desk, callers).running(), serving_grpc():
            yield

    @contextlib.asynccontextmanager
    async def serving_grpc() -> AsyncIterator[None]:
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
    """The HTTP edge, and the methods of `serve.get_app_handle(<name of the cluster>)`: those of `Service`."""

    def __init__(self, config: ClusterConfig, encoder: DeploymentHandle, worker: DeploymentHandle) -> None:
        replica_calls_on_loopback()
        configure_logs(config.logging.format)
        parse_in_turn()
        begin_tracing(config.tracing)
        self._http_host = _checked_host(config)
        name = ray.get_runtime_context().get_actor_name()
        snapshot = RegistrySnapshot(NamedActor(partial(connect_registry, config)), replica=name)
        self._config = config
        self._handles = {ENCODER: encoder, WORKER: worker}
        self._queue = Dispatcher(config.admission, num_sharing=config.ingress.num_replicas)
        self._links = self._make_links(uuid.uuid4().hex)
        slot_link = next((link for link in self._links if isinstance(link, SlotLink)), None)
        why_none = {pool: self._why_none(pool) for pool in self._handles}
        self._service = Service(config, snapshot, encoder, worker, why_none, self._queue, slot_link, EdgeMetrics())

    def __serve_build_asgi_app__(self) -> Any:
        limiter = ReadLimiter(self._queue)
        callers = Callers(self._config.access, self._config.ingress.num_replicas)
        app = create_http_app(self._service, self._config, self._http_host, self._watch_replicas, callers, limiter)
        access = _http_access(callers, self._config, self._http_host, app)
        put_gate_before_serve(limiter, access, self._config.http.route_prefix, partial(_around_gate, self._config))
        return app

    async def generate(self, request: ImageRequest | Mapping[str, Any]) -> ImageResult:
        return await self._service.generate(request)

    async def generate_stream(
        self, request: ImageRequest | Mapping[str, Any]
    ) -> AsyncGenerator[ImageProgress | ImageResult]:
        """Yield progress and the result, over a handle: `handle.options(stream=True).generate_stream.remote(...)`."""
        async with self._service.generate_stream(request) as pieces:
            async for piece in pieces:
                yield piece

    async def embed(self, request: EmbeddingRequest | Mapping[str, Any]) -> EmbeddingResult:
        return await self._service.embed(request)

    async def score(self, request: ScoringRequest | Mapping[str, Any]) -> EmbeddingResult:
        return await self._service.score(request)

    async def chat(self, request: ChatRequest | Mapping[str, Any]) -> TextResult:
        return await self._service.chat(request)

    async def complete(self, request: CompletionRequest | Mapping[str, Any]) -> TextResult:
        return await self._service.complete(request)

    async def chat_stream(self, request: ChatRequest | Mapping[str, Any]) -> AsyncGenerator[TextChunk]:
        """Yield the pieces of a chat, over a handle: `handle.options(stream=True).chat_stream.remote(...)`."""
        async with self._service.texts.stream_text(as_record(ChatRequest, request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def run_pipeline(self, request: PipelineRequest | Mapping[str, Any]) -> PipelineResult:
        """Run a pipeline: `{"pipeline": name, "inputs": {...}}` is one item of it, a PipelineRequest any number."""
        return await self._service.run_pipeline(request_of(request, self._service.pipelines.signature))

    async def follow(self, before: ClusterConfig, after: ClusterConfig) -> list[str]:
        """Apply another config as `Operations.follow` does: `atelier apply` calls one ingress for all of them."""
        return await self._service.operations.follow(before, after)

    def _watch_replicas(self) -> None:
        """Follow the replicas from now on: Serve's thread reports them to this event loop."""
        gc.collect()
        gc.freeze()  # libraries and routes stay: collecting over them in the middle of a request takes 0.1 s
        for link in self._links:
            link.start()
        self._restoring = shared_task(self._service.operations.restore_admission())
        loop = asyncio.get_running_loop()
        for pool, handle in self._handles.items():

            def on_replicas(names: Collection[str], pool: str = pool) -> None:
                loop.call_soon_threadsafe(self._queue.set_replicas, pool, names)

            watch_replicas(handle, on_replicas)

    def _make_links(self, name: str) -> list[Link]:
        """Return the links to the controller: for placement, and for the slots of several ingresses."""
        config = self._config
        if not config.has_controller:
            return []
        controller = _controller_of(config)
        links: list[Link] = [link_queue(name, self._queue, controller, config.controller.tick_s)]
        return links if config.ingress.num_replicas == 1 else [*links, SlotLink(name, self._queue, controller)]

    def _why_none(self, pool: str) -> WhyNone:
        """Return a function that explains why no replica can answer, by Serve's controller if the queue knows none."""
        states = ReplicaStates(pool)

        async def why_none_can() -> str | None:
            return None if self._queue.num_replicas(pool) else await states.why_none_can()

        return why_none_can


def _controller_of(config: ClusterConfig) -> NamedActor:
    return NamedActor(partial(connect_controller, config))


def _checked_host(config: ClusterConfig) -> str:
    """Return the address that clients reach: HAProxy's, or that of Serve, which may have got another one than this
    config.

    Raises ConfigError when other machines reach it and no key is needed. `serve run` and `serve deploy` end here.
    """
    door = os.environ.get(HTTP_ADDRESS, "").rpartition(":")[0]
    host = door or proxy_host() or config.http.host
    for key, problem in config.open_hosts(host).items():
        raise ConfigError(f"{key}: {problem}")
    return host
