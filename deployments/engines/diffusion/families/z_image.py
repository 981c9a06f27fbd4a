"""Z-Image and Z-Image-Turbo: one stream of image patches and of a language model's reading of the prompt.

Source: diffusers 0.42, `pipelines/z_image/pipeline_z_image.py`, `models/transformers/transformer_z_image.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from deployments.engines.diffusion.families.base import (
    Defaults,
    EditDefaults,
    Family,
    Guidance,
    ImageDefaults,
    ImageSize,
    Network,
    Rows,
)
from deployments.engines.diffusion.families.flow_matching import FlowLatents, ReadTexts, ShiftedSteps
from deployments.engines.records.protocol import DiffusionRequest, PromptForm

if TYPE_CHECKING:  # the ingress has no torch
    import torch

SIDE: Final = 1024  # pixels, whatever the configs say
TEXT_MULTIPLE: Final = 32  # the transformer pads texts to it with a learned vector that it attends to


class ZDefaults(Defaults):
    def sides(self, variant: Mapping[str, bool | int]) -> tuple[int, int]:
        return SIDE, SIDE


class ZTexts(ReadTexts):
    """The prompt is a chat's first message, its encoding the language model's last layer but one. The transformer pads
    texts itself.
    """

    masks: ClassVar[bool] = True
    counts_tokens: ClassVar[bool] = True

    def padded_length(self, num_tokens: int) -> int:
        """Return the length to which the transformer pads a text: texts of one length share forwards without a mask."""
        return -(-num_tokens // TEXT_MULTIPLE) * TEXT_MULTIPLE


class AddedGuidance(Guidance):
    """Guidance is added to the prompt's prediction, so that a scale of 0 is none, as for Z-Image-Turbo with its 9
    steps.
    """

    rule: ClassVar[str] = "guidance_scale > 0"

    def uses_negative(self, request: DiffusionRequest, has_negative: bool) -> bool:
        return request.guidance_scale > 0

    def combine(self, negative: torch.Tensor, prompt: torch.Tensor, scale: float) -> torch.Tensor:
        return prompt + scale * (prompt - negative)


class ZLatents(FlowLatents):
    """Latents are images: (num_images, C, h, w), in float32."""

    are_float32: ClassVar[bool] = True


class ZNetwork(Network):
    keeps_precision: ClassVar[Sequence[str]] = ("*norm*", "*embed*", "*pad_token", "all_final_layer.*")

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


Z_IMAGE: Final = Family(
    class_name="ZImagePipeline",
    other_class_names=("ZImageImg2ImgPipeline", "ZImageInpaintPipeline"),
    denoiser_name="transformer",
    defaults=ZDefaults(
        ImageDefaults(num_inference_steps=50, guidance_scale=5.0),
        edits={
            "image-to-image": EditDefaults(strength=0.6, guidance_scale=5.0, num_inference_steps=50),
            "inpainting": EditDefaults(strength=1.0, guidance_scale=5.0, num_inference_steps=50),
        },
    ),
    network=ZNetwork(),
    texts=ZTexts(PromptForm(layers=(-2,), variables=(("enable_thinking", True),))),
    latents=ZLatents(),
    guidance=AddedGuidance(),
    steps=ShiftedSteps(),
)
