"""The latents before the first step: noise, or an image under noise; and the kept, unmasked part of an image.

Noise is drawn in the order of the stock pipelines, from the same generator: the sample of the image's latents, the
noise, the sample of the masked image's latents. A stochastic solver goes on drawing from there. Source: diffusers 0.42,
`pipelines/stable_diffusion/pipeline_stable_diffusion_{img2img,inpaint}.py`, and the same of SDXL, SD3 and Flux.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers.utils.torch_utils import randn_tensor
from torch.nn import functional as F

from deployments.engines.diffusion.families.base import Family, ImageSize
from deployments.engines.diffusion.image_codec import ImageCodec, unit_pixels
from deployments.engines.diffusion.samplers import MaskedLatents, SigmaSolver, first_noise
from deployments.engines.diffusion.solvers import add_noise
from deployments.engines.records.protocol import DiffusionRequest, EngineError
from weights.memory.devices import host_generator

_MASKED_FROM = 128  # of 255, as stock's 0.5
_ALIKE = 0.9995  # noises with a higher cosine are not interpolated


@dataclass(frozen=True, slots=True)
class KeptImage:
    """An image with a kept part: latents, noise and mask (1 is painted anew), all of one shape."""

    latents: torch.Tensor
    noise: torch.Tensor
    mask: torch.Tensor

    def put_back(self, solver: Any, latents: torch.Tensor, next_timestep: torch.Tensor | None) -> torch.Tensor:
        """Return the latents with the kept part as noisy as the next step expects; None if there is no next step."""
        kept = self.latents
        if next_timestep is not None:
            kept = add_noise(solver, kept, self.noise, next_timestep.reshape(1))
        return (1 - self.mask) * kept + self.mask * latents


@dataclass(frozen=True, slots=True)
class FirstLatents:
    """Latents before step `first_step` of the solver's schedule.

    `extra_channels` are the denoiser's further inputs along the second axis: (B, 5, h, w), mask and masked image,
    of an inpainting UNet of 9 channels; images in patches, for a family that reads them beside its latents.
    """

    latents: torch.Tensor
    first_step: int = 0
    kept: KeptImage | None = None
    extra_channels: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LatentsMaker:
    """Makes the first latents of the requests of one pipeline."""

    family: Family
    codec: ImageCodec
    denoiser_config: Mapping[str, Any]
    device: torch.device

    def first_latents(
        self, request: DiffusionRequest, size: ImageSize, solver: Any, generator: torch.Generator, dtype: torch.dtype
    ) -> FirstLatents:
        """Draw the noise of a request, in `dtype`, and begin at its image if it has one.

        The solver's begin index is set. Raises EngineError for a request that this pipeline cannot begin.
        """
        family = self.family
        if family.steps.refines_only and request.init_image is None:
            raise EngineError("this model refines images, and makes none of a prompt alone: give it an init_image")
        num_extra = family.network.num_extra_channels(self.denoiser_config)
        if num_extra and request.mask_image is None:
            raise EngineError("this model paints the masked part: give it an init_image and a mask_image")
        shape = self.shape_of(request, size)

        def draw(num_images: int) -> torch.Tensor:
            return randn_tensor((num_images, *shape[1:]), generator=generator, device=self.device, dtype=dtype)

        def draw_noise() -> torch.Tensor:
            noise = draw(request.num_images)
            if (variation := request.variation) is None:
                return noise
            own = host_generator(variation.seed)
            other = randn_tensor(noise.shape, generator=own, device=self.device, dtype=dtype)
            return mixed_noise(noise, other, variation.strength)

        if request.init_image is None or family.steps.attends_to_image:
            begun = family.latents.pack(family.latents.first(draw_noise(), solver))
            return FirstLatents(begun, extra_channels=self._images_beside(request, begun))
        first_step = _first_step(family, request, solver)
        image = unit_pixels(request.init_image, self.device) * 2 - 1
        mask = None if request.mask_image is None else _mask_pixels(request.mask_image, self.device)
        # Stock's UNets of 9 channels see the image in those only, unless some of it shows through the first noise.
        starts_as_noise = mask is not None and family.steps.inpaints_from_noise and request.strength == 1.0
        latents = noise = torch.empty(0)
        if not (num_extra and starts_as_noise):
            latents = self._encode(image, generator, dtype, request).expand(shape)
        noise = draw_noise()
        if starts_as_noise:
            begun = family.latents.first(noise, solver)
        else:
            timesteps = solver.timesteps[first_step].expand(request.num_images)
            begun = add_noise(solver, latents, noise, timesteps)
        begun = family.latents.pack(begun)
        if mask is None:
            return FirstLatents(begun, first_step)
        mask_B1hw = F.interpolate(mask, size=shape[2:]).to(dtype).expand(request.num_images, -1, -1, -1)
        if num_extra:
            masked = self._encode(image * (1 - mask), generator, dtype, request).expand(shape)
            return FirstLatents(begun, first_step, extra_channels=torch.cat([mask_B1hw, masked], dim=1))
        if self.codec.draws_latents:
            draw(1)  # stock encodes the masked image and ignores it
        pack: Callable[[torch.Tensor], torch.Tensor] = family.latents.pack
        kept = KeptImage(pack(latents), pack(noise), pack(mask_B1hw.expand(shape)))
        return FirstLatents(begun, first_step, kept)

    def sampled_latents(
        self, request: DiffusionRequest, size: ImageSize, solver: SigmaSolver, dtype: torch.dtype
    ) -> FirstLatents:
        """Return the latents of a request with a sampler before its first step; `dtype` is the denoiser's.

        Raises EngineError for a request that this pipeline cannot begin.
        """
        family, sampler = self.family, solver.sampler
        if family.network.num_extra_channels(self.denoiser_config):
            raise EngineError(
                "sampler: this model paints the masked part, and reads it beside its latents; leave it out"
            )
        shape = self.shape_of(request, size)
        latents = torch.zeros(shape, device=self.device)
        if request.latents is not None:
            latents = self.taken_in(request.latents, shape)
        noise = torch.zeros(shape, device=self.device)
        if sampler.adds_noise:
            seed = request.seed if sampler.noise_seed is None else sampler.noise_seed
            noise = first_noise(sampler, shape, seed).to(self.device)
        pack = family.latents.pack
        if request.noise_mask is not None:
            mask = torch.from_numpy(request.noise_mask).to(self.device)[:, None]
            mask_BChw = F.interpolate(mask, size=shape[2:], mode="bilinear").expand(shape)
            solver.kept = MaskedLatents(pack(latents), pack(noise), pack(mask_BChw))
        begun = solver.first_latents(pack(latents), pack(noise))
        return FirstLatents(begun, extra_channels=self._images_beside(request, begun.to(dtype)))

    def shape_of(self, request: DiffusionRequest, size: ImageSize) -> tuple[int, ...]:
        """Return the shape (B, C, h, w) of a request's latents."""
        return (request.num_images, *self.family.latents.noise_shape(self.denoiser_config, size))

    def taken_in(self, given: npt.NDArray[np.float32], shape: tuple[int, ...]) -> torch.Tensor:
        """Return latents of a request at the scale at which they are denoised; zeros stay zeros.

        Raises EngineError for another shape.
        """
        if given.shape != shape:
            raise EngineError(f"latents: their shape is {given.shape}, expected {shape} for images of this size")
        latents = torch.tensor(given, device=self.device)
        return self.codec.scaled(latents, self.family.latents.taken_in) if given.any() else latents

    def _images_beside(self, request: DiffusionRequest, begun: torch.Tensor) -> torch.Tensor | None:
        """Return the images of a request in patches (B, N, C), for a family that reads them beside the latents."""
        images = request.references if request.init_image is None else (request.init_image,)
        if not images and not request.reference_latents:
            return None
        patches = []
        for image in images:
            pixels = (unit_pixels(image, self.device) * 2 - 1).to(begun.dtype)
            latents = self.codec.most_likely(pixels, self.family.latents.scale)
            patches.append(self.family.latents.pack(latents).to(begun))
        channels, *_ = self.family.latents.noise_shape(self.denoiser_config, ImageSize(0, 0, 0, 0))
        for given in request.reference_latents:
            if given.shape[:2] != (1, channels):
                raise EngineError(f"reference_latents: their shape is {given.shape}, expected (1, {channels}, ...)")
            latents = self.codec.scaled(torch.tensor(given, device=self.device), self.family.latents.taken_in)
            patches.append(self.family.latents.pack(latents).to(begun))
        return torch.cat(patches, dim=1).expand(request.num_images, -1, -1)

    def _encode(
        self, image: torch.Tensor, generator: torch.Generator, dtype: torch.dtype, request: DiffusionRequest
    ) -> torch.Tensor:
        may_change = not request.deterministic
        latents = self.codec.encode(
            image.to(dtype), generator, upcasts=self.family.latents.upcasts_vae, may_change=may_change
        )
        return self.family.latents.scale(latents.to(dtype), self.codec.vae)


