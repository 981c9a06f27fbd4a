"""What a request may ask for is bounded after all that it leaves open is filled in."""

from __future__ import annotations

from typing import Any

import pytest

from configs.cluster import LimitsConfig
from configs.model import GenerationDefaults
from deployments.defaults import with_image_defaults
from deployments.errors import InvalidRequest
from deployments.limits import check_image, check_text
from deployments.records import CompletionRequest, ImageRequest

FLUX, SDXL = "FluxPipeline", "StableDiffusionXLPipeline"
LIMITS = LimitsConfig(max_pixels=512 * 512, max_inference_steps=20)
FITS = {"width": 512, "height": 512, "num_inference_steps": 20}


def check(given: dict[str, Any], defaults: dict[str, Any], class_name: str) -> None:
    asked = ImageRequest(model="m", prompt="p", **given)
    check_image(with_image_defaults(asked, GenerationDefaults(**defaults), class_name), LIMITS, asked)


@pytest.mark.parametrize("class_name", [FLUX, SDXL])
@pytest.mark.parametrize("missing", list(FITS))
def test_leaving_a_field_out_is_no_way_around_its_limit(class_name: str, missing: str) -> None:
    given = {name: value for name, value in FITS.items() if name != missing}
    param = "num_inference_steps" if missing == "num_inference_steps" else "size"
    with pytest.raises(InvalidRequest, match=rf"{param}: .* \(the model's default\), at most") as caught:
        check(given, {}, class_name)
    assert caught.value.param == param
    check(given, {missing: FITS[missing]}, class_name)  # the model's own default fits
    check(FITS, {}, class_name)


def test_a_default_of_the_model_is_bounded_too() -> None:
    with pytest.raises(InvalidRequest, match=r"num_inference_steps: 30 .the model's default., at most 20 are allowed"):
        check({"width": 64, "height": 64}, {"num_inference_steps": 30}, FLUX)


def test_what_was_asked_for_is_not_called_a_default() -> None:
    with pytest.raises(InvalidRequest, match=r"^num_inference_steps: 21, at most 20 are allowed$"):
        check(FITS | {"num_inference_steps": 21}, {}, SDXL)
    with pytest.raises(InvalidRequest, match=r"^size: 262656 pixels, at most 262144 are allowed$"):
        check(FITS | {"width": 513}, {}, SDXL)


def test_an_adapter_is_used_once_for_images_and_texts() -> None:
    twice = ({"name": "a"}, {"name": "b"}, {"name": "a", "scale": 0.5})
    with pytest.raises(InvalidRequest, match="an adapter may be used once per request"):
        check(FITS | {"lora": twice}, {}, FLUX)
    with pytest.raises(InvalidRequest, match="an adapter may be used once per request"):
        check_text(CompletionRequest(model="m", prompt="p", lora=twice), LIMITS)
    check_text(CompletionRequest(model="m", prompt="p", lora=twice[:2]), LIMITS)
    with pytest.raises(InvalidRequest, match="lora: 2 adapters, at most 1 are allowed"):
        check_text(CompletionRequest(model="m", prompt="p", lora=twice[:2]), LimitsConfig(max_loras=1))
