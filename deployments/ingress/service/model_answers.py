"""A model as OpenAI's model object, and its nearness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from deployments.ingress.messages.responses import Answer
from deployments.ingress.service.catalog import Endpoint, ModelCard

NearTier = Literal["resident", "memory", "disk"]


@dataclass(frozen=True, slots=True)
class Nearness:
    """The nearness of a model: ready in a replica, in a node's memory, or on disk.

    `ready_in_s` is the controller's estimate until a worker could start it; None if it does not plan this kind.
    """

    tier: NearTier
    ready_in_s: float | None = None


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
    """A model, adapter or pipeline: OpenAI's model object, and further fields.

    `endpoints` are the paths under /v1 that take its name as their model; none of an adapter, say. One that
    `encodes_itself` has its text encoders in the worker, and not in the text encoder service. One that `sees` takes
    images in chats. `tier` and `ready_in_s`, seconds until a worker could start it, are there if they are asked for
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
