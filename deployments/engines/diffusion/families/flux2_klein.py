"""FLUX.2 [klein]: a FLUX.2 whose prompts a smaller language model reads, guided away from a text.

Source: diffusers 0.42, `pipelines/flux2/pipeline_flux2_klein.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from deployments.engines.diffusion.families.base import ImageDefaults, NoNegative
from deployments.engines.diffusion.families.flux2 import Flux2
from deployments.engines.protocol import DiffusionRequest, PromptForm

# FLUX.2 [klein], distilled, by its model card.
DISTILLED: Final = ImageDefaults(num_inference_steps=4, guidance_scale=1.0, side=1024)


class Flux2Klein(Flux2):
    """Flux2KleinPipeline. Stock guides away from an empty text; here a negative prompt is one."""

    class_name: ClassVar[str] = "Flux2KleinPipeline"
    guidance_rule: ClassVar[str] = "guidance_scale > 1"
    reading: ClassVar[PromptForm] = PromptForm(
        layers=(9, 18, 27), variables=(("enable_thinking", False),), keeps_padding=True
    )

    def __init__(self, *, is_distilled: bool = False) -> None:
        self._is_distilled = is_distilled

    def variant(self, model_index: Mapping[str, Any]) -> Flux2Klein:
        return Flux2Klein(is_distilled=model_index.get("is_distilled") is True)

    def defaults_of(self, variant: Mapping[str, bool | int]) -> ImageDefaults:
        return DISTILLED if variant.get("is_distilled") is True else self.defaults

    def no_negative(self, model_index: Mapping[str, Any]) -> NoNegative:
        return "empty text"

    def uses_negative(self, request: DiffusionRequest, has_negative: bool) -> bool:
        return request.guidance_scale > 1 and not self._is_distilled

    def refusal(self, denoiser_config: Mapping[str, Any]) -> str | None:
        is_guided = denoiser_config.get("guidance_embeds", True)  # the default of the class
        return "a FLUX.2 [klein] with embedded guidance is not supported" if is_guided else None
