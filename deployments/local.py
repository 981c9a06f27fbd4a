"""The models of a cluster config in one process, without Ray: `atelier generate --local`.

Store, attach, encode, denoise and decode are the code that the cluster runs; only the extents come from the local
disk instead of a node's shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from cluster.registry.directory import Entry, misplaced, wanted_dtype
from cluster.registry.importing import base_of, base_of_control, bases_of, dtype_of, like_of, parts_of
from cluster.registry.manifests import variant_of
from configs.cluster import ClusterConfig, ModelReplicaConfig
from configs.model import AdapterConfig, ModelConfig
from deployments.engines.servable import why_unservable
from deployments.modules.budget import ModuleBudget
from deployments.modules.builder import Builder
from deployments.modules.cache import ModuleCache
from deployments.modules.encoders import TextEncoderBuilder
from deployments.modules.loading import ComponentBuilder
from deployments.records import ImageProgress, ImageRequest, ImageResult
from deployments.records.errors import ModelUnavailable, UnknownModel, as_service_errors
from deployments.replicas.step_loop import DeviceThread
from deployments.requests.defaults import (
    as_upscale,
    merges_lora,
    prompts_of,
    text_rules,
    with_image_defaults,
    with_learned_words,
)
from deployments.requests.fitted_images import with_fitting_images
from deployments.requests.limits import check_image, check_upscale
from deployments.services.image_service import ImageService
from deployments.text.fallback import FallbackEncoder
from weights.formats.checkpoint import read_checkpoint
from weights.formats.control_files import is_control_file
from weights.formats.learned_words import WORDS_CLASS, words_in
from weights.formats.source import AdapterBase, BasePipeline, Checkpoint
from weights.loading.provider import LocalExtents
from weights.memory.devices import open_device
from weights.operations.intake import import_model
from weights.platform.processor import auto_dtype, processor_flags
from weights.records.errors import WeightsError
from weights.records.manifest import ExtentRef, Manifest
from weights.storage.store import WeightStore

OnStep = Callable[[int, int], None]  # steps done, steps in all


class LocalModels:
    """The models of a cluster config in this process."""

    def __init__(self, config: ClusterConfig) -> None:
        """Raises ModelUnavailable for an adapter that does not fit its models, by headers and configs."""
        self._config = config
        self._store = WeightStore(config.store.path)
        with as_service_errors():
            for settings in (config.text_encoder, config.worker):
                for name in (settings.device, *settings.other_devices):
                    open_device(name, config.simulated)
            self._auto_dtype = auto_dtype(config.worker.device, processor_flags())
            for adapter in config.adapters:
                if isinstance(adapter.path, Path) and adapter.path.exists():
                    self._check_servable(adapter)

    def generate(self, request: ImageRequest, on_step: OnStep | None = None) -> ImageResult:
        """Return images. Raises the ServiceErrors of `deployments.records.errors`.

        `on_step` is called with the steps done and the steps in all.
        """
        return asyncio.run(self._generate(request, on_step))

    async def _generate(self, request: ImageRequest, on_step: OnStep | None) -> ImageResult:
        start = time.perf_counter()
        self._check_adapters(request)
        named = words_in(prompts_of(request), self._own_adapters(request.model))
        with as_service_errors():
            manifest = await self._manifest(request.model)
            words = [name for name in named if (await self._manifest(name)).class_name == WORDS_CLASS]
        request = with_learned_words(request, words)
        defaults = self._config.defaults_of(request.model)
        variant, limits = variant_of(manifest, self._store.skeleton(manifest)), self._config.ingress.limits
        if manifest.kind == "upscaler":
            request, warnings = as_upscale(request)
            check_upscale(request, limits, int(variant["scale"]))
        else:
            asked, request = request, with_image_defaults(request, defaults, manifest.class_name or "", variant)
            check_image(request, limits, asked)
            request, warnings = with_fitting_images(asked, request, manifest.class_name or "", variant)
        rules = text_rules(self._config.entries[request.model])
        rules["merges_lora"] = merges_lora(request, self._config.entries)
        rules |= {"reports_steps": on_step is not None, "partial_images": 0, "checkpoint_steps": 0}
        request = request.model_copy(update=rules)

        def on_progress(progress: ImageProgress) -> None:
            if on_step is not None:
                on_step(progress.step, progress.num_steps)

        extents, device = _UnleasedExtents(self._store.packs), DeviceThread()
        # A module cache each, as in a cluster: text encoders and denoiser have budgets of their own.
        encoder_cache = self._module_cache(extents, self._config.text_encoder, TextEncoderBuilder())
        worker_cache = self._module_cache(extents, self._config.worker, ComponentBuilder(self._config.worker))
        encoder = FallbackEncoder(encoder_cache, device, warnings=())
        images = ImageService(worker_cache, self._config.worker, device)
        result = await images.generate(request, encoder.condition, on_progress)
        assert isinstance(result, ImageResult)  # there is nowhere to migrate to
        total_ms = (time.perf_counter() - start) * 1e3  # bringing the model into the store included
        warnings = (*result.warnings, *warnings)
        return replace(result, timings_ms=result.timings_ms | {"total": total_ms}, warnings=warnings)

    def _own_adapters(self, model: str) -> list[str]:
        entries = self._config.entries.values()
        return [entry.id for entry in entries if isinstance(entry, AdapterConfig) and model in entry.base]

    def _check_adapters(self, request: ImageRequest) -> None:
        """Raise UnknownModel for an adapter of any kind that is for other models, as the ingress does."""
        own = self._own_adapters(request.model)
        for param, uses in (
            ("lora", request.lora),
            ("control", request.control),
            ("ip_adapter", request.ip_adapter),
        ):
            for use in uses:
                if use.name not in own:
                    what = {"lora": "adapter", "control": "ControlNet"}.get(param, "IP-Adapter")
                    known = ", ".join(own) or "none"
                    raise UnknownModel(f"no {what} {use.name!r} for {request.model!r} (known: {known})", param)

    def _module_cache(self, extents: _UnleasedExtents, settings: ModelReplicaConfig, builder: Builder) -> ModuleCache:
        return ModuleCache(
            self._manifest,
            extents,
            self._store.models,
            ModuleBudget.of(settings, "worker" if settings is self._config.worker else "text_encoder"),
            builder,
        )

    async def _manifest(self, model: str, version: str | None = None) -> Manifest:
        entry = self._config.entries.get(model)
        if entry is None:
            raise UnknownModel(f"no model {model!r} (known: {', '.join(self._config.entries)})", "model")
        component = entry.component if isinstance(entry, ModelConfig) else None
        options = self._config.store.object_storage.options()
        if isinstance(entry, ModelConfig) and isinstance(entry.like, str):
            await self._manifest(entry.like)  # in the store, so that the next line finds it
        is_here = isinstance(entry.path, Path) and entry.path.exists()
        if isinstance(entry, AdapterConfig) and is_here and is_control_file(Path(entry.path)):
            await self._manifest(entry.base[0])
        like, parts = self._like(entry), parts_of(entry)
        dtype = self._check_servable(entry) if is_here else wanted_dtype(entry, self._auto_dtype)
        return import_model(
            self._store, entry.id, entry.path, component=component, dtype=dtype, like=like, parts=parts, options=options
        )

    def _check_servable(self, entry: Entry) -> str:
        """Return the dtype that a local model or adapter gets. Raises ModelUnavailable for what cannot be served."""
        checkpoint, path = self._read(entry), Path(entry.path)
        bases = self._bases(entry) if isinstance(entry, AdapterConfig) else []
        dtype = dtype_of(entry, path, bases, self._auto_dtype)
        if reason := misplaced(entry, checkpoint) or why_unservable(checkpoint, bases, dtype):
            raise ModelUnavailable(f"model {entry.id!r}: {reason}")
        return dtype

    def _bases(self, adapter: AdapterConfig) -> list[AdapterBase]:
        """Return the models that an adapter is for, as they will be in the store, or are there of another source."""
        found = {base.model: base for base in bases_of(adapter, self._store)}
        for id_ in adapter.base:
            entry = self._config.entries[id_]
            with contextlib.suppress(WeightsError):  # its own requests are told
                if isinstance(entry.path, Path):
                    found[id_] = base_of(id_, self._read(entry), wanted_dtype(entry, self._auto_dtype))
        return [*found.values()]

    def _read(self, entry: Entry) -> Checkpoint:
        component = entry.component if isinstance(entry, ModelConfig) else None
        return read_checkpoint(Path(entry.path), component=component, like=self._like(entry), parts=parts_of(entry))

    def _like(self, entry: Entry) -> BasePipeline | None:
        """Return the pipeline by whose configs the single file of an entry is read."""
        if isinstance(entry, AdapterConfig) and isinstance(entry.path, Path):
            return base_of_control(entry, entry.path, self._store, self._config.entries[entry.base[0]].path)
        return like_of(entry, self._store)


class _UnleasedExtents(LocalExtents):
    """Extents of the local disk for a module cache that leases: only the views of the built modules hold it."""

    def release(self, extents: Sequence[ExtentRef]) -> None:
        """Do nothing: the views of the built modules keep the bytes."""

    def prefetch(self, extents: Sequence[ExtentRef]) -> None:
        """Do nothing: there is no memory of the node to bring them into."""
