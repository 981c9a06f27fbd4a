"""FLUX.2 [dev]: three layers of a language model condition two streams, beside which an image may stand.

Source: diffusers 0.42, `pipelines/flux2/pipeline_flux2.py`, `models/transformers/transformer_flux2.py`.

FLUX.2 [klein]: a FLUX.2 whose prompts a smaller language model reads, guided away from a text.

Source: diffusers 0.42, `pipelines/flux2/pipeline_flux2_klein.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from deployments.engines.diffusion.families.base import (
    Defaults,
    EditDefaults,
    Family,
    Guidance,
    ImageDefaults,
    ImageSize,
    LatentReferences,
    Network,
    Rows,
)
from deployments.engines.diffusion.families.flow_matching import PATCH, FlowLatents, ReadTexts, ShiftedSteps
from deployments.engines.records.protocol import DiffusionRequest, PromptForm

if TYPE_CHECKING:
    import torch


IMAGE_TIME: Final = 10  # the first coordinate of a reference image, twice that of a second; that of the latents is 0
# The system prompt of the model's training; the line breaks are stock's.
SYSTEM: Final = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)


class Flux2Texts(ReadTexts):
    """Shorter texts are padded to the limit, as in the model's training."""

    refused_rules: ClassVar[Mapping[str, str]] = {
        **ReadTexts.refused_rules,
        "trimmed": "text_padding 'trimmed': FLUX.2 was trained on padded texts; use stock",
    }


class Unguided(Guidance):
    """Guidance is an input of the transformer, so there is no negative condition."""

    rule: ClassVar[str] = "never: the model reads its guidance_scale"

    def uses_negative(self, request: DiffusionRequest, has_negative: bool) -> bool:
        return False


