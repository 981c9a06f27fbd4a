"""Z-Image and Z-Image-Turbo: one stream of image patches and of a language model's reading of the prompt.

Source: diffusers 0.42, `pipelines/z_image/pipeline_z_image.py`, `models/transformers/transformer_z_image.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from deployments.engines.diffusion.families.base import EditDefaults, ImageDefaults, ImageSize, Rows, Task
from deployments.engines.diffusion.families.flow_matching import PromptReader, ShiftedFlow
from deployments.engines.records.protocol import DiffusionRequest, PromptForm

if TYPE_CHECKING:  # the ingress has no torch
    import torch

SIDE: Final = 1024  # pixels, whatever the configs say
TEXT_MULTIPLE: Final = 32  # to which the transformer pads a text with a learned vector that it attends to


class ZImage(PromptReader, ShiftedFlow):
    """ZImagePipeline. The prompt is a chat's first message, its encoding the language model's last layer but one.

    Guidance is added to the prompt's prediction, so that a scale of 0 is none (what Z-Image-Turbo wants, with 9 steps).
    Latents are images: (num_images, C, h, w), in float32. The transformer pads texts itself.
    """

    class_name: ClassVar[str] = "ZImagePipeline"
    denoiser_name: ClassVar[str] = "transformer"
    other_class_names: ClassVar[Sequence[str]] = ("ZImageImg2ImgPipeline", "ZImageInpaintPipeline")
    defaults: ClassVar[ImageDefaults] = ImageDefaults(num_inference_steps=50, guidance_scale=5.0)
    edits: ClassVar[Mapping[Task, EditDefaults]] = {
        "image-to-image": EditDefaults(strength=0.6, guidance_scale=5.0, num_inference_steps=50),
        "inpainting": EditDefaults(strength=1.0, guidance_scale=5.0, num_inference_steps=50),
    }
    reading: ClassVar[PromptForm] = PromptForm(layers=(-2,), variables=(("enable_thinking", True),))
    guidance_rule: ClassVar[str] = "guidance_scale > 0"
    keeps_precision: ClassVar[Sequence[str]] = ("*norm*", "*embed*", "*pad_token", "all_final_layer.*")
    embedding_parts: ClassVar[Sequence[str]] = ()
    masks_text: ClassVar[bool] = True
    counts_tokens: ClassVar[bool] = True
    float32_latents: ClassVar[bool] = True

    def default_sides(self, variant: Mapping[str, bool | int]) -> tuple[int, int]:
        return SIDE, SIDE

    def padded_text_length(self, num_tokens: int) -> int:
        """Return the length to which the transformer pads a text: those of one share forwards without a mask."""
        return -(-num_tokens // TEXT_MULTIPLE) * TEXT_MULTIPLE

    def uses_negative(self, request: DiffusionRequest, has_negative: bool) -> bool:
        return request.guidance_scale > 0

    def combine_guidance(self, negative: torch.Tensor, prompt: torch.Tensor, scale: float) -> torch.Tensor:
        return prompt + scale * (prompt - negative)

    def text_widths(self, denoiser: Any) -> tuple[int, int | None]:
        return denoiser.config.cap_feat_dim, None

    def predict_noise(self, denoiser: Any, rows: Rows, size: ImageSize) -> torch.Tensor:
        import torch

        latents = rows.latents.to(denoiser.dtype)
        (images,) = denoiser(
            list(latents.unsqueeze(2).unbind()),
            (1000 - rows.timesteps) / 1000,
            [prompt[:length] for prompt, length in zip(rows.prompts, rows.lengths, strict=True)],
            return_dict=False,
        )
        return -torch.stack([image.squeeze(1).float() for image in images])
