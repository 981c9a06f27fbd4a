"""Worker: the Serve deployment that denoises and writes text. One replica runs any model, switching to what is asked.

A switch leases the model's components from the module cache: what another model shares with it stays, what is missing
is attached from the node's shared memory. Text encoding runs in its own service meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, ClassVar

import ray
from ray import serve

from cluster.controller.actor import connect_controller
from cluster.controller.link import ControllerLink
from cluster.controller.reports import Orders
from cluster.telemetry import RequestMetrics
from configs.cluster import ClusterConfig
from deployments.errors import ModelUnavailable
from deployments.modules.loading import ComponentBuilder, is_denoise_component, within_memory
from deployments.records import (
    EmbeddingRequest,
    EmbeddingResult,
    ImageRequest,
    ImageResult,
    TextChunk,
    TextRequestRecord,
    TextResult,
)
from deployments.services.image_service import ImagePiece, ImageService
from deployments.services.model_replica import ModelReplica
from deployments.services.ordered_models import OrderedModels
from deployments.services.replica_calls import ReplicaCalls, ReplicaStates
from deployments.services.step_loop import DeviceThread
from deployments.services.text_service import TextService, whole_text
from deployments.text.client import EncoderDown, TextEncoderClient
from deployments.text.fallback import FallbackEncoder
from weights.manifest import ModelKind


class Worker(ModelReplica):
    """One replica. `encoder` is the handle of the text-encoder service."""

    _kinds: ClassVar[tuple[ModelKind, ...]] = ("diffusion", "llm")
    _wants = staticmethod(is_denoise_component)

    async def __init__(self, config: ClusterConfig, encoder: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        self._settings = within_memory(config.worker, config.simulated)
        calls = ReplicaCalls(encoder, ReplicaStates("text_encoder").why_none_runs)
        self._encoder = TextEncoderClient(calls, config.http.request_timeout_s)
        self._device = DeviceThread()
        self._metrics = RequestMetrics()
        builder = ComponentBuilder(self._settings)
        self._name = serve.get_replica_context().replica_id.unique_id
        await self._open(
            config,
            f"worker-{self._name}",
            self._settings,
            builder,
            self._settings.num_threads,
            builder.working_memory,
            builder.can_stream,
        )
        self._images = ImageService(self._module_cache, self._settings, self._device)
        self._texts = TextService(self._module_cache, self._device)
        self._fallback_encoder = FallbackEncoder(self._module_cache, self._device)
        if config.controller.enabled:
            self._ordered = OrderedModels(
                self._module_cache,
                self._wants,
                self._kinds,
                pool=serve.get_replica_context().deployment,
                node=ray.get_runtime_context().get_node_id(),
                slots=self._settings.max_running_images,
            )
            connect = partial(connect_controller, config)
            self._link = ControllerLink(
                self._name,
                connect,
                self._ordered.report,
                self._obey,
                self._ordered.news,
                config.controller.tick_s,
            )
            self._link.start()

    def _obey(self, orders: Orders) -> None:
        self._ordered.obey(orders)
        self._images.hand_over(orders.hand_over)

    async def stream_images(
        self, request: ImageRequest, checkpoint: bytes | None = None
    ) -> AsyncGenerator[ImagePiece, None]:
        """Yield what the request asks to hear of its steps, and its ImageResult at the end.

        The text is encoded elsewhere while this replica switches to the model. Without the text-encoder service this
        replica encodes the text itself, if its settings let it. With the `checkpoint` of an earlier piece, from any
        replica, the request goes on after that piece.
        """
        try:
            async with contextlib.aclosing(self._image_pieces(request, checkpoint)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, ImageResult) and piece.switch:
                        self._metrics.count_attached(request.model, piece.switch.attached_bytes)
                        self._metrics.count_request("image", request.model, piece.timings_ms)
                    yield piece
        except EncoderDown as error:
            raise ModelUnavailable(str(error), "model") from None

    async def _image_pieces(self, request: ImageRequest, checkpoint: bytes | None) -> AsyncGenerator[ImagePiece, None]:
        """Yield the pieces of `stream_images`. Raises EncoderDown, before the first, if the text cannot be encoded."""
        stream = self._images.stream_images
        try:
            async with contextlib.aclosing(stream(request, self._encoder.condition, checkpoint=checkpoint)) as pieces:
                async for piece in pieces:
                    yield piece
                return
        except EncoderDown:
            if not self._settings.encodes_alone:
                raise
        alone = stream(request, self._fallback_encoder.condition, encode_first=True)
        async with contextlib.aclosing(alone) as pieces:
            async for piece in pieces:
                yield piece

    async def write_text(self, request: TextRequestRecord) -> TextResult:
        """Return the whole text in one answer: cheaper than a stream, whose every piece is a message of its own."""
        async with contextlib.aclosing(self.stream_text(request, is_patient=True)) as stream:
            return whole_text(request.model, [chunk async for chunk in stream])

    async def embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        """Return one vector per input, of a language model's hidden states."""
        result = await self._texts.embed(request)
        self._metrics.count_request("embedding", request.model, result.timings_ms)
        return result

    async def stream_text(
        self, request: TextRequestRecord, *, is_patient: bool = False
    ) -> AsyncGenerator[TextChunk, None]:
        """Yield text as it comes; with `is_patient`, its first piece, and all others at the end.

        The last chunk has the timings and the switch report.
        """
        async with contextlib.aclosing(self._texts.stream_text(request, is_patient=is_patient)) as stream:
            async for chunk in stream:
                if chunk.switch is not None:
                    self._metrics.count_attached(request.model, chunk.switch.attached_bytes)
                    self._metrics.count_request("text", request.model, chunk.timings_ms)
                yield chunk

    async def describe(self) -> dict[str, Any]:
        """Add the running work and the state of the text encoder to what every replica tells of itself."""
        return await super().describe() | {
            "name": self._name,
            "process": os.getpid(),
            "denoising": self._images.num_running,
            "text_encoder_down": self._encoder.is_believed_down,
            "texts_encoded_alone": self._fallback_encoder.num_requests,
        }