def mixed_noise(noise: torch.Tensor, other: torch.Tensor, share: float) -> torch.Tensor:
    """Interpolate noises (B, C, h, w) spherically, along the columns of each channel.

    Source: AUTOMATIC1111/stable-diffusion-webui, `modules/rng.py:slerp`, for each image.
    """
    found = []
    for low, high in zip(noise.float(), other.float(), strict=True):
        cosines = (low / low.norm(dim=1, keepdim=True) * (high / high.norm(dim=1, keepdim=True))).sum(1)
        if cosines.mean() > _ALIKE:
            found.append(low * share + high * (1 - share))
            continue
        angles = cosines.clamp(-1, 1).acos().unsqueeze(1)
        found.append((((1 - share) * angles).sin() * low + (share * angles).sin() * high) / angles.sin())
    return torch.stack(found).to(noise.dtype)


def _first_step(family: Family, request: DiffusionRequest, solver: Any) -> int:
    """Return the place in the solver's schedule to begin at, by the request's strength, and begin there.

    If the request has its own schedule, stock counts the solver's steps of it.
    """
    is_given = request.sigmas is not None or request.timesteps is not None
    num_steps = len(solver.timesteps) if is_given else request.num_inference_steps
    first = family.steps.first(num_steps, request.strength) * solver.order
    if first >= len(solver.timesteps):
        raise EngineError(f"strength {request.strength} of {num_steps} steps leaves no step to take; ask for more")
    if hasattr(solver, "set_begin_index"):
        solver.set_begin_index(first)
    return first


def _mask_pixels(mask: npt.NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    """Return a mask, uint8 (H, W), as float32 (1, 1, H, W) of zeros and ones."""
    return torch.from_numpy((mask >= _MASKED_FROM).astype(np.float32))[None, None].to(device)
