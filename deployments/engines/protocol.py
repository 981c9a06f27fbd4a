"""The records that cross the border of an engine. Small, immutable, free of Ray and of HTTP.

An engine sees these and tensors; it never sees a handle, a socket or a config file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args


class EngineError(Exception):
    """A request that the engine cannot run; the message is meant for the person who sent it."""


class ComputationFailed(Exception):
    """The model broke down on one request, which was in order: numbers that are not finite, say. Says where."""


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise EngineError for a value that the Literal type `choices` does not have."""
    if value not in get_args(choices):
        raise EngineError(f"{name} {value!r}: expected one of {', '.join(get_args(choices))}")


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """One LoRA of a request: `name` of a registered adapter and its strength."""

    name: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class DiffusionRequest:
    """What the denoise loop needs beside the text conditioning.

    `guidance_scale` means what the stock pipeline of the family means by it: classifier-free guidance for
    SDXL, the embedded guidance for guidance-distilled Flux. `true_cfg_scale` > 1 with a negative prompt is
    classifier-free guidance for Flux. `seed` gives the latents of
    `torch.Generator("cpu").manual_seed(seed)`, for all `num_images` from one generator, as stock does.
    """

    request_id: str
    width: int
    height: int
    num_inference_steps: int
    guidance_scale: float
    seed: int
    num_images: int = 1
    true_cfg_scale: float = 1.0
    adapters: tuple[AdapterUse, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are picked. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch those filters off.

    `seed` None draws a fresh one. `stop` strings end the text and are not part of it.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A prompt as token ids, ready for the scheduler."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one engine step added to one request.

    `text` may be empty (an unfinished UTF-8 sequence or the possible beginning of a stop string is held
    back). `finish_reason` is None while the request runs, else "stop", "length" or "abort".
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_completion_tokens: int
    finish_reason: str | None = None
