"""ImageService: images from the models that a module cache has built. Ray-free: the worker and `local.py` share it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import torch

from configs.cluster import WorkerConfig
from deployments.engines.costs.step_costs import RememberedCosts, StepCosts
from deployments.engines.diffusion.checkpoints import conditioning_of
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.diffusion.families import family_of
from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline, settings_hash
from deployments.engines.diffusion.rows import adapter_names
from deployments.engines.graph.replay import Replays
from deployments.engines.ranks.following import RankChannel
from deployments.engines.records.protocol import ConditionedRequest, DiffusionOutput
from deployments.engines.stock.known import is_stock_class
from deployments.modules.cache import Lease, ModuleCache
from deployments.modules.loading import ComponentBuilder, batch_bounds, is_denoise_component
from deployments.modules.parts import Merging
from deployments.modules.ranked_building import ROWS, TILES, LeadingBuilder
from deployments.records import (
    CacheUse,
    ClipRequest,
    ClipResult,
    ImageProgress,
    ImageRequest,
    ImageResult,
    SwitchReport,
)
from deployments.records.errors import as_service_errors
from deployments.records.tasks import in_thread, shared_task
from deployments.replicas.step_loop import DeviceThread, EngineLoop
from deployments.services.image_requests import (
    ImageJob,
    OnProgress,
    conditioning_request,
    denoise_request,
    ignored_inputs,
    progress_of,
    result_of,
    vae_result,
)
from deployments.services.sequential_phases import SequentialPhases
from deployments.services.stock_service import StockService, TextSource
from deployments.services.upscale_service import UpscaleService
from deployments.text.requests import Conditioning, ConditioningRequest, pack
from weights.records.manifest import Manifest

EncodeText = Callable[[ConditioningRequest], Awaitable[Conditioning]]
ImagePiece = ImageProgress | ImageResult
MAX_SETTINGS: Final = 1024
_NO_PREVIEWS: Final = "partial_images: none were made, the device has no room for denoiser and VAE together"
KEEP_COSTS_S: Final = 30.0  # between two writings of the measured costs


class _PipelineEngine(NamedTuple):
    """The engine of one pipeline, and the name under which its costs are stored."""

    loop: EngineLoop[ConditionedRequest, DiffusionOutput]
    engine: DiffusionEngine
    costs: StepCosts
    subject: str


def _ignore(_: ImageProgress) -> None:
    """Ignore progress that nobody asked for."""


@dataclass(slots=True)
class _Moving:
    """A request that may be migrated, its engine once it has one, and whether its migration is wanted."""

    model: str
    engine: _PipelineEngine | None = None
    is_wanted: bool = False


class ImageService:
    """Denoises and decodes on one device thread, in batches of all requests of a pipeline. Lives on one event loop."""

    def __init__(
        self,
        module_cache: ModuleCache,
        settings: WorkerConfig,
        device: DeviceThread,
        builder: ComponentBuilder | None = None,
    ) -> None:
        """`builder` has built the modules of the cache, perhaps with other ranks of the replica."""
        self._module_cache = module_cache
        self._settings = settings
        self._device = device
        self._builder = builder
        self._sequential = SequentialPhases(module_cache, settings, device)
        self._stock = StockService(module_cache, device, builder)
        self._upscaling = UpscaleService(module_cache, settings, device)
        self._settings_hashes: dict[tuple[str, str], str] = {}  # by model and version
        self._remembered = RememberedCosts()
        self._kept_s = time.monotonic()
        self._keeping: asyncio.Task[None] | None = None
        self._moving: dict[str, _Moving] = {}  # by request
        self._migrations: set[asyncio.Task[None]] = set()
        self._num_denoising = 0

    @property
    def num_running(self) -> int:
        """The number of requests between their noise and their images."""
        return self._num_denoising + self._stock.num_running + self._upscaling.num_running

    def migrate_out(self, models: Collection[str]) -> None:
        """Migrate the running requests of these models to other replicas, each after its next step."""
        for request_id, moving in self._moving.items():
            if moving.model in models and not moving.is_wanted:
                moving.is_wanted = True
                if moving.engine is not None:
                    self._begin_migration(request_id, moving.engine)

    def _begin_migration(self, request_id: str, engine: _PipelineEngine) -> None:
        self._migrations.add(task := shared_task(engine.loop.end_early(request_id, engine.engine.migrate_out)))
        task.add_done_callback(self._migrations.discard)

    async def generate(
        self,
        request: ImageRequest,
        encode_text: EncodeText,
        on_progress: OnProgress = _ignore,
        *,
        checkpoint: bytes | None = None,
        encode_first: bool = False,
    ) -> ImagePiece:
        """Return the images of a request. `on_progress` gets the requested progress of steps, on the event loop.

        `with_image_defaults` has completed the request. With a `checkpoint` of the same request it goes on from there,
        and no text is encoded. Else the model is switched to while the text is being encoded; with `encode_first` after
        it, for an encoder that takes room from the same cache. A request that is migrated returns the progress that
        says so instead. A cancelled request ends when none of its steps runs any more.

        Raises the ServiceErrors of `deployments.records.errors`, and errors of `encode_text`; no lease is left then.
        """
        with as_service_errors():
            manifest = await self._module_cache.manifests.find_version(request.model, request.model_version)
            if manifest.kind == "upscaler":
                return await self._upscaling.enlarge(request, manifest, on_progress)
            if is_stock_class(manifest.class_name or "") and not request.is_of_vae:
                source = TextSource(encode_text, is_first=encode_first)
                return await self._stock.make_images(request, manifest, source, on_progress)
            return await self._run_family(
                request, manifest, encode_text, on_progress, checkpoint, encode_first=encode_first
            )

    async def make_clip(
        self, request: ClipRequest, encode_text: EncodeText, on_progress: OnProgress, *, encode_first: bool = False
    ) -> ClipResult:
        """Return the video or audio of a request. As `generate`."""
        with as_service_errors():
            manifest = await self._module_cache.manifests.find_version(request.model, request.model_version)
            source = TextSource(encode_text, is_first=encode_first)
            return await self._stock.make_clip(request, manifest, source, on_progress)

    async def _run_family(
        self,
        request: ImageRequest,
        manifest: Manifest,
        encode_text: EncodeText,
        on_progress: OnProgress,
        checkpoint: bytes | None,
        *,
        encode_first: bool,
    ) -> ImagePiece:
        start = time.perf_counter()
        denoise = denoise_request(request)
        if request.is_of_vae:
            array, switch = await self._sequential.run_vae(ImageJob(request, manifest, denoise, None, start))
            return vae_result(request, array, switch, time.perf_counter() - start)
        with self._movable(denoise.request_id, request.model):
            make_text = partial(conditioning_request, request, denoise, manifest.class_name or "")
            text = await in_thread(make_text) if denoise.references else make_text()
            async with _under_way(_kept_text(checkpoint) if checkpoint else encode_text(text)) as encoding:
                if encode_first:
                    await encoding
                job = await self._prepare(ImageJob(request, manifest, denoise, checkpoint, start))
                run = self._run_colocated if job.is_whole else self._run_sequentially
                output, report = await run(job, encoding, on_progress)
                conditioning = await encoding
        if output.is_moved:
            return progress_of(output)
        warnings: tuple[str, ...] = () if job.is_whole or not request.partial_images else (_NO_PREVIEWS,)
        warnings += conditioning.warnings + ignored_inputs(request, text.use_negative, manifest.class_name or "")
        return result_of(request, job.denoise, output, conditioning, report, warnings, time.perf_counter() - start)

    async def _prepare(self, job: ImageJob) -> ImageJob:
        """Return the job with its adapters and its way of leasing the device."""
        cache, request = self._module_cache, job.request
        find, versions = cache.manifests.find_version, request.adapter_versions
        adapters = {name: await find(name, versions.get(name)) for name in job.adapter_names}
        if adapters and cache.forwards.footprints is not None:
            await in_thread(cache.forwards.learn_adapted, job.manifest, adapters)
        merging = self._merging(request, job.manifest, adapters)
        is_whole = cache.can_hold(job.manifest, is_denoise_component, adapters, merging)
        denoise = job.denoise if merging is None else replace(job.denoise, merges_adapter=True)
        return replace(job, denoise=denoise, merging=merging, is_whole=is_whole)

    async def _run_colocated(
        self, job: ImageJob, encoding: Awaitable[Conditioning], on_progress: OnProgress
    ) -> tuple[DiffusionOutput, SwitchReport]:
        """Return the last output of a request with its whole model leased, and the switch to the model."""
        async with job.lease(self._module_cache, is_denoise_component, job.adapter_names) as lease:
            ready = replace(job.conditioned(await encoding), adapters=lease.adapters)
            return await self._denoise(lease, ready, on_progress), lease.report

    async def _run_sequentially(
        self, job: ImageJob, encoding: Awaitable[Conditioning], on_progress: OnProgress
    ) -> tuple[DiffusionOutput, SwitchReport]:
        """Return the last output of a request that leases its model phase by phase, and all switches."""
        conditioned = replace(job.conditioned(await encoding), num_previews=0)
        denoise = partial(self._denoise, on_progress=on_progress, is_whole=False)
        return await self._sequential.run_phases(job, conditioned, denoise)

    def _merging(self, request: ImageRequest, manifest: Manifest, adapters: Mapping[str, Manifest]) -> Merging | None:
        """Return the request's LoRA to merge, if any."""
        if not request.merges_lora:
            return None
        merging = Merging(request.lora[0].name, family_of(manifest.class_name or "").denoiser_name)
        return self._module_cache.choose_merging(manifest, is_denoise_component, adapters, merging)

    @contextlib.contextmanager
    def _movable(self, request_id: str, model: str) -> Iterator[None]:
        self._moving[request_id] = _Moving(model)
        try:
            yield
        finally:
            del self._moving[request_id]

    async def _denoise(
        self, lease: Lease, request: ConditionedRequest, on_progress: OnProgress, *, is_whole: bool = True
    ) -> DiffusionOutput:
        """Run one request in the engine that all requests for the leased modules share; return its last output.

        `is_whole`: the VAE is among them, and the last output has images.
        """
        settings = await self._settings_of(lease)
        pipeline = None if is_whole else await self._sequential.denoise_pipeline(lease)
        engine: _PipelineEngine = lease.bound(lambda: self._engine(lease, pipeline), settings)
        if request.request.merges_adapter:  # beside other requests' steps, which it would delay
            await in_thread(engine.engine.pipeline.merge_adapter, request.request, request.adapters)
        await self._learn_footprints(lease, request, engine.engine.pipeline)
        moving = self._moving[request.request_id]
        if moving.is_wanted:  # before its first step
            return DiffusionOutput(request.request_id, 0, 0, checkpoint=request.resume_from, is_moved=True)

        def on_output(output: DiffusionOutput) -> None:
            if not output.is_last:
                on_progress(progress_of(output))

        moving.engine = engine
        self._num_denoising += 1
        try:
            output = await engine.loop.run_request(request, on_output)
        finally:
            moving.engine = None
            self._num_denoising -= 1
        if time.monotonic() - self._kept_s >= KEEP_COSTS_S:
            self._kept_s = time.monotonic()
            self._keeping = asyncio.ensure_future(self._keep_costs(engine))
        return output

    async def _learn_footprints(self, lease: Lease, request: ConditionedRequest, pipeline: DenoisePipeline) -> None:
        """Learn the memory of a request's forwards, beside other requests' steps, if memory is counted."""
        if (book := self._module_cache.forwards.footprints) is None:
            return
        wanted, folder = request.request, lease.skeleton
        lengths = {
            one.shape[1]
            for name, one in request.conditioning.items()
            if name.endswith("prompt_embeds") and one.ndim == 3
        }
        for length in lengths:
            size = wanted.height, wanted.width, length
            if not book.knows(lease.manifest, *size, adapter_names(wanted)):
                shapes = await in_thread(pipeline.adapter_shapes, wanted, request.adapters)
                await in_thread(book.learn, lease.manifest, folder, *size, shapes)

    async def _keep_costs(self, engine: _PipelineEngine) -> None:
        figures = await self._device.run_work(engine.costs.figures)  # between two steps, which change them
        await asyncio.to_thread(self._remembered.keep_figures, engine.subject, figures)

    def _engine(self, lease: Lease, pipeline: DenoisePipeline | None) -> _PipelineEngine:
        subject = _subject(lease, self._settings)
        costs = self._remembered.recall_costs(subject)
        engine = DiffusionEngine(pipeline or self._pipeline(lease), costs)
        return _PipelineEngine(EngineLoop(self._device, engine, kind="image"), engine, costs, subject)

    async def _settings_of(self, lease: Lease) -> str:
        """Return the identity of the pipeline's settings, read once for each version of a model."""
        version = lease.manifest.model, lease.manifest.fingerprint
        if version not in self._settings_hashes:
            self._settings_hashes[version] = await asyncio.to_thread(settings_hash, lease.skeleton)
            while len(self._settings_hashes) > MAX_SETTINGS:
                self._settings_hashes.pop(next(iter(self._settings_hashes)))
        return self._settings_hashes[version]

    def _pipeline(self, lease: Lease) -> DenoisePipeline:
        return create_pipeline(
            lease.manifest.class_name or "",
            lease.skeleton,
            lease.modules,
            device=self._settings.torch_device,
            bounds=batch_bounds(self._settings),
            replays=self._replays(),
            workspace=self._module_cache.forwards.workspace(lease.manifest),
            ranks=self._channel_of(lease, family_of(lease.manifest.class_name or "").denoiser_name, ROWS),
            tiles=self._channel_of(lease, "vae", TILES),
        )

    def _channel_of(self, lease: Lease, name: str, kind: str) -> RankChannel | None:
        """Return the way to the other ranks' modules of that name; None where this process computes alone."""
        return (
            self._builder.channel_of(lease.modules[name], kind) if isinstance(self._builder, LeadingBuilder) else None
        )

    def _replays(self) -> Replays | None:
        asked = self._settings.replay
        if asked is False or (asked == "auto" and torch.device(self._settings.torch_device).type == "cuda"):
            return None
        return Replays(is_checked=asked == "checked")


def _subject(lease: Lease, settings: WorkerConfig) -> str:
    """Return the key of a step's time, without its shape: structures and dtypes, machine, device and threads."""
    modules = lease.modules.items()
    parts = sorted(f"{name} {type(one).__name__} {_structure(one)}" for name, one in modules)
    place = platform.node(), settings.device, str(torch.get_num_threads())
    return hashlib.sha256("\n".join([*place, *parts]).encode()).hexdigest()


def _structure(module: torch.nn.Module) -> str:
    return str([(name, tuple(one.shape), str(one.dtype)) for name, one in module.named_parameters()])


async def _kept_text(checkpoint: bytes) -> Conditioning:
    """Return the conditioning of a checkpoint. Not on the event loop: it may be megabytes."""
    tensors = await asyncio.to_thread(lambda: pack(conditioning_of(checkpoint)))
    return Conditioning(tensors, encode_ms=0.0, cache=CacheUse(0, 0), warnings=())


@contextlib.asynccontextmanager
async def _under_way(work: Awaitable[Conditioning]) -> AsyncIterator[asyncio.Future[Conditioning]]:
    """Run the work beside the block, at most until its end."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
