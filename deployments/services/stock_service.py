"""StockService: images, videos and audio by the pipelines of diffusers that have no family here.

A part of the image service, on whose device thread it runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from torch import nn

from cluster.ray_seam.request_ids import part_id
from deployments.engines.graph.workspace import LendingMemory
from deployments.engines.ranks.following import RankChannel
from deployments.engines.records.clip_files import MEDIA_TYPES, WAV, encode_audio, encode_video
from deployments.engines.records.protocol import (
    AdapterUse,
    BesideLatents,
    ComputationFailed,
    DiffusionOutput,
    ImagePromptUse,
    StockRequest,
)
from deployments.engines.stock.adapted import with_side_paths
from deployments.engines.stock.engine import StockEngine
from deployments.engines.stock.inputs import FIELDS
from deployments.engines.stock.known import check_class
from deployments.engines.stock.loading import StockModel
from deployments.engines.stock.texts import NotApart, TextCall, TextPlanner, weightless_modules
from deployments.engines.text.prompt_weights import plain_texts, weights_lost
from deployments.modules.cache import Lease, ModuleCache
from deployments.modules.loading import ComponentBuilder, is_denoise_component, is_pipeline_component
from deployments.modules.parts import Fitting
from deployments.modules.ranked_building import CALLS, TILES, LeadingBuilder
from deployments.modules.stock_parts import is_stock_text
from deployments.records import (
    CacheUse,
    ClipRequest,
    ClipResult,
    ImageRequest,
    ImageResult,
    SwitchReport,
    TimingsMs,
)
from deployments.records.tasks import in_thread, shared_task
from deployments.replicas.step_loop import DeviceThread, EngineLoop
from deployments.services.clips import clip_request, frame_rate
from deployments.services.image_requests import OnProgress, progress_of
from deployments.text.requests import Conditioning, ConditioningRequest, unpack
from weights.formats.lora import changes_text_encoders
from weights.records.manifest import Manifest
from weights.residency.recent import Recent

_NO_PREVIEWS = "partial_images: none were made: diffusers' own code runs this pipeline, which shows nothing on the way"
_MAX_PLANNERS: Final = 16  # some MB each of a large pipeline's structure
_MAX_TEXTS: Final = 8  # of one request: its prompt, its negative prompt, and further ones of a class
_StockLoop = EngineLoop[StockRequest, DiffusionOutput]


@dataclass(frozen=True, slots=True)
class TextSource:
    """The encoder of a request's text. With `is_first`, it takes room from the same cache as the pipeline."""

    encode: Callable[[ConditioningRequest], Awaitable[Conditioning]]
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A request with its texts, and the seconds of their encoding."""

    request: StockRequest
    encode_ms: float = 0.0
    cache: CacheUse = field(default_factory=lambda: CacheUse(0, 0))
    warnings: tuple[str, ...] = ()

    def with_text(self, call: TextCall, found: Conditioning) -> _Encoded:
        """Return the request with one more text."""
        texts = {**(self.request.texts or {}), call.key: unpack(found.tensors)}
        cache = CacheUse(self.cache.hits + found.cache.hits, self.cache.misses + found.cache.misses)
        warnings = (*self.warnings, *(one for one in found.warnings if one not in self.warnings))
        return _Encoded(replace(self.request, texts=texts), self.encode_ms + found.encode_ms, cache, warnings)


@dataclass(frozen=True, slots=True)
class _Made:
    """The last output of a request, the switch to its model, and its texts."""

    output: DiffusionOutput
    report: SwitchReport
    encoded: _Encoded
    has_previews: bool

    @property
    def timings_ms(self) -> TimingsMs:
        """Return the phases. A text that the pipeline encodes itself is in its steps."""
        times = self.output.times
        return {
            "queue": times.queue_s * 1e3,
            "encode": self.encoded.encode_ms,
            "switch": self.report.switch_ms,
            "denoise": times.denoise_s * 1e3,
            "decode": times.decode_s * 1e3,
        }


class StockService:
    """Runs stock pipelines on the device thread, the requests of a model one after the other. Of one event loop."""

    def __init__(
        self, module_cache: ModuleCache, device: DeviceThread, builder: ComponentBuilder | None = None
    ) -> None:
        """`builder` has built the modules of the cache, perhaps with other ranks of the replica."""
        self._module_cache = module_cache
        self._device = device
        self._builder = builder
        self._planners: Recent[str, asyncio.Task[TextPlanner]] = Recent(_MAX_PLANNERS)  # by fingerprint
        self.num_running = 0

    async def make_images(
        self, request: ImageRequest, manifest: Manifest, source: TextSource, on_progress: OnProgress
    ) -> ImageResult:
        """Return the images of a request. `on_progress` gets the requested progress of steps.

        A cancelled caller ends the request at its next call of a module.
        Raises EngineError, ComputationFailed, and errors of a lease and of `source`.
        """
        start = time.perf_counter()
        texts, is_lost = plain_texts(request.prompt_syntax or "plain", request.prompt, request.negative_prompt)
        request = request.model_copy(update={"prompt": texts[0], "negative_prompt": texts[1]})
        stock = _stock_request(request)
        asked = ConditioningRequest(
            request.model, request.prompt, None, False, priority=request.priority, timeout_s=request.timeout_s
        )
        made, warnings = await self._run(asked, manifest, stock, request.adapter_versions, source, on_progress)
        warnings += (weights_lost(manifest.class_name or ""),) if is_lost else ()
        warnings += (_NO_PREVIEWS,) if request.partial_images and not made.has_previews else ()
        return _result_of(request, made, warnings, time.perf_counter() - start)

    async def make_clip(
        self, request: ClipRequest, manifest: Manifest, source: TextSource, on_progress: OnProgress
    ) -> ClipResult:
        """Return the clip of a request. As `make_images`."""
        start, class_name = time.perf_counter(), manifest.class_name or ""
        described = await in_thread(check_class, class_name)
        stock = clip_request(request, class_name, described)
        asked = ConditioningRequest(request.model, request.prompt, None, False, priority=request.priority)
        made, warnings = await self._run(asked, manifest, stock, request.adapter_versions, source, on_progress)
        encoding_s = time.perf_counter()
        result = await in_thread(_clip_of, request, made, warnings, frame_rate(request, described))
        end = time.perf_counter()
        timings = result.timings_ms | {"encode_file": (end - encoding_s) * 1e3, "total": (end - start) * 1e3}
        return replace(result, timings_ms=timings)

    async def _run(
        self,
        asked: ConditioningRequest,
        manifest: Manifest,
        stock: StockRequest,
        versions: Mapping[str, str],
        source: TextSource,
        on_progress: OnProgress,
    ) -> tuple[_Made, tuple[str, ...]]:
        """Return the outcome of a request, and warnings. No lease is left after it.

        `versions` are those of its adapters. A LoRA that changes a text encoder is where the text is encoded: here.
        """

        previews = list[int]()

        def on_output(output: DiffusionOutput) -> None:
            if output.preview_index is not None:
                previews.append(output.preview_index)
            if not output.is_last:
                on_progress(progress_of(output))

        cache = self._module_cache
        lora_names = [use.name for use in stock.adapters]
        names = [*lora_names, *(use.name for use in stock.image_prompts)]
        loras = {name: await cache.manifests.find_version(name, versions.get(name)) for name in lora_names}
        parts = [part for lora in loras.values() for part in lora.components.values()]
        changes_text = any(changes_text_encoders(part.tensors) for part in parts)
        planner, first = (None, None) if changes_text else await self._plan_text(manifest, stock)
        asked = replace(asked, model_version=manifest.fingerprint)
        encoding = asyncio.ensure_future(_encode(asked, stock, planner, first, source))
        wants = is_pipeline_component if planner is None else is_denoise_component
        try:
            forwards = cache.forwards
            book = forwards.footprints
            planned = await in_thread(forwards.plan_call, manifest, wants, stock) if book else {}
            planned = with_side_paths(planned, manifest.components) if names else planned
            room_bytes = book.inside(max(planned.values())) if book and planned else 0
            if source.is_first:
                await encoding
            lease_all = cache.lease(
                asked.model,
                wants,
                names,
                version=manifest.fingerprint,
                adapter_versions=versions,
                fitting=Fitting(room_bytes=room_bytes),
            )
            async with lease_all as lease:
                loaded: _LoadedModel = lease.bound(
                    lambda: _LoadedModel(self._device, forwards.memory, self._channels_of(lease)),
                    f"stock {manifest.fingerprint}",
                )
                engine, loop = await loaded.engine_of(lease, planner)
                encoded = await encoding
                self.num_running += 1
                try:
                    ready = replace(
                        encoded.request, forward_bytes=planned, loras=lease.adapters, prompters=lease.adapters
                    )
                    output = await loop.run_request(ready, on_output)
                finally:
                    self.num_running -= 1
        finally:
            encoding.cancel()
        return _Made(output, lease.report, encoded, bool(previews)), (*encoded.warnings, *engine.inputs.ignored(stock))

    def _channels_of(self, lease: Lease) -> dict[str, RankChannel]:
        """Return the ways to the other ranks' denoisers and VAEs, by name."""
        if not isinstance(builder := self._builder, LeadingBuilder):
            return {}
        kinds = {name: TILES if name == "vae" else CALLS for name in lease.modules}
        found = {name: builder.channel_of(lease.modules[name], kind) for name, kind in kinds.items()}
        return {name: channel for name, channel in found.items() if channel is not None}

    async def _plan_text(self, manifest: Manifest, stock: StockRequest) -> tuple[TextPlanner | None, TextCall | None]:
        """Return the finder of a request's texts (None if the pipeline encodes them itself), and the first text.

        Raises EngineError for options that the class does not take.
        """
        if not any(map(is_stock_text, manifest.components.values())):
            return None, None
        planner = await self._planner_of(manifest)
        try:
            return planner, await in_thread(planner.next_text, stock, {})
        except NotApart:
            return None, None

    async def _planner_of(self, manifest: Manifest) -> TextPlanner:
        key = manifest.fingerprint
        task = self._planners.get(key)
        if task is None or (task.done() and task.exception()):
            folder = self._module_cache.skeleton(manifest)
            task = shared_task(in_thread(_open_planner, manifest, folder))
        self._planners.note(key, task)
        return await asyncio.shield(task)


