"""Qwen-Image: two streams, of image patches and of a language model's reading of the prompt. Its editing models change
images, which the language model sees and whose patches stand beside those of the latents.

Source: diffusers 0.42, `pipelines/qwenimage/pipeline_qwenimage.py`, `pipeline_qwenimage_edit.py` and `_edit_plus.py`,
`models/transformers/transformer_qwenimage.py`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from deployments.engines.diffusion.families.base import (
    EditDefaults,
    ImageDefaults,
    ImageSize,
    NoNegative,
    Rows,
    Task,
)
from deployments.engines.diffusion.families.flow_matching import PATCH, PackedFlow, PromptReader, num_patches
from deployments.engines.records.input_images import resize_pixels
from deployments.engines.records.protocol import DiffusionRequest, EngineError, PromptForm

if TYPE_CHECKING:  # the ingress has no torch
    import numpy as np
    import numpy.typing as npt
    import torch

# The model was trained behind these words; their own encodings, of the first 34 tokens, are left out.
READING: Final = PromptForm(
    layers=(-1,),
    template="<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n",
    num_dropped=34,
)
_EDIT_TEMPLATE: Final = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
_IMAGE: Final = "<|vision_start|>{image}<|vision_end|>"
_AREA: Final = 1024 * 1024  # pixels of an image that is changed, and of the result
_SMALL_AREA: Final = 384 * 384  # of one that is only seen
_SIDE_MULTIPLE: Final = 32
_MAX_RATIO: Final = 16  # of the sides
_TEXT_STEP: Final = 256  # tokens


class QwenImage(PromptReader, PackedFlow):
    """QwenImagePipeline. Guidance against a negative prompt is `true_cfg_scale`, at the prompt's own strength.

    Latents are packed patches: (num_images, h/2 * w/2, 4 * C). The VAE is one of videos, each image a frame.
    """

    class_name: ClassVar[str] = "QwenImagePipeline"
    denoiser_name: ClassVar[str] = "transformer"
    other_class_names: ClassVar[Sequence[str]] = ("QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline")
    defaults: ClassVar[ImageDefaults] = ImageDefaults(num_inference_steps=50, guidance_scale=1.0, true_cfg_scale=4.0)
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
        if denoiser_config.get("use_additional_t_cond") or denoiser_config.get("use_layer3d_rope"):
            return "a Qwen-Image transformer for layers is not supported"
        if denoiser_config.get("zero_cond_t") and not self.max_references:
            return "a Qwen-Image transformer for edits is not supported"
        return None

    def text_widths(self, denoiser: Any) -> tuple[int, int | None]:
        return denoiser.config.joint_attention_dim, None

    def predict_noise(self, denoiser: Any, rows: Rows, size: ImageSize) -> torch.Tensor:
        beside = rows.sizes[0].references if rows.sizes else ()
        shapes = [(1, one.latent_height // PATCH, one.latent_width // PATCH) for one in (size, *beside)]
        noise: torch.Tensor = denoiser(
            hidden_states=rows.latents,
            timestep=rows.timesteps.to(rows.latents.dtype) / 1000,
            encoder_hidden_states=rows.prompts,
            encoder_hidden_states_mask=rows.mask,
            img_shapes=[shapes] * len(rows),
            return_dict=False,
        )[0]
        return noise[:, : num_patches(size)]


class QwenImageEdit(QwenImage):
    """QwenImageEditPipeline. It changes one image, which the language model sees as large as the VAE does.

    A prompt longer than 1024 tokens, which stock takes whole, is cut.
    """

    class_name: ClassVar[str] = "QwenImageEditPipeline"
    other_class_names: ClassVar[Sequence[str]] = ()
    edits: ClassVar[Mapping[Task, EditDefaults]] = {}
    max_references: ClassVar[int] = 1
    repeats_rows: ClassVar[bool] = True  # with their times, and then with time 0, which is that of images beside
    default_tokens: ClassVar[int] = 1024
    reading: ClassVar[PromptForm] = PromptForm(layers=(-1,), template=_EDIT_TEMPLATE, num_dropped=64, image=_IMAGE)

    def padded_text_length(self, num_tokens: int) -> int:
        """Return a power of two for a short text, and for one with an image, of thousands of tokens, a multiple."""
        if num_tokens <= _TEXT_STEP:
            return super().padded_text_length(num_tokens)
        return math.ceil(num_tokens / _TEXT_STEP) * _TEXT_STEP

    def batch_shape(self, size: ImageSize) -> Hashable:
        return super().batch_shape(size), size.references

    def sides_beside(self, references: Sequence[npt.NDArray[np.uint8]], multiple: int) -> tuple[int, int]:
        *_, (width, height) = (_sides_of_area(image, _AREA) for image in references)
        return width // multiple * multiple, height // multiple * multiple

    def seen_reference(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return resize_pixels(pixels, _sides_of_area(pixels, _AREA))

    def encoded_reference(self, pixels: npt.NDArray[np.uint8], multiple: int) -> npt.NDArray[np.uint8]:
        return resize_pixels(self.seen_reference(pixels), self.sides_beside([pixels], multiple))


class QwenImageEditPlus(QwenImageEdit):
    """QwenImageEditPlusPipeline. It changes several images into one; the language model sees them smaller."""

    class_name: ClassVar[str] = "QwenImageEditPlusPipeline"
    max_references: ClassVar[int] = 8  # stock bounds nothing; trained on up to three
    reading: ClassVar[PromptForm] = replace(QwenImageEdit.reading, image=f"Picture {{number}}: {_IMAGE}")

    def seen_reference(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return resize_pixels(pixels, _sides_of_area(pixels, _SMALL_AREA))

    def encoded_reference(self, pixels: npt.NDArray[np.uint8], multiple: int) -> npt.NDArray[np.uint8]:
        return resize_pixels(pixels, self.sides_beside([pixels], multiple))


def _sides_of_area(pixels: npt.NDArray[np.uint8], area: int) -> tuple[int, int]:
    """Return the width and height of so many pixels, about, in the ratio of an image's. Raises EngineError."""
    height, width = pixels.shape[:2]
    if max(height, width) > _MAX_RATIO * min(height, width):
        raise EngineError(f"an image of {width}x{height} pixels: no side may be more than {_MAX_RATIO} times the other")
    ratio = width / height
    exact = math.sqrt(area * ratio)
    sides = exact, exact / ratio
    return round(sides[0] / _SIDE_MULTIPLE) * _SIDE_MULTIPLE, round(sides[1] / _SIDE_MULTIPLE) * _SIDE_MULTIPLE


def _by_channel(values: Sequence[float], like_BCHW: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.tensor(values).view(1, -1, 1, 1).to(like_BCHW.device, like_BCHW.dtype)
