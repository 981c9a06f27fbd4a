"""The HTTP application: routes, limits and errors over a Service. The gRPC server starts and stops with it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from configs.cluster import ClusterConfig
from deployments.ingress import errors
from deployments.ingress.admin.routes import create_admin_router
from deployments.ingress.kserve.grpc.server import start_grpc_server
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.repository import Repository
from deployments.ingress.kserve.rest import routing
from deployments.ingress.kserve.rest.repository_routes import create_repository_router
from deployments.ingress.kserve.rest.routes import create_inference_router
from deployments.ingress.kserve.statistics import Statistics
from deployments.ingress.limits import Admission, AdmissionGate, BodyLimit
from deployments.ingress.openai.embeddings import create_embeddings_router
from deployments.ingress.openai.images import create_images_router
from deployments.ingress.openai.models import create_models_router
from deployments.ingress.openai.text import create_text_router
from deployments.ingress.service import Service

_DESCRIPTION = """Images, text and embeddings from one cluster, in the OpenAI protocol (`/v1`) and in the Open Inference
Protocol of KServe and Triton (`/v2`). Every answer says how long each stage took: in the `Server-Timing` header, and
under `/v1` in the field `timings_ms`."""


def create_http_app(service: Service, config: ClusterConfig, admission: Admission | None = None) -> FastAPI:
    """Return the application. It needs no Ray: a test gives it a Service over fakes.

    `admission` counts the requests that come over handles as well.
    """
    limits = config.ingress.limits
    admission = admission or Admission(config.ingress.max_ongoing_requests)
    statistics, repository = Statistics(), Repository(service)
    inference = Inference(service, limits, statistics)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if config.grpc is None:
            yield
            return
        server = await start_grpc_server(
            inference,
            repository,
            statistics,
            host=config.grpc.host,
            port=config.grpc.port,
            max_message_bytes=limits.max_body_bytes,
            admission=admission,
        )
        try:
            yield
        finally:
            await server.stop()

    app = FastAPI(
        title="Atelier", version="1", description=_DESCRIPTION, docs_url="/docs", redoc_url=None, lifespan=lifespan
    )
    errors.install_error_handlers(app)
    routing.install_error_handlers(app)
    app.include_router(create_images_router(service))
    app.include_router(create_embeddings_router(service))
    app.include_router(create_text_router(service))
    app.include_router(create_models_router(service))
    app.include_router(create_repository_router(repository, statistics))  # `/v2/models/stats` is no model
    app.include_router(create_inference_router(inference, limits))
    app.include_router(create_admin_router(service))
    app.add_middleware(BodyLimit, max_bytes=limits.max_body_bytes)
    app.add_middleware(AdmissionGate, admission=admission)
    return app
