"""Worker: the Serve deployment that denoises and writes text. One replica runs any model, and switches on request.

A switch leases the model's components from the module cache: components shared with another model stay, missing ones
are attached from the node's shared memory. Text encoding runs in its own service meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any, ClassVar

import ray
from ray import serve

from cluster.placement.reports import Orders, WorkerReport
from cluster.placement.serving.actor import connect_controller
from cluster.placement.serving.link import ControllerLink
from cluster.process.ray_calls import NamedActor
from cluster.process.telemetry import RequestMetrics
from configs.cluster import ClusterConfig
from deployments.modules.loading import ComponentBuilder, is_denoise_component, within_memory
from deployments.modules.ranked_building import LeadingBuilder
from deployments.records import (
    ClipRequest,
    ClipResult,
    EmbeddingRequest,
    EmbeddingResult,
    ImageProgress,
    ImageRequest,
    ImageResult,
    PromptTokens,
    SwitchReport,
    TextChunk,
    TextRequestRecord,
    TextResult,
    merge_progress,
    merge_text_chunks,
)
from deployments.records.errors import ModelUnavailable
from deployments.replicas.output_channel import OutputChannel
from deployments.replicas.replica_calls import ReplicaCalls, ReplicaStates
from deployments.replicas.replica_end import ReplicaEnd
from deployments.replicas.step_loop import DeviceThread
from deployments.services.image_requests import OnProgress
from deployments.services.image_service import ImagePiece, ImageService
from deployments.services.model_replica import ModelReplica
from deployments.services.ordered_models import OrderedModels
from deployments.services.text_service import TextService, whole_text
from deployments.services.worker_ranks import WorkerRanks, start_ranks
from deployments.text.client import EncoderDown, TextEncoderClient
from deployments.text.fallback import FallbackEncoder
from weights.records.manifest import ModelKind


class _WorkerReporter:
    """A worker's reports to the controller: its models, and its running images."""

    def __init__(self, models: OrderedModels, images: ImageService) -> None:
        self.changed = models.changed
        self._models = models
        self._images = images

    async def report(self) -> WorkerReport:
        return await self._models.report()

    def apply(self, orders: Orders) -> None:
        self._models.apply(orders)
        self._images.migrate_out(orders.migrate)


