"""GET /v1/models: the models usable under /v1, with their endpoints; with `all`, adapters and other models as well."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from deployments.engines.diffusion.known_solvers import solvers_for
from deployments.ingress.messages.responses import Answer, documented, json_response
from deployments.ingress.service.catalog import ModelCard
from deployments.ingress.service.model_answers import ModelAnswer, Nearness
from deployments.ingress.service.service import Service

_All = Annotated[
    bool, Query(description="list also models without a path under /v1: adapters, ControlNets, heads, ...")
]


_Near = Annotated[
    bool, Query(description="say how near each is, as of a moment ago: `tier` resident, memory or disk, `ready_in_s`")
]


class ModelsAnswer(Answer):
    """Models, adapters and pipelines."""

    object: Literal["list"]
    data: list[ModelAnswer]


class SchedulersAnswer(Answer):
    """The schedulers that a request may name for a model, by the names of diffusers' classes; its own comes first."""

    object: Literal["list"]
    data: list[str]


def create_models_router(service: Service, ask_nearness: Callable[[], Awaitable[Mapping[str, Nearness]]]) -> APIRouter:
    """Return the routes. `ask_nearness` returns the nearness of each model."""
    router = APIRouter(tags=["models"])

    @router.get("/v1/models", response_model=ModelsAnswer, responses=documented(400, 503))
    async def models(all: _All = False, nearness: _Near = False) -> Response:  # their names in the query
        """Every model and pipeline usable here, or that would be if it were available, with its state."""
        cards = [card for card in await service.listing.models() if all or card.endpoint or _is_away(card)]
        near = await ask_nearness() if nearness else {}
        answers = [ModelAnswer.of(card, None if card.state == "does_not_fit" else near.get(card.id)) for card in cards]
        return json_response(ModelsAnswer(object="list", data=answers))

    @router.get("/v1/models/{model}", response_model=ModelAnswer, responses=documented(404, 503))
    async def model(model: str) -> Response:
        """One model, adapter or pipeline."""
        return json_response(ModelAnswer.of(await service.listing.model(model)))

    @router.get("/v1/models/{model}/schedulers", response_model=SchedulersAnswer, responses=documented(404, 503))
    async def schedulers(model: str) -> Response:
        """The schedulers that a model takes; none for a model without one of its own."""
        config = await service.listing.solver_config(model)
        return json_response(SchedulersAnswer(object="list", data=solvers_for(config)))

    return router


def _is_away(card: ModelCard) -> bool:
    """Return whether this is a model or pipeline that is only unavailable, or just being registered."""
    return not card.base and (card.kind is None or (card.kind == "pipeline" and card.state == "unavailable"))
