"""Each option of a request reaches the engine by its declaration alone: from a body, and from the model's defaults."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from configs.cluster import LimitsConfig
from configs.model import GenerationDefaults
from configs.options import (
    Acceleration,
    Denoising,
    DiffusionOptions,
    PictureOptions,
    PromptReading,
    Sampler,
    Sampling,
    SamplingOptions,
    Variation,
)
from deployments.engines.records.protocol import DiffusionRequest, SamplingParams
from deployments.ingress.openai.image_bodies import GenerationBody
from deployments.ingress.openai.text import CompletionBody
from deployments.records import ClipOptions, CompletionRequest, ImageRequest
from deployments.requests.defaults import with_image_defaults, with_text_defaults
from deployments.services.image_requests import conditioning_request, denoise_request
from deployments.services.text_prompts import text_requests
from deployments.text.requests import ConditioningRequest

pytestmark = pytest.mark.slow  # imports transformers

CLASS = "StableDiffusionXLPipeline"
OF_TEXTS = sorted(field.name for field in fields(Sampling))
OF_STEPS = sorted(field.name for field in fields(Denoising))
OF_PROMPTS = sorted(field.name for field in fields(PromptReading))
SPECIAL: dict[str, Any] = {
    "scheduler": "EulerDiscreteScheduler",
    "sigmas": (1.0, 0.5),
    "timesteps": (9, 3),
    "deterministic": True,
    "prompt_syntax": "weighted",
    "acceleration": Acceleration(interval=4),
    "variation": Variation(seed=3, strength=0.5),
    "sampler": Sampler(name="euler", sigmas=(2.0, 1.0, 0.0)),
}


def value_of(name: str) -> Any:
    """Return a value that differs from what holds where nobody says one."""
    if name in SPECIAL:
        return SPECIAL[name]
    model = SamplingOptions if name in OF_TEXTS else PictureOptions
    return 3 if int in _types_of(model.model_fields[name].annotation) else 0.625


def _types_of(annotation: Any) -> set[Any]:
    parts = getattr(annotation, "__args__", ())
    return {annotation}.union(*map(_types_of, parts)) if parts else {annotation}


def sampling_of(request: CompletionRequest) -> SamplingParams:
    engine: Any = SimpleNamespace(max_model_len=64, generation_defaults={}, encode_text=lambda text: (1, 2))
    (made,), _ = text_requests(engine, request)
    return made.sampling


def asked_of(request: ImageRequest, defaults: GenerationDefaults) -> tuple[DiffusionRequest, ConditioningRequest]:
    filled = with_image_defaults(request, defaults, CLASS)
    denoise = denoise_request(filled)
    return denoise, conditioning_request(filled, denoise, CLASS)


@pytest.mark.parametrize("name", OF_TEXTS)
def test_an_option_of_a_text_reaches_the_sampler(name: str) -> None:
    value, texts = value_of(name), {"model": "m", "prompt": "p"}
    assert getattr(sampling_of(CompletionBody(**texts).to_record()), name) != value
    assert getattr(sampling_of(CompletionBody(**texts, **{name: value}).to_record()), name) == value
    defaults = GenerationDefaults.model_validate({name: value})
    assert getattr(sampling_of(with_text_defaults(CompletionRequest(**texts), defaults)), name) == value


@pytest.mark.parametrize("name", [*OF_STEPS, *OF_PROMPTS])
def test_an_option_of_an_image_reaches_its_engine(name: str) -> None:
    value, place = value_of(name), 0 if name in OF_STEPS else 1
    # Without an image to begin with, a default strength is none: a body's may stand beside it.
    body = GenerationBody.model_validate({"model": "m", "prompt": "p", name: value})
    plain, open_ = ImageRequest(model="m", prompt="p"), GenerationDefaults()
    assert getattr(asked_of(plain, open_)[place], name) != value
    assert getattr(asked_of(body.to_record(LimitsConfig()), open_)[place], name) == value
    if name != "strength":
        defaults = GenerationDefaults.model_validate({name: value})
        assert getattr(asked_of(plain, defaults)[place], name) == value


def test_an_engine_takes_the_options_that_are_asked_for_and_no_other() -> None:
    assert set(OF_TEXTS) == SamplingOptions.model_fields.keys()
    by_itself = {"negative_prompt", "width", "height", "num_inference_steps", "guidance_scale"}  # needed for any image
    assert {*OF_STEPS, *OF_PROMPTS} == PictureOptions.model_fields.keys() - by_itself
    assert DiffusionOptions.model_fields.keys() <= ClipOptions.model_fields.keys()
