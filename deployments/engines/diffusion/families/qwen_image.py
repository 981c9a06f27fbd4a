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
    Adapters,
    ControlRows,
    Defaults,
    EditDefaults,
    EncodeImages,
    Family,
    ImageDefaults,
    ImageSize,
    LatentReferences,
    Latents,
    Network,
    References,
    Rows,
    sum_residuals,
)
from deployments.engines.diffusion.families.flow_matching import (
    PATCH,
    PackedLatents,
    ReadTexts,
    ShiftedSteps,
    TrueGuidance,
    num_patches,
)
from deployments.engines.records.input_images import resize_pixels
from deployments.engines.records.protocol import EngineError, PromptForm

if TYPE_CHECKING:  # the ingress has no torch
    import numpy as np
    import numpy.typing as npt
    import torch

# The system prompt of the model's training; its own encodings, of the first 34 tokens, are left out.
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
_AREA: Final = 1024 * 1024  # pixels of an edited image, and of the result
_SMALL_AREA: Final = 384 * 384  # of an image for the language model alone
_SIDE_MULTIPLE: Final = 32
_MAX_RATIO: Final = 16  # of the sides
_TEXT_STEP: Final = 256  # tokens


class QwenTexts(ReadTexts):
    masks: ClassVar[bool] = True


class NormKeeping(TrueGuidance):
    """Guidance against a negative prompt at the prompt's own strength."""

    def combine(self, negative: torch.Tensor, prompt: torch.Tensor, scale: float) -> torch.Tensor:
        """Guide with each patch's prediction as long as for the prompt alone."""
        import torch

        guided = super().combine(negative, prompt, scale)
        return guided * (torch.norm(prompt, dim=-1, keepdim=True) / torch.norm(guided, dim=-1, keepdim=True))


class QwenLatents(PackedLatents):
    """Packed patches: (num_images, h/2 * w/2, 4 * C). The VAE is one of videos, each image a frame."""

    def batch_shape(self, size: ImageSize) -> Hashable:
        return super().batch_shape(size), size.references

    def scale(self, vae_latents: torch.Tensor, vae: Any) -> torch.Tensor:
        mean, std = (_by_channel(vae.config[f"latents_{name}"], vae_latents) for name in ("mean", "std"))
        return (vae_latents - mean) * (1.0 / std)

    def unscale(self, latents_BCHW: torch.Tensor, vae: Any) -> torch.Tensor:
        mean, std = (_by_channel(vae.config[f"latents_{name}"], latents_BCHW) for name in ("mean", "std"))
        return latents_BCHW / (1.0 / std) + mean


class QwenAdapters(Adapters):
    """ControlNets that read latents of an image in patches, and the prompt, beside a negative one too."""

    control_keys: ClassVar[Mapping[str, Sequence[str]]] = {
        "QwenImageControlNetModel": (
            *("in_channels", "patch_size", "num_attention_heads", "attention_head_dim", "joint_attention_dim"),
            "axes_dims_rope",
        )
    }
    controls_read_prompt: ClassVar[bool] = True
    encodes_controls: ClassVar[bool] = True

    def __init__(self, latents: Latents) -> None:
        self._latents = latents

    def control_inputs(self, net: Any, pixels_B3HW: torch.Tensor, encode: EncodeImages) -> tuple[torch.Tensor, ...]:
        return (self._latents.pack(encode(pixels_B3HW * 2 - 1)),)

    def control_refusal(
        self, class_name: str, config: Mapping[str, Any], denoiser_config: Mapping[str, Any], pixels_per_latent: int
    ) -> str | None:
        if more := config.get("extra_condition_channels"):
            return f"reads {more} channels beside its image's (extra_condition_channels), which is not supported"
        return None


