"""Flux: flow matching with a transformer over 2x2 patches of latents.

Source: diffusers 0.42, `pipelines/flux/pipeline_flux.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor

from deployments.engines.diffusion.pipeline import DenoisePipeline
from deployments.engines.diffusion.rows import Rows
from deployments.engines.diffusion.state import Branch, take_branches
from deployments.engines.protocol import DiffusionRequest

PATCH = 2


class FluxDenoise(DenoisePipeline):
    """`guidance_scale` is embedded if the transformer has an embedding for it, else it does nothing.

    Guidance against a negative prompt is `true_cfg_scale`. Latents of a state are packed patches:
    (num_images, h/2 * w/2, 4 * C).
    """

    denoiser_name: ClassVar[str] = "transformer"

    @property
    def size_multiple(self) -> int:
        return PATCH * self._decoder.scale_factor

    def _branches(
        self, request: DiffusionRequest, conditioning: Mapping[str, torch.Tensor]
    ) -> tuple[tuple[Branch, ...], float]:
        config = self.denoiser.config
        guided = request.true_cfg_scale > 1 and "negative_prompt_embeds" in conditioning
        widths = (config.joint_attention_dim, config.pooled_projection_dim)
        return take_branches(conditioning, widths, guided, self.device, self.denoiser.dtype), request.true_cfg_scale

    def _create_solver(self, request: DiffusionRequest, begin_index: int) -> Any:
        config, steps = self._solvers.config, request.num_inference_steps
        schedule: dict[str, Any] = {"sigmas": np.linspace(1.0, 1 / steps, steps)}
        if config.get("use_flow_sigmas"):
            schedule = {"num_inference_steps": steps}
        num_patches = (request.height // self.size_multiple) * (request.width // self.size_multiple)
        return self._solvers.create(self.device, begin_index, mu=_shift(num_patches, config), **schedule)

    def _initial_latents(
        self, request: DiffusionRequest, solver: Any, dtype: torch.dtype, generator: torch.Generator
    ) -> torch.Tensor:
        channels = self.denoiser.config.in_channels // PATCH**2
        height, width = (side // self._decoder.scale_factor for side in (request.height, request.width))
        shape = (request.num_images, channels, height, width)
        return _pack(randn_tensor(shape, generator=generator, device=self.device, dtype=dtype))

    def _forward(self, rows: Rows, height: int, width: int) -> torch.Tensor:
        latents, prompt = rows.latents, rows.prompts
        patches = (height // self.size_multiple, width // self.size_multiple)
        noise: torch.Tensor = self.denoiser(
            hidden_states=latents,
            timestep=rows.timesteps.to(latents.dtype) / 1000,
            guidance=rows.guidance if self.denoiser.config.guidance_embeds else None,
            pooled_projections=rows.pooled,
            encoder_hidden_states=prompt,
            txt_ids=torch.zeros(prompt.shape[1], 3, device=self.device, dtype=latents.dtype),
            img_ids=_patch_ids(*patches).to(self.device, latents.dtype),
            return_dict=False,
        )[0]
        return noise

    def _latent_images(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        config = self._decoder.vae.config
        images = _unpack(latents, height // self.size_multiple, width // self.size_multiple)
        return images / config.scaling_factor + config.shift_factor


def _shift(num_patches: int, config: Mapping[str, Any]) -> float:
    """Resolution-dependent mu, a line through (base patches, base shift) and (max patches, max shift)."""
    base_patches, max_patches = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base_shift, max_shift = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (max_shift - base_shift) / (max_patches - base_patches)
    return num_patches * slope + (base_shift - slope * base_patches)


def _pack(latents_BCHW: torch.Tensor) -> torch.Tensor:
    """(B, C, 2h, 2w) -> (B, h * w, 4 * C)."""
    batch, channels, height, width = latents_BCHW.shape
    patches = latents_BCHW.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH**2)


def _unpack(latents_BLC: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """(B, h * w, 4 * C) -> (B, C, 2h, 2w)."""
    batch, _, width = latents_BLC.shape
    channels = width // PATCH**2
    patches = latents_BLC.view(batch, rows, columns, channels, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, rows * PATCH, columns * PATCH)


def _patch_ids(rows: int, columns: int) -> torch.Tensor:
    """Positions (h * w, 3): (0, row, column)."""
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] = torch.arange(rows)[:, None]
    ids[..., 2] = torch.arange(columns)[None, :]
    return ids.view(-1, 3)
