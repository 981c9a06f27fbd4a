"""Stable Diffusion XL: a UNet with size conditioning.

Source: diffusers 0.42, `pipelines/stable_diffusion_xl/pipeline_stable_diffusion_xl.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import nn

from deployments.engines.diffusion.pipeline import DenoisePipeline
from deployments.engines.diffusion.rows import DEFAULT_BOUNDS, BatchBounds, Rows
from deployments.engines.diffusion.state import Branch, take_branches
from deployments.engines.protocol import DiffusionRequest, EngineError

NUM_TIME_IDS = 6  # original height and width, crop top and left, target height and width


class SDXLDenoise(DenoisePipeline):
    """Classifier-free guidance when `guidance_scale` > 1.

    Original and target size are the request's, crops are 0. Latents of a state are images: (num_images,
    C, h, w). No watermark is added.
    """

    denoiser_name: ClassVar[str] = "unet"

    def __init__(
        self,
        folder: Path,
        modules: Mapping[str, nn.Module],
        device: str | torch.device = "cpu",
        bounds: BatchBounds = DEFAULT_BOUNDS,
    ) -> None:
        super().__init__(folder, modules, device, bounds)
        if self.denoiser.config.time_cond_proj_dim is not None:
            raise EngineError(f"{folder}: a UNet with embedded guidance (time_cond_proj_dim) is not supported")

    @property
    def size_multiple(self) -> int:
        return math.lcm(8, self._decoder.scale_factor)  # stock asks for 8 whatever the VAE

    def _branches(
        self, request: DiffusionRequest, conditioning: Mapping[str, torch.Tensor]
    ) -> tuple[tuple[Branch, ...], float]:
        config = self.denoiser.config
        pooled = self.denoiser.add_embedding.linear_1.in_features - NUM_TIME_IDS * config.addition_time_embed_dim
        guided = request.guidance_scale > 1
        widths = (config.cross_attention_dim, pooled)
        return take_branches(conditioning, widths, guided, self.device, self.denoiser.dtype), request.guidance_scale

    def _create_solver(self, request: DiffusionRequest, begin_index: int) -> Any:
        return self._solvers.create(self.device, begin_index, num_inference_steps=request.num_inference_steps)

    def _initial_latents(
        self, request: DiffusionRequest, solver: Any, dtype: torch.dtype, generator: torch.Generator
    ) -> torch.Tensor:
        height, width = (side // self._decoder.scale_factor for side in (request.height, request.width))
        shape = (request.num_images, self.denoiser.config.in_channels, height, width)
        noise: torch.Tensor = randn_tensor(shape, generator=generator, device=self.device, dtype=dtype)
        return noise * solver.init_noise_sigma

    def _forward(self, rows: Rows, height: int, width: int) -> torch.Tensor:
        latents = rows.latents
        size_ids = torch.tensor([height, width, 0, 0, height, width], device=self.device, dtype=latents.dtype)
        noise: torch.Tensor = self.denoiser(
            latents,
            rows.timesteps,
            encoder_hidden_states=rows.prompts,
            added_cond_kwargs={"text_embeds": rows.pooled, "time_ids": size_ids.expand(len(latents), -1)},
            return_dict=False,
        )[0]
        return noise

    def _latent_images(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        config = self._decoder.vae.config
        mean, std = config.get("latents_mean"), config.get("latents_std")
        if mean is None or std is None:
            return latents / config.scaling_factor
        mean_C11, std_C11 = (torch.tensor(values).view(-1, 1, 1).to(latents) for values in (mean, std))
        return latents * std_C11 / config.scaling_factor + mean_C11
