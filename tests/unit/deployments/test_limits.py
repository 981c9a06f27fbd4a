"""Limits of a request: what it may ask for is bounded after all that it leaves open is filled in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from configs.cluster import LimitsConfig
from configs.model import GenerationDefaults
from deployments.records import ClipRequest, CompletionRequest, HeadRequest, ImageRequest
from deployments.records.errors import InvalidRequest
from deployments.requests.defaults import with_image_defaults
from deployments.requests.limits import check_clip, check_head, check_image, check_text
from deployments.services.image_requests import conditioning_request, denoise_request

FLUX, SDXL = "FluxPipeline", "StableDiffusionXLPipeline"
LIMITS = LimitsConfig(max_pixels=512 * 512, max_inference_steps=20)
FITS = {"width": 512, "height": 512, "num_inference_steps": 20}


def check(given: dict[str, Any], defaults: dict[str, Any], class_name: str) -> ImageRequest:
    asked = ImageRequest(model="m", prompt="p", **given)
    filled = with_image_defaults(asked, GenerationDefaults(**defaults), class_name)
    check_image(filled, LIMITS, asked)
    return filled


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


def test_a_strength_in_text_encoders_is_for_images() -> None:
    uses = ({"name": "a", "scale": 0.5, "text_scale": 0.25}, {"name": "b", "scale": 0.75})
    request = check(FITS | {"lora": uses}, {}, FLUX)
    denoise = denoise_request(request)
    assert [(use.name, use.scale) for use in denoise.adapters] == [("a", 0.5), ("b", 0.75)]
    assert conditioning_request(request, denoise, FLUX).adapters == {"a": 0.25, "b": 0.75}
    with pytest.raises(InvalidRequest, match="lora: text_scale is for image models"):
        check_text(CompletionRequest(model="m", prompt="p", lora=uses), LIMITS)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_a_head_is_given_one_feature_at_least(shape: tuple[int, int]) -> None:
    text = f"features: {shape[0]} rows of {shape[1]} features, expected one of each at least"
    with pytest.raises(InvalidRequest, match=text) as caught:
        check_head(HeadRequest("m", np.zeros(shape, np.float32)), LIMITS)
    assert caught.value.param == "features"
    check_head(HeadRequest("m", np.zeros((1, 1), np.float32)), LIMITS)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"prior_num_inference_steps": 201}, "prior_num_inference_steps: a number above 200"),
        ({"upsampling_height": 2049}, "upsampling_height: a number above 2048"),
        ({"resolution": 65_536}, "resolution: a number above 2048"),
        ({"frame_size": 4096}, "frame_size: a number above 2048"),
        ({"max_area": 2**22 + 1}, "max_area: a number above 4194304"),
        ({"num_prompts_per_image": 11}, "num_prompts_per_image: a number above 10"),
        ({"tiles": [[1, {"size": 65_537}]]}, "tiles: a number above 65536"),
        ({"prompt_2": "x" * 20_000, "more": ["y" * 13_000]}, "33000 characters, at most 32768"),
    ],
)
def test_what_only_a_class_knows_is_bounded(extra: dict[str, Any], text: str) -> None:
    sound = ImageRequest(
        model="m", prompt="p", extra={"max_area": 2**22, "upsampling_width": 2048, "prompt_2": "x" * 100}
    )
    check_image(sound, LimitsConfig())
    with pytest.raises(InvalidRequest, match=text):
        check_image(ImageRequest(model="m", prompt="p", extra=extra), LimitsConfig())


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ({"video": np.zeros((4, 8, 8, 3), np.uint8)}, r"images.video: 4 frames, at most 3 are allowed"),
        ({"faces": [np.zeros((9, 8, 3), np.uint8)]}, r"images.faces: 72 pixels of an image, at most 64 are allowed"),
        (
            {"video": np.zeros((2, 8, 8, 3), np.uint8), "image": np.zeros((8, 5, 3), np.uint8)},
            r"images: 168 pixels in all, at most 160 are allowed",
        ),
    ],
)
def test_images_and_videos_by_name_are_bounded_for_handles_as_for_http(images: Any, words: str) -> None:
    limits = LimitsConfig(max_frames=3, max_pixels=64, max_video_pixels=160)
    check_clip(ClipRequest(model="m", prompt="p", images={"video": np.zeros((2, 8, 8, 3), np.uint8)}), limits, "video")
    with pytest.raises(InvalidRequest, match=words):
        check_clip(ClipRequest(model="m", prompt="p", images=images), limits, "video")
    with pytest.raises(InvalidRequest, match=words):
        check_image(ImageRequest(model="m", prompt="p", images=images), limits)


def test_audio_by_name_is_bounded_for_handles_as_for_http() -> None:
    limits, second = LimitsConfig(max_audio_s=2.5), (np.zeros((2, 8000)), 8000)
    heard = ClipRequest(model="m", prompt="p", audio={"src_audio": second, "reference_audio": second})
    assert heard.audio["src_audio"].samples.dtype == np.float32
    check_clip(heard, limits, "audio")
    with pytest.raises(InvalidRequest, match=r"audio: 3 seconds in all, at most 2\.5 are allowed"):
        check_clip(ClipRequest(model="m", prompt="p", audio=dict.fromkeys("abc", second)), limits, "audio")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (np.zeros((1, 4)), "expected samples and how many of them are a second"),
        ((np.zeros((1, 4)), 0), "0 samples a second, expected 1 to 192000"),
        ((np.zeros((1, 4)), 8000.0), "8000.0 samples a second"),
        ((np.zeros((3, 4)), 8000), "3 channels, expected 1 or 2"),
        ((np.zeros(4), 8000), r"float64 of shape \(4,\), expected floats \(channels, samples\)"),
        ((np.zeros((1, 4), np.int16), 8000), "int16 of shape"),
        ((np.zeros((1, 0)), 8000), "no sample is in it"),
        ((np.array([[0.0, np.nan]]), 8000), "samples that are not finite"),
    ],
)
def test_what_is_no_audio_by_name_is_refused(given: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"audio\.src_audio: {words}"):
        ClipRequest(model="m", prompt="p", audio={"src_audio": given})


@pytest.mark.parametrize("images", [{"video": []}, {"video": np.zeros((2, 8, 8, 4), np.uint8)}, {"video": "cat.mp4"}])
def test_what_are_no_images_by_name_is_refused(images: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"images\.video: expected"):
        ClipRequest(model="m", prompt="p", images=images)
