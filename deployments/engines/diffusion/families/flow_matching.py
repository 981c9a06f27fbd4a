"""The parts that families of flow matching share: noise is mixed with the image, unscaled, and the VAE has a shift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from deployments.engines.diffusion.families.base import Family, ImageSize, Rows

if TYPE_CHECKING:  # the ingress has no torch
    import torch


class FlowMatching(Family):
    """A transformer modulated by time and pooled text, whose solver is FlowMatchEulerDiscreteScheduler in stock."""

    embedding_parts: ClassVar[Sequence[str]] = ("time_text_embed",)
    modulated_layers: ClassVar[str] = "*norm*.linear"
    text_layers: ClassVar[str] = "context_embedder"

    def embed_times(self, denoiser: Any, rows: Rows, size: ImageSize) -> Sequence[torch.Tensor]:
        return [denoiser.time_text_embed(rows.timesteps, rows.pooled)]

    def first_step(self, num_inference_steps: int, strength: float) -> int:
        return int(num_inference_steps - min(num_inference_steps * strength, num_inference_steps))

    def first_latents(self, noise_BCHW: torch.Tensor, solver: Any) -> torch.Tensor:
        return noise_BCHW

    def scale_latents(self, vae_latents: torch.Tensor, vae_config: Mapping[str, Any]) -> torch.Tensor:
        return (vae_latents - vae_config["shift_factor"]) * vae_config["scaling_factor"]

    def unscale_latents(self, latents_BCHW: torch.Tensor, vae_config: Mapping[str, Any]) -> torch.Tensor:
        return latents_BCHW / vae_config["scaling_factor"] + vae_config["shift_factor"]


def dynamic_shift(num_patches: int, solver_config: Mapping[str, Any], max_shift: float) -> float:
    """Return mu, which depends on the resolution: a line through (base patches, base shift) and (max, max).

    `max_shift` is the pipeline's, for a solver whose config has none.
    """
    base_patches, max_patches = (
        solver_config.get("base_image_seq_len", 256),
        solver_config.get("max_image_seq_len", 4096),
    )
    base_shift, max_shift = solver_config.get("base_shift", 0.5), solver_config.get("max_shift", max_shift)
    slope = (max_shift - base_shift) / (max_patches - base_patches)
    return float(num_patches * slope + (base_shift - slope * base_patches))
