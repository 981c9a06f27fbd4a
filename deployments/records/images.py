"""Images and clips, which are videos and audio: the requests, what a stream tells on the way, and the results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, PlainValidator

from configs.model import LongText, TextPadding
from configs.options import DiffusionOptions, PictureOptions, Sampler
from deployments.engines.records.clip_files import VideoFormat as VideoFormat
from deployments.engines.records.input_images import why_no_pixels
from deployments.engines.records.protocol import DiffusionKind
from deployments.engines.records.sounds import Sound, why_no_sound
from deployments.records.requests import (
    MAX_INT32,
    MAX_SEED,
    SEED_RULE,
    CacheUse,
    Count,
    Finite,
    Loras,
    Name,
    RequestModel,
    ServedRequest,
    SwitchReport,
    TimingsMs,
)

NO_PROMPT = " "  # to the tokenizers of text encoders, a space is as empty as nothing
MAX_PARTIAL_IMAGES = 3  # OpenAI's
MAX_NAMED_IMAGES = 8
_COLORS = 3
_MAX_FLOATS = 2**26  # of an array: an image of 4,096 x 4,096 pixels has fewer
REFERENCES = "image"  # among `images`, those that a model changes

ClipOutput = Literal["file", "frames"]


def _as_pixels(value: Any, num_axes: int) -> npt.NDArray[np.uint8]:
    pixels = np.asarray(value)
    if reason := why_no_pixels(pixels, num_axes):
        raise ValueError(reason)
    return pixels


def _as_image(value: Any) -> npt.NDArray[np.uint8]:
    return _as_pixels(value, 3)


def _as_mask(value: Any) -> npt.NDArray[np.uint8]:
    return _as_pixels(value, 2)


def _as_pictures(value: Any) -> npt.NDArray[np.uint8] | tuple[npt.NDArray[np.uint8], ...]:
    if isinstance(value, list | tuple) or np.ndim(value) == 4:
        pictures = tuple(map(_as_image, value))
        if not pictures:
            raise ValueError("expected an image at least, got none")
        return pictures
    return _as_image(value)


def _as_floats(value: Any, num_axes: int) -> npt.NDArray[np.float32]:
    floats = np.asarray(value)
    if floats.ndim != num_axes or floats.dtype != np.float32 or not 0 < floats.size <= _MAX_FLOATS:
        expected = f"float32 with {num_axes} axes and at most {_MAX_FLOATS} numbers"
        raise ValueError(f"expected {expected}, got {floats.dtype} {floats.shape}")
    if not np.isfinite(floats).all():
        raise ValueError("expected finite numbers")
    return floats


def _as_latents(value: Any) -> npt.NDArray[np.float32]:
    return _as_floats(value, 4)


def _as_noise_mask(value: Any) -> npt.NDArray[np.float32]:
    return _as_floats(value, 3)


def _as_sound(value: Any) -> Sound:
    if isinstance(value, Sound):
        value = value.samples, value.rate
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("expected samples and how many of them are a second")
    samples, rate = np.asarray(value[0]), value[1]
    if reason := why_no_sound(samples, rate):
        raise ValueError(reason)
    return Sound(samples.astype(np.float32, copy=False), rate)


Pixels = Annotated[npt.NDArray[np.uint8], PlainValidator(_as_image)]  # (height, width, 3); a PIL image in RGB will do
Mask = Annotated[npt.NDArray[np.uint8], PlainValidator(_as_mask)]  # (height, width)
# One image, several, or a video: its frames, which may be an array (frames, height, width, 3).
Pictures = Annotated[npt.NDArray[np.uint8] | tuple[npt.NDArray[np.uint8], ...], PlainValidator(_as_pictures)]

# (number, channels, height, width) in the VAE's space; of pixels (number, height, width, 3) from 0 to 1.
Floats = Annotated[npt.NDArray[np.float32], PlainValidator(_as_latents)]
NoiseMask = Annotated[npt.NDArray[np.float32], PlainValidator(_as_noise_mask)]  # (number or 1, height, width)

# Samples, floats (channels, number) from -1 to 1, and how many are a second, as a pair.
Audio = Annotated[Sound, PlainValidator(_as_sound)]


class ControlNetUse(RequestModel):
    """One ControlNet of a request, the image that it reads, its weight, and the part of the steps in which it acts.

    `mode` is for a union of ControlNets: the number of the one that the image is for.
    """

    name: Name
    image: Pixels
    scale: float = Field(1.0, ge=-10, le=10, allow_inf_nan=False)
    start: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    end: float = Field(1.0, ge=0, le=1, allow_inf_nan=False)
    mode: int | None = Field(None, ge=0, le=MAX_INT32, description="of a union of ControlNets")


class ImagePromptUse(RequestModel):
    """One IP-Adapter of a request, the image that it reads, of any size, and its weight."""

    name: Name
    image: Pixels
    scale: float = Field(1.0, ge=-10, le=10, allow_inf_nan=False)


class ImageOptions(RequestModel, PictureOptions):
    """The options of an image. Those that are None come from the model's defaults; a seed of None is drawn."""

    model: Name
    prompt: str = Field(min_length=1)
    n: Count = 1
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description=SEED_RULE)
    lora: Loras = ()
    scheduler_options: dict[Name, bool | int | Annotated[float, Finite] | Name] = Field(
        {}, max_length=16, description='options of its config, such as {"use_karras_sigmas": true}'
    )
    extra: dict[Name, Any] = Field(
        {},
        max_length=64,
        description="further parameters of the pipeline's class, by name, where diffusers' code runs it",
    )