class PatchLatents(FlowLatents):
    """Latents are patches, normalized by the VAE's statistics: (num_images, h/2 * w/2, 4 * C). So are ComfyUI's."""

    patch: ClassVar[int] = PATCH

    def noise_shape(self, denoiser_config: Mapping[str, Any], size: ImageSize) -> tuple[int, int, int]:
        return int(denoiser_config["in_channels"]), size.latent_height // PATCH, size.latent_width // PATCH

    def batch_shape(self, size: ImageSize) -> Hashable:
        return super().batch_shape(size), size.references

    def pack(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Pack (B, 4 * C, h/2, w/2), whose channels are patches already, -> (B, h/2 * w/2, 4 * C)."""
        return images_BCHW.flatten(2).transpose(1, 2)

    def unpack(self, latents: torch.Tensor, size: ImageSize) -> torch.Tensor:
        rows, columns = size.latent_height // PATCH, size.latent_width // PATCH
        return latents.transpose(1, 2).reshape(len(latents), -1, rows, columns)

    def scale(self, vae_latents: torch.Tensor, vae: Any) -> torch.Tensor:
        """Return patches (B, 4 * C, h/2, w/2) of latents (B, C, h, w)."""
        batch, channels, height, width = vae_latents.shape
        patches = vae_latents.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
        patches = patches.permute(0, 1, 3, 5, 2, 4).reshape(batch, -1, height // PATCH, width // PATCH)
        mean, deviation = _statistics(vae, patches)
        return (patches - mean) / deviation

    def unscale(self, latents_BCHW: torch.Tensor, vae: Any) -> torch.Tensor:
        """Return latents (B, C, h, w) of patches (B, 4 * C, h/2, w/2)."""
        mean, deviation = _statistics(vae, latents_BCHW)
        patches = latents_BCHW * deviation + mean
        batch, _, rows, columns = patches.shape
        patches = patches.reshape(batch, -1, PATCH, PATCH, rows, columns).permute(0, 1, 4, 2, 5, 3)
        return patches.reshape(batch, -1, rows * PATCH, columns * PATCH)


class Flux2Steps(ShiftedSteps):
    """The transformer reads an image of the request beside the latents, not under noise: `strength` is none
    of its options.
    """

    attends_to_image: ClassVar[bool] = True

    def shift(self, num_patches: int, num_steps: int, solver_config: Mapping[str, Any]) -> float:
        """Return mu, fitted for 10 and for 200 steps: a line between them, and for large images that of 200."""
        of_200 = 0.00016927 * num_patches + 0.45666666
        if num_patches > 4300:
            return of_200
        slope = (of_200 - (8.73809524e-05 * num_patches + 1.89833333)) / 190.0
        return slope * num_steps + (of_200 - 200.0 * slope)


class Flux2Network(Network):
    """Two streams, of patches and of the prompt, with one modulation."""

    keeps_precision: ClassVar[Sequence[str]] = ("*norm*", "*embed*", "*modulation*", "proj_out.weight")

    def text_widths(self, denoiser: Any) -> tuple[int, int | None]:
        return denoiser.config.joint_attention_dim, None

    def predict_noise(self, denoiser: Any, rows: Rows, size: ImageSize) -> torch.Tensor:
        import torch

        latents = rows.latents.to(denoiser.dtype)
        patches = _ids(0, size.latent_height // PATCH, size.latent_width // PATCH, 1)
        beside = rows.sizes[0].references if rows.sizes else ()
        if not beside and latents.shape[1] != len(patches):
            beside = (size,)  # the image of a request has its size
        images = [patches]
        for place, one in enumerate(beside):
            time = IMAGE_TIME * (place + 1)
            images.append(_ids(time, one.latent_height // PATCH, one.latent_width // PATCH, 1))
        noise: torch.Tensor = denoiser(
            hidden_states=latents,
            timestep=rows.timesteps.to(rows.latents.dtype) / 1000,
            guidance=rows.guidance if denoiser.config.guidance_embeds else None,
            encoder_hidden_states=rows.prompts,
            # One for all rows, with an axis for them as stock has it: ranks cut ids by their second one.
            txt_ids=_ids(0, 1, 1, rows.prompts.shape[1])[None].to(latents.device),
            img_ids=torch.cat(images)[None].to(latents.device),
            return_dict=False,
        )[0]
        return noise[:, : len(patches)]


def _statistics(vae: Any, like_BCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the deviation of each channel of a patch, from the VAE's batch norm."""
    import torch

    mean, variance = vae.bn.running_mean.view(1, -1, 1, 1), vae.bn.running_var.view(1, -1, 1, 1)
    deviation = torch.sqrt(variance + vae.config.batch_norm_eps)
    return mean.to(like_BCHW), deviation.to(like_BCHW)


def _ids(time: int, rows: int, columns: int, length: int) -> torch.Tensor:
    """Return the coordinates (rows * columns * length, 4) of tokens: time, row, column, place in a text."""
    import torch

    return torch.cartesian_prod(torch.tensor([time]), torch.arange(rows), torch.arange(columns), torch.arange(length))


FLUX_2: Final = Family(
    class_name="Flux2Pipeline",
    denoiser_name="transformer",
    defaults=Defaults(
        ImageDefaults(num_inference_steps=50, guidance_scale=4.0),
        edits={"image-to-image": EditDefaults(strength=1.0, guidance_scale=4.0, num_inference_steps=50)},
    ),
    network=Flux2Network(),
    texts=Flux2Texts(
        PromptForm(
            layers=(10, 20, 30),
            variables=(("add_generation_prompt", False),),
            keeps_padding=True,
            system=SYSTEM,
            removed="[IMG]",
        ),
        without_negative="unguided",
    ),
    latents=PatchLatents(),
    guidance=Unguided(),
    steps=Flux2Steps(),
    references=LatentReferences(),
)


# FLUX.2 [klein], distilled, by its model card.
DISTILLED: Final = ImageDefaults(num_inference_steps=4, guidance_scale=1.0)


class KleinDefaults(Defaults):
    """Defaults that differ for a distilled checkpoint."""

    def of(self, variant: Mapping[str, bool | int]) -> ImageDefaults:
        return DISTILLED if variant.get("is_distilled") is True else self.usual


class KleinNetwork(Flux2Network):
    def refusal(self, denoiser_config: Mapping[str, Any]) -> str | None:
        is_guided = denoiser_config.get("guidance_embeds", True)  # the default of the class
        return "a FLUX.2 [klein] with embedded guidance is not supported" if is_guided else None


class DistilledGuidance(Guidance):
    """No guidance: a distilled model needs none."""

    def uses_negative(self, request: DiffusionRequest, has_negative: bool) -> bool:
        return False


class Flux2Klein(Family):
    """Flux2KleinPipeline. Stock guides away from an empty text; here a request may have a negative prompt."""

    def variant(self, model_index: Mapping[str, Any]) -> Family:
        is_distilled = model_index.get("is_distilled") is True
        return replace(self, guidance=DistilledGuidance()) if is_distilled else self


FLUX_2_KLEIN: Final = Flux2Klein(
    class_name="Flux2KleinPipeline",
    denoiser_name="transformer",
    defaults=KleinDefaults(FLUX_2.defaults.usual, edits=FLUX_2.defaults.edits),
    network=KleinNetwork(),
    texts=Flux2Texts(PromptForm(layers=(9, 18, 27), variables=(("enable_thinking", False),), keeps_padding=True)),
    latents=FLUX_2.latents,
    steps=FLUX_2.steps,
    references=FLUX_2.references,
)
