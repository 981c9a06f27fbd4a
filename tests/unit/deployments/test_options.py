"""Each option of a request reaches the engine by its declaration alone: from a body, and from the model's defaults."""

from __future__ import annotations

import json
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

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
from deployments.ingress.openai.image_files import describe_image
from deployments.ingress.openai.text import CompletionBody
from deployments.records import CacheUse, ClipOptions, CompletionRequest, ImageRequest, ImageResult
from deployments.records.errors import InvalidRequest
from deployments.requests.defaults import as_upscale, with_image_defaults, with_text_defaults
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


@pytest.mark.parametrize("name", [*OF_STEPS, *OF_PROMPTS])
def test_an_option_of_an_image_is_in_its_description(name: str) -> None:
    image, value = np.zeros((8, 8, 3), np.uint8), value_of(name)
    request = ImageRequest(model="m", prompt="p", init_image=image).model_copy(update={name: value})
    result = ImageResult("m", [image], 9, 4, {}, None, CacheUse(0, 0), guidance_scale=3.5)
    facts = json.loads(json.dumps(describe_image(request, result, 0).facts))
    assert facts["guidance_scale"] == 3.5
    assert type(value)(**facts[name]) == value if isinstance(value, BaseModel) else facts[name] == _listed(value)
    plain = ImageRequest(model="m", prompt="p")
    assert name not in describe_image(plain, result, 0).facts


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_a_default_strength_is_of_no_image_that_begins_with_noise() -> None:
    result = ImageResult("m", [np.zeros((8, 8, 3), np.uint8)], 9, 4, {}, None, CacheUse(0, 0))
    asked = ImageRequest(model="m", prompt="p").model_copy(update={"strength": 0.5})
    assert "strength" not in describe_image(asked, result, 0).facts


@pytest.mark.parametrize("name", sorted(PictureOptions.model_fields))
def test_an_option_without_effect_on_an_upscaler_is_told(name: str) -> None:
    value = "a dog" if name == "negative_prompt" else value_of(name)
    image = np.zeros((8, 8, 3), np.uint8)
    asked = ImageRequest(model="m", prompt=" ", init_image=image).model_copy(update={name: value})
    if name in ("width", "height"):
        with pytest.raises(InvalidRequest, match=f"^{name}: "):
            as_upscale(asked)
        return
    request, warnings = as_upscale(asked)
    ignored = name not in ("prompt_syntax", "deterministic")
    assert warnings == ((f"without effect on an upscaler: {name}",) if ignored else ())
    assert (getattr(request, name) is None) == ignored


def test_an_engine_takes_the_options_that_are_asked_for_and_no_other() -> None:
    assert set(OF_TEXTS) == SamplingOptions.model_fields.keys()
    by_itself = {"negative_prompt", "width", "height", "num_inference_steps", "guidance_scale"}  # needed for any image
    assert {*OF_STEPS, *OF_PROMPTS} == PictureOptions.model_fields.keys() - by_itself
    assert DiffusionOptions.model_fields.keys() <= ClipOptions.model_fields.keys()
