"""Latents that a model reads in channels beside its own: of an image with a part to fill in, or of a control image.

FLUX.1's classes for both encode images by themselves, sampling the VAE's posterior from the request's generator. A
request that brings the latents has the noise of its seed, and a mask that may be soft.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F

from deployments.engines.diffusion.families.flow_matching import PATCH, PackedLatents
from deployments.engines.records.protocol import BesideLatents, EngineError, StockRequest

FILLS: Final = "FluxFillPipeline"
CONTROLLED: Final = "FluxControlPipeline"
_LATENTS: Final = PackedLatents()


def put_beside(pipeline: Any, request: StockRequest) -> dict[str, Any]:
    """Make a pipeline of one request read its latents, and return arguments of its call. Raises EngineError."""
    beside = request.beside
    if beside is None:
        if request.latents is not None or request.noise_mask is not None:
            raise EngineError("latents: a model that diffusers' own code runs keeps none of them")
        return {}
    name, count = type(pipeline).__name__, request.num_images
    if name == CONTROLLED:
        _check(pipeline, request, has_mask=False)
        return {"control_image": _packed(pipeline, beside.latents)}
    if name != FILLS:
        raise EngineError(f"beside: a {name} reads no latents in further channels ({FILLS} and {CONTROLLED} do)")
    _check(pipeline, request, has_mask=True)
    masked = _packed(pipeline, beside.latents).expand(count, -1, -1)
    mask = _packed_mask(pipeline, beside).expand(count, -1, -1)
    prepare = pipeline.prepare_latents

    def with_noise(image: Any, timestep: Any, batch: int, channels: int, *rest: Any) -> Any:
        *sizes, generator, _ = rest
        _, _, height, width = beside.latents.shape
        noise = torch.randn((batch, channels, height, width), generator=generator)
        return prepare(image, timestep, batch, channels, *sizes, generator, _LATENTS.pack(noise))

    def with_masks(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, device = given[7:9]
        return mask.to(device, dtype), masked.to(device, dtype)

    pipeline.prepare_latents, pipeline.prepare_mask_latents = with_noise, with_masks
    if request.noise_mask is not None and request.latents is not None:
        pipeline.scheduler.keep(*_kept(pipeline, request.latents, request.noise_mask))
    size = request.fields["width"], request.fields["height"]
    return {"image": PIL.Image.new("RGB", size), "mask_image": PIL.Image.new("L", size)}  # by nobody read


def _check(pipeline: Any, request: StockRequest, *, has_mask: bool) -> None:
    beside = request.beside
    assert beside is not None
    if request.sampler is None:
        raise EngineError("beside: latents beside others come with a sampler")
    cell, size = pipeline.vae_scale_factor, (request.fields.get("width"), request.fields.get("height"))
    sides = tuple(cell * side for side in beside.latents.shape[:1:-1])
    channels = pipeline.vae.config.latent_channels
    if beside.latents.shape[:2] != (1, channels) or sides != size or any(side % (PATCH * cell) for side in sides):
        expected = f"(1, {channels}, ...) for {size[0]}x{size[1]} pixels, whole patches"
        raise EngineError(f"beside: latents of the shape {beside.latents.shape}, expected {expected}")
    if has_mask != (beside.mask is not None):
        raise EngineError("beside: a mask comes with the latents of an image to fill in, and with no others")
    if beside.mask is not None and beside.mask.shape != (1, *sides[::-1]):
        raise EngineError(f"beside: a mask of the shape {beside.mask.shape}, expected {(1, *sides[::-1])}")
    if request.latents is not None and request.latents.shape != beside.latents.shape:
        raise EngineError(f"latents: their shape is {request.latents.shape}, expected {beside.latents.shape}")
    if request.noise_mask is not None and len(request.noise_mask) != 1:
        raise EngineError(f"noise_mask: {len(request.noise_mask)} of them, expected one")


def _packed(pipeline: Any, latents: np.ndarray) -> torch.Tensor:
    return _LATENTS.pack(_LATENTS.scale(torch.from_numpy(np.array(latents)), pipeline.vae))


def _packed_mask(pipeline: Any, beside: BesideLatents) -> torch.Tensor:
    """Return a mask in the form of latents: the pixels of each place are its channels."""
    assert beside.mask is not None
    pixels = torch.from_numpy(np.array(beside.mask))[:, None]
    return _LATENTS.pack(F.pixel_unshuffle(pixels, pipeline.vae_scale_factor))


def _kept(pipeline: Any, latents: np.ndarray, noise_mask: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    shape = latents.shape
    mask = F.interpolate(torch.from_numpy(np.array(noise_mask))[:, None], size=shape[2:], mode="bilinear")
    return _packed(pipeline, latents), _LATENTS.pack(mask.expand(shape).contiguous())
