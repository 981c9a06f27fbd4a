"""Stable Diffusion 1 and 2: a UNet that attends to one CLIP's tokens.

Source: diffusers 0.42, `pipelines/stable_diffusion/pipeline_stable_diffusion.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, ClassVar

from configs.model import LongText
from deployments.engines.diffusion.families.base import (
    EditDefaults,
    ImageDefaults,
    ImageSize,
    Rows,
    Task,
)
from deployments.engines.diffusion.families.texts import Encoded, EncoderUse, Role, output_of
from deployments.engines.diffusion.families.unet import UNetFamily
from deployments.engines.protocol import LAST

if TYPE_CHECKING:  # the ingress has no torch
    import torch


class StableDiffusion(UNetFamily):
    """StableDiffusionPipeline. CLIP's last layer is the text; no negative prompt is the empty one.

    A checkpoint's safety checker is not run: no image is looked at.
    """

    class_name: ClassVar[str] = "StableDiffusionPipeline"
    other_class_names: ClassVar[Sequence[str]] = ("StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline")
    # The stock pipeline takes the side from the UNet: 512 pixels for version 1.
    defaults: ClassVar[ImageDefaults] = ImageDefaults(num_inference_steps=50, guidance_scale=7.5, side=512)
    edits: ClassVar[Mapping[Task, EditDefaults]] = {
        "image-to-image": EditDefaults(strength=0.8, guidance_scale=7.5, num_inference_steps=50),
        "inpainting": EditDefaults(strength=1.0, guidance_scale=7.5, num_inference_steps=50),
    }
    takes_clip_skip: ClassVar[bool] = True
    lora_loader: ClassVar[str | None] = "StableDiffusionLoraLoaderMixin"
    lora_encoders: ClassVar[Sequence[str]] = ("text_encoder",)
    refused_text_rules: ClassVar[Mapping[str, str]] = {
        "trimmed": "text_padding 'trimmed' is for T5: the UNet of StableDiffusionPipeline was trained on CLIP's "
        "padding; use stock",
    }

    def text_encoders(
        self, max_sequence_length: int | None, long_text: LongText, lacking: Set[str] = frozenset()
    ) -> Sequence[EncoderUse]:
        return (EncoderUse("text_encoder", None, long_text, layer=LAST),)

    def join_encodings(self, role: Role, encodings: Mapping[str, Encoded]) -> dict[str, torch.Tensor]:
        return {"prompt_embeds": output_of(role, encodings, "text_encoder", "hidden").unsqueeze(0)}

    def text_widths(self, denoiser: Any) -> tuple[int, int | None]:
        return denoiser.config.cross_attention_dim, None

    def added_conditioning(self, pooled: torch.Tensor | None, rows: Rows, size: ImageSize) -> dict[str, Any]:
        return {}
