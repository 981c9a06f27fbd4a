"""The HTTP application: routes, limits and errors put together over a Service."""

from __future__ import annotations

from fastapi import FastAPI

from configs.cluster import LimitsConfig
from deployments.ingress import admin, admin_models, errors, openai_embeddings, openai_images, openai_text
from deployments.ingress.limits import BodyLimit
from deployments.ingress.service import Service

DESCRIPTION = """Images, text and embeddings from one cluster, in the OpenAI protocol.
Every answer says how long each stage took: in the `Server-Timing` header and in the field `timings_ms`."""


def create_http_app(service: Service, limits: LimitsConfig) -> FastAPI:
    """Needs no Ray: a test gives it a Service over fakes."""
    app = FastAPI(title="Atelier", version="1", description=DESCRIPTION, docs_url="/docs", redoc_url=None)
    errors.install(app)
    app.include_router(openai_images.create_router(service))
    app.include_router(openai_embeddings.create_router(service))
    app.include_router(openai_text.create_router(service))
    app.include_router(admin.create_router(service))
    app.include_router(admin_models.create_router(service.operations))
    app.add_middleware(BodyLimit, max_bytes=limits.max_body_bytes)
    return app
