"""The ControlNets of a request: networks beside the denoiser, whose residuals it adds up in some of the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deployments.engines.diffusion.families.base import Family
from deployments.engines.diffusion.image_codec import ImageCodec, unit_pixels
from deployments.engines.nn.batch_invariant import make_batch_invariant
from deployments.engines.protocol import DiffusionRequest, EngineError


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """A ControlNet and its image as it reads it, (num_images, …). `reads_prompt`: never the negative prompt."""

    name: str
    net: Any
    image: torch.Tensor
    scale: float
    start: float
    end: float
    reads_prompt: bool

    def acts_at(self, step_index: int, num_steps: int) -> bool:
        """Return whether it acts at a step, counted from 0: the whole step lies within its part of the schedule."""
        return not (step_index / num_steps < self.start or (step_index + 1) / num_steps > self.end)


def make_controls(
    request: DiffusionRequest,
    known: Mapping[str, object],
    family: Family,
    denoiser: Any,
    codec: ImageCodec,
    generator: torch.Generator,
    device: torch.device,
) -> tuple[Control, ...]:
    """Return the ControlNets of a request, in its order; encoding an image may draw from the generator, as in stock.

    `known` has them by name. Raises EngineError for one that is not there or does not fit the denoiser.
    """
    controls = []
    for use in request.control:
        net = known.get(use.name)
        if not isinstance(net, nn.Module):
            nets = ", ".join(sorted(name for name, thing in known.items() if isinstance(thing, nn.Module)))
            raise EngineError(f"control: {use.name!r} is no known ControlNet (known: {nets or 'none'})")
        if reason := _misfit(family, net, denoiser, codec.scale_factor):
            raise EngineError(f"control: {use.name!r} {reason}")
        make_batch_invariant(net)
        pixels = unit_pixels(use.image, device).expand(request.num_images, -1, -1, -1)
        with torch.no_grad():
            image = family.control_image(net, pixels, lambda images: codec.encode(images, generator), codec.vae)
        image = image.to(device, denoiser.dtype)
        controls.append(Control(use.name, net, image, use.scale, use.start, use.end, family.controls_read_prompt))
    return tuple(controls)


def _misfit(family: Family, net: Any, denoiser: Any, pixels_per_latent: int) -> str | None:
    """Return why the ControlNet cannot go with the denoiser, or None."""
    reason = family.control_misfit(type(net).__name__, net.config, denoiser.config, pixels_per_latent)
    if reason is None and net.dtype != denoiser.dtype:
        return f"is in {net.dtype}, and the model in {denoiser.dtype}: register it again, without a dtype"
    return reason
