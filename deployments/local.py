"""The models of a cluster config in one process, without Ray: `atelier generate --local`.

Store, attach, encode, denoise and decode are the code that the cluster runs; only the extents come from the local
disk instead of a node's shared memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from configs.cluster import ClusterConfig, ModelReplicaConfig
from configs.model import ModelConfig
from deployments.defaults import merges_lora, text_rules, with_image_defaults
from deployments.errors import UnknownModel, as_service_errors
from deployments.limits import check_image
from deployments.modules.built_modules import no_working_memory
from deployments.modules.cache import ModuleCache
from deployments.modules.loading import ComponentBuilder
from deployments.records import ImageRequest, ImageResult
from deployments.services.image_service import ImageService, OnStep
from deployments.services.step_loop import DeviceThread
from deployments.text.encoders import TextEncoderBuilder
from deployments.text.fallback import FallbackEncoder
from weights.formats.pipeline_variant import pipeline_variant
from weights.intake import bring_in
from weights.manifest import ExtentRef, Manifest
from weights.memory.devices import open_device
from weights.provider import LocalExtents
from weights.store import WeightStore


class LocalModels:
    """The models of a cluster config in this process."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._store = WeightStore(config.store.path)
        with as_service_errors():
            for settings in (config.text_encoder, config.worker):
                open_device(settings.device, config.simulated)

    def generate(self, request: ImageRequest, on_step: OnStep | None = None) -> ImageResult:
        """Return images. Raises the ServiceErrors of `deployments.errors`.

        `on_step` is called with the steps done and the steps in all.
        """
        return asyncio.run(self._generate(request, on_step))

    async def _generate(self, request: ImageRequest, on_step: OnStep | None) -> ImageResult:
        start = time.perf_counter()
        with as_service_errors():
            manifest = await self._manifest(request.model)
        defaults = self._config.defaults_of(request.model)
        variant = pipeline_variant(self._store.skeleton(manifest))
        asked, request = request, with_image_defaults(request, defaults, manifest.class_name or "", variant)
        check_image(request, self._config.ingress.limits, asked)
        rules = text_rules(self._config.entries[request.model])
        rules["merges_lora"] = merges_lora(request, self._config.entries)
        request = request.model_copy(update=rules)
        extents, device = _UnleasedExtents(self._store.packs), DeviceThread()
        # A module cache each, as in a cluster: text encoders and denoiser have budgets of their own.
        encoder_cache = self._module_cache(extents, self._config.text_encoder, TextEncoderBuilder())
        worker_cache = self._module_cache(extents, self._config.worker, ComponentBuilder(self._config.worker))
        encoder = FallbackEncoder(encoder_cache, device, warnings=())
        images = ImageService(worker_cache, self._config.worker, device)
        result = await images.generate(request, encoder.condition, on_step=on_step)
        total_ms = (time.perf_counter() - start) * 1e3  # bringing the model into the store included
        return replace(result, timings_ms=result.timings_ms | {"total": total_ms})

    def _module_cache(
        self, extents: _UnleasedExtents, settings: ModelReplicaConfig, builder: ComponentBuilder | TextEncoderBuilder
    ) -> ModuleCache:
        return ModuleCache(
            self._manifest,
            extents,
            self._store.models,
            settings.weights_budget_bytes,
            builder,
            working_memory=builder.working_memory if isinstance(builder, ComponentBuilder) else no_working_memory,
            can_stream=builder.can_stream if isinstance(builder, ComponentBuilder) else lambda component: False,
            device=settings.device,
        )

    async def _manifest(self, model: str, version: str | None = None) -> Manifest:
        entry = self._config.entries.get(model)
        if entry is None:
            raise UnknownModel(f"no model {model!r} (known: {', '.join(self._config.entries)})", "model")
        component = entry.component if isinstance(entry, ModelConfig) else None
        options = self._config.store.object_storage.options()
        return bring_in(self._store, entry.id, entry.path, component=component, dtype=entry.dtype, options=options)


class _UnleasedExtents(LocalExtents):
    """Extents of the local disk for a module cache that leases: only the views of the built modules hold it."""

    def release(self, extents: Sequence[ExtentRef]) -> None:
        """Do nothing: the views of the built modules keep the bytes."""

    def prefetch(self, extents: Sequence[ExtentRef]) -> None:
        """Do nothing: there is no memory of the node to bring them into."""
