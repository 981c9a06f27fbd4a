"""Stable Diffusion 1 and 2: a UNet that attends to one CLIP's tokens.

Source: diffusers 0.42, `pipelines/stable_diffusion/pipeline_stable_diffusion.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from configs.model import LongText
from deployments.engines.diffusion.families.base import (
    ControlRows,
    EditDefaults,
    Encoded,
    EncoderUse,
    Family,
    ImageDefaults,
    ImageSize,
    Role,
    Rows,
    Task,
    output_of,
    sum_residuals,
)

if TYPE_CHECKING:  # the ingress has no torch
    import torch


class StableDiffusion(Family):
    """StableDiffusionPipeline. CLIP's last layer is the text; no negative prompt is the empty one.

    Latents are images: (num_images, C, h, w). A checkpoint's safety checker is not run: no image is looked at.
    """

    class_name: ClassVar[str] = "StableDiffusionPipeline"
    denoiser_name: ClassVar[str] = "unet"
    other_class_names: ClassVar[Sequence[str]] = ("StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline")
    # The stock pipeline takes the side from the UNet: 512 pixels for version 1.
    defaults: ClassVar[ImageDefaults] = ImageDefaults(num_inference_steps=50, guidance_scale=7.5, side=512)
    edits: ClassVar[Mapping[Task, EditDefaults]] = {
        "image-to-image": EditDefaults(strength=0.8, guidance_scale=7.5, num_inference_steps=50),
        "inpainting": EditDefaults(strength=1.0, guidance_scale=7.5, num_inference_steps=50),
    }
    lora_loader: ClassVar[str | None] = "StableDiffusionLoraLoaderMixin"
    lora_encoders: ClassVar[Sequence[str]] = ("text_encoder",)
    keeps_precision: ClassVar[Sequence[str]] = ("time_embedding.*", "add_embedding.*", "*time_emb_proj*")
    control_class: ClassVar[str | None] = "ControlNetModel"
    control_keys: ClassVar[Sequence[str]] = ("block_out_channels", "cross_attention_dim", "addition_embed_type")
    refused_text_rules: ClassVar[Mapping[str, str]] = {
        "trimmed": "text_padding 'trimmed' is for T5: the UNet of StableDiffusionPipeline was trained on CLIP's "
        "padding; use stock",
        "chunk": "long_text 'chunk' is for StableDiffusionXLPipeline; use truncate or error",
    }

    def text_encoders(self, max_sequence_length: int | None, long_text: LongText) -> Sequence[EncoderUse]:
        return (EncoderUse("text_encoder", None, long_text, layer="last"),)

    def join_encodings(self, role: Role, encodings: Mapping[str, Encoded]) -> dict[str, torch.Tensor]:
        return {"prompt_embeds": output_of(role, encodings, "text_encoder", "hidden").unsqueeze(0)}

    def size_multiple(self, pixels_per_latent: int) -> int:
        return math.lcm(8, pixels_per_latent)  # stock asks for 8 whatever the VAE

    def latent_channels(self, denoiser_config: Mapping[str, Any]) -> int:
        return int(denoiser_config["out_channels"])

    def num_extra_channels(self, denoiser_config: Mapping[str, Any]) -> int:
        return int(denoiser_config["in_channels"]) - int(denoiser_config["out_channels"])

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
        return denoiser.config.cross_attention_dim, None

    def predict_noise(self, denoiser: Any, rows: Rows, size: ImageSize) -> torch.Tensor:
        def run(control: ControlRows) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            down, mid = control.net(
                rows.latents[:, : control.net.config.in_channels],  # without those that inpainting UNets read besides
                rows.timesteps,
                encoder_hidden_states=control.prompts,
                controlnet_cond=control.images,
                return_dict=False,
            )
            return down, [mid]

        down, mid = sum_residuals(rows, run) or (None, [None])
        noise: torch.Tensor = denoiser(
            rows.latents,
            rows.timesteps,
            encoder_hidden_states=rows.prompts,
            down_block_additional_residuals=down,
            mid_block_additional_residual=mid[0],
            return_dict=False,
        )[0]
        return noise