class ImageRequest(ServedRequest, ImageOptions):
    """A request for images from a diffusion model.

    The same prompt, seed, steps and guidance give the image that the stock diffusers pipeline gives with
    `torch.Generator("cpu").manual_seed(seed)`, up to rounding where requests share a step.

    `prompt_2` is read by all text encoders but the first, in place of `prompt`, where the class has a family.

    `init_image` makes it image-to-image: `strength` (None is the pipeline's default) is the part of the steps that run,
    so 1 keeps nothing of it. `mask_image` makes that inpainting: what is 128 or more is painted anew. All images have
    the size of the result; where `width` and `height` are None, they are those of `init_image`, else of the first of
    `control`.

    `partial_images` asks a stream for so many previews on the way (fewer where there are not as many steps),
    `reports_steps` for every step, and `checkpoint_steps` for a checkpoint every so many steps; an answer in one piece
    has none of them. After its worker's death a request goes on from its last checkpoint; those that are not asked for
    are not told, and come every `checkpoint_interval_s` seconds (0: never).

    `ip_adapter` names IP-Adapters, with the images that are prompts to them.

    `images` has further images that a stock pipeline takes, by the names of its class's parameters (`control_image`);
    several of one name where the class takes a list. `references` are those that an editing model changes.

    With a `sampler` a request may begin at `latents` (None: at zeros), and paint where `noise_mask` is 1, and softly
    where it is less. `reference_latents`, (1, channels, height, width) each, are read beside its own. A class that has
    channels for them reads `beside_latents` there: those of a control image, or of one with a part to fill in where
    `beside_mask` is 1, in pixels. `output` says what it gives in place of an image, as a DiffusionRequest has it; a
    request for encoded `pixels` or decoded `latents` reads nothing else.

    The ingress sets the last six fields. `adapter_versions` (by name) are as `model_version`; `text_padding` and
    `long_text` are the model's; `merges_lora` says that the one LoRA is merged where it can be (`AdapterConfig`);
    `scaled_from` is the width and height of a file that was larger than an image may be.
    """

    prompt_2: str | None = Field(None, min_length=1)
    init_image: Pixels | None = None
    mask_image: Mask | None = None
    control: tuple[ControlNetUse, ...] = ()
    ip_adapter: tuple[ImagePromptUse, ...] = ()
    images: dict[Name, Pictures] = Field({}, max_length=MAX_NAMED_IMAGES)
    latents: Floats | None = None
    noise_mask: NoiseMask | None = None
    reference_latents: tuple[Floats, ...] = Field((), max_length=MAX_NAMED_IMAGES)
    beside_latents: Floats | None = None
    beside_mask: NoiseMask | None = None
    pixels: Floats | None = None
    output: DiffusionKind = "image"
    partial_images: int = Field(0, ge=0, le=MAX_PARTIAL_IMAGES)
    reports_steps: bool = False
    checkpoint_steps: int = Field(0, ge=0, le=MAX_INT32)
    checkpoint_interval_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    adapter_versions: dict[str, str] = Field({})
    text_padding: TextPadding = "stock"
    long_text: LongText = "truncate"
    merges_lora: bool = False
    scaled_from: tuple[Count, Count] | None = None

    @property
    def references(self) -> tuple[npt.NDArray[np.uint8], ...]:
        """Return the images of the parameter `image`, in sizes of their own."""
        named = self.images.get(REFERENCES, ())
        return named if isinstance(named, tuple) else (named,)

    @property
    def is_of_vae(self) -> bool:
        """Return whether it asks for the VAE's work alone."""
        return self.output in ("encoded", "decoded")