def _open_planner(manifest: Manifest, folder: Path) -> TextPlanner:
    parts = {name: one for name, one in manifest.components.items() if is_pipeline_component(one)}
    modules = weightless_modules(parts, folder, torch.device("cpu"))
    return TextPlanner(StockModel(manifest.class_name or "", folder, modules))


def _open_model(
    manifest: Manifest, folder: Path, modules: Mapping[str, nn.Module], planner: TextPlanner | None
) -> StockModel:
    """Return the model over leased modules, with the planner's tokenizers and configs. Raises EngineError."""
    if planner is None:
        return StockModel(manifest.class_name or "", folder, modules)
    device = next((one.device for module in modules.values() for one in module.parameters()), torch.device("cpu"))
    texts = {name: one for name, one in manifest.components.items() if is_stock_text(one)}
    return planner.model.over(modules, weightless_modules(texts, folder, device))


async def _encode(
    asked: ConditioningRequest,
    stock: StockRequest,
    planner: TextPlanner | None,
    first: TextCall | None,
    source: TextSource,
) -> _Encoded:
    """Return the request with all texts of its call, one after the other: a text may depend on the last."""
    if planner is None:
        return _Encoded(stock)
    encoded, call = _Encoded(replace(stock, texts={})), first
    for _ in range(_MAX_TEXTS):
        if call is None:
            return encoded
        encoded = encoded.with_text(call, await source.encode(replace(asked, arguments=call.arguments)))
        try:
            call = await in_thread(planner.next_text, encoded.request, encoded.request.texts or {})
        except NotApart as error:
            raise ComputationFailed(str(error)) from None
    raise ComputationFailed(f"{planner.model.cls.__name__} asks for more than {_MAX_TEXTS} texts")


