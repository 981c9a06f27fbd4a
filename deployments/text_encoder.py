"""The embedding service: text encoders of all models behind one deployment, merged and cached."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from ray import serve

from cluster.telemetry import RequestMetrics
from configs.cluster import ClusterConfig
from deployments.embedding_cache import EmbeddingCache, Encoding
from deployments.encoding import (
    CachedEncoders,
    ConditioningRequest,
    EncodeJob,
    TextEncoderBuilder,
    embedding_of,
    encode_jobs,
    is_text_encoder,
)
from deployments.errors import as_service_errors
from deployments.records import CacheUse, EmbeddingRequest, EmbeddingResult
from deployments.replica import limit_threads, open_host, prepare_models
from deployments.tensor_records import PackedTensor, pack


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Conditioning on its way to a worker."""

    tensors: dict[str, PackedTensor]
    encode_ms: float
    cache: CacheUse
    warnings: tuple[str, ...]


class TextEncoderService:
    """One replica. `@serve.batch` is where the jobs of concurrent requests become one forward."""

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        settings = config.text_encoder
        limit_threads(None, settings.num_cpus)
        self._builder = TextEncoderBuilder()
        self._host = await open_host(config, "text-encoder", settings, self._builder)
        await prepare_models(self._host, config.models, ("diffusion", "embedding"), is_text_encoder, self._builder)
        self._cache = EmbeddingCache(settings.cache_bytes)
        self._encoders = CachedEncoders(self._cache, self._run_merged)
        self._metrics = RequestMetrics()
        self._num_batches = self._num_jobs = 0
        self._merge.set_max_batch_size(settings.max_batch_size)
        self._merge.set_batch_wait_timeout_s(settings.batch_wait_timeout_s)

    async def condition(self, request: ConditioningRequest) -> Conditioning:
        """The tensors that a diffusion pipeline's `start` takes for this prompt."""
        start = time.perf_counter()
        with as_service_errors():
            async with self._host.lease(request.model, is_text_encoder, version=request.model_version) as lease:
                class_name = lease.manifest.class_name or ""
                tensors, encoded = await self._encoders.condition(request, class_name, lease.skeleton, lease.modules)
        self._metrics.encoded(request.model, encoded.cache.hits, encoded.cache.misses)
        encode_ms = (time.perf_counter() - start) * 1e3
        return Conditioning(pack(tensors), encode_ms, encoded.cache, encoded.warnings)

    async def embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        """One vector per input."""
        start = time.perf_counter()
        with as_service_errors():
            async with self._host.lease(request.model, is_text_encoder, version=request.model_version) as lease:
                (encoder,) = lease.modules.values()
                encoded = await self._encoders.embed(encoder, request.input)
                switch_ms = lease.report.switch_ms
        self._metrics.encoded(request.model, encoded.cache.hits, encoded.cache.misses)
        total_ms = (time.perf_counter() - start) * 1e3
        return EmbeddingResult(
            model=request.model,
            embeddings=[embedding_of(output).float().cpu().numpy().astype(np.float32) for output in encoded.outputs],
            num_tokens=encoded.num_tokens,
            timings_ms={"switch": switch_ms, "encode": total_ms - switch_ms, "total": total_ms},
            cache=encoded.cache,
            warnings=encoded.warnings,
        )

    async def prefetch(self, model: str) -> None:
        """Bring the model's encoders as near as there is room that nothing needs."""
        with as_service_errors():
            await self._host.prefetch(model, is_text_encoder)

    async def pin(self, model: str) -> None:
        """Keep the encoders once they are here, until `unpin`. Raises Overloaded when the pinned ones do not fit."""
        with as_service_errors():
            await self._host.pin(model, is_text_encoder)

    async def unpin(self, model: str) -> None:
        self._host.unpin(model)

    async def describe(self) -> dict[str, Any]:
        """A snapshot of this replica, as JSON-able values."""
        return self._host.describe() | {
            "skeletons": asdict(self._builder.skeletons.stats()),
            "cache": asdict(self._cache.stats()),
            "batches": self._num_batches,
            "batched_jobs": self._num_jobs,
        }

    async def _run_merged(self, job: EncodeJob) -> Encoding:
        outcome = await self._merge(job)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @serve.batch
    async def _merge(self, jobs: list[EncodeJob]) -> list[Encoding | Exception]:
        self._num_batches += 1
        self._num_jobs += len(jobs)
        return await asyncio.to_thread(encode_jobs, jobs)
