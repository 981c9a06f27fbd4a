"""The embedding service: text encoders of all models behind one deployment, merged and cached."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from cluster.actor_names import cluster_key
from cluster.encodings.actor import connect_shared_encodings
from cluster.encodings.ray_tier import RaySharedTier
from cluster.telemetry import RequestMetrics
from configs.cluster import ClusterConfig
from configs.merging import MergeConfig
from deployments.batching.batcher import RequestMerger
from deployments.batching.serve_adapter import ServeDoor
from deployments.engines.text.padding_counts import EncodeCounter
from deployments.errors import as_service_errors
from deployments.pipelines.planning import plan_segments
from deployments.pipelines.plans import SegmentCall, SegmentResult
from deployments.pipelines.ports import known_model
from deployments.pipelines.segments import SegmentRunner
from deployments.records import EmbeddingRequest, EmbeddingResult, HeadRequest
from deployments.services.model_replica import ModelReplica
from deployments.services.segment_ops import EncoderOps
from deployments.text.cache import EmbeddingCache, Encoding
from deployments.text.cached_encoders import CachedEncoders, embedding_of
from deployments.text.encode_jobs import EncodeJob, encode_jobs
from deployments.text.keyed_encoders import TextEncoderBuilder, is_text_encoder
from deployments.text.records import Conditioning, ConditioningRequest
from deployments.text.tensor_records import pack
from deployments.threads import in_thread
from weights.manifest import ModelKind


class TextEncoderService(ModelReplica):
    """One replica. `ServeDoor` is where requests come through `@serve.batch` into the merger."""

    _kinds: ClassVar[tuple[ModelKind, ...]] = ("diffusion", "embedding", "head")
    _wants = staticmethod(is_text_encoder)

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        settings = config.text_encoder
        shared = None
        if settings.shared_cache_bytes:
            connect = partial(connect_shared_encodings, cluster_key(config), settings.shared_cache_bytes)
            with contextlib.suppress(Exception):  # it may be missing
                await asyncio.to_thread(connect)  # its process starts now, so that the first text need not wait for it
            shared = RaySharedTier(connect)
        self._cache = EmbeddingCache(settings.cache_bytes, shared)
        await self._open(config, "text-encoder", settings, TextEncoderBuilder())
        self._padding = EncodeCounter()
        self._merging: MergeConfig = await self._registry.encoder_merging.remote() or settings.merging
        self._merger: RequestMerger[EncodeJob, Encoding] = RequestMerger(self._encode, self._merging)
        self._door = ServeDoor(self._merger, settings.max_ongoing_requests)
        self._encoders = CachedEncoders(self._cache, self._run_merged)
        self._segments = SegmentRunner(settings.torch_device)
        if config.pipelines:
            models = {record.id: known_model(record) for record in await self._registry.statuses.remote()}
            for segment in plan_segments(config.pipelines, models, settings.merging.max_batch_size):
                self._segments.prepare_segment(segment)
        self._metrics = RequestMetrics()

    async def condition(self, request: ConditioningRequest) -> Conditioning:
        """The tensors that a diffusion pipeline's `start` takes for this prompt."""
        start = time.perf_counter()
        with as_service_errors():
            async with self._host.lease(request.model, is_text_encoder, version=request.model_version) as lease:
                class_name = lease.manifest.class_name or ""
                tensors, encoded = await self._encoders.condition(request, class_name, lease.skeleton, lease.modules)
        self._metrics.count_encodings(request.model, encoded.cache.hits, encoded.cache.misses)
        encode_ms = (time.perf_counter() - start) * 1e3
        return Conditioning(pack(tensors), encode_ms, encoded.cache, encoded.warnings)

    async def embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        """One vector per input."""
        start = time.perf_counter()
        with as_service_errors():
            async with self._host.lease(request.model, is_text_encoder, version=request.model_version) as lease:
                (encoder,) = lease.modules.values()
                encoded = await self._encoders.embed(
                    encoder,
                    request.input,
                    long_text=request.long_text,
                    priority=request.priority,
                    timeout_s=request.timeout_s,
                )
                switch_ms = lease.report.switch_ms
        self._metrics.count_encodings(request.model, encoded.cache.hits, encoded.cache.misses)
        total_ms = (time.perf_counter() - start) * 1e3
        return EmbeddingResult(
            model=request.model,
            embeddings=[embedding_of(output).float().cpu().numpy().astype(np.float32) for output in encoded.outputs],
            num_tokens=encoded.num_tokens,
            timings_ms={"switch": switch_ms, "encode": total_ms - switch_ms, "total": total_ms},
            cache=encoded.cache,
            warnings=encoded.warnings,
        )

    async def apply_head(self, request: HeadRequest) -> npt.NDArray[np.float32]:
        """(n, in) -> (n, out)."""
        with as_service_errors():
            async with self._host.lease(request.model, is_text_encoder, version=request.model_version) as lease:
                (head,) = lease.modules.values()
                features = torch.from_numpy(np.array(request.features))  # what comes from Ray is read-only
                scores = await in_thread(head.apply, features)
        result: npt.NDArray[np.float32] = scores.float().cpu().numpy()
        return result

    async def run_segment(self, call: SegmentCall, *upstream: SegmentResult) -> SegmentResult:
        """Steps of a pipeline, one after the other; what they hand on stays on the device."""
        with as_service_errors():
            return await self._segments.run_segment(call, upstream, EncoderOps(self._host, self._encoders, call))

    async def retune(self, merging: MergeConfig) -> None:
        """From now on, for those who wait as well."""
        self._merging = merging
        self._merger.retune(merging)

    async def describe(self) -> dict[str, Any]:
        """Add the cache, the batches and the pipelines' segments to what every replica tells of itself."""
        return await super().describe() | {
            "cache": asdict(self._cache.stats()),
            "merging": asdict(self._merger.stats()),
            "merge_config": self._merging.model_dump(mode="json"),
            "padding": asdict(self._padding.stats()),
            "segments": asdict(self._segments.stats()),
        }

    def _condemn(self, extents: Sequence[str]) -> None:
        """Forget all encodings as well: nobody knows since when the weights that computed them were damaged."""
        super()._condemn(extents)
        self._cache.forget_all()

    async def _run_merged(self, jobs: Sequence[EncodeJob], priority: int, timeout_s: float | None) -> list[Encoding]:
        # By number: the merger remembers groups, and must not keep an encoder's weights with them.
        group, costs = id(jobs[0].encoder), [job.num_tokens for job in jobs]
        return await self._door.submit(jobs, group=group, costs=costs, priority=priority, timeout_s=timeout_s)

    async def _encode(self, jobs: Sequence[EncodeJob]) -> Sequence[Encoding | Exception]:
        return await asyncio.to_thread(encode_jobs, jobs, counter=self._padding)
