"""A worker that encodes text itself, while the embedding service is down: slower, in its own memory, but answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from cluster.encodings.packed import PackedTensor
from deployments.modules.component_builder import is_denoise_component
from deployments.modules.model_host import ModelHost
from deployments.services.step_loop import DeviceThread
from deployments.text.cache import EmbeddingCache, Encoding
from deployments.text.cached_encoders import CachedEncoders
from deployments.text.encode_jobs import EncodeJob, encoded_or_raised
from deployments.text.keyed_encoders import is_text_encoder
from deployments.text.records import Conditioning, ConditioningRequest
from deployments.text.tensor_records import pack
from weights.manifest import Component

CACHE_BYTES: Final = 16 * 2**20
WARNING: Final = "the worker encoded the text itself: the text encoder service does not answer"


class OwnEncoder:
    """Lives on one event loop. Encoders come into the worker's own budget, and leave it as any module does."""

    def __init__(self, host: ModelHost, device: DeviceThread, warnings: tuple[str, ...] = (WARNING,)) -> None:
        self._host = host
        self._device = device
        self._warnings = warnings
        self._encoders = CachedEncoders(EmbeddingCache(CACHE_BYTES), self._run)
        self.num_requests = 0

    async def condition(self, request: ConditioningRequest) -> Conditioning:
        """HAZARD: nothing of the model may be leased meanwhile: encoders and denoiser need not fit side by side."""
        start = time.perf_counter()
        self.num_requests += 1
        async with self._host.lease(request.model, _is_encoder, version=request.model_version) as lease:
            class_name = lease.manifest.class_name or ""
            tensors, encoded = await self._encoders.condition(request, class_name, lease.skeleton, lease.modules)
        packed: dict[str, PackedTensor] = pack(tensors)
        encode_ms = (time.perf_counter() - start) * 1e3
        return Conditioning(packed, encode_ms, encoded.cache, encoded.warnings + self._warnings)

    async def _run(self, jobs: Sequence[EncodeJob], priority: int, timeout_s: float | None) -> list[Encoding]:
        return await self._device.run(encoded_or_raised, jobs)


def _is_encoder(component: Component) -> bool:
    return is_text_encoder(component) and not is_denoise_component(component)
