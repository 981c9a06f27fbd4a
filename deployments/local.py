"""The same models in one process, without Ray: `atelier generate --local`.

Store, attach, encode, denoise and decode are the code that the cluster runs; only the extents come from the local
disk instead of a node's shared memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from configs.cluster import ClusterConfig, ModelReplicaConfig
from configs.model import ModelConfig
from deployments.defaults import text_rules, with_image_defaults
from deployments.engines.diffusion.factory import create_pipeline
from deployments.errors import UnknownModel, as_service_errors
from deployments.image_requests import conditioning_request, denoise_request, ignored_inputs
from deployments.limits import check_image
from deployments.modules.component_builder import ComponentBuilder, batch_bounds, is_denoise_component
from deployments.modules.model_host import ModelHost
from deployments.records import ImageRequest, ImageResult
from deployments.text.cache import EmbeddingCache, Encoding
from deployments.text.cached_encoders import CachedEncoders
from deployments.text.encode_jobs import EncodeJob, encoded_or_raised
from deployments.text.keyed_encoders import TextEncoderBuilder, is_text_encoder
from weights.intake import bring_in
from weights.manifest import ExtentRef, Manifest
from weights.provider import LocalExtents
from weights.store import WeightStore

OnStep = Callable[[int, int], None]  # steps done, steps in all


class _UnleasedExtents(LocalExtents):
    def release(self, extents: Sequence[ExtentRef]) -> None:
        """Nothing is held: the views of the built modules keep the bytes."""

    def prefetch(self, extents: Sequence[ExtentRef]) -> None:
        """There is no memory of the node to bring them into."""


class LocalModels:
    """The models of a cluster config in this process."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._store = WeightStore(config.store.path)

    def generate(self, request: ImageRequest, on_step: OnStep | None = None) -> ImageResult:
        """Pictures. Raises the ServiceErrors of `deployments.errors`."""
        return asyncio.run(self._generate(request, on_step))

    async def _generate(self, request: ImageRequest, on_step: OnStep | None) -> ImageResult:
        start = time.perf_counter()
        extents = _UnleasedExtents(self._store.packs)
        worker_host = self._host(extents, self._config.worker, ComponentBuilder(self._config.worker))
        encoder_host = self._host(extents, self._config.text_encoder, TextEncoderBuilder())
        encoders = CachedEncoders(EmbeddingCache(self._config.text_encoder.cache_bytes), _encode_alone)
        with as_service_errors():
            manifest = await self._manifest(request.model)
            class_name = manifest.class_name or ""
            asked, request = request, with_image_defaults(request, self._config.defaults_of(request.model), class_name)
            check_image(request, self._config.ingress.limits, asked)
            denoise = denoise_request(request)
            entry = self._config.entries[request.model]
            request = request.model_copy(update=text_rules(entry))
            text = conditioning_request(request, denoise, class_name)
            names = [use.name for use in request.lora]
            async with (
                encoder_host.lease(request.model, is_text_encoder) as texts,
                worker_host.lease(request.model, is_denoise_component, names) as lease,
            ):
                encoding_start = time.perf_counter()
                conditioning, encoded = await encoders.condition(text, class_name, texts.skeleton, texts.modules)
                denoising = time.perf_counter()
                pipeline = create_pipeline(
                    class_name,
                    lease.skeleton,
                    lease.modules,
                    device=self._config.worker.torch_device,
                    bounds=batch_bounds(self._config.worker),
                )
                for name in names:
                    pipeline.add_adapter(name, lease.adapters[name])
                state = pipeline.start(denoise, conditioning)
                while not state.done:
                    pipeline.step([state])
                    if on_step:
                        on_step(state.step_index, state.num_steps)
                denoised = time.perf_counter()
                images = pipeline.decode_alone(state)
        now = time.perf_counter()
        return ImageResult(
            model=request.model,
            images=list(images),
            seed=denoise.seed,
            num_inference_steps=denoise.num_inference_steps,
            timings_ms={
                "switch": texts.report.switch_ms + lease.report.switch_ms,
                "encode": (denoising - encoding_start) * 1e3,
                "denoise": (denoised - denoising) * 1e3,
                "decode": (now - denoised) * 1e3,
                "total": (now - start) * 1e3,
            },
            switch=lease.report,
            cache=encoded.cache,
            warnings=encoded.warnings + ignored_inputs(request, text.use_negative),
        )

    def _host(
        self, extents: _UnleasedExtents, settings: ModelReplicaConfig, build: ComponentBuilder | TextEncoderBuilder
    ) -> ModelHost:
        return ModelHost(
            self._manifest,
            extents,
            self._store.models,
            settings.weights_budget_bytes,
            build,
            device=settings.device,
        )

    async def _manifest(self, model: str, version: str | None = None) -> Manifest:
        entry = self._config.entries.get(model)
        if entry is None:
            raise UnknownModel(f"no model {model!r} (known: {', '.join(self._config.entries)})", "model")
        component = entry.component if isinstance(entry, ModelConfig) else None
        options = self._config.store.object_storage.options()
        return bring_in(self._store, entry.id, entry.path, component=component, dtype=entry.dtype, options=options)


async def _encode_alone(jobs: Sequence[EncodeJob], priority: int, timeout_s: float | None) -> list[Encoding]:
    """Nobody else is here to wait for."""
    return encoded_or_raised(jobs)
