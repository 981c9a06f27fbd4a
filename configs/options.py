"""Options of requests, one line each as they are asked for and one as an engine takes them.

Bodies, records and a model's defaults embed the `...Options`, where None leaves an option open. Engines embed the other
records, where nothing is open. A new option is its two lines here, and the code that acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

_MAX_INT32: Final = 2**31 - 1
_Count = Annotated[int, Field(ge=1, le=_MAX_INT32)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]

# "weighted": (word), (word:1.3), [word] and BREAK as in the Stable Diffusion WebUI; "compel": word++, (words)--;
# "comfyui": (word) and (word:1.3), whose vectors lie from those of an empty prompt.
PromptSyntax = Literal["plain", "weighted", "compel", "comfyui"]


class Acceleration(BaseModel):
    """The steps of an image that compute no forward: their output is extrapolated from those computed before.

    After `warmup` steps every `interval`-th one is computed, as TaylorSeer has it (2503.06923); `order` is that of the
    Taylor polynomial. With `max_error` the interval, at most `interval`, follows from how far the last prediction was
    off, as a share of the output's norm.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    interval: int = Field(3, ge=1, le=20, description="steps from one computed step to the next; 1: all are computed")
    order: int = Field(1, ge=0, le=3, description="of the polynomial; 0 takes the last output again")
    warmup: int = Field(3, ge=1, le=1000, description="steps that are computed first")
    max_error: _Finite | None = Field(None, gt=0, le=1, description="of a prediction; then the interval adapts")

    def computes(self, step: int) -> bool:
        """Return whether a step, counted from 0, is computed at a fixed interval."""
        return step < self.warmup or (step - self.warmup - 1) % self.interval == 0

    def num_computed(self, num_steps: int, start: int = 0) -> int:
        """Return the number of steps computed from `start` on: an upper bound where the interval adapts."""
        if self.max_error is not None:
            return num_steps - start
        return sum(map(self.computes, range(start, num_steps)))


class Variation(BaseModel):
    """Another seed, whose noise an image's first noise lies towards: 0 is none of it, 1 all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(ge=0, lt=2**63)
    strength: _Finite = Field(ge=0, le=1)


# Samplers of k-diffusion, by their names in ComfyUI.
SamplerName = Literal[
    "euler",
    "euler_ancestral",
    "ddim",
    "heun",
    "dpm_2",
    "dpm_2_ancestral",
    "lms",
    "dpmpp_2s_ancestral",
    "dpmpp_2m",
    "res_multistep",
    "lcm",
    "uni_pc",
    "uni_pc_bh2",
]

# Those that draw noise in their steps.
DRAWING_SAMPLERS: Final[tuple[SamplerName, ...]] = ("euler_ancestral", "dpm_2_ancestral", "dpmpp_2s_ancestral", "lcm")


class Sampler(BaseModel):
    """A sampler of k-diffusion over given levels of noise, as ComfyUI runs it.

    It is in place of all that a pipeline has for its steps: scheduler, schedule and guidance. Latents are float32. The
    first noise is one draw of `torch.randn` for all images, of a generator on the CPU with the seed; noise of steps is
    of one with the seed that follows, as where ComfyUI runs on a CPU.

    `sigmas` are one more than there are steps; the last one is 0 unless noise is left over. `cfg` is the scale of
    guidance by the negative prompt, which is not read at 1. `picks` are places in a longer batch whose noise the images
    have. Without `adds_noise` the latents of the request have theirs. `eta` and `s_noise` are those of the samplers
    that add noise as they go. With `cfg_norm` what guidance finds clean is in no place longer than what the prompt
    alone finds there, and then multiplied by it: ComfyUI's CFGNorm. With `zeroes_negative` the negative prompt's
    vectors are all 0: its ConditioningZeroOut. With `masks_until` a mask paints at each level of noise where it is as
    much as that level's share of the times from the first level to this one: its DifferentialDiffusion.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: SamplerName
    sigmas: tuple[_Finite, ...] = Field(min_length=2, max_length=1001)
    cfg: _Finite = Field(1.0, ge=0, le=100)
    adds_noise: bool = True
    noise_seed: int | None = Field(None, ge=0, lt=2**64, description="of the noise; default: the image's")
    picks: tuple[Annotated[int, Field(ge=0, lt=64)], ...] | None = Field(None, min_length=1, max_length=64)
    eta: _Finite = Field(1.0, ge=0, le=1)
    s_noise: _Finite = Field(1.0, ge=0, le=100)
    cfg_norm: _Finite | None = Field(None, ge=0, le=100, description="bounds guidance by the prompt's own prediction")
    zeroes_negative: bool = False
    masks_until: _Finite | None = Field(None, ge=0, description="the level of noise at which a mask paints everywhere")

    @property
    def num_steps(self) -> int:
        """The number of steps, some of which have two forwards."""
        return len(self.sigmas) - 1


