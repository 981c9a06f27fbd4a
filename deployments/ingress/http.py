"""The HTTP application: routes, limits and errors put together over a Service. gRPC lives and ends with it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from configs.cluster import ClusterConfig
from deployments.ingress import api_docs, errors
from deployments.ingress.admin import cluster as admin
from deployments.ingress.admin import models as admin_models
from deployments.ingress.admission import Admission, AdmissionGate
from deployments.ingress.kserve.grpc.server import start_grpc_server
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.repository import Repository
from deployments.ingress.kserve.rest import errors as rest_errors
from deployments.ingress.kserve.rest import repository_routes as repository_http
from deployments.ingress.kserve.rest import routes as open_inference
from deployments.ingress.kserve.statistics import Statistics
from deployments.ingress.limits import BodyLimit
from deployments.ingress.openai import embeddings as openai_embeddings
from deployments.ingress.openai import images as openai_images
from deployments.ingress.openai import text as openai_text
from deployments.ingress.service import Service

DESCRIPTION = """Images, text and embeddings from one cluster, in the OpenAI protocol (`/v1`) and in the Open Inference
Protocol of KServe and Triton (`/v2`). Every answer says how long each stage took: in the `Server-Timing` header, and
under `/v1` in the field `timings_ms`."""


def create_http_app(service: Service, config: ClusterConfig, admission: Admission | None = None) -> FastAPI:
    """Needs no Ray: a test gives it a Service over fakes. `admission` counts what comes over handles as well."""
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
        title="Atelier", version="1", description=DESCRIPTION, docs_url="/docs", redoc_url=None, lifespan=lifespan
    )
    errors.install(app)
    rest_errors.install(app)
    api_docs.install(app)
    app.include_router(openai_images.create_router(service))
    app.include_router(openai_embeddings.create_router(service))
    app.include_router(openai_text.create_router(service))
    app.include_router(repository_http.create_router(repository, statistics))  # `/v2/models/stats` is no model
    app.include_router(open_inference.create_router(inference, limits))
    app.include_router(admin.create_router(service))
    app.include_router(admin_models.create_router(service.operations))
    app.add_middleware(BodyLimit, max_bytes=limits.max_body_bytes)
    app.add_middleware(AdmissionGate, admission=admission)
    return app