class _LoadedModel:
    """The engine over one lease's modules. Its tokenizers and configs are read once, by the first request."""

    def __init__(self, device: DeviceThread, memory: LendingMemory | None, ranks: Mapping[str, RankChannel]) -> None:
        self._device = device
        self._memory = memory
        self._ranks = ranks
        self._loading: asyncio.Task[tuple[StockEngine, _StockLoop]] | None = None

    async def engine_of(self, lease: Lease, planner: TextPlanner | None) -> tuple[StockEngine, _StockLoop]:
        """Return the engine and its loop. Raises EngineError for parts that cannot be loaded; then it may try again."""
        if self._loading is None or (self._loading.done() and self._loading.exception()):
            self._loading = shared_task(self._load(lease, planner))
        return await asyncio.shield(self._loading)

    async def _load(self, lease: Lease, planner: TextPlanner | None) -> tuple[StockEngine, _StockLoop]:
        # The lease's modules, not the lease: they stay as long as this object.
        model = await in_thread(_open_model, lease.manifest, lease.skeleton, lease.modules, planner)
        engine = StockEngine(model, memory=self._memory, ranks=self._ranks)
        return engine, EngineLoop(self._device, engine, "stock")


def _stock_request(request: ImageRequest) -> StockRequest:
    """Return the request in the stock engine's form. Options left open take the class's defaults."""
    images, beside = (
        {"image": request.init_image, "mask_image": request.mask_image} | request.images,
        request.beside_latents,
    )
    return StockRequest(
        request_id=part_id(),
        seed=_seed_of(request),
        prompt=request.prompt,
        num_images=request.n,
        fields={name: value for name in FIELDS if name != "prompt" and (value := getattr(request, name)) is not None},
        images={name: pixels for name, pixels in images.items() if pixels is not None},
        extra=request.extra,
        scheduler=request.scheduler,
        scheduler_options=request.scheduler_options,
        sampler=request.sampler and request.sampler.model_copy(update={"noise_seed": _seed_of(request)}),
        reports_steps=request.reports_steps,
        num_previews=request.partial_images,
        adapters=tuple(AdapterUse(use.name, use.scale, use.text_scale) for use in request.lora),
        image_prompts=tuple(ImagePromptUse(use.name, use.image, use.scale) for use in request.ip_adapter),
        beside=None if beside is None else BesideLatents(beside, request.beside_mask),
        latents=request.latents,
        noise_mask=request.noise_mask,
    )


