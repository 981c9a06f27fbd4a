"""Bodies of /sdapi/v1: requests of the Stable Diffusion WebUI, and the records that they become.

Source: AUTOMATIC1111/stable-diffusion-webui, `modules/api/models.py` and the page "API" of its wiki.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
from pydantic import Field

from configs.cluster import LimitsConfig
from deployments.errors import InvalidRequest
from deployments.ingress.compat.a1111_upscaling import LANCZOS, SecondPass
from deployments.ingress.openai.image_bodies import GenerationBody
from deployments.ingress.openai.image_files import SAMPLER_NAMES
from deployments.records import NO_PROMPT, Count, ImageRequest, Name, RequestModel, as_record

SAMPLERS: Final = {name: class_name for class_name, name in SAMPLER_NAMES.items()}
SCHEDULERS: Final[dict[str, dict[str, bool]]] = {
    "automatic": {},
    "karras": {"use_karras_sigmas": True},
    "exponential": {"use_exponential_sigmas": True},
    "beta": {"use_beta_sigmas": True},
}
AUTOMATIC: Final = "Automatic"  # the model's own
_BY_LOWER: Final = {name.lower(): name for name in SAMPLERS}
_LORA: Final = re.compile(r"<lora:([^<>]{1,400})>")  # <lora:name:0.8>
_OF_FIRST_PASS: Final = ("hr_checkpoint_name", "hr_sampler_name", "hr_scheduler", "hr_prompt", "hr_negative_prompt")
_HR_STRENGTH: Final = 0.7  # that the WebUI's page begins with
_KEPT: Final = 128  # a mask is white where it says more than that


class OverrideSettings(RequestModel, extra="ignore"):
    """Settings of one request."""

    sd_model_checkpoint: Name | None = None
    CLIP_stop_at_last_layers: int | None = Field(None, ge=1, le=12)


class TextToImageBody(RequestModel, extra="ignore"):
    """A request for images. Fields without a meaning here (`restore_faces`, `styles`, `eta`, ...) have no effect."""

    prompt: str | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    sampler_name: str | None = None
    sampler_index: str | None = None
    scheduler: str | None = None
    steps: Count | None = None
    cfg_scale: float | None = Field(None, ge=0, le=100)
    width: Count | None = None
    height: Count | None = None
    batch_size: Count | None = None
    n_iter: Count | None = None
    enable_hr: bool | None = None
    denoising_strength: float | None = Field(None, ge=0, le=1, description="of the second pass")
    hr_scale: float = Field(2.0, gt=0, le=8, allow_inf_nan=False)
    hr_upscaler: str | None = None
    hr_second_pass_steps: int = Field(0, ge=0, description="0: as many as the first pass")
    hr_resize_x: int = Field(0, ge=0, le=2**16)
    hr_resize_y: int = Field(0, ge=0, le=2**16)
    hr_checkpoint_name: str | None = None
    hr_sampler_name: str | None = None
    hr_scheduler: str | None = None
    hr_prompt: str | None = None
    hr_negative_prompt: str | None = None
    script_name: str | None = None
    alwayson_scripts: dict[str, Any] | None = None
    override_settings: OverrideSettings | None = None
    send_images: bool | None = True

    @property
    def num_images(self) -> int:
        """The images of the request."""
        return (self.batch_size or 1) * (self.n_iter or 1)

    @property
    def model_id(self) -> str | None:
        """The model that the request names."""
        return self.override_settings.sd_model_checkpoint if self.override_settings else None

    @property
    def _clip_skip(self) -> int | None:
        """The layers that are left out: the WebUI counts from 1, which is the last one."""
        last = self.override_settings.CLIP_stop_at_last_layers if self.override_settings else None
        return None if last is None else last - 1

    @property
    def second_pass(self) -> SecondPass | None:
        """The second pass that is asked for. Raises InvalidRequest for one of another model, sampler or prompt."""
        if not self.enable_hr:
            return None
        for name in _OF_FIRST_PASS:
            if getattr(self, name):
                raise InvalidRequest(f"{name}: the second pass has that of the first here", name)
        strength = _HR_STRENGTH if self.denoising_strength is None else self.denoising_strength
        size = self.hr_resize_x, self.hr_resize_y
        return SecondPass(
            self.hr_upscaler or LANCZOS, self.hr_scale, *size, self.hr_second_pass_steps or None, strength
        )

    def to_record(self, model: str, limits: LimitsConfig) -> ImageRequest:
        """Return the request of the first image as the service takes it; the record's `n` counts them all.

        Decodes images: not for the event loop. Raises InvalidRequest.
        """
        return as_record(GenerationBody, self._fields(model)).to_record(limits)

    def _fields(self, model: str) -> dict[str, Any]:
        if self.script_name or self.alwayson_scripts:
            name = "script_name" if self.script_name else "alwayson_scripts"
            raise InvalidRequest(f"{name}: there are no scripts here", name)
        prompt = self.prompt or ""
        loras = [_lora_of(found) for found in _LORA.finditer(prompt)]
        given: dict[str, Any] = {
            "model": model,
            "prompt": _LORA.sub("", prompt).strip() or NO_PROMPT,
            "negative_prompt": self.negative_prompt or None,
            "prompt_syntax": "weighted",
            "clip_skip": self._clip_skip,
            "n": self.num_images,
            "num_inference_steps": self.steps,
            "guidance_scale": self.cfg_scale,
            "width": self.width,
            "height": self.height,
            "seed": self.seed if self.seed is not None and self.seed >= 0 else None,
            "lora": loras,
        }
        return given | self._scheduler()

    def _scheduler(self) -> dict[str, Any]:
        """Return the class of diffusers that a sampler is, with its options: "DPM++ 2M Karras" has both in its name.

        Raises InvalidRequest with the known ones.
        """
        name = self.sampler_name or self.sampler_index or AUTOMATIC
        spacing = (self.scheduler or AUTOMATIC).lower()
        begun, _, last = name.rpartition(" ")
        if spacing == AUTOMATIC.lower() and last.lower() in SCHEDULERS and begun:
            name, spacing = begun, last.lower()
        if spacing not in SCHEDULERS:
            text = f"scheduler: {self.scheduler!r:.80} is not known (known: {', '.join(SCHEDULERS)})"
            raise InvalidRequest(text, "scheduler")
        options = {"scheduler_options": SCHEDULERS[spacing]}
        if name == AUTOMATIC:
            return options
        if (known := _BY_LOWER.get(name.lower())) is None:
            text = f"sampler_name: no sampler {name!r:.80} (known: {', '.join((AUTOMATIC, *SAMPLERS))})"
            raise InvalidRequest(text, "sampler_name")
        return options | {"scheduler": SAMPLERS[known]}


class ImageToImageBody(TextToImageBody):
    """A request for images that are like an image, or for what is masked in it."""

    init_images: list[str] = Field(min_length=1, max_length=1, description="one file in base64, or a data URL of one")
    mask: str | None = Field(None, description="a file in base64: what is white is painted anew")
    inpainting_mask_invert: int | bool | None = None
    denoising_strength: float = Field(0.75, gt=0, le=1)

    def to_record(self, model: str, limits: LimitsConfig) -> ImageRequest:
        """Return the request as `TextToImageBody` does, with its images."""
        record = super().to_record(model, limits)
        if record.mask_image is None or not self.inpainting_mask_invert:
            return record
        inverted = np.where(record.mask_image < _KEPT, np.uint8(255), np.uint8(0))
        return record.model_copy(update={"mask_image": inverted})

    @property
    def second_pass(self) -> SecondPass | None:
        """None: an image to begin with has its size already. Raises InvalidRequest where one is asked for."""
        if self.enable_hr:
            raise InvalidRequest("enable_hr: img2img has no second pass", "enable_hr")
        return None

    def _fields(self, model: str) -> dict[str, Any]:
        images = {"init_image": self.init_images[0], "mask_image": self.mask, "strength": self.denoising_strength}
        return super()._fields(model) | images


def _lora_of(found: re.Match[str]) -> dict[str, Any]:
    name, _, scale = found[1].partition(":")
    try:
        return {"name": name.strip(), "scale": float(scale.partition(":")[0] or 1)}
    except ValueError:
        raise InvalidRequest(f"prompt: {found[0]!r} is not <lora:name:scale>", "prompt") from None


class OptionsBody(RequestModel, extra="ignore", strict=True):
    """Options to set. Those without a meaning here have no effect."""

    sd_model_checkpoint: Name | None = None
    CLIP_stop_at_last_layers: int | None = Field(None, ge=1, le=12)