@dataclass(frozen=True, slots=True)
class ImageResult:
    """The answer to an ImageRequest: n arrays (height, width, 3) uint8, and the seed that was used. Of a class that
    draws transparency they have a fourth channel.

    A request for another output has it in `array`, float32, and no images.

    A multi-model pipeline does not know what its models did: its `seed`, `switch`, `num_inference_steps` and
    `guidance_scale` are None.
    """

    model: str
    images: list[npt.NDArray[np.uint8]]
    seed: int | None
    num_inference_steps: int | None
    timings_ms: TimingsMs
    switch: SwitchReport | None
    cache: CacheUse
    warnings: tuple[str, ...] = ()
    guidance_scale: float | None = None
    array: npt.NDArray[np.float32] | None = None

    def opaque(self, taker: str) -> ImageResult:
        """Return the result for a taker of three colors, with a warning where that loses transparency."""
        if all(image.shape[-1] == _COLORS for image in self.images):
            return self
        images = [np.ascontiguousarray(image[..., :_COLORS]) for image in self.images]
        lost = f"{taker} has no transparency: the colors that the model drew are given without it"
        return replace(self, images=images, warnings=(*self.warnings, lost))


@dataclass(frozen=True, slots=True, eq=False)
class ImageProgress:
    """A piece of an image stream before its ImageResult: `step` of `num_steps` are done.

    `previews` are n arrays (height, width, 3) uint8, what this step expects, or (); `preview_index` counts from 0.
    With `checkpoint`, `Worker.stream_images` goes on elsewhere: it has to after one that `is_moved`, the last.
    """

    step: int
    num_steps: int
    previews: tuple[npt.NDArray[np.uint8], ...] = ()
    preview_index: int | None = None
    checkpoint: bytes | None = None
    is_moved: bool = False


def merge_progress(older: Any, newer: Any) -> ImageProgress | None:
    """Return one progress in the place of two: the newest step, previews and checkpoint.

    None where the newer one is the end of its stream: it comes as it is.
    """
    if not (isinstance(older, ImageProgress) and isinstance(newer, ImageProgress)) or newer.is_moved:
        return None
    shown = newer if newer.previews else older
    checkpoint = newer.checkpoint or older.checkpoint
    return replace(newer, previews=shown.previews, preview_index=shown.preview_index, checkpoint=checkpoint)


class ClipOptions(RequestModel, DiffusionOptions):
    """The options of a clip. What is None comes from the model's defaults, else from its class; a seed is drawn."""

    model: Name
    prompt: str = Field(min_length=1)
    seconds: float | None = Field(None, gt=0, le=3600, allow_inf_nan=False, description="duration")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description=SEED_RULE)
    lora: Loras = ()
    scheduler_options: dict[Name, bool | int | Annotated[float, Finite] | Name] = Field({}, max_length=16)
    extra: dict[Name, Any] = Field({}, max_length=64, description="further parameters of the pipeline's class, by name")


class VideoOptions(ClipOptions):
    """The options of a video. `seconds` and `num_frames` say the same: one of them is given."""

    width: Count | None = Field(None, description="pixels")
    height: Count | None = Field(None, description="pixels")
    num_frames: Count | None = Field(None, description="in place of `seconds`")
    fps: float | None = Field(
        None, ge=1, le=120, allow_inf_nan=False, description="frames per second; default: as the class shows its videos"
    )
    output_format: VideoFormat = "mp4"


class ClipRequest(ServedRequest, VideoOptions):
    """A request for a clip from a model that makes videos or audio. `images` go to the parameters of their names,
    and so do videos, as their frames, and `audio`.

    `reports_steps` asks for a piece after every step. A `sampler` is in place of the scheduler, and draws the first
    noise by its own seed. Of a pipeline with two denoisers, the second one runs from the step `second_from` on; one
    that has a single denoiser takes none below its number of steps. `output` "frames" is a video's pixels in place of
    its file. The ingress sets `model_version` and `adapter_versions`.
    """

    images: dict[Name, Pictures] = Field({}, max_length=MAX_NAMED_IMAGES)
    audio: dict[Name, Audio] = Field({}, max_length=MAX_NAMED_IMAGES)
    sampler: Sampler | None = None
    second_from: int | None = Field(None, ge=0, le=MAX_INT32)
    output: ClipOutput = "file"
    reports_steps: bool = False
    adapter_versions: dict[str, str] = Field({})


@dataclass(frozen=True, slots=True)
class ClipResult:
    """The answer to a ClipRequest: a file, and what is in it. `width` and `height` of audio are 0.

    `rate` is frames or samples per second, `length` how many of them there are. A request for `frames` has those,
    uint8 (number, height, width, 3), and an empty file.
    """

    model: str
    file: bytes
    media_type: str
    length: int
    rate: float
    width: int
    height: int
    seed: int | None
    num_inference_steps: int | None
    timings_ms: TimingsMs
    switch: SwitchReport
    warnings: tuple[str, ...] = ()
    frames: npt.NDArray[np.uint8] | None = None

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.length / self.rate
