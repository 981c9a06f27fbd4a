"""Requests that a taker refuses, by the field to blame, and what is filled in for those that it takes."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from configs.model import GenerationDefaults
from deployments.records import ImageRequest
from deployments.records.errors import InvalidRequest
from deployments.requests.defaults import as_upscale, with_image_defaults

PICTURE = np.zeros((16, 24, 3), np.uint8)
LATENTS = np.zeros((2, 4, 8, 16), np.float32)
NONE = GenerationDefaults()
EDITING = "QwenImageEditPlusPipeline"


def request(**more: Any) -> ImageRequest:
    return ImageRequest(**{"model": "m", "prompt": "words"} | more)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"latents": LATENTS}, "latents: an upscaler takes no latents and gives none"),
        ({"output": "latent"}, "output: an upscaler takes no latents and gives none"),
        ({"width": 8}, "width: an upscaler takes an image alone, and its scale is its own"),
        ({"extra": {"a": 1}}, "extra: an upscaler takes an image alone, and its scale is its own"),
        ({"n": 2}, "n: 2 images, and an upscaler makes one of one"),
    ],
)
def test_an_upscaler_takes_an_image_alone(more: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{words}$"):
        as_upscale(request(init_image=PICTURE, **more))


def test_an_upscaler_says_what_has_no_effect() -> None:
    plain, warnings = as_upscale(request(prompt=" ", init_image=PICTURE))
    assert (plain.height, plain.width, warnings) == (16, 24, ())
    told, warnings = as_upscale(request(prompt="words", init_image=PICTURE, strength=0.5, num_inference_steps=3))
    assert (told.strength, told.num_inference_steps, told.prompt) == (None, None, plain.prompt)
    assert len(warnings) == 1
    assert all(name in warnings[0] for name in ("prompt", "strength", "num_inference_steps"))
    _, warnings = as_upscale(request(prompt=" ", init_image=PICTURE, scaled_from=(48, 32)))
    assert warnings == ("the image of 48x32 pixels was scaled to 24x16: the largest allowed",)
    empty, warnings = as_upscale(request(prompt=" ", scaled_from=(48, 32)))
    assert (empty.height, warnings) == (None, ())


@pytest.mark.parametrize(
    ("class_name", "more", "words"),
    [
        ("FluxPipeline", {"extra": {"a": 1}}, "extra: FluxPipeline has none here"),
        ("FluxPipeline", {"images": {"a": (PICTURE,)}}, "images: FluxPipeline has none here"),
        (EDITING, {"strength": 0.5, "init_image": PICTURE}, "strength: model 'm' .* takes none"),
        (EDITING, {"images": {"a": (PICTURE,)}}, r"images\.a: model 'm' .* takes images\.image alone"),
        (EDITING, {}, "init_image: model 'm' .* changes images, and the request has none"),
        (EDITING, {"images": {"image": (PICTURE,) * 8}, "init_image": PICTURE}, "images: 9 of them, .* takes 8"),
        (EDITING, {"beside_latents": LATENTS}, "beside_latents: a QwenImageEditPlusPipeline reads none here"),
        ("FluxPipeline", {"output": "encoded"}, "pixels: the request has none, and its output is 'encoded'"),
        ("FluxPipeline", {"output": "decoded"}, "latents: the request has none, and its output is 'decoded'"),
        ("NoPipeline", {}, "model 'm' is a NoPipeline, which diffusers does not have"),
        ("", {}, "model 'm' is a pipeline without a class, which diffusers does not have"),
    ],
)
def test_a_class_refuses_what_it_does_not_read(class_name: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        with_image_defaults(request(**more), NONE, class_name)


def test_latents_say_their_images_sizes() -> None:
    found = with_image_defaults(request(latents=LATENTS), NONE, "StableDiffusionPipeline", MappingProxyType({}))
    assert (found.n, found.height, found.width) == (2, 64, 128)
    assert found.seed is not None
    own = with_image_defaults(request(latents=LATENTS, width=8, seed=7), NONE, "StableDiffusionPipeline")
    assert (own.height, own.width, own.seed) == (64, 8, 7)
    decoded = with_image_defaults(request(latents=LATENTS, output="decoded"), NONE, "StableDiffusionPipeline")
    assert (decoded.n, decoded.height, decoded.width, decoded.num_inference_steps) == (2, 64, 128, 1)


def test_images_to_change_come_under_one_name() -> None:
    found = with_image_defaults(request(init_image=PICTURE, images={"image": (PICTURE,) * 7}), NONE, EDITING)
    assert found.init_image is None
    assert len(found.images["image"]) == 8
    assert found.width is not None


STOCK = "KandinskyV22Pipeline"  # diffusers' own code runs it


def test_a_class_without_a_family_has_the_configs_defaults() -> None:
    defaults = GenerationDefaults(width=640, height=512, num_inference_steps=9, strength=0.5)
    plain = with_image_defaults(request(), defaults, STOCK)
    assert (plain.width, plain.height, plain.num_inference_steps, plain.strength) == (640, 512, 9, None)
    for pictures in ({"init_image": PICTURE}, {"images": {"image": (PICTURE,)}}):
        found = with_image_defaults(request(**pictures), defaults, STOCK)
        assert (found.width, found.height) == (None, None)
        assert found.strength == (0.5 if "init_image" in pictures else None)
    with pytest.raises(InvalidRequest, match=f"latents: a {STOCK}, which diffusers' own code runs, takes no latents"):
        with_image_defaults(request(latents=LATENTS), NONE, STOCK)
    with pytest.raises(InvalidRequest, match=f"prompt_2: diffusers' own code runs a {STOCK}, and takes none here"):
        with_image_defaults(request(prompt_2="more"), NONE, STOCK)


@pytest.mark.parametrize(
    ("own", "is_usual"), [({}, True), ({"num_inference_steps": 4}, False), ({"sigmas": (1.0, 0.5)}, False)]
)
def test_a_requests_own_steps_leave_out_those_of_the_config(own: dict[str, Any], is_usual: bool) -> None:
    defaults = GenerationDefaults(num_inference_steps=9, scheduler="euler")
    found = with_image_defaults(request(**own), defaults, "StableDiffusionXLPipeline")
    assert (found.num_inference_steps == 9) is is_usual
    assert found.num_inference_steps == own.get("num_inference_steps", found.num_inference_steps)
    assert found.scheduler == "euler"
