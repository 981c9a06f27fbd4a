"""Clips, which are seen or heard over time: videos and audio. The request and the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.records.images import MAX_NAMED_IMAGES, Pictures
from deployments.records.requests import (
    MAX_SEED,
    SEED_RULE,
    Count,
    Finite,
    Name,
    RequestModel,
    ServedRequest,
    SwitchReport,
    TimingsMs,
)

VideoFormat = Literal["mp4", "webm"]


class ClipOptions(RequestModel):
    """The options of a clip. What is None comes from the model's defaults, else from its class; a seed is drawn."""

    model: Name
    prompt: str = Field(min_length=1)
    negative_prompt: str | None = None
    seconds: float | None = Field(None, gt=0, le=3600, allow_inf_nan=False, description="duration")
    num_inference_steps: Count | None = None
    guidance_scale: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    true_cfg_scale: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    max_sequence_length: Count | None = Field(None, description="tokens of the prompt")
    strength: float | None = Field(None, gt=0, le=1, allow_inf_nan=False, description="how much is made anew")
    sigmas: tuple[Annotated[float, Finite], ...] | None = Field(None, min_length=1, max_length=1000)
    timesteps: tuple[int, ...] | None = Field(None, min_length=1, max_length=1000)
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description=SEED_RULE)
    scheduler: Name | None = Field(None, description="a class of diffusers, in place of the model's own")
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
    and so do videos, as their frames.

    `reports_steps` asks for a piece after every step. The ingress sets `model_version`.
    """

    images: dict[Name, Pictures] = Field({}, max_length=MAX_NAMED_IMAGES)
    reports_steps: bool = False


@dataclass(frozen=True, slots=True)
class ClipResult:
    """The answer to a ClipRequest: a file, and what is in it. `width` and `height` of audio are 0.

    `rate` is frames or samples per second, `length` how many of them there are.
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

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.length / self.rate
