"""The common parts of families of flow matching: noise is mixed with the image, unscaled, and the VAE has a shift.

Most read patches of PATCH x PATCH latents, and shift their schedule by the number of patches.

After them come the common parts of families whose prompts a language model reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from configs.model import LongText
from deployments.engines.diffusion.families.base import (
    Guidance,
    ImageSize,
    Latents,
    Network,
    NoNegative,
    Rows,
    Steps,
    Texts,
)
from deployments.engines.diffusion.families.texts import Encoded, EncoderUse, Role, output_of
from deployments.engines.records.protocol import DiffusionRequest, EngineError, PromptForm

if TYPE_CHECKING:
    import torch


PATCH: Final = 2


class ModulatedFlow(Network):
    """A transformer modulated by time and pooled text."""

    embedding_parts: ClassVar[Sequence[str]] = ("time_text_embed",)
    modulated_layers: ClassVar[str] = "*norm*.linear"
    text_layers: ClassVar[str] = "context_embedder"

    def embed_times(self, denoiser: Any, rows: Rows, size: ImageSize) -> Sequence[torch.Tensor]:
        return [denoiser.time_text_embed(rows.timesteps, rows.pooled)]


class FlowSteps(Steps):
    """The steps of a solver that is FlowMatchEulerDiscreteScheduler in stock."""

    def first(self, num_inference_steps: int, strength: float) -> int:
        return int(num_inference_steps - min(num_inference_steps * strength, num_inference_steps))


class ShiftedSteps(FlowSteps):
    """A schedule shifted by the number of patches."""

    def schedule(self, request: DiffusionRequest, solver_config: Mapping[str, Any], size: ImageSize) -> dict[str, Any]:
        steps = request.num_inference_steps
        schedule: dict[str, Any] = {"sigmas": np.linspace(1.0, 1 / steps, steps)}
        if request.sigmas is not None or request.timesteps is not None:
            schedule = super().schedule(request, solver_config, size)
        elif solver_config.get("use_flow_sigmas"):
            schedule = {"num_inference_steps": steps}
            if not solver_config.get("use_dynamic_shifting"):
                return schedule
        return schedule | {"mu": self.shift(num_patches(size), steps, solver_config)}

    def shift(self, num_patches: int, num_steps: int, solver_config: Mapping[str, Any]) -> float:
        """Return mu, by which the solver shifts its schedule."""
        return dynamic_shift(num_patches, solver_config, max_shift=1.15)


class FlowLatents(Latents):
    """Latents in patches, of a VAE with a shift."""

    def size_multiple(self, pixels_per_latent: int) -> int:
        return PATCH * pixels_per_latent

    def first(self, noise_BCHW: torch.Tensor, solver: Any) -> torch.Tensor:
        return noise_BCHW

    def scale(self, vae_latents: torch.Tensor, vae: Any) -> torch.Tensor:
        return (vae_latents - vae.config["shift_factor"]) * vae.config["scaling_factor"]

    def unscale(self, latents_BCHW: torch.Tensor, vae: Any) -> torch.Tensor:
        return latents_BCHW / vae.config["scaling_factor"] + vae.config["shift_factor"]


class PackedLatents(FlowLatents):
    """Latents in packed patches for the transformer: (num_images, h/2 * w/2, 4 * C)."""

    def channels(self, denoiser_config: Mapping[str, Any]) -> int:
        return int(denoiser_config["in_channels"]) // PATCH**2

    def pack(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Pack (B, C, 2h, 2w) -> (B, h * w, 4 * C)."""
        batch, channels, height, width = images_BCHW.shape
        patches = images_BCHW.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
        return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH**2)

    def unpack(self, latents: torch.Tensor, size: ImageSize) -> torch.Tensor:
        """Unpack (B, h * w, 4 * C) -> (B, C, 2h, 2w)."""
        batch, _, width = latents.shape
        channels = width // PATCH**2
        rows, columns = size.latent_height // PATCH, size.latent_width // PATCH
        patches = latents.view(batch, rows, columns, channels, PATCH, PATCH)
        return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, rows * PATCH, columns * PATCH)


class TrueGuidance(Guidance):
    """Guidance by `true_cfg_scale`, away from a negative prompt: `guidance_scale` is a number that the model reads."""

    rule: ClassVar[str] = "true_cfg_scale > 1"

    def uses_negative(self, request: DiffusionRequest, has_negative: bool) -> bool:
        return request.true_cfg_scale > 1 and has_negative

    def scale(self, request: DiffusionRequest) -> float:
        return request.true_cfg_scale


def num_patches(size: ImageSize) -> int:
    """Return the number of patches of an image."""
    return (size.latent_height // PATCH) * (size.latent_width // PATCH)


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


ENCODER: Final = "text_encoder"


@dataclass(frozen=True, slots=True)
class ReadTexts(Texts):
    """One text encoder, a language model that reads a prompt in one piece, in the form of `reading`.

    `without_negative` is the negative condition of a request without a negative prompt.
    """

    refused_rules: ClassVar[Mapping[str, str]] = {
        "chunk": "long_text 'chunk' is for CLIP, and a language model reads this pipeline's prompts, in one piece; use "
        "truncate or error"
    }
    reading: PromptForm
    max_tokens: int = 512
    default_tokens: int = 512
    without_negative: NoNegative = "empty text"

    def encoders(
        self, max_sequence_length: int | None, long_text: LongText, lacking: Set[str] = frozenset()
    ) -> Sequence[EncoderUse]:
        num_tokens = self.default_tokens if max_sequence_length is None else max_sequence_length
        if not 1 <= num_tokens <= self.max_tokens:
            raise EngineError(f"max_sequence_length {num_tokens}: expected 1 to {self.max_tokens}")
        return (EncoderUse(ENCODER, num_tokens + self.reading.num_dropped, long_text, form=self.reading),)

    def join(self, role: Role, encodings: Mapping[str, Encoded]) -> dict[str, torch.Tensor]:
        return {"prompt_embeds": output_of(role, encodings, ENCODER, "hidden").unsqueeze(0)}

    def no_negative(self, model_index: Mapping[str, Any]) -> NoNegative:
        return self.without_negative
