"""Stable Diffusion XL: a UNet with size conditioning.

Source: diffusers 0.42, `pipelines/stable_diffusion_xl/pipeline_stable_diffusion_xl.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from configs.model import LongText
from deployments.engines.diffusion.families.base import (
    ControlRows,
    EditDefaults,
    Encoded,
    EncoderUse,
    Family,
    ImageDefaults,
    ImageSize,
    NoNegative,
    Role,
    Rows,
    Task,
    output_of,
    sum_residuals,
)
from deployments.engines.protocol import EngineError

if TYPE_CHECKING:  # the ingress has no torch
    import torch

NUM_TIME_IDS: Final = 6  # original height and width, crop top and left, target height and width


class StableDiffusionXL(Family):
    """StableDiffusionXLPipeline. Two CLIPs read the text; long texts may come in chunks of 77 tokens.

    Original and target size are the request's, crops are 0. Latents are images: (num_images, C, h, w). No watermark
    is added.
    """

    class_name: ClassVar[str] = "StableDiffusionXLPipeline"
    denoiser_name: ClassVar[str] = "unet"
    other_class_names: ClassVar[Sequence[str]] = (
        "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusionXLInpaintPipeline",
    )
    defaults: ClassVar[ImageDefaults] = ImageDefaults(num_inference_steps=50, guidance_scale=5.0, side=1024)
    edits: ClassVar[Mapping[Task, EditDefaults]] = {
        "image-to-image": EditDefaults(strength=0.3, guidance_scale=5.0, num_inference_steps=50),
        "inpainting": EditDefaults(strength=0.9999, guidance_scale=7.5, num_inference_steps=50),
    }
    upcasts_vae: ClassVar[bool] = True
    lora_loader: ClassVar[str | None] = "StableDiffusionXLLoraLoaderMixin"
    lora_encoders: ClassVar[Sequence[str]] = ("text_encoder", "text_encoder_2")
    keeps_precision: ClassVar[Sequence[str]] = ("time_embedding.*", "add_embedding.*", "*time_emb_proj*")
    control_class: ClassVar[str | None] = "ControlNetModel"
    control_keys: ClassVar[Sequence[str]] = ("block_out_channels", "cross_attention_dim", "addition_embed_type")
    refused_text_rules: ClassVar[Mapping[str, str]] = {
        "trimmed": "text_padding 'trimmed' is for T5: the UNet of StableDiffusionXLPipeline was trained on CLIP's "
        "padding; use stock"
    }

    def text_encoders(self, max_sequence_length: int | None, long_text: LongText) -> Sequence[EncoderUse]:
        return EncoderUse("text_encoder", None, long_text), EncoderUse("text_encoder_2", None, long_text)

    def join_encodings(self, role: Role, encodings: Mapping[str, Encoded]) -> dict[str, torch.Tensor]:
        import torch

        first = output_of(role, encodings, "text_encoder", "penultimate")
        second = output_of(role, encodings, "text_encoder_2", "penultimate")
        pooled = output_of(role, encodings, "text_encoder_2", "pooled")
        if len(first) != len(second):
            raise EngineError(
                f"text_encoder gave {len(first)} tokens and text_encoder_2 {len(second)}: "
                f"{self.class_name} needs tokenizers of one length"
            )
        prompt = torch.cat([first, second.to(first.device)], dim=-1).to(second.dtype)
        return {"prompt_embeds": prompt.unsqueeze(0), "pooled_prompt_embeds": pooled.unsqueeze(0)}

    def no_negative(self, model_index: Mapping[str, Any]) -> NoNegative:
        return "zeros" if model_index.get("force_zeros_for_empty_prompt", True) else "empty text"

    def size_multiple(self, pixels_per_latent: int) -> int:
        return math.lcm(8, pixels_per_latent)  # stock asks for 8 whatever the VAE

    def latent_channels(self, denoiser_config: Mapping[str, Any]) -> int:
        return int(denoiser_config["out_channels"])

    def num_extra_channels(self, denoiser_config: Mapping[str, Any]) -> int:
        return int(denoiser_config["in_channels"]) - int(denoiser_config["out_channels"])

    def scale_latents(self, vae_latents: torch.Tensor, vae_config: Mapping[str, Any]) -> torch.Tensor:
        mean_C11, std_C11 = _latent_statistics(vae_latents, vae_config)
        return (vae_latents - mean_C11) * vae_config["scaling_factor"] / std_C11

    def unscale_latents(self, latents_BCHW: torch.Tensor, vae_config: Mapping[str, Any]) -> torch.Tensor:
        mean_C11, std_C11 = _latent_statistics(latents_BCHW, vae_config)
        return latents_BCHW * std_C11 / vae_config["scaling_factor"] + mean_C11

    def refusal(self, denoiser: Any) -> str | None:
        if denoiser.config.time_cond_proj_dim is None:
            return None
        return "a UNet with embedded guidance (time_cond_proj_dim) is not supported"

    def control_refusal(self, net: Any, pixels_per_latent: int) -> str | None:
        if net.config.global_pool_conditions:
            return "pools its image (global_pool_conditions), which is not supported"
        factor = 2 ** (len(net.config.conditioning_embedding_out_channels) - 1)
        if factor == pixels_per_latent:
            return None
        return f"reduces its image by {factor}, and the model's latents have a side of 1/{pixels_per_latent}"

    def text_widths(self, denoiser: Any) -> tuple[int, int | None]:
        config = denoiser.config
        pooled = denoiser.add_embedding.linear_1.in_features - NUM_TIME_IDS * config.addition_time_embed_dim
        return config.cross_attention_dim, pooled

    def predict_noise(self, denoiser: Any, rows: Rows, size: ImageSize) -> torch.Tensor:
        import torch

        latents = rows.latents
        ids = [size.height, size.width, 0, 0, size.height, size.width]
        size_ids = torch.tensor(ids, device=latents.device, dtype=latents.dtype)
        time_ids = size_ids.expand(len(latents), -1)

        def run(control: ControlRows) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            down, mid = control.net(
                latents[:, : control.net.config.in_channels],  # without those that inpainting UNets read besides
                rows.timesteps,
                encoder_hidden_states=control.prompts,
                controlnet_cond=control.images,
                added_cond_kwargs={"text_embeds": control.pooled, "time_ids": time_ids},
                return_dict=False,
            )
            return down, [mid]

        down, mid = sum_residuals(rows, run) or (None, [None])
        noise: torch.Tensor = denoiser(
            latents,
            rows.timesteps,
            encoder_hidden_states=rows.prompts,
            added_cond_kwargs={"text_embeds": rows.pooled, "time_ids": time_ids},
            down_block_additional_residuals=down,
            mid_block_additional_residual=mid[0],
            return_dict=False,
        )[0]
        return noise


def _latent_statistics(like: torch.Tensor, vae_config: Mapping[str, Any]) -> tuple[torch.Tensor | float, ...]:
    """Return mean and standard deviation of the VAE's latents, (C, 1, 1) each, if its config has them; else 0 and 1."""
    import torch

    mean, std = vae_config.get("latents_mean"), vae_config.get("latents_std")
    if mean is None or std is None:
        return 0.0, 1.0
    return tuple(torch.tensor(values).view(-1, 1, 1).to(like) for values in (mean, std))
