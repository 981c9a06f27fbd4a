"""Qwen-Image: two streams, of image patches and of a language model's reading of the prompt.

Source: diffusers 0.42, `pipelines/qwenimage/pipeline_qwenimage.py`, `models/transformers/transformer_qwenimage.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from deployments.engines.diffusion.families.base import (
    EditDefaults,
    ImageDefaults,
    ImageSize,
    NoNegative,
    Rows,
    Task,
)
from deployments.engines.diffusion.families.flow_matching import PATCH, PackedFlow
from deployments.engines.diffusion.families.prompt_reader import PromptReader
from deployments.engines.protocol import DiffusionRequest, PromptForm

if TYPE_CHECKING:  # the ingress has no torch
    import torch

# The model was trained behind these words; their own encodings, of the first 34 tokens, are left out.
READING: Final = PromptForm(
    layers=(-1,),
    template="<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n",
    num_dropped=34,
)


class QwenImage(PromptReader, PackedFlow):
    """QwenImagePipeline. Guidance against a negative prompt is `true_cfg_scale`, at the prompt's own strength.

    Latents are packed patches: (num_images, h/2 * w/2, 4 * C). The VAE is one of videos, each image a frame.
    """

    class_name: ClassVar[str] = "QwenImagePipeline"
    denoiser_name: ClassVar[str] = "transformer"
    other_class_names: ClassVar[Sequence[str]] = ("QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline")
    defaults: ClassVar[ImageDefaults] = ImageDefaults(
        num_inference_steps=50, guidance_scale=1.0, side=1024, true_cfg_scale=4.0
    )
    edits: ClassVar[Mapping[Task, EditDefaults]] = {
        "image-to-image": EditDefaults(strength=0.6, guidance_scale=1.0, num_inference_steps=50),
        "inpainting": EditDefaults(strength=0.6, guidance_scale=1.0, num_inference_steps=50),
    }
    reading: ClassVar[PromptForm] = READING
    max_tokens: ClassVar[int] = 1024
    guidance_rule: ClassVar[str] = "true_cfg_scale > 1"
    keeps_precision: ClassVar[Sequence[str]] = ("*norm*", "*embed*", "img_in.*", "txt_in.*", "proj_out.weight")
    embedding_parts: ClassVar[Sequence[str]] = ()
    masks_text: ClassVar[bool] = True

    def no_negative(self, model_index: Mapping[str, Any]) -> NoNegative:
        return "unguided"

    def uses_negative(self, request: DiffusionRequest, has_negative: bool) -> bool:
        return request.true_cfg_scale > 1 and has_negative

    def cfg_scale(self, request: DiffusionRequest) -> float:
        return request.true_cfg_scale

    def combine_guidance(self, negative: torch.Tensor, prompt: torch.Tensor, scale: float) -> torch.Tensor:
        """Guide without making a patch's prediction longer than it is for the prompt alone."""
        import torch

        guided = super().combine_guidance(negative, prompt, scale)
        return guided * (torch.norm(prompt, dim=-1, keepdim=True) / torch.norm(guided, dim=-1, keepdim=True))

    def scale_latents(self, vae_latents: torch.Tensor, vae: Any) -> torch.Tensor:
        mean, std = (_by_channel(vae.config[f"latents_{name}"], vae_latents) for name in ("mean", "std"))
        return (vae_latents - mean) * (1.0 / std)

    def unscale_latents(self, latents_BCHW: torch.Tensor, vae: Any) -> torch.Tensor:
        mean, std = (_by_channel(vae.config[f"latents_{name}"], latents_BCHW) for name in ("mean", "std"))
        return latents_BCHW / (1.0 / std) + mean

    def refusal(self, denoiser_config: Mapping[str, Any]) -> str | None:
        if denoiser_config.get("guidance_embeds"):
            return "a Qwen-Image with embedded guidance is not supported"
        if denoiser_config.get("zero_cond_t") or denoiser_config.get("use_additional_t_cond"):
            return "a Qwen-Image transformer for edits or layers is not supported"
        return None

    def text_widths(self, denoiser: Any) -> tuple[int, int | None]:
        return denoiser.config.joint_attention_dim, None

    def predict_noise(self, denoiser: Any, rows: Rows, size: ImageSize) -> torch.Tensor:
        shape = 1, size.latent_height // PATCH, size.latent_width // PATCH
        noise: torch.Tensor = denoiser(
            hidden_states=rows.latents,
            timestep=rows.timesteps.to(rows.latents.dtype) / 1000,
            encoder_hidden_states=rows.prompts,
            encoder_hidden_states_mask=rows.mask,
            img_shapes=[[shape]] * len(rows),
            return_dict=False,
        )[0]
        return noise


def _by_channel(values: Sequence[float], like_BCHW: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.tensor(values).view(1, -1, 1, 1).to(like_BCHW.device, like_BCHW.dtype)
