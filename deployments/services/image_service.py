"""ImageService: images from the models that a module cache has built. Ray-free: the worker and `local.py` share it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import platform
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import torch

from configs.cluster import WorkerConfig
from deployments.engines.diffusion.checkpoints import conditioning_of
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.diffusion.families import family_of
from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline, settings_hash
from deployments.engines.protocol import ConditionedRequest, DiffusionOutput, DiffusionRequest
from deployments.engines.step_costs import StepCosts
from deployments.errors import as_service_errors
from deployments.modules.cache import ModuleCache
from deployments.modules.lease import Lease
from deployments.modules.loading import batch_bounds, is_denoise_component
from deployments.modules.merging import Merging
from deployments.records import CacheUse, ImageProgress, ImageRequest, ImageResult, SwitchReport
from deployments.services.apart_phases import ApartPhases
from deployments.services.image_requests import (
    conditioning_request,
    denoise_request,
    ignored_inputs,
    progress_of,
    result_of,
)
from deployments.services.remembered_costs import RememberedCosts
from deployments.services.step_loop import DeviceThread, EngineLoop
from deployments.tasks import in_thread, shared_task
from deployments.text.requests import Conditioning, ConditioningRequest, pack, unpack
from weights.manifest import Manifest

EncodeText = Callable[[ConditioningRequest], Awaitable[Conditioning]]
_WithText = Callable[[], Awaitable[ConditionedRequest]]
_LeaseParts = Callable[..., AbstractAsyncContextManager[Lease]]  # `ModuleCache.lease` of one model
OnStep = Callable[[int, int], None]  # steps done, steps in all
ImagePiece = ImageProgress | ImageResult
MAX_SETTINGS: Final = 1024
_NO_PREVIEWS: Final = "partial_images: none were made, the device has no room for denoiser and VAE together"
KEEP_COSTS_S: Final = 30.0  # from one writing of the measured costs to the next


class _PipelineEngine(NamedTuple):
    """The engine of one pipeline, and the name that its costs are remembered under."""

    loop: EngineLoop[ConditionedRequest, DiffusionOutput]
    engine: DiffusionEngine
    costs: StepCosts
    subject: str


@dataclass(slots=True)
class _Moving:
    """A request that may be handed over, its engine once it is there, and whether that is wanted."""

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
        remembered: RememberedCosts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._module_cache = module_cache
        self._settings = settings
        self._device = device
        self._apart = ApartPhases(settings, device)
        self._settings_hashes: dict[tuple[str, str], str] = {}  # by model and version
        self._remembered = remembered or RememberedCosts()
        self._clock = clock
        self._kept_s = clock()
        self._keeping: asyncio.Task[None] | None = None
        self._moving: dict[str, _Moving] = {}  # by request
        self._hand_overs: set[asyncio.Task[None]] = set()
        self.num_running = 0  # requests between their noise and their images

    def hand_over(self, models: Collection[str]) -> None:
        """Let another replica go on with the requests of these models that are under way, each after its next step."""
        for request_id, moving in self._moving.items():
            if moving.model in models and not moving.is_wanted:
                moving.is_wanted = True
                if moving.engine is not None:
                    self._begin_hand_over(request_id, moving.engine)

    def _begin_hand_over(self, request_id: str, engine: _PipelineEngine) -> None:
        self._hand_overs.add(task := shared_task(engine.loop.end_early(request_id, engine.engine.hand_over)))
        task.add_done_callback(self._hand_overs.discard)

    async def generate(
        self,
        request: ImageRequest,
        encode_text: EncodeText,
        *,
        encode_first: bool = False,
        on_step: OnStep | None = None,
    ) -> ImageResult:
        """Return the images of a request, as `stream_images` does; nothing but `on_step` tells of the way there."""
        reports = {"reports_steps": on_step is not None, "partial_images": 0, "checkpoint_steps": 0}
        pieces = self.stream_images(request.model_copy(update=reports), encode_text, encode_first=encode_first)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, ImageResult):
                    return piece
                if on_step is not None:
                    on_step(piece.step, piece.num_steps)
        raise AssertionError("a stream of images ends with its result")

    async def stream_images(
        self,
        request: ImageRequest,
        encode_text: EncodeText,
        *,
        checkpoint: bytes | None = None,
        encode_first: bool = False,
    ) -> AsyncGenerator[ImagePiece, None]:
        """Yield what the request asks to hear of its steps, and its ImageResult at the end.

        `with_image_defaults` has filled the request in. With a `checkpoint` of the same request it goes on from there,
        and no text is encoded. Else the model is switched to while the text is being encoded; with `encode_first` after
        it, for an encoder that takes room from the same cache. Closing the generator early ends the request. One that
        is handed over ends with a piece that says so.

        Raises the ServiceErrors of `deployments.errors`, and what `encode_text` raises; nothing is leased then.
        """
        start = time.perf_counter()
        denoise = denoise_request(request)
        with as_service_errors(), self._movable(denoise.request_id, request.model):
            manifest = await self._module_cache.manifests.find_version(request.model, request.model_version)
            text = conditioning_request(request, denoise, manifest.class_name or "")
            encoding = asyncio.ensure_future(_kept_text(checkpoint) if checkpoint else encode_text(text))
            try:
                if encode_first:
                    await encoding
                adapters = await self._adapters_of(request)
                merging = self._merging(request, manifest, adapters)
                if merging is not None:
                    denoise = replace(denoise, merges_adapter=True)
                with_text = partial(_with_text, request, denoise, encoding, checkpoint, start)
                is_whole = self._module_cache.can_hold(manifest, is_denoise_component, adapters, merging)
                lease_parts = partial(
                    self._module_cache.lease,
                    request.model,
                    version=manifest.fingerprint,
                    adapter_versions=request.adapter_versions,
                    merging=merging,
                )
                if is_whole:
                    outputs = self._run_whole(request, lease_parts, with_text)
                else:
                    outputs = self._run_apart(request, manifest, lease_parts, with_text)
                async with contextlib.aclosing(outputs) as told:
                    async for output, report in told:  # noqa: B007  # the last report is told
                        if not output.is_last:
                            yield progress_of(output)
                conditioning = await encoding
            finally:
                encoding.cancel()
        if output.is_moved:
            yield progress_of(output)
            return
        warnings: tuple[str, ...] = () if is_whole or not request.partial_images else (_NO_PREVIEWS,)
        warnings += conditioning.warnings + ignored_inputs(request, text.use_negative, manifest.class_name or "")
        yield result_of(request, denoise, output, conditioning, report, warnings, time.perf_counter() - start)

    async def _adapters_of(self, request: ImageRequest) -> dict[str, Manifest]:
        """Return the manifests of the LoRAs and ControlNets of a request, by name."""
        find, versions = self._module_cache.manifests.find_version, request.adapter_versions
        return {name: await find(name, versions.get(name)) for name in _adapter_names(request)}

    async def _run_whole(
        self, request: ImageRequest, lease_parts: _LeaseParts, with_text: _WithText
    ) -> AsyncGenerator[tuple[DiffusionOutput, SwitchReport], None]:
        """Yield what the engine tells of a request whose whole model is leased, and the switch to that."""
        async with lease_parts(is_denoise_component, _adapter_names(request)) as lease:
            ready = replace(await with_text(), adapters=lease.adapters)
            async with contextlib.aclosing(self._denoise(lease, ready)) as outputs:
                async for output in outputs:
                    yield output, lease.report

    async def _run_apart(
        self, request: ImageRequest, manifest: Manifest, lease_parts: _LeaseParts, with_text: _WithText
    ) -> AsyncGenerator[tuple[DiffusionOutput, SwitchReport], None]:
        """Yield what the engine tells of a request that has a phase of its model at a time, and the switches so far."""
        phases = self._apart.stream_phases(
            request,
            replace(await with_text(), num_previews=0),
            manifest,
            lambda wants, names, max_wait_s: lease_parts(wants, names, max_wait_s=max_wait_s, streams=True),
            partial(self._denoise, is_whole=False),
        )
        async with contextlib.aclosing(phases) as told:
            async for output_and_report in told:
                yield output_and_report

    def _merging(self, request: ImageRequest, manifest: Manifest, adapters: Mapping[str, Manifest]) -> Merging | None:
        """Return which LoRA of the request is merged."""
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
        self, lease: Lease, request: ConditionedRequest, *, is_whole: bool = True
    ) -> AsyncGenerator[DiffusionOutput, None]:
        """Run one request in the engine of the leased modules, which all requests for them share.

        `is_whole`: the VAE is among them, and the last output has images.
        """
        settings = await self._settings_of(lease)
        pipeline = None if is_whole else await self._apart.denoise_pipeline(lease)
        engine: _PipelineEngine = lease.bound(lambda: self._engine(lease, pipeline), settings)
        if request.request.merges_adapter:  # beside the steps of others, which it would hold up
            await in_thread(engine.engine.pipeline.merge_adapter, request.request, request.adapters)
        moving = self._moving[request.request_id]
        if moving.is_wanted:  # before it has begun
            yield DiffusionOutput(request.request_id, 0, 0, checkpoint=request.resume_from, is_moved=True)
            return
        moving.engine = engine
        self.num_running += 1
        try:
            # Closed before the lease ends: the engine may be in a step of this request when the stream is left.
            async with contextlib.aclosing(engine.loop.stream_outputs(request)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            moving.engine = None
            self.num_running -= 1
        if self._clock() - self._kept_s >= KEEP_COSTS_S:
            self._kept_s = self._clock()
            self._keeping = asyncio.ensure_future(self._keep_costs(engine))

    async def _keep_costs(self, engine: _PipelineEngine) -> None:
        figures = await self._device.run_work(engine.costs.figures)  # between two steps, which change them
        await asyncio.to_thread(self._remembered.keep_figures, engine.subject, figures)

    def _engine(self, lease: Lease, pipeline: DenoisePipeline | None) -> _PipelineEngine:
        subject = _subject(lease, self._settings)
        costs = self._remembered.recall_costs(subject)
        engine = DiffusionEngine(pipeline or self._pipeline(lease), costs)
        return _PipelineEngine(EngineLoop(self._device, engine), engine, costs, subject)

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
        )


def _adapter_names(request: ImageRequest) -> list[str]:
    return sorted({*(use.name for use in request.lora), *(use.name for use in request.control)})


def _subject(lease: Lease, settings: WorkerConfig) -> str:
    """Return what a step's time depends on beside its shape: structures and dtypes, the machine, device and threads."""
    modules = lease.modules.items()
    parts = sorted(f"{name} {type(one).__name__} {_structure(one)}" for name, one in modules)
    place = platform.node(), settings.device, str(torch.get_num_threads())
    return hashlib.sha256("\n".join([*place, *parts]).encode()).hexdigest()