def _seed_of(request: ImageRequest) -> int:
    """Return the seed of a request's noise."""
    own = None if request.sampler is None else request.sampler.noise_seed
    return (request.seed or 0) if own is None else own


def _result_of(request: ImageRequest, made: _Made, warnings: tuple[str, ...], total_s: float) -> ImageResult:
    assert made.output.images is not None  # it is the last
    return ImageResult(
        model=request.model,
        images=list(made.output.images),
        seed=request.seed,
        num_inference_steps=request.num_inference_steps or made.output.num_steps,
        timings_ms=made.timings_ms | {"total": total_s * 1e3},
        switch=made.report,
        cache=made.encoded.cache,
        warnings=warnings,
        guidance_scale=request.guidance_scale,
    )


def _clip_of(request: ClipRequest, made: _Made, warnings: tuple[str, ...], fps: float) -> ClipResult:
    """Return the answer made of the last output. Blocks: it writes the file."""
    output = made.output
    if output.samples is not None:
        height = width = 0
        length, rate = output.samples.shape[1], float(output.sample_rate)
        file, media_type = encode_audio(output.samples, output.sample_rate), WAV
    else:
        assert output.images is not None  # it is the last
        (length, height, width, _), rate = output.images.shape, fps
        media_type, is_file = MEDIA_TYPES[request.output_format], request.output == "file"
        file = encode_video(output.images, fps, request.output_format) if is_file else b""
    return ClipResult(
        model=request.model,
        file=file,
        media_type=media_type,
        length=length,
        rate=rate,
        width=width,
        height=height,
        seed=request.seed,
        num_inference_steps=request.num_inference_steps or output.num_steps,
        timings_ms=made.timings_ms,
        switch=made.report,
        warnings=warnings,
        frames=output.images if request.output == "frames" else None,
    )
