"""What operators and probes ask: models, health and metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.responses import Response

from cluster.telemetry import metrics_urls
from deployments.ingress.api_docs import documented
from deployments.ingress.errors import envelope
from deployments.ingress.kserve.targets import PROBE_TIMEOUT_S
from deployments.ingress.openai.answers import HealthBody, ModelBody, ModelsAnswer
from deployments.ingress.service import Service
from deployments.records import ModelCard

METRICS_TIMEOUT_S = 5.0


def create_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models", tags=["models"], response_model=ModelsAnswer, responses=documented(503))
    async def models() -> dict[str, Any]:
        """Every model and adapter, with its state."""
        return {"object": "list", "data": [model_object(card) for card in await service.models()]}

    @router.get("/v1/models/{model}", tags=["models"], response_model=ModelBody, responses=documented(404, 503))
    async def model(model: str) -> dict[str, Any]:
        """One model or adapter."""
        return model_object(await service.model(model))

    @router.get("/healthz", tags=["operations"], response_model=HealthBody, responses={503: {"model": HealthBody}})
    async def healthz() -> JSONResponse:
        """200 when requests can be answered; 503 while configured models are still entering the store, or nothing is
        known of them yet.
        """
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                cards, entering = await service.models(), await service.entering()
        except TimeoutError:
            return JSONResponse({"status": "starting", "models_ready": 0, "models": 0}, 503)
        ready = [card.id for card in cards if card.state in ("ready", "updating", "unloaded")]
        state = "starting" if entering else "ok" if len(ready) == len(cards) else "degraded"
        body = {"status": state, "models_ready": len(ready), "models": len(cards)}
        return JSONResponse(body, 503 if entering or not ready else 200)

    @router.get(
        "/metrics",
        tags=["operations"],
        response_class=PlainTextResponse,
        responses=documented(_503="a node's exporter did not answer"),
    )
    async def metrics() -> Response:
        """Prometheus text of every node of the cluster, as Ray exports it."""
        pages = []
        async with httpx.AsyncClient(timeout=METRICS_TIMEOUT_S) as client:
            for url in metrics_urls():
                try:
                    pages.append((await client.get(url)).raise_for_status().text)
                except httpx.HTTPError as error:
                    body = envelope(f"{url} did not answer: {error}", "server_error", "metrics_unavailable")
                    return JSONResponse(body, 503)
        return PlainTextResponse("".join(pages), media_type="text/plain; version=0.0.4")

    return router


def model_object(card: ModelCard) -> dict[str, Any]:
    """OpenAI's model object, and what else is known."""
    return {
        "id": card.id,
        "object": "model",
        "created": 0,
        "owned_by": "atelier",
        "kind": card.kind,
        "state": card.state,
        "bytes": card.nbytes,
        "base": card.base,
        "description": card.description,
        "defaults": card.defaults,
        "error": card.error,
    }