class Worker(ModelReplica):
    """One replica. `encoder` is the handle of the text-encoder service."""

    _kinds: ClassVar[tuple[ModelKind, ...]] = ("diffusion", "llm", "upscaler")
    _section: ClassVar[str] = "worker"
    _wants = staticmethod(is_denoise_component)
    _ordered: OrderedModels | None = None  # None without a controller, or before there is one
    _ranks: WorkerRanks | None = None  # None where one process computes a model

    async def __init__(self, config: ClusterConfig, encoder: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        self._settings = within_memory(config.worker, config.simulated)
        calls = ReplicaCalls(encoder, ReplicaStates("text_encoder").why_none_runs)
        self._encoder = TextEncoderClient(calls, config.http.request_timeout_s)
        end = ReplicaEnd()
        self._device = DeviceThread(end=end)
        self._metrics = RequestMetrics()
        self._name = serve.get_replica_context().replica_id.unique_id
        builder = ComponentBuilder(self._settings)
        if self._settings.num_processes > 1:
            self._ranks = await start_ranks(config, self._settings, f"worker-{self._name}", end)
            builder = LeadingBuilder(self._settings, self._ranks)
        await self._open(
            config,
            f"worker-{self._name}",
            self._settings,
            builder,
            self._settings.num_threads,
        )
        self._images = ImageService(self._module_cache, self._settings, self._device, builder)
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
            controller = NamedActor(partial(connect_controller, config))
            reporter = _WorkerReporter(self._ordered, self._images)
            self._link = ControllerLink(self._name, controller, reporter, config.controller.tick_s)
            self._link.start()

    async def check_health(self) -> None:
        """Raise where another rank of this replica does not answer: Serve then starts another replica."""
        if self._ranks is not None:
            await self._ranks.check()

    def _note_load(self, model: str, version: str, error: str | None) -> None:
        if self._ordered is not None:
            self._ordered.note_load(model, version, error)

    async def stream_images(
        self, request: ImageRequest, checkpoint: bytes | None = None
    ) -> AsyncGenerator[ImagePiece, None]:
        """Yield the requested events of the steps, then the ImageResult.

        The text is encoded elsewhere while this replica switches to the model. Without the text-encoder service this
        replica encodes the text itself, if its settings let it. With the `checkpoint` of an earlier piece, from any
        replica, the request goes on after that piece.
        """
        channel = OutputChannel(partial(self._put_images, request, checkpoint), merge=merge_progress)
        async with channel:
            async for piece in channel:
                yield piece

    async def _put_images(
        self, request: ImageRequest, checkpoint: bytes | None, pieces: OutputChannel[ImagePiece]
    ) -> None:
        result = await self._generate(request, checkpoint, pieces.put)
        if isinstance(result, ImageResult) and result.switch:
            self._count("image", result.timings_ms, result.switch)
        pieces.put(result)

    async def _generate(self, request: ImageRequest, checkpoint: bytes | None, on_progress: OnProgress) -> ImagePiece:
        """Return the images, or the progress of a migrated request."""
        try:
            return await self._images.generate(request, self._encoder.condition, on_progress, checkpoint=checkpoint)
        except EncoderDown as error:  # before the first step
            self._check_encodes_alone(error)
        return await self._images.generate(request, self._fallback_encoder.condition, on_progress, encode_first=True)

    async def _make_clip(self, request: ClipRequest, on_progress: OnProgress) -> ClipResult:
        try:
            return await self._images.make_clip(request, self._encoder.condition, on_progress)
        except EncoderDown as error:
            self._check_encodes_alone(error)
        return await self._images.make_clip(request, self._fallback_encoder.condition, on_progress, encode_first=True)

    def _check_encodes_alone(self, error: EncoderDown) -> None:
        if not self._settings.encodes_alone:
            raise ModelUnavailable(str(error), "model") from None

    async def stream_clip(self, request: ClipRequest) -> AsyncGenerator[ImageProgress | ClipResult, None]:
        """Yield the requested events of the steps, then the ClipResult: a video or audio."""

        async def put_clip(pieces: OutputChannel[ImageProgress | ClipResult]) -> None:
            result = await self._make_clip(request, pieces.put)
            self._count("clip", result.timings_ms, result.switch)
            pieces.put(result)

        async with OutputChannel(put_clip, merge=merge_progress) as channel:
            async for piece in channel:
                yield piece

    async def write_text(self, request: TextRequestRecord) -> TextResult:
        """Return the whole text in one answer: cheaper than a stream, with its message for every piece."""
        chunks: list[TextChunk] = []
        await self._texts.write(request, chunks.append, coalesces=True)
        self._count_text(chunks[-1])
        return whole_text(request.model, chunks)

    async def embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        """Return one vector per input, of a language model's hidden states."""
        result = await self._texts.embed(request)
        self._count("embedding", result.timings_ms)
        return result

    async def tokenize(self, request: TextRequestRecord, has_special_tokens: bool) -> PromptTokens:
        """Return the prompt of a request in the model's tokens."""
        return await self._texts.tokenize(request, has_special_tokens=has_special_tokens)

    async def stream_text(self, request: TextRequestRecord) -> AsyncGenerator[TextChunk, None]:
        """Yield text as it comes. The last chunk has the timings and the switch report."""

        async def put_chunks(chunks: OutputChannel[TextChunk]) -> None:
            await self._texts.write(request, chunks.put)

        async with OutputChannel(put_chunks, merge=merge_text_chunks) as channel:
            async for chunk in channel:
                if chunk.switch is not None:
                    self._count_text(chunk)
                yield chunk

    def _count_text(self, last: TextChunk) -> None:
        if last.switch is not None:
            self._count("text", last.timings_ms, last.switch)

    def _count(self, kind: str, timings_ms: Mapping[str, float], switch: SwitchReport | None = None) -> None:
        """Count an answered request, and the steps made until now."""
        self._metrics.count_request(kind, timings_ms)
        if switch is not None:
            self._metrics.count_attached(switch.attached_bytes)
        self._metrics.count_steps(self._device.steps)

    async def describe(self) -> dict[str, Any]:
        """Add the running work and the state of the text encoder to the description of a replica."""
        return await super().describe() | {
            "name": self._name,
            "process": os.getpid(),
            "denoising": self._images.num_running,
            "text_encoder_down": self._encoder.is_believed_down,
            "texts_encoded_alone": self._fallback_encoder.num_requests,
            **await self._described_ranks(),
        }

    async def _described_ranks(self) -> dict[str, Any]:
        if self._ranks is None:
            return {}
        assert isinstance(self._builder, LeadingBuilder)
        return {"ranks": await self._ranks.describe(self._builder.shared_bytes)}
