"""The ingress deployment. Light on purpose: no torch, so that this replica starts fast and stays small."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.registry.actor import connect_registry
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.limits import Admission
from deployments.ingress.service import Service
from deployments.records import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    EmbeddingResult,
    ImageRequest,
    ImageResult,
    TextChunk,
    TextResult,
)
from deployments.services.replica_calls import ReplicaStates


@serve.ingress()
class Ingress:
    """The HTTP edge, and the methods of `serve.get_app_handle("atelier")`: those of `Service`, with a bound."""

    def __init__(self, config: ClusterConfig, encoder: DeploymentHandle, worker: DeploymentHandle) -> None:
        snapshot = RegistrySnapshot(lambda: connect_registry(config))
        self._config = config
        self._admission = Admission(config.ingress.max_ongoing_requests)
        self._service = Service(config, snapshot, encoder, worker, lambda name: ReplicaStates(name).why_none_can)

    def __serve_build_asgi_app__(self) -> Any:
        return create_http_app(self._service, self._config, self._admission)

    async def generate(self, request: ImageRequest | Mapping[str, Any]) -> ImageResult:
        with self._admission.admit_request():
            return await self._service.generate(request)

    async def embed(self, request: EmbeddingRequest | Mapping[str, Any]) -> EmbeddingResult:
        with self._admission.admit_request():
            return await self._service.embed(request)

    async def chat(self, request: ChatRequest | Mapping[str, Any]) -> TextResult:
        with self._admission.admit_request():
            return await self._service.chat(request)

    async def complete(self, request: CompletionRequest | Mapping[str, Any]) -> TextResult:
        with self._admission.admit_request():
            return await self._service.complete(request)

    async def chat_stream(self, request: ChatRequest | Mapping[str, Any]) -> AsyncGenerator[TextChunk]:
        """Over a handle: `handle.options(stream=True).chat_stream.remote(...)`."""
        with self._admission.admit_request():
            async with aclosing(self._service.chat_stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
