"""Where requests of every protocol meet: check, find the model, ask the replicas, time the stages.

HTTP routes, handle calls and pipelines all call these methods. Nothing here knows HTTP.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from cluster.errors import ModelUnknown
from configs.cluster import ClusterConfig
from configs.model import ModelConfig
from deployments.defaults import with_image_defaults, with_text_defaults
from deployments.errors import InvalidRequest, ModelUnavailable, UnknownModel
from deployments.ingress.errors import unwrap
from deployments.ingress.limits import check_embedding, check_image, check_text
from deployments.records import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    EmbeddingResult,
    ImageRequest,
    ImageResult,
    ModelCard,
    TextChunk,
    TextResult,
    TimingsMs,
    as_record,
)

_WANTED = {"diffusion": "images", "llm": "text", "embedding": "embeddings"}


class Service:
    """`registry` is the directory's actor handle, `encoder` and `worker` are deployment handles."""

    def __init__(self, config: ClusterConfig, registry: Any, encoder: Any, worker: Any) -> None:
        self._config = config
        self._registry = registry
        self._encoder = encoder
        self._worker = worker

    async def generate(self, request: ImageRequest | Mapping[str, Any]) -> ImageResult:
        """Pictures. Raises the ServiceErrors of `deployments.errors`."""
        request = as_record(ImageRequest, request)
        request = with_image_defaults(request, self._config.defaults_of(request.model))
        check_image(request, self._config.ingress.limits)
        await self._check_model(request.model, "diffusion")
        for use in request.lora:
            await self._check_adapter(use.name, request.model)
        start = time.perf_counter()
        result: ImageResult = await _answer(self._worker.generate.remote(request))
        _account(result.timings_ms, start)
        return result

    async def embed(self, request: EmbeddingRequest | Mapping[str, Any]) -> EmbeddingResult:
        """Embeddings. Raises the ServiceErrors of `deployments.errors`."""
        request = as_record(EmbeddingRequest, request)
        check_embedding(request, self._config.ingress.limits)
        await self._check_model(request.model, "embedding")
        start = time.perf_counter()
        result: EmbeddingResult = await _answer(self._encoder.embed.remote(request))
        _account(result.timings_ms, start)
        return result

    async def chat(self, request: ChatRequest | Mapping[str, Any]) -> TextResult:
        """A whole answer of a chat model. Raises the ServiceErrors of `deployments.errors`."""
        return await self._whole(as_record(ChatRequest, request))

    async def complete(self, request: CompletionRequest | Mapping[str, Any]) -> TextResult:
        """A whole continuation of a text."""
        return await self._whole(as_record(CompletionRequest, request))

    async def chat_stream(self, request: ChatRequest | Mapping[str, Any]) -> AsyncIterator[TextChunk]:
        """The same answer, piece by piece. Over a handle: `handle.options(stream=True).chat_stream.remote(...)`."""
        async for chunk in self.stream(as_record(ChatRequest, request)):
            yield chunk

    async def stream(self, request: ChatRequest | CompletionRequest) -> AsyncIterator[TextChunk]:
        """Pieces of text; the last one has the finish reason and the timings."""
        request = await self._checked_text(request)
        start = time.perf_counter()
        try:
            async for chunk in self._worker.options(stream=True).stream_text.remote(request):
                if chunk.timings_ms:
                    _account(chunk.timings_ms, start)
                yield chunk
        except Exception as error:
            raise unwrap(error) from error

    async def _whole(self, request: ChatRequest | CompletionRequest) -> TextResult:
        request = await self._checked_text(request)
        start = time.perf_counter()
        result: TextResult = await _answer(self._worker.write_text.remote(request))
        _account(result.timings_ms, start)
        return result

    async def _checked_text(self, request: ChatRequest | CompletionRequest) -> ChatRequest | CompletionRequest:
        check_text(request, self._config.ingress.limits)
        await self._check_model(request.model, "llm")
        return with_text_defaults(request, self._config.defaults_of(request.model))

    async def models(self) -> list[ModelCard]:
        """Every configured model and adapter, in the order of the config."""
        statuses = {status.id: status for status in await self._registry.statuses.remote()}
        return [self._card(statuses[id_]) for id_ in self._config.entries if id_ in statuses]

    async def model(self, id_: str) -> ModelCard:
        """Raises UnknownModel with the known names."""
        return self._card(await self._status(id_))

    async def describe(self) -> dict[str, Any]:
        """The cluster at a glance, every replica of it, as JSON-able values."""
        keepers = await self._registry.keeper_stats.remote()
        return {
            "cluster": self._config.name,
            "models": [_plain(card) for card in await self.models()],
            "nodes": [_plain(stats) for stats in keepers],
            "text_encoders": await self._encoder.broadcast("describe").results_async(),
            "workers": await self._worker.broadcast("describe").results_async(),
        }

    async def _status(self, id_: str) -> Any:
        try:
            return await _answer(self._registry.status.remote(id_))
        except ModelUnknown as error:
            raise UnknownModel(str(error), "model") from None

    async def _check_model(self, id_: str, kind: str) -> None:
        status = await self._status(id_)
        if status.state == "unavailable" and status.kind is None:
            raise ModelUnavailable(f"model {id_!r} is unavailable: {status.error}", "model")
        if status.kind != kind:
            fitting = [card.id for card in await self.models() if card.kind == kind]
            raise InvalidRequest(
                f"model {id_!r} ({status.kind}) does not make {_WANTED[kind]}; models that do: "
                f"{', '.join(fitting) or 'none'}",
                "model",
            )

    async def _check_adapter(self, id_: str, model: str) -> None:
        fitting = [adapter.id for adapter in self._config.adapters if model in adapter.base]
        if id_ not in fitting:
            raise UnknownModel(f"no adapter {id_!r} for {model!r} (known: {', '.join(fitting) or 'none'})", "lora")
        status = await self._status(id_)
        if status.state == "unavailable" and status.kind is None:
            raise ModelUnavailable(f"adapter {id_!r} is unavailable: {status.error}", "lora")

    def _card(self, status: Any) -> ModelCard:
        entry = self._config.entries[status.id]
        defaults = self._config.defaults_of(status.id)
        return ModelCard(
            id=status.id,
            kind=status.kind,
            state=status.state,
            nbytes=status.nbytes,
            base=() if isinstance(entry, ModelConfig) else entry.base,
            description=entry.description if isinstance(entry, ModelConfig) else "",
            error=status.error,
            defaults=defaults.model_dump(exclude_none=True),
        )


async def _answer(response: Any) -> Any:
    """Await a handle or actor call; a replica's own error comes out as itself."""
    try:
        return await response
    except Exception as error:
        original = unwrap(error)
        raise original from (error if original is not error else None)


def _account(timings_ms: TimingsMs, start: float) -> None:
    """What passed here but not in the replica is queueing: transport and waiting for a place."""
    elapsed_ms = (time.perf_counter() - start) * 1e3
    inside_ms = timings_ms.get("total", elapsed_ms)
    timings_ms["queue"] = timings_ms.get("queue", 0.0) + max(0.0, elapsed_ms - inside_ms)
    timings_ms["total"] = elapsed_ms


def _plain(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}
