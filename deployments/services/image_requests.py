"""An image request in the terms of its engine and its text encoder, and their outputs as pieces of the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cluster.ray_seam.request_ids import part_id
from configs.options import Denoising, PromptReading, said
from deployments.engines.diffusion.families import family_of
from deployments.engines.diffusion.families.base import PlainGuidance
from deployments.engines.records.protocol import (
    AdapterUse,
    ConditionedRequest,
    ControlUse,
    DiffusionOutput,
    DiffusionRequest,
    ImagePromptUse,
)
from deployments.modules.cache import Lease, ModuleCache
from deployments.modules.parts import Fitting, Merging, Wants
from deployments.records import CacheUse, ImageProgress, ImageRequest, ImageResult, SwitchReport
from deployments.text.requests import Conditioning, ConditioningRequest, unpack
from weights.records.manifest import Manifest

OnProgress = Callable[[ImageProgress], None]
_NumberT = TypeVar("_NumberT", int, float)


@dataclass(frozen=True, slots=True, eq=False)
class ImageJob:
    """A running request, which began at `start`: its model, its engine's terms, and its way of leasing the device.

    `is_whole`: denoiser and VAE are leased together. It continues from `checkpoint`, if it has one.
    """

    request: ImageRequest
    manifest: Manifest
    denoise: DiffusionRequest
    checkpoint: bytes | None
    start: float
    merging: Merging | None = None
    is_whole: bool = True

    @property
    def adapter_names(self) -> list[str]:
        """Return the names of its LoRAs, ControlNets and IP-Adapters."""
        uses = (self.request.lora, self.request.control, self.request.ip_adapter)
        return sorted({use.name for some in uses for use in some})

    def lease(
        self,
        cache: ModuleCache,
        wants: Wants,
        adapters: Sequence[str],
        *,
        max_wait_s: float | None = None,
    ) -> AbstractAsyncContextManager[Lease]:
        """Return a lease of the wanted components of its model, and of some of its adapters."""
        return cache.lease(
            self.request.model,
            wants,
            adapters,
            version=self.manifest.fingerprint,
            adapter_versions=self.request.adapter_versions,
            max_wait_s=max_wait_s,
            fitting=Fitting(self.merging, streams=not self.is_whole),
        )

    def conditioned(self, conditioning: Conditioning) -> ConditionedRequest:
        """Return the engine's request without its adapters."""
        request = self.request
        left_s = None if request.timeout_s is None else request.timeout_s - (time.perf_counter() - self.start)
        return ConditionedRequest(
            self.denoise,
            unpack(conditioning.tensors),
            reports_steps=request.reports_steps,
            num_previews=request.partial_images,
            checkpoint_steps=request.checkpoint_steps,
            checkpoint_interval_s=request.checkpoint_interval_s,
            resume_from=self.checkpoint,
            timeout_s=left_s,
        )


def denoise_request(request: ImageRequest) -> DiffusionRequest:
    """Return the request in the engine's terms."""
    return DiffusionRequest(
        request_id=part_id(),
        width=_filled(request.width),
        height=_filled(request.height),
        num_inference_steps=_filled(request.num_inference_steps),
        guidance_scale=_filled(request.guidance_scale),
        seed=_filled(request.seed),
        num_images=request.n,
        adapters=tuple(AdapterUse(use.name, use.scale) for use in request.lora),
        init_image=request.init_image,
        mask_image=request.mask_image,
        image_prompts=tuple(ImagePromptUse(use.name, use.image, use.scale) for use in request.ip_adapter),
        scheduler_options=request.scheduler_options,
        references=request.references,
        latents=request.latents,
        noise_mask=request.noise_mask,
        reference_latents=request.reference_latents,
        pixels=request.pixels,
        output=request.output,
        control=tuple(
            ControlUse(use.name, use.image, use.scale, use.start, use.end, use.mode) for use in request.control
        ),
        **said(request, Denoising),
    )


def _filled(value: _NumberT | None) -> _NumberT:
    if value is None:
        raise ValueError("the request's defaults must be filled in before: see with_image_defaults")
    return value


def conditioning_request(request: ImageRequest, denoise: DiffusionRequest, class_name: str) -> ConditioningRequest:
    """Return the text half of the request, for a text encoder. Takes milliseconds for images, which it resizes."""
    family = family_of(class_name)
    return ConditioningRequest(
        model=request.model,
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        use_negative=family.guidance_of(denoise).uses_negative(denoise, request.negative_prompt is not None),
        model_version=request.model_version,
        text_padding=request.text_padding,
        long_text=request.long_text,
        priority=request.priority,
        timeout_s=request.timeout_s,
        adapters={use.name: use.scale if use.text_scale is None else use.text_scale for use in request.lora},
        encodes_alone=bool(request.deterministic),
        adapter_versions=request.adapter_versions,
        images=tuple(map(family.references.seen, denoise.references)),
        prompt_2=request.prompt_2,
        **said(request, PromptReading),
    )


def progress_of(output: DiffusionOutput) -> ImageProgress:
    """Return the progress of a step in the form for the caller."""
    previews = () if output.preview is None else tuple(output.preview)
    return ImageProgress(
        output.step_index, output.num_steps, previews, output.preview_index, output.checkpoint, output.is_moved
    )


def result_of(
    request: ImageRequest,
    denoise: DiffusionRequest,
    output: DiffusionOutput,
    conditioning: Conditioning,
    report: SwitchReport,
    warnings: tuple[str, ...],
    total_s: float,
) -> ImageResult:
    """Return the answer made of the last output."""
    images: list[npt.NDArray[np.uint8]] = []
    array = None
    if request.output == "image":
        assert output.images is not None  # it is the last
        images = list(output.images)
    elif output.latents is not None:
        array = output.latents.numpy()
    return ImageResult(
        model=request.model,
        images=images,
        seed=denoise.seed,
        num_inference_steps=denoise.num_inference_steps,
        timings_ms={
            "queue": output.times.queue_s * 1e3,
            "encode": conditioning.encode_ms,
            "switch": report.switch_ms,
            "denoise": output.times.denoise_s * 1e3,
            "decode": output.times.decode_s * 1e3,
            "total": total_s * 1e3,
        },
        switch=report,
        cache=conditioning.cache,
        warnings=warnings,
        guidance_scale=denoise.guidance_scale,
        array=array,
    )


def vae_result(
    request: ImageRequest, array: npt.NDArray[np.float32], report: SwitchReport, total_s: float
) -> ImageResult:
    """Return the answer to a request for the VAE's work alone."""
    timings = {"switch": report.switch_ms, "total": total_s * 1e3}
    return ImageResult(request.model, [], None, None, timings, report, CacheUse(0, 0), array=array)


def ignored_inputs(request: ImageRequest, use_negative: bool, class_name: str) -> tuple[str, ...]:
    """Return warnings about options that had no effect."""
    family, found = family_of(class_name), []
    if request.negative_prompt and not use_negative:
        rule = family.guidance.rule if request.sampler is None else PlainGuidance.rule
        found.append(f"negative_prompt had no effect: guidance is off ({class_name} needs {rule})")
    if request.clip_skip and not family.texts.takes_clip_skip:
        found.append(f"clip_skip had no effect: {class_name} reads its prompts by other layers")
    return tuple(found)
