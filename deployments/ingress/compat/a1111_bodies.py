"""Bodies and answers of /sdapi/v1: requests of the Stable Diffusion WebUI, the records that they become, and enlarging.

Source: AUTOMATIC1111/stable-diffusion-webui, `modules/api/models.py` and the page "API" of its wiki; for enlarging
(`extra-single-image`, and the second pass of `enable_hr`) `modules/upscaler.py`, `scripts/postprocessing_upscale.py`
and `modules/processing.py`: a network runs until the image is as large as asked for, three times at most, and Lanczos'
filter does the rest.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field
from starlette.responses import Response

from configs.cluster import LimitsConfig
from deployments.engines.records.input_images import resize_pixels
from deployments.ingress.compat.a1111_painting import (
    FROM_AROUND,
    LATENT,
    MAX_BLUR,
    ORIGINAL,
    Painting,
    PaintOptions,
    paint,
)
from deployments.ingress.messages.responses import Answer, Failure, json_response
from deployments.ingress.openai.image_bodies import GenerationBody
from deployments.ingress.openai.image_files import SAMPLER_NAMES
from deployments.ingress.openai.uploads import decode_base64_within
from deployments.ingress.service.service import Service
from deployments.records import NO_PROMPT, Count, ImageRequest, Name, RequestModel, as_record
from deployments.records.errors import InvalidRequest
from deployments.requests.defaults import draw_seed

LANCZOS: Final = "Lanczos"
NONE: Final = "None"
_LATENT: Final = "Latent"
_MAX_PASSES: Final = 3
_SIDE_MULTIPLE: Final = 8  # of sides: others are rounded down, as the WebUI does by its latents
Pixels = npt.NDArray[np.uint8]
_SDE: Final = {"algorithm_type": "sde-dpmsolver++"}
# The samplers of the WebUI: classes of diffusers, and their options.
SAMPLERS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    **{name: (class_name, {}) for class_name, name in SAMPLER_NAMES.items()},
    "DPM++ 2M SDE": ("DPMSolverMultistepScheduler", {**_SDE}),
    "DPM++ 2M SDE Heun": ("DPMSolverMultistepScheduler", {**_SDE, "solver_type": "heun"}),
    "TCD": ("TCDScheduler", {}),
}
# Samplers that diffusers computes in another way than k-diffusion.
_NO_SAMPLERS: Final = {
    name.lower()
    for name in (
        "DPM2 CFG++",
        "DPM fast",
        "DPM adaptive",
        "Restart",
        "DDIM CFG++",
    )
}
# The spacings of steps. Karras and its kin lie between the first sigma of a model's training and the last one.
_ALL_SIGMAS: Final = {"timestep_spacing": "linspace"}
SCHEDULERS: Final[dict[str, dict[str, bool | str]]] = {
    "Automatic": {"timestep_spacing": "automatic"},
    "Uniform": {**_ALL_SIGMAS},
    "Karras": {"use_karras_sigmas": True, **_ALL_SIGMAS},
    "Exponential": {"use_exponential_sigmas": True, **_ALL_SIGMAS},
    "SGM Uniform": {"timestep_spacing": "trailing"},
    "Normal": {**_ALL_SIGMAS},
    "Simple": {"timestep_spacing": "trailing"},
    "DDIM": {"timestep_spacing": "leading"},
    "Beta": {"use_beta_sigmas": True, **_ALL_SIGMAS},
}
AUTOMATIC: Final = "Automatic"  # the model's own
_SAME: Final = ("", "use same sampler", "use same scheduler", "use same checkpoint")  # as the first pass has
_STRENGTHS: Final = ("te", "unet")  # of a LoRA in a prompt, in that order
_BY_LOWER: Final = {name.lower(): name for name in SAMPLERS}
_SPACINGS: Final = {name.lower(): name for name in sorted(SCHEDULERS, key=len, reverse=True)}
_ALWAYS_LINEAR: Final = ("DPMSolverSinglestepScheduler",)  # have one spacing, and no option for it
_NETWORK: Final = re.compile(r"<(lora|lyco|hypernet):([^<>]{1,400})>")  # <lora:name:0.8>
_OF_FIRST_PASS: Final = ("hr_checkpoint_name", "hr_prompt", "hr_negative_prompt")
_HR_STRENGTH: Final = 0.7  # the default of the WebUI's page
# Fields of the WebUI that change an image there but not here, with their neutral values.
_VAIN: Final[dict[str, tuple[Any, ...]]] = {
    "styles": ([],),
    "tiling": (False,),
    "restore_faces": (False,),
    "seed_resize_from_h": (-1, 0),
    "seed_resize_from_w": (-1, 0),
    "eta": (),
    "s_churn": (0,),
    "s_tmin": (0,),
    "s_tmax": (0,),
    "s_noise": (1,),
    "s_min_uncond": (0,),
    "refiner_checkpoint": ("", "None"),
    "refiner_switch_at": (1,),
    "image_cfg_scale": (),
    "initial_noise_multiplier": (1,),
    "save_images": (False,),
}
# Fields without an effect on images, whatever their values.
_ABOUT_FILES: Final = frozenset(
    {
        *("do_not_save_samples", "do_not_save_grid", "include_init_images", "script_args", "firstphase_width"),
        *("override_settings_restore_afterwards", "disable_extra_networks", "comments", "force_task_id"),
        *("firstphase_height", "firstpass_image", "infotext", "latent_mask"),
    }
)
_SETTINGS: Final = {"sd_vae": ("Automatic", "")}
_MAX_SHOWN: Final = 20  # of fields in a warning


class WebuiError(Answer):
    """The form of every error under /sdapi."""

    error: str
    detail: str
    body: Literal[""]
    errors: str


def webui_failure_response(failure: Failure) -> Response:
    """Return `failure` in the form of the WebUI."""
    answer = WebuiError(error=failure.code, detail=failure.message, body="", errors=failure.message)
    return json_response(answer, failure.status, failure.headers)


class WebuiImages(Answer):
    """The images of a request as PNG files in base64; `info` is JSON with their seeds and options."""

    images: list[str]
    parameters: dict[str, Any]
    info: str


class WebuiImage(Answer):
    """An enlarged image as a PNG file in base64."""

    html_info: str
    image: str


class WebuiUpscaler(Answer):
    """A way to enlarge images: a filter, or the name of a model."""

    name: str
    model_name: None = None
    model_path: None = None
    model_url: None = None
    scale: None = None


class WebuiModel(Answer):
    """A diffusion model. Its title is its name here."""

    title: str
    model_name: str
    hash: str
    sha256: str
    filename: str
    config: None = None


class WebuiSampler(Answer):
    name: str
    aliases: list[str]
    options: dict[str, str]


class WebuiScheduler(Answer):
    """A way to space the steps."""

    name: str
    label: str
    aliases: None = None
    default_rho: float = -1.0
    need_inner_model: bool = False


class WebuiLora(Answer):
    """A LoRA, and the models that it is for."""

    name: str
    alias: str
    path: str
    metadata: dict[str, Any]


class WebuiOptions(Answer):
    """The options with a meaning here: the model of requests that name none."""

    sd_model_checkpoint: str | None
    samples_format: Literal["png"]


class WebuiState(Answer):
    """The running work of the caller's key: job number `job_no` of `job_count`, and the step of that image."""

    skipped: bool
    interrupted: bool
    stopping_generation: bool
    job: str
    job_count: int
    job_timestamp: str
    job_no: int
    sampling_step: int
    sampling_steps: int