def _structure(module: torch.nn.Module) -> str:
    return str([(name, tuple(one.shape), str(one.dtype)) for name, one in module.named_parameters()])


async def _with_text(
    request: ImageRequest,
    denoise: DiffusionRequest,
    encoding: Awaitable[Conditioning],
    checkpoint: bytes | None,
    start: float,
) -> ConditionedRequest:
    """Return what the engine is given, once the text is encoded. The request began at `start`."""
    tensors = unpack((await encoding).tensors)
    return ConditionedRequest(
        denoise,
        tensors,
        reports_steps=request.reports_steps,
        num_previews=request.partial_images,
        checkpoint_steps=request.checkpoint_steps,
        checkpoint_interval_s=request.checkpoint_interval_s,
        resume_from=checkpoint,
        timeout_s=_time_left(request, start),
    )


async def _kept_text(checkpoint: bytes) -> Conditioning:
    """Return the conditioning of a checkpoint. Not on the event loop: it may be megabytes."""
    tensors = await asyncio.to_thread(lambda: pack(conditioning_of(checkpoint)))
    return Conditioning(tensors, encode_ms=0.0, cache=CacheUse(0, 0), warnings=())


def _time_left(request: ImageRequest, start: float) -> float | None:
    return None if request.timeout_s is None else request.timeout_s - (time.perf_counter() - start)
