"""GET /v1/models: what can be asked under /v1, and where; with `all`, adapters and other models as well."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from deployments.ingress.admin.picture import Nearness, NearTier
from deployments.ingress.catalog import Endpoint, ModelCard
from deployments.ingress.responses import Answer, documented, json_response
from deployments.ingress.service import Service

_All = Annotated[bool, Query(description="list also what no path under /v1 takes: adapters, ControlNets, heads, ...")]


_Near = Annotated[
    bool, Query(description="say how near each is, as of a moment ago: `tier` resident, memory or disk, `ready_in_s`")
]


_PATHS: Final[dict[Endpoint, tuple[str, ...]]] = {
    "images": ("/v1/images/generations",),
    "larger images": ("/v1/images/variations", "/v1/images/edits"),
    "video": ("/v1/videos",),
    "audio": ("/v1/audio/generations",),
    "text": ("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    "embeddings": ("/v1/embeddings",),
    "ranks": ("/v1/rerank", "/v1/classify"),
    "classes": ("/v1/classify",),
}


class ModelAnswer(Answer):
    """A model, adapter or pipeline: OpenAI's model object, and what else is known.

    `endpoints` are the paths under /v1 that take its name as their model; none of an adapter, say. One that
    `encodes_itself` has its text encoders in the worker, and not in the text encoder service. One that `sees` takes
    images in chats. `tier` and `ready_in_s`, seconds until a worker could start it, are there where they are asked for
    and known.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    kind: str | None
    state: str
    bytes: int
    base: tuple[str, ...]
    description: str
    defaults: dict[str, Any]
    error: str
    endpoints: tuple[str, ...]
    encodes_itself: bool
    sees: bool
    tier: NearTier | None = None
    ready_in_s: float | None = None

    @classmethod
    def of(cls, card: ModelCard, near: Nearness | None = None) -> ModelAnswer:
        """Return the object of a model."""
        paths = _PATHS[card.endpoint] if card.endpoint else ()
        answer = cls(
            id=card.id,
            object="model",
            created=0,
            owned_by="atelier",
            kind=card.kind,
            state=card.state,
            bytes=card.nbytes,
            base=card.base,
            description=card.description,
            defaults=card.defaults,
            error=card.error,
            endpoints=paths + _PATHS["embeddings"] if card.kind == "llm" else paths,
            encodes_itself=card.encodes_itself,
            sees=card.sees,
        )
        return answer.model_copy(update={"tier": near.tier, "ready_in_s": near.ready_in_s}) if near else answer


class ModelsAnswer(Answer):
    """Models, adapters and pipelines."""

    object: Literal["list"]
    data: list[ModelAnswer]


def create_models_router(service: Service, ask_nearness: Callable[[], Awaitable[Mapping[str, Nearness]]]) -> APIRouter:
    """Return the routes. `ask_nearness` tells how near each model is."""
    router = APIRouter(tags=["models"])

    @router.get("/v1/models", response_model=ModelsAnswer, responses=documented(400, 503))
    async def models(all: _All = False, nearness: _Near = False) -> Response:  # their names in the query
        """Every model and pipeline that can be asked here, or could if it were there, with its state."""
        cards = [card for card in await service.models() if all or card.endpoint or _is_away(card)]
        near = await ask_nearness() if nearness else {}
        answers = [ModelAnswer.of(card, None if card.state == "does_not_fit" else near.get(card.id)) for card in cards]
        return json_response(ModelsAnswer(object="list", data=answers))

    @router.get("/v1/models/{model}", response_model=ModelAnswer, responses=documented(404, 503))
    async def model(model: str) -> Response:
        """One model, adapter or pipeline."""
        return json_response(ModelAnswer.of(await service.model(model)))

    return router


def _is_away(card: ModelCard) -> bool:
    """Return whether it is a model or pipeline that might be asked if it were not unavailable, or just registered."""
    return not card.base and (card.kind is None or (card.kind == "pipeline" and card.state == "unavailable"))
