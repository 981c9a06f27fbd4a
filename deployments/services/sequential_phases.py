"""An image in phases that lease the device one after the other: VAE, denoiser, VAE. For devices too small for both.

A request holds one lease at a time and waits for room with none, so requests never wait for each other in a circle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from configs.cluster import WorkerConfig
from deployments.engines.building.skeletons import blank_module
from deployments.engines.diffusion.families import family_of, vae_family_of
from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline
from deployments.engines.records.protocol import ConditionedRequest, DiffusionOutput
from deployments.modules.cache import Lease, ModuleCache
from deployments.modules.loading import batch_bounds, is_denoise_component
from deployments.modules.parts import Wants
from deployments.records import SwitchReport
from deployments.replicas.step_loop import DeviceThread
from deployments.services.image_requests import ImageJob
from weights.records.manifest import Component
from weights.residency.recent import Recent

MAX_BLANK: Final = 8  # a blank FLUX transformer takes about 5 MB
MAX_WAIT_S: Final = 3600.0  # for the VAE after the steps: other requests end, and this one has a deadline
VAE: Final = "vae"

Denoise = Callable[[Lease, ConditionedRequest], Awaitable[DiffusionOutput]]  # -> the last output


class SequentialPhases:
    """The pipelines of one device that leases denoiser and VAE in turn. Lives on one event loop."""

    def __init__(self, cache: ModuleCache, settings: WorkerConfig, device: DeviceThread) -> None:
        self._cache = cache
        self._settings = settings
        self._device = device
        self._blank: Recent[str, nn.Module] = Recent(MAX_BLANK)  # by structure

    async def run_phases(
        self, job: ImageJob, conditioned: ConditionedRequest, run: Denoise
    ) -> tuple[DiffusionOutput, SwitchReport]:
        """Return the images, or the last output of a migrated request, with all switches. `run` denoises.

        `conditioned` lacks its adapters.
        """
        request, family = job.request, family_of(job.manifest.class_name or "")
        denoiser = family.denoiser_name
        nets = sorted({use.name for use in request.control})
        take = partial(job.lease, self._cache)
        reports = []
        has_inputs = request.init_image is not None or request.latents is not None
        has_inputs = has_inputs or bool(request.references or request.reference_latents)
        if has_inputs or (nets and family.adapters.encodes_controls):
            async with take(_all_but(denoiser), nets) as lease:
                reports.append(lease.report)
                pipeline = await self._pipeline(lease, denoiser)
                posteriors = await self._device.run_work(
                    pipeline.encode_inputs, conditioned.request, conditioned.conditioning, lease.adapters
                )
            del pipeline, lease  # a float16 VAE has copied itself, and the copy goes with them
            conditioned = replace(conditioned, posteriors=posteriors)
        async with take(_all_but(VAE), job.adapter_names) as lease:
            reports.append(lease.report)
            output = await run(lease, replace(conditioned, adapters=lease.adapters))
        if output.is_moved:
            return output, _together(reports)
        loop, latents = asyncio.get_running_loop(), output.latents
        assert latents is not None  # the VAE was not leased
        start = loop.time()
        async with take(_all_but(denoiser), [], max_wait_s=MAX_WAIT_S) as lease:
            reports.append(lease.report)
            pipeline = await self._pipeline(lease, denoiser)
            made = await self._device.run_work(pipeline.decode_latents, conditioned.request, latents)
        times = replace(output.times, decode_s=loop.time() - start)
        images, latents = (None, made) if isinstance(made, torch.Tensor) else (made, None)
        return replace(output, images=images, latents=latents, times=times), _together(reports)

    async def run_vae(self, job: ImageJob) -> tuple[npt.NDArray[np.float32], SwitchReport]:
        """Return the VAE's result for a request's pixels or latents, and the switch: a turn for each image."""
        family = vae_family_of(job.manifest.class_name or "")
        async with job.lease(self._cache, _all_but(family.denoiser_name), []) as lease:
            pipeline = await self._pipeline(lease, family.denoiser_name, family.class_name)
            vae = pipeline.vae_alone
            run = vae.encode if job.request.output == "encoded" else vae.decode
            found = [await self._device.run_work(run, job.denoise, place) for place in range(job.request.n)]
            return np.stack(found), lease.report

    async def denoise_pipeline(self, lease: Lease) -> DenoisePipeline:
        """Return a pipeline that denoises with the leased modules, and has no VAE."""
        return await self._pipeline(lease, VAE)

    async def _pipeline(self, lease: Lease, absent: str, class_name: str = "") -> DenoisePipeline:
        """Return the pipeline over a lease that lacks one module; it is of the model's class, or of another one."""
        component = lease.manifest.components[absent]
        blank = await asyncio.to_thread(self._blank_module, component, lease.skeleton / component.folder)

        def make() -> DenoisePipeline:
            return create_pipeline(
                class_name or lease.manifest.class_name or "",
                lease.skeleton,
                lease.modules | {absent: blank},
                device=self._settings.torch_device,
                bounds=batch_bounds(self._settings),
                workspace=self._cache.forwards.workspace(lease.manifest),
            )

        pipeline: DenoisePipeline = lease.bound(make, f"without {component.module_key} of {lease.manifest.fingerprint}")
        return pipeline

    def _blank_module(self, component: Component, folder: Path) -> nn.Module:
        return self._blank.used(component.module_key, lambda: blank_module(component, folder))


def _all_but(name: str) -> Wants:
    return lambda component: is_denoise_component(component) and component.name != name


def _together(reports: list[SwitchReport]) -> SwitchReport:
    """Return the sum of the switches of one request."""
    first, *others = reports
    for other in others:
        numbers = {
            name: getattr(first, name) + getattr(other, name)
            for name in SwitchReport.__dataclass_fields__
            if name not in ("model", "built", "reused")
        }
        built = tuple(dict.fromkeys((*first.built, *other.built)))
        reused = tuple(name for name in dict.fromkeys((*first.reused, *other.reused)) if name not in built)
        first = replace(first, **numbers, built=built, reused=reused)
    return first
