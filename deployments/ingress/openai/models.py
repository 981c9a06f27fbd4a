"""GET /v1/models: every model, adapter and pipeline, with its state."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from deployments.ingress.errors import documented
from deployments.ingress.openai.answers import ModelAnswer, ModelsAnswer
from deployments.ingress.responses import json_response
from deployments.ingress.service import Service


def create_models_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["models"])

    @router.get("/v1/models", response_model=ModelsAnswer, responses=documented(503))
    async def models() -> Response:
        """Every model and adapter, with its state."""
        cards = await service.models()
        return json_response(ModelsAnswer(object="list", data=[ModelAnswer.of(card) for card in cards]))

    @router.get("/v1/models/{model}", response_model=ModelAnswer, responses=documented(404, 503))
    async def model(model: str) -> Response:
        """One model or adapter."""
        return json_response(ModelAnswer.of(await service.model(model)))

    return router