class SamplingOptions(BaseModel):
    """The options of sampling tokens."""

    max_tokens: _Count | None = Field(None, description="maximum tokens of an answer")
    temperature: _Finite | None = Field(None, ge=0, le=2)
    top_p: _Finite | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=_MAX_INT32)
    min_p: _Finite | None = Field(None, ge=0, le=1)
    typical_p: _Finite | None = Field(None, gt=0, le=1)
    repetition_penalty: _Finite | None = Field(None, gt=0, le=100)
    frequency_penalty: _Finite | None = Field(None, ge=-2, le=2)
    presence_penalty: _Finite | None = Field(None, ge=-2, le=2)
    top_n_sigma: _Finite | None = Field(
        None,
        ge=0,
        le=100,
        description="standard deviations of the logits below the best one that a token may lie; 0: any",
    )


@dataclass(frozen=True, slots=True)
class Sampling:
    """SamplingOptions of an engine: each is off by default. `temperature` 0 is greedy."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    top_n_sigma: float = 0.0


class DiffusionOptions(BaseModel):
    """The options of an image or a clip."""

    negative_prompt: str | None = None
    num_inference_steps: _Count | None = None
    guidance_scale: _Finite | None = Field(None, ge=0, le=100)
    true_cfg_scale: _Finite | None = Field(
        None,
        ge=0,
        le=100,
        description="guidance by a negative prompt; 1, which is off, by default",
    )
    max_sequence_length: _Count | None = Field(None, description="maximum tokens of the prompt")
    strength: _Finite | None = Field(None, gt=0, le=1, description="how much of an input image is made anew")
    scheduler: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="a class of diffusers, in place of the model's own"
    )
    sigmas: tuple[_Finite, ...] | None = Field(None, min_length=1, max_length=1000)
    timesteps: tuple[int, ...] | None = Field(None, min_length=1, max_length=1000)


class PictureOptions(DiffusionOptions):
    """The options of an image."""

    width: _Count | None = Field(None, description="pixels")
    height: _Count | None = Field(None, description="pixels")
    prompt_syntax: PromptSyntax | None = Field(
        None,
        description="weighted: (word), (word:1.3), [word] and BREAK as in the Stable Diffusion WebUI; compel: word++, "
        "(words)-- and (words)1.3 as in Compel; comfyui: (word) and (word:1.3) as ComfyUI has them; else plain",
    )
    clip_skip: int | None = Field(
        None, ge=0, le=64, description="layers of its CLIPs that a Stable Diffusion 1, 2 or XL leaves out of prompts"
    )
    deterministic: bool | None = Field(None, description="the same bits in any batch, on devices of one kind")
    acceleration: Acceleration | None = Field(
        None, description='steps that are extrapolated, such as {"interval": 3, "order": 1, "warmup": 3}'
    )
    variation: Variation | None = Field(
        None, description='another seed whose noise is mixed in, such as {"seed": 7, "strength": 0.2}'
    )
    sampler: Sampler | None = Field(
        None,
        description="a sampler of k-diffusion over given sigmas, as ComfyUI runs it, such as "
        '{"name": "euler", "sigmas": [14.6, 4.1, 1.2, 0], "cfg": 7}',
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoising:
    """PictureOptions of a diffusion engine, but for those without which no image is made."""

    true_cfg_scale: float = 1.0
    strength: float = 1.0
    scheduler: str | None = None
    sigmas: tuple[float, ...] | None = None
    timesteps: tuple[int, ...] | None = None
    deterministic: bool = False
    acceleration: Acceleration | None = None
    variation: Variation | None = None
    sampler: Sampler | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReading:
    """PictureOptions of a text encoder."""

    max_sequence_length: int | None = None
    prompt_syntax: PromptSyntax = "plain"
    clip_skip: int = 0


def said(asked: BaseModel, record: type[Sampling | Denoising | PromptReading]) -> dict[str, Any]:
    """Return the options of an engine's record that a request does not leave open."""
    return {field.name: value for field in fields(record) if (value := getattr(asked, field.name)) is not None}