class QwenNetwork(Network):
    """Two streams, of patches and of the prompt. Models with `edits` mark reference images by their time."""

    keeps_precision: ClassVar[Sequence[str]] = ("*norm*", "*embed*", "img_in.*", "txt_in.*", "proj_out.weight")

    def __init__(self, *, edits: bool = False) -> None:
        self._edits = edits

    def refusal(self, denoiser_config: Mapping[str, Any]) -> str | None:
        if denoiser_config.get("guidance_embeds"):
            return "a Qwen-Image with embedded guidance is not supported"
        if denoiser_config.get("use_additional_t_cond") or denoiser_config.get("use_layer3d_rope"):
            return "a Qwen-Image transformer for layers is not supported"
        if denoiser_config.get("zero_cond_t") and not self._edits:
            return "a Qwen-Image transformer for edits is not supported"
        return None

    def text_widths(self, denoiser: Any) -> tuple[int, int | None]:
        return denoiser.config.joint_attention_dim, None

    def predict_noise(self, denoiser: Any, rows: Rows, size: ImageSize) -> torch.Tensor:
        beside = rows.sizes[0].references if rows.sizes else ()
        shapes = [(1, one.latent_height // PATCH, one.latent_width // PATCH) for one in (size, *beside)]
        timesteps = rows.timesteps.to(rows.latents.dtype) / 1000

        def run(control: ControlRows) -> Sequence[Sequence[torch.Tensor]]:
            residuals: Sequence[torch.Tensor] = control.net(
                hidden_states=rows.latents,
                controlnet_cond=control.images,
                timestep=timesteps,
                encoder_hidden_states=control.prompts,
                img_shapes=[shapes] * len(rows),
                return_dict=False,
            )
            return [residuals]

        (blocks,) = sum_residuals(rows, run) or (None,)
        noise: torch.Tensor = denoiser(
            hidden_states=rows.latents,
            timestep=timesteps,
            encoder_hidden_states=rows.prompts,
            encoder_hidden_states_mask=rows.mask,
            img_shapes=[shapes] * len(rows),
            controlnet_block_samples=blocks,
            return_dict=False,
        )[0]
        return noise[:, : num_patches(size)]


_LATENTS: Final = QwenLatents()
QWEN_IMAGE: Final = Family(
    class_name="QwenImagePipeline",
    other_class_names=("QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline"),
    denoiser_name="transformer",
    defaults=Defaults(
        ImageDefaults(num_inference_steps=50, guidance_scale=1.0, true_cfg_scale=4.0),
        edits={
            "image-to-image": EditDefaults(strength=0.6, guidance_scale=1.0, num_inference_steps=50),
            "inpainting": EditDefaults(strength=0.6, guidance_scale=1.0, num_inference_steps=50),
        },
    ),
    network=QwenNetwork(),
    texts=QwenTexts(READING, max_tokens=1024, without_negative="unguided"),
    latents=_LATENTS,
    guidance=NormKeeping(),
    steps=ShiftedSteps(),
    adapters=QwenAdapters(_LATENTS),
    references=LatentReferences(),
)


class EditTexts(QwenTexts):
    """Prompts longer than 1024 tokens, which stock takes whole, are cut."""

    def padded_length(self, num_tokens: int) -> int:
        """Return a power of two for a short text, and a multiple of a step for a text of thousands of tokens."""
        if num_tokens <= _TEXT_STEP:
            return super().padded_length(num_tokens)
        return math.ceil(num_tokens / _TEXT_STEP) * _TEXT_STEP


class EditAdapters(Adapters):
    repeats_rows: ClassVar[bool] = True  # with their times, and again with time 0 for reference images


class OneReference(References):
    """One edited image, which the language model sees as large as the VAE does."""

    most: ClassVar[int] = 1

    def sides(self, references: Sequence[npt.NDArray[np.uint8]], multiple: int) -> tuple[int, int]:
        *_, (width, height) = (_sides_of_area(image, _AREA) for image in references)
        return width // multiple * multiple, height // multiple * multiple

    def seen(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return resize_pixels(pixels, _sides_of_area(pixels, _AREA))

    def encoded(self, pixels: npt.NDArray[np.uint8], multiple: int) -> npt.NDArray[np.uint8]:
        return resize_pixels(self.seen(pixels), self.sides([pixels], multiple))


class SeveralReferences(OneReference):
    """Several images edited into one; the language model sees them smaller."""

    most: ClassVar[int] = 8  # stock bounds nothing; trained on up to three

    def seen(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return resize_pixels(pixels, _sides_of_area(pixels, _SMALL_AREA))

    def encoded(self, pixels: npt.NDArray[np.uint8], multiple: int) -> npt.NDArray[np.uint8]:
        return resize_pixels(pixels, self.sides([pixels], multiple))


def _sides_of_area(pixels: npt.NDArray[np.uint8], area: int) -> tuple[int, int]:
    """Return a width and height of about so many pixels, in the image's ratio. Raises EngineError."""
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


_EDIT_READING: Final = PromptForm(layers=(-1,), template=_EDIT_TEMPLATE, num_dropped=64, image=_IMAGE)
_PLUS_READING: Final = replace(_EDIT_READING, image=f"Picture {{number}}: {_IMAGE}")
QWEN_IMAGE_EDIT: Final = Family(
    class_name="QwenImageEditPipeline",
    denoiser_name="transformer",
    defaults=Defaults(QWEN_IMAGE.defaults.usual),
    network=QwenNetwork(edits=True),
    texts=EditTexts(_EDIT_READING, max_tokens=1024, default_tokens=1024, without_negative="unguided"),
    latents=_LATENTS,
    guidance=NormKeeping(),
    steps=ShiftedSteps(),
    adapters=EditAdapters(),
    references=OneReference(),
)
QWEN_IMAGE_EDIT_PLUS: Final = replace(
    QWEN_IMAGE_EDIT,
    class_name="QwenImageEditPlusPipeline",
    texts=EditTexts(_PLUS_READING, max_tokens=1024, default_tokens=1024, without_negative="unguided"),
    references=SeveralReferences(),
)