class WebuiProgress(Answer):
    """The done part of the running work, from 0 to 1, and the seconds of the rest at that pace."""

    progress: float
    eta_relative: float
    state: WebuiState
    current_image: None
    textinfo: None


class Size(NamedTuple):
    """Width and height, in pixels."""

    width: int
    height: int


class SecondPass(NamedTuple):
    """The second pass of `enable_hr`. A size of 0 is `scale` times that of the first; steps of None are the first's.

    `solver` has an ImageRequest's fields for its sampler and scheduler.
    """

    upscaler: str
    scale: float
    width: int
    height: int
    steps: int | None
    strength: float
    solver: dict[str, Any]

    def size_after(self, first: Pixels) -> Size:
        """Return the size of the second pass."""
        height, width = first.shape[:2]
        scale = self.scale
        if self.width or self.height:
            scale = max(self.width / width, self.height / height)
        sides = [self.width or int(width * scale), self.height or int(height * scale)]
        return Size(*map(_rounded, sides))


class ExtraImageBody(RequestModel, extra="ignore"):
    """A request to enlarge an image. There are no face restorers, and no second upscaler beside the first."""

    image: str = Field(min_length=1, description="a file in base64, or a data URL of one")
    resize_mode: int = Field(0, ge=0, le=1, description="0: by a factor; 1: to a size")
    upscaling_resize: float = Field(2.0, gt=0, le=16, allow_inf_nan=False)
    upscaling_resize_w: Count = 512
    upscaling_resize_h: Count = 512
    upscaling_crop: bool = True
    upscaler_1: str = NONE
    extras_upscaler_2_visibility: float = 0
    gfpgan_visibility: float = 0
    codeformer_visibility: float = 0

    def pixels(self, limits: LimitsConfig) -> Pixels:
        """Return the image. Blocks, in a decoder process. Raises InvalidRequest."""
        for name in ("extras_upscaler_2_visibility", "gfpgan_visibility", "codeformer_visibility"):
            if getattr(self, name):
                raise InvalidRequest(f"{name}: there is only upscaler_1 here", name)
        return decode_base64_within(self.image, "image", limits).pixels

    def size_of(self, image: Pixels) -> Size:
        """Return the size of the image before it is cut."""
        height, width = image.shape[:2]
        scale = self.upscaling_resize
        if self.resize_mode == 1:
            scale = max(self.upscaling_resize_w / width, self.upscaling_resize_h / height)
        return Size(max(1, round(width * scale)), max(1, round(height * scale)))

    def cut(self, image: Pixels) -> Pixels:
        """Return the middle of an image larger than the requested size."""
        if self.resize_mode == 0 or not self.upscaling_crop:
            return image
        top = max(0, (image.shape[0] - self.upscaling_resize_h) // 2)
        left = max(0, (image.shape[1] - self.upscaling_resize_w) // 2)
        return image[top : top + self.upscaling_resize_h, left : left + self.upscaling_resize_w]


async def upscalers(service: Service) -> list[str]:
    """Return the names of upscalers, for `upscaler_1` and `hr_upscaler`."""
    networks = [card.id for card in await service.listing.models() if card.kind == "upscaler"]
    return [NONE, LANCZOS, *networks]


async def resized(service: Service, image: Pixels, upscaler: str, size: Size, limits: LimitsConfig) -> Pixels:
    """Return an image in another size, by a network if it is to be larger. Raises the ServiceErrors.

    The WebUI's ways to enlarge latents ("Latent", "Latent (bicubic)") enlarge the image by Lanczos' filter here.
    """
    known = await upscalers(service)
    if upscaler.startswith(_LATENT):
        upscaler = LANCZOS
    if upscaler not in known:
        raise InvalidRequest(f"upscaler: no upscaler {upscaler!r:.80} (known: {', '.join(known)})", "upscaler")
    if size.width * size.height > limits.max_upload_pixels:
        text = f"{size.width}x{size.height} pixels, at most {limits.max_upload_pixels} are allowed"
        raise InvalidRequest(f"size: {text}", "upscaling_resize")
    if upscaler not in (NONE, LANCZOS):
        image = await _enlarged(service, image, upscaler, size)
    if image.shape[:2] == (size.height, size.width):
        return image
    return await asyncio.to_thread(resize_pixels, image, size)


async def _enlarged(service: Service, image: Pixels, upscaler: str, size: Size) -> Pixels:
    for _ in range(_MAX_PASSES):
        if image.shape[0] >= size.height and image.shape[1] >= size.width:
            break
        fields: dict[str, Any] = {"model": upscaler, "prompt": NO_PROMPT, "init_image": image}
        larger = (await service.generate(ImageRequest(**fields))).images[0]
        if larger.shape == image.shape:  # of scale 1
            return larger
        image = larger
    return image


class OverrideSettings(RequestModel, extra="allow"):
    """Settings of one request."""

    sd_model_checkpoint: Name | None = None
    CLIP_stop_at_last_layers: int | None = Field(None, ge=1, le=12)


class TextToImageBody(RequestModel, extra="allow"):
    """A request for images. Fields without a meaning here (`restore_faces`, `styles`, `eta`, ...) have no effect;
    `warnings` name them.
    """

    prompt: str | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    subseed: int | None = None
    subseed_strength: float = Field(0, ge=0, le=1)
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
        """The number of layers left out: the WebUI counts from 1, which is the last one."""
        last = self.override_settings.CLIP_stop_at_last_layers if self.override_settings else None
        return None if last is None else last - 1

    @property
    def second_pass(self) -> SecondPass | None:
        """The requested second pass. Raises InvalidRequest for one of another model, sampler or prompt."""
        if not self.enable_hr:
            return None
        firsts = {"hr_prompt": self.prompt, "hr_negative_prompt": self.negative_prompt}
        for name in _OF_FIRST_PASS:
            value = getattr(self, name) or ""
            if value.lower() not in _SAME and value != firsts.get(name, self.model_id):
                raise InvalidRequest(f"{name}: the second pass has that of the first here", name)
        sampler, spacing = (
            None if (value or "").lower() in _SAME else value for value in (self.hr_sampler_name, self.hr_scheduler)
        )
        solver = _solver_of(sampler or self._sampler, spacing or (None if sampler else self.scheduler))
        strength = _HR_STRENGTH if self.denoising_strength is None else self.denoising_strength
        size = self.hr_resize_x, self.hr_resize_y
        return SecondPass(
            self.hr_upscaler or LANCZOS, self.hr_scale, *size, self.hr_second_pass_steps or None, strength, solver
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of options that have no effect."""
        settings = (self.override_settings.model_extra or {}) if self.override_settings else {}
        vain = [
            name
            for name, value in (self.model_extra or {}).items()
            if name not in _ABOUT_FILES and value is not None and value not in _VAIN.get(name, ())
        ]
        vain += [
            f"override_settings.{name}"
            for name, value in settings.items()
            if value is not None and value not in _SETTINGS.get(name, ())
        ]
        shown = ", ".join(f"{name:.80}" for name in vain[:_MAX_SHOWN])
        more = f" and {len(vain) - _MAX_SHOWN} more" if len(vain) > _MAX_SHOWN else ""
        return (f"without effect here: {shown}{more}",) if vain else ()

    def to_record(self, model: str, limits: LimitsConfig) -> tuple[ImageRequest, Painting | None]:
        """Return the first image's request in the service's form; the record's `n` counts them all.

        For an img2img request, also the painting for its results. Decodes images: not for the event loop. Raises
        InvalidRequest.
        """
        return as_record(GenerationBody, self._fields(model)).to_record(limits), None

    def _fields(self, model: str) -> dict[str, Any]:
        if self.script_name or self.alwayson_scripts:
            name = "script_name" if self.script_name else "alwayson_scripts"
            raise InvalidRequest(f"{name}: there are no scripts here", name)
        prompt = self.prompt or ""
        loras = [_lora_of(found) for found in _NETWORK.finditer(prompt)]
        given: dict[str, Any] = {
            "model": model,
            "prompt": _NETWORK.sub("", prompt).strip() or NO_PROMPT,
            "negative_prompt": self.negative_prompt or None,
            "prompt_syntax": "weighted",
            "clip_skip": self._clip_skip,
            "n": self.num_images,
            "num_inference_steps": self.steps,
            "guidance_scale": self.cfg_scale,
            "width": self.width and _rounded(self.width),
            "height": self.height and _rounded(self.height),
            "seed": self.seed if self.seed is not None and self.seed >= 0 else None,
            "lora": loras,
        }
        if self.subseed_strength:
            subseed = self.subseed if self.subseed is not None and self.subseed >= 0 else draw_seed()
            given["variation"] = {"seed": subseed, "strength": self.subseed_strength}
        return given | _solver_of(self._sampler, self.scheduler)

    @property
    def _sampler(self) -> str:
        return self.sampler_name or self.sampler_index or AUTOMATIC


class ImageToImageBody(TextToImageBody):
    """A request for images like an image, or for new contents of its masked part."""

    init_images: list[str] = Field(min_length=1, max_length=1, description="one file in base64, or a data URL of one")
    mask: str | None = Field(None, description="a file in base64: the white part is painted anew")
    inpainting_mask_invert: int | bool | None = None
    mask_blur: int | None = Field(None, ge=0, le=MAX_BLUR)
    mask_blur_x: int = Field(4, ge=0, le=MAX_BLUR)
    mask_blur_y: int = Field(4, ge=0, le=MAX_BLUR)
    resize_mode: int = Field(0, ge=0, le=LATENT, description="0: plain; 1: its middle; 2: its edges drawn out")
    inpainting_fill: int = Field(FROM_AROUND, ge=0, le=3, description="0: with its surroundings; 1: with its contents")
    inpaint_full_res: bool | None = Field(None, description="only the masked part, in the size of the request")
    inpaint_full_res_padding: int | None = Field(None, ge=0, le=2**16)
    denoising_strength: float = Field(0.75, gt=0, le=1)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of options that have no effect."""
        found = super().warnings
        if self.resize_mode == LATENT:
            found += ("resize_mode 3 had no effect: the image is resized, not its latents",)
        if self.mask is not None and self.inpainting_fill > ORIGINAL:
            found += (
                f"inpainting_fill {self.inpainting_fill} had no effect: the masked part is painted over as it is",
            )
        return found

    @property
    def _painting(self) -> PaintOptions:
        blurs = (self.mask_blur_x, self.mask_blur_y) if self.mask_blur is None else (self.mask_blur, self.mask_blur)
        return PaintOptions(
            self.resize_mode,
            *blurs,
            is_inverted=bool(self.inpainting_mask_invert),
            fill=min(self.inpainting_fill, ORIGINAL),
            only_masked=self.inpaint_full_res is not False,
            padding=self.inpaint_full_res_padding or 0,
        )

    def to_record(self, model: str, limits: LimitsConfig) -> tuple[ImageRequest, Painting | None]:
        """Return the request as `TextToImageBody` does, with its images."""
        record, _ = super().to_record(model, limits)
        image = decode_base64_within(self.init_images[0], "init_images", limits)
        mask = None if self.mask is None else decode_base64_within(self.mask, "mask", limits)
        width, height = (_rounded(one) for one in (self.width or image.size[0], self.height or image.size[1]))
        if width * height > limits.max_pixels:  # before anything is resized to it
            text = f"size: {width}x{height}, at most {limits.max_pixels} pixels are allowed"
            raise InvalidRequest(text, "size")
        painting = paint(image, mask, width, height, self._painting)
        update = {"init_image": painting.image, "mask_image": painting.mask, "strength": self.denoising_strength}
        return record.model_copy(update=update | {"width": width, "height": height}), painting

    @property
    def second_pass(self) -> SecondPass | None:
        """None: an image to begin with has its size already. Raises InvalidRequest for a requested second pass."""
        if self.enable_hr:
            raise InvalidRequest("enable_hr: img2img has no second pass", "enable_hr")
        return None


def _rounded(side: int) -> int:
    return max(_SIDE_MULTIPLE, side // _SIDE_MULTIPLE * _SIDE_MULTIPLE)


def _solver_of(sampler: str, scheduler: str | None) -> dict[str, Any]:
    """Return the class of diffusers for a sampler, with its options: "DPM++ 2M Karras" has both in its name.

    Raises InvalidRequest with the known ones.
    """
    spacing, name = (scheduler or AUTOMATIC).replace("_", " ").lower(), sampler
    if spacing == AUTOMATIC.lower() and name.lower() not in _BY_LOWER:
        for one in _SPACINGS:
            if name.lower().endswith(f" {one}"):
                spacing, name = one, name[: -len(one)].rstrip()
                break
    if spacing not in _SPACINGS:
        text = f"scheduler: {scheduler!r:.80} is not known (known: {', '.join(SCHEDULERS)})"
        raise InvalidRequest(text, "scheduler")
    options = SCHEDULERS[_SPACINGS[spacing]]
    others = {key: value for key, value in options.items() if key != "timestep_spacing"}
    if name.lower() == AUTOMATIC.lower():
        is_own = spacing == AUTOMATIC.lower()
        return {"scheduler_options": others or ({} if is_own else options)}  # for a class that may have no choice of it
    if (known := _BY_LOWER.get(name.lower())) is None:
        why = ": diffusers has none that computes it" if name.lower() in _NO_SAMPLERS else ""
        text = f"sampler_name: no sampler {name!r:.80}{why} (known: {', '.join((AUTOMATIC, *SAMPLERS))})"
        raise InvalidRequest(text, "sampler_name")
    class_name, own = SAMPLERS[known]
    if class_name in _ALWAYS_LINEAR and options.get("timestep_spacing") in ("linspace", "automatic"):
        options = others
    return {"scheduler": class_name, "scheduler_options": options | own}


def _lora_of(found: re.Match[str]) -> dict[str, Any]:
    """Return the LoRA of `<lora:name:0.8>`, `<lora:name:0.8:0.5>` or `<lora:name:te=0.8:unet=0.5>`.

    The first number is the strength in text encoders, the second in the UNet, if it is another. Source: the WebUI,
    `extensions-builtin/Lora/extra_networks_lora.py`. Raises InvalidRequest.
    """
    kind, (name, *words) = found[1], found[2].split(":")
    if kind == "hypernet":
        raise InvalidRequest(f"prompt: {found[0]!r}: there are no hypernetworks here", "prompt")
    given = dict(zip(_STRENGTHS, [word for word in words if "=" not in word], strict=False))
    given |= {key.strip(): value for key, equals, value in (word.partition("=") for word in words) if equals}
    given = {key: value for key, value in given.items() if value.strip()}
    try:
        numbers = {key: float(value) for key, value in given.items()}
    except ValueError:
        numbers = {}
    if len(words) > len(_STRENGTHS) or numbers.keys() != given.keys() or not numbers.keys() <= set(_STRENGTHS):
        raise InvalidRequest(
            f"prompt: {found[0]!r} is not <lora:name:scale>, or <lora:name:scale in text encoders:scale in the UNet>",
            "prompt",
        )
    text_scale = numbers.get("te", 1.0)
    use = {"name": name.strip(), "scale": numbers.get("unet", text_scale)}
    return use if use["scale"] == text_scale else use | {"text_scale": text_scale}


class OptionsBody(RequestModel, extra="ignore", strict=True):
    """Options to set. Options without a meaning here have no effect."""

    sd_model_checkpoint: Name | None = None
    CLIP_stop_at_last_layers: int | None = Field(None, ge=1, le=12)
