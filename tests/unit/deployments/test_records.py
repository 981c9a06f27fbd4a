"""Requests are strict, and errors survive the way out of a replica."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from typing import Any

import diffusers
import numpy as np
import pytest
from kit.panics import Panic
from pydantic import ValidationError

from cluster.records.errors import KeeperFailed
from configs.cluster import LimitsConfig
from configs.model import GenerationDefaults
from deployments.engines.records.protocol import ComputationFailed, EngineError
from deployments.records import (
    MAX_SEED,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ImageOptions,
    ImageRequest,
    TextOptions,
    as_record,
)
from deployments.records.errors import (
    GenerationFailed,
    InvalidRequest,
    ModelUnavailable,
    Overloaded,
    ServiceError,
    UnknownModel,
    as_service_errors,
)
from deployments.requests.defaults import with_image_defaults, with_text_defaults
from deployments.requests.limits import check_image
from deployments.services.image_requests import conditioning_request, denoise_request, ignored_inputs
from weights.records.errors import BudgetExceeded, ExtentCorrupt

FLUX, SDXL = "FluxPipeline", "StableDiffusionXLPipeline"
IMAGE = {"model": "m", "prompt": "p"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("class_", "fields", "where"),
    [
        (ImageRequest, {**IMAGE, "promt": "x"}, ("promt",)),
        (ImageRequest, {"model": "m"}, ("prompt",)),
        (ImageRequest, {**IMAGE, "prompt": ""}, ("prompt",)),
        (ImageRequest, {**IMAGE, "n": 0}, ("n",)),
        (ImageRequest, {**IMAGE, "width": 0}, ("width",)),
        (ImageRequest, {**IMAGE, "num_inference_steps": 0}, ("num_inference_steps",)),
        (ImageRequest, {**IMAGE, "guidance_scale": float("nan")}, ("guidance_scale",)),
        (ImageRequest, {**IMAGE, "true_cfg_scale": float("inf")}, ("true_cfg_scale",)),
        (ImageRequest, {**IMAGE, "seed": -1}, ("seed",)),
        (ImageRequest, {**IMAGE, "seed": MAX_SEED + 1}, ("seed",)),
        (ImageRequest, {**IMAGE, "lora": [{"name": "a", "scale": float("nan")}]}, ("lora", 0, "scale")),
        (ImageRequest, {**IMAGE, "lora": [{"name": "a", "scale": 11}]}, ("lora", 0, "scale")),
        (ImageRequest, {**IMAGE, "model": "m" * 257}, ("model",)),
        (ImageRequest, {**IMAGE, "height": 2**31}, ("height",)),
        (ImageRequest, {**IMAGE, "n": 2**31}, ("n",)),
        (ImageRequest, {**IMAGE, "priority": 101}, ("priority",)),
        (ChatRequest, {**CHAT, "stop": ["x" * 257]}, ("stop", 0)),
        (ChatRequest, {**CHAT, "stop": [""]}, ("stop", 0)),
        (ChatRequest, {**CHAT, "top_k": 2**31}, ("top_k",)),
        (ChatRequest, {**CHAT, "max_tokens": 2**31}, ("max_tokens",)),
        (EmbeddingRequest, {"model": "m", "input": ()}, ("input",)),
        (EmbeddingRequest, {"model": "m", "input": ("x",), "priority": 101}, ("priority",)),
        (ChatRequest, {"model": "m", "messages": []}, ("messages",)),
        (ChatRequest, {"model": "m", "messages": [{"role": "robot", "content": ""}]}, ("messages", 0, "role")),
        (ChatRequest, {**CHAT, "temperature": float("nan")}, ("temperature",)),
        (ChatRequest, {**CHAT, "temperature": 2.1}, ("temperature",)),
        (ChatRequest, {**CHAT, "top_p": 0}, ("top_p",)),
        (ChatRequest, {**CHAT, "max_tokens": 0}, ("max_tokens",)),
        (ChatRequest, {**CHAT, "stop": ["a"] * 65}, ("stop",)),
        (CompletionRequest, {"model": "m", "prompt": ""}, ("prompt",)),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(class_: Any, fields: dict[str, Any], where: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        class_(**fields)
    named = ".".join(map(str, where))
    assert (caught.value.param or "").startswith(named)
    assert str(caught.value).startswith(f"{caught.value.param}: ")
    with pytest.raises(InvalidRequest) as mapped:
        as_record(class_, fields)
    assert (str(mapped.value), mapped.value.param) == (str(caught.value), caught.value.param)


def test_requests_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ImageRequest(**IMAGE).n = 2


def test_defaults_fill_what_is_open_and_nothing_else() -> None:
    defaults = GenerationDefaults(width=64, num_inference_steps=7, temperature=0.5, max_tokens=9)
    request = with_image_defaults(ImageRequest(**IMAGE, width=32, guidance_scale=0.0), defaults, FLUX)
    assert (request.width, request.height, request.num_inference_steps, request.guidance_scale) == (32, 1024, 7, 0.0)
    text = with_text_defaults(ChatRequest(**CHAT, temperature=0.0), defaults)
    assert (text.temperature, text.max_tokens) == (0.0, 9)
    assert with_text_defaults(ChatRequest(**CHAT), GenerationDefaults()).temperature is None


def test_a_model_may_have_a_default_for_every_option_that_shapes_an_answer() -> None:
    own = {"model", "prompt", "n", "lora", "logprobs", "ignore_eos"}  # of one request, not of a model
    options = (ImageOptions.model_fields.keys() | {"strength"} | TextOptions.model_fields.keys()) - own
    of_chats = {"chat_template_kwargs", "enable_thinking", "reasoning_effort", "tool_form", "reasoning_form"}
    assert of_chats < ChatRequest.model_fields.keys()
    assert GenerationDefaults.model_fields.keys() == options | of_chats


@pytest.mark.parametrize("name", sorted(GenerationDefaults.model_fields))
def test_a_default_is_bounded_as_the_option_is(name: str) -> None:
    bound: dict[str, Any] = {"sigmas": (math.inf,), "stop": ("",), "stop_token_ids": (-1,), "logit_bias": {1: 101.0}}
    texts = ("scheduler", "negative_prompt", "tool_form", "reasoning_form")
    wrong = bound.get(name, 3 if name in texts else "wrong")
    with pytest.raises(ValidationError, match=name):
        GenerationDefaults.model_validate({name: wrong})
    if name not in bound and isinstance(wrong, str) and name not in ("deterministic", "timesteps"):
        with pytest.raises(ValidationError, match=name):
            GenerationDefaults.model_validate({name: -3})


def test_defaults_of_images_apply_where_the_request_says_nothing_of_them() -> None:
    defaults = GenerationDefaults(negative_prompt="blurry", true_cfg_scale=2.0, scheduler="EulerDiscreteScheduler")
    defaults = defaults.model_copy(update={"deterministic": True, "seed": 7, "strength": 0.5})
    filled = with_image_defaults(ImageRequest(**IMAGE), defaults, FLUX)
    assert (filled.negative_prompt, filled.true_cfg_scale, filled.scheduler) == (
        "blurry",
        2.0,
        "EulerDiscreteScheduler",
    )
    assert (filled.deterministic, filled.seed, filled.strength) == (True, 7, None)
    own = ImageRequest(**IMAGE, negative_prompt="", true_cfg_scale=1.0, deterministic=False, seed=0)
    filled = with_image_defaults(own, defaults, FLUX)
    assert (filled.negative_prompt, filled.true_cfg_scale, filled.deterministic, filled.seed) == ("", 1.0, False, 0)
    edit = ImageRequest(**IMAGE, init_image=np.zeros((32, 32, 3), np.uint8))
    assert with_image_defaults(edit, defaults, FLUX).strength == 0.5


def test_a_schedule_of_the_model_gives_way_to_the_steps_of_a_request() -> None:
    defaults = GenerationDefaults(sigmas=(1.0, 0.5, 0.25))
    assert with_image_defaults(ImageRequest(**IMAGE), defaults, FLUX).num_inference_steps == 3
    own = with_image_defaults(ImageRequest(**IMAGE, num_inference_steps=5), defaults, FLUX)
    assert (own.num_inference_steps, own.sigmas) == (5, None)
    with pytest.raises(ValidationError, match="num_inference_steps and sigmas both say which steps there are"):
        GenerationDefaults(sigmas=(1.0,), num_inference_steps=3)


def test_defaults_of_texts_apply_where_the_request_says_nothing_of_them() -> None:
    defaults = GenerationDefaults(top_p=0.5, top_k=3, frequency_penalty=0.2, stop=("###",), logit_bias={3: -1.0})
    filled = with_text_defaults(ChatRequest(**CHAT, top_k=0, presence_penalty=0.0), defaults)
    assert (filled.top_p, filled.top_k, filled.frequency_penalty, filled.presence_penalty) == (0.5, 0, 0.2, 0.0)
    assert (filled.stop, filled.logit_bias) == (("###",), {3: -1.0})
    assert with_text_defaults(ChatRequest(**CHAT, stop=("a",)), defaults).stop == ("a",)


def test_a_seed_is_drawn_unless_it_is_given() -> None:
    empty = GenerationDefaults()
    for seed in (0, 2**32, MAX_SEED):
        assert with_image_defaults(ImageRequest(**IMAGE, seed=seed), empty, FLUX).seed == seed
        assert with_text_defaults(ChatRequest(**CHAT, seed=seed), empty).seed == seed


def test_drawn_seeds_are_what_every_json_reader_keeps() -> None:
    """As JavaScript does, many read numbers as doubles: beyond 53 bits the last ones are lost."""
    empty = GenerationDefaults()
    images = [with_image_defaults(ImageRequest(**IMAGE), empty, FLUX).seed for _ in range(200)]
    texts = [with_text_defaults(CompletionRequest(model="m", prompt="p"), empty).seed for _ in range(200)]
    for drawn in (images, texts):
        assert len(set(drawn)) > 190
        assert all(seed is not None and 0 <= seed < 2**32 and int(float(seed)) == seed for seed in drawn)


@pytest.mark.parametrize(
    ("class_name", "steps", "guidance", "side"),
    [
        (FLUX, 28, 3.5, 1024),
        (SDXL, 50, 5.0, 1024),
        ("StableDiffusion3Pipeline", 28, 7.0, 1024),
        ("StableDiffusionPipeline", 50, 7.5, 512),
    ],
)
def test_families_fill_in_what_stock_does(class_name: str, steps: int, guidance: float, side: int) -> None:
    filled = with_image_defaults(ImageRequest(**IMAGE), GenerationDefaults(), class_name)
    assert (filled.width, filled.height) == (side, side)
    assert (filled.num_inference_steps, filled.guidance_scale, filled.max_sequence_length) == (steps, guidance, None)
    pipeline = inspect.signature(getattr(diffusers, class_name).__call__).parameters
    assert (pipeline["num_inference_steps"].default, pipeline["guidance_scale"].default) == (steps, guidance)


def test_a_pipeline_of_no_family_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="model 'm' is a PixelPipeline, which diffusers does not have"):
        with_image_defaults(ImageRequest(**IMAGE), GenerationDefaults(), "PixelPipeline")


@pytest.mark.parametrize(
    ("more", "class_name", "words"),
    [
        ({"extra": {"clip_skip": 1}}, FLUX, "extra: FluxPipeline has none here"),
        ({"images": {"control_image": np.zeros((8, 8, 3), np.uint8)}}, FLUX, "images: FluxPipeline has none here"),
        ({"acceleration": {"interval": 2}}, "SanaPipeline", "acceleration: diffusers' own code runs a SanaPipeline"),
        ({"variation": {"seed": 1, "strength": 0.5}}, "SanaPipeline", "variation: diffusers' own code runs a Sana"),
        ({"sigmas": [1.0, 0.5], "num_inference_steps": 3}, "SanaPipeline", "num_inference_steps: 3, but 2 sigmas"),
    ],
)
def test_options_of_the_other_kind_of_pipeline_are_refused(more: Any, class_name: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        with_image_defaults(ImageRequest(**IMAGE, **more), GenerationDefaults(), class_name)


EDIT, PLUS = "QwenImageEditPipeline", "QwenImageEditPlusPipeline"


@pytest.mark.parametrize(
    ("more", "class_name", "words"),
    [
        ({}, EDIT, r"init_image: model 'm' \(QwenImageEditPipeline\) changes images, and the request has none"),
        ({"init_image": (8, 8, 3), "images": {"image": (8, 8, 3)}}, EDIT, "images: 2 of them, and .* takes 1"),
        (
            {"images": {"image": (9, 8, 8, 3)}},
            PLUS,
            "images: 9 of them, and model 'm' .QwenImageEditPlusPipeline. take",
        ),
        ({"images": {"mask": (8, 8, 3)}}, PLUS, "images.mask: .* takes images.image alone"),
        ({"init_image": (8, 8, 3), "mask_image": (8, 8)}, PLUS, "mask_image: .* takes none"),
        ({"init_image": (8, 200, 3)}, PLUS, "images: an image of 200x8 pixels: no side may be more than 16 times"),
    ],
)
def test_what_a_model_that_changes_images_cannot_take(more: dict[str, Any], class_name: str, words: str) -> None:
    def pixels(shape: Any) -> Any:
        if isinstance(shape, dict):
            return {name: pixels(one) for name, one in shape.items()}
        return np.zeros(shape, np.uint8)

    request = ImageRequest(**IMAGE, **{name: pixels(shape) for name, shape in more.items()})
    with pytest.raises(InvalidRequest, match=words):
        with_image_defaults(request, GenerationDefaults(), class_name)


@pytest.mark.parametrize("class_name", [EDIT, PLUS])
def test_a_model_that_changes_images_gets_the_defaults_of_its_class(class_name: str) -> None:
    image = np.zeros((300, 500, 3), np.uint8)
    asked = ImageRequest(**IMAGE, init_image=image)
    filled = with_image_defaults(asked, GenerationDefaults(strength=0.5), class_name)
    check_image(filled, LimitsConfig(), asked)
    assert (filled.width, filled.height) == (1312, 800)  # a million pixels in the ratio of the image
    assert len(filled.references) == 1
    assert filled.references[0] is image
    assert with_image_defaults(filled, GenerationDefaults(), class_name) == filled
    defaults = inspect.signature(getattr(diffusers, class_name).__call__).parameters
    for name in ("true_cfg_scale", "num_inference_steps"):
        assert getattr(filled, name) == defaults[name].default
    own = with_image_defaults(ImageRequest(**IMAGE, init_image=image, width=64), GenerationDefaults(), class_name)
    assert (own.width, own.height) == (64, 800)


def test_a_default_that_extrapolates_steps_says_nothing_to_a_stock_pipeline() -> None:
    defaults = GenerationDefaults(acceleration={"interval": 2})
    assert with_image_defaults(ImageRequest(**IMAGE), defaults, "SanaPipeline").acceleration is None


def test_a_stock_pipeline_gets_the_steps_of_its_class_and_the_defaults_of_its_config() -> None:
    defaults = GenerationDefaults(extra={"use_resolution_binning": False}, guidance_scale=2.0)
    filled = with_image_defaults(ImageRequest(**IMAGE), defaults, "SanaPipeline")
    assert (filled.num_inference_steps, filled.guidance_scale, filled.width) == (20, 2.0, None)
    assert filled.extra == {"use_resolution_binning": False}
    assert filled.seed is not None
    own = with_image_defaults(ImageRequest(**IMAGE, num_inference_steps=3, extra={"a": 1}), defaults, "SanaPipeline")
    assert (own.num_inference_steps, own.extra) == (3, {"a": 1})


@pytest.mark.parametrize("class_", ServiceError.__subclasses__())
def test_errors_survive_a_copy_by_their_arguments(class_: type[ServiceError]) -> None:
    again = copy.copy(class_("what happened", "field"))
    assert (type(again), str(again), again.message, again.param) == (class_, *["what happened"] * 2, "field")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (EngineError("x"), InvalidRequest),
        (BudgetExceeded("x"), Overloaded),
        (ExtentCorrupt("x"), ModelUnavailable),
        (KeeperFailed("x"), ModelUnavailable),
        (UnknownModel("x"), UnknownModel),
        (ComputationFailed("x"), GenerationFailed),
        (MemoryError("x"), Overloaded),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: x"), Overloaded),
        (RuntimeError("x"), RuntimeError),
        (KeyError("x"), KeyError),
        (Panic("x"), GenerationFailed),
        (asyncio.CancelledError("x"), asyncio.CancelledError),
    ],
)
def test_lower_floors_are_said_in_the_services_terms(raised: BaseException, expected: type[BaseException]) -> None:
    with pytest.raises(expected, match=r"x|not enough memory"), as_service_errors():
        raise raised


def test_flux_schnell_has_the_defaults_of_its_model_card() -> None:
    image = np.zeros((16, 24, 3), np.uint8)
    dev, schnell = ({"guidance_embeds": on, "use_dynamic_shifting": on} for on in (True, False))
    request, edit = ImageRequest(**IMAGE), ImageRequest(**IMAGE, init_image=image)
    for asked, variant, expected in [
        (request, dev, (28, 3.5, None, None)),
        (request, {}, (28, 3.5, None, None)),
        (request, {"guidance_embeds": False, "use_dynamic_shifting": True}, (28, 3.5, None, None)),
        (request, schnell, (4, 0.0, 256, None)),
        (edit, dev, (28, 7.0, None, 0.6)),
        (edit, schnell, (4, 0.0, 256, 0.6)),
    ]:
        filled = with_image_defaults(asked, GenerationDefaults(), FLUX, variant)
        found = filled.num_inference_steps, filled.guidance_scale, filled.max_sequence_length, filled.strength
        assert found == expected
    own = GenerationDefaults(num_inference_steps=2, max_sequence_length=64)
    filled = with_image_defaults(request, own, FLUX, schnell)
    assert (filled.num_inference_steps, filled.max_sequence_length, filled.guidance_scale) == (2, 64, 0.0)


@pytest.mark.parametrize("task", ["Img2Img", "Inpaint"])
@pytest.mark.parametrize("class_name", [FLUX, SDXL, "StableDiffusionPipeline", "StableDiffusion3Pipeline"])
def test_edits_fill_in_what_stock_does(class_name, task):
    image = np.zeros((16, 24, 3), np.uint8)
    mask = {"mask_image": image[..., 0]} if task == "Inpaint" else {}
    filled = with_image_defaults(ImageRequest(**IMAGE, init_image=image, **mask), GenerationDefaults(), class_name)
    stock = getattr(diffusers, class_name.replace("Pipeline", f"{task}Pipeline"))
    defaults = inspect.signature(stock.__call__).parameters
    for name in ("strength", "guidance_scale", "num_inference_steps"):
        assert getattr(filled, name) == defaults[name].default


def test_images_that_do_not_fit_are_refused_before_they_travel():
    image = np.zeros((16, 24, 3), np.uint8)
    request = with_image_defaults(ImageRequest(**IMAGE, mask_image=image[..., 0]), GenerationDefaults(), SDXL)
    with pytest.raises(InvalidRequest, match="mask_image: a mask needs an init_image") as caught:
        check_image(request, LimitsConfig())
    assert caught.value.param == "mask_image"
    request = with_image_defaults(ImageRequest(**IMAGE, init_image=image, width=32), GenerationDefaults(), SDXL)
    with pytest.raises(InvalidRequest, match="init_image: 24x16 pixels, expected the 32x16 of the request"):
        check_image(request, LimitsConfig())


def test_images_of_a_request():
    image, mask = np.zeros((16, 24, 3), np.uint8), np.zeros((16, 24), np.uint8)
    fields = {**IMAGE, "init_image": image, "mask_image": mask, "control": [{"name": "c", "image": image, "end": 0.5}]}
    request = as_record(ImageRequest, fields)
    again = request.model_copy(update={"priority": 1})
    assert np.array_equal(again.init_image, image)
    assert again.control[0].end == 0.5
    filled = with_image_defaults(request, GenerationDefaults(width=512, height=512), SDXL)
    assert (filled.width, filled.height) == (24, 16)
    asked = with_image_defaults(as_record(ImageRequest, {**fields, "width": 8}), GenerationDefaults(), SDXL)
    assert (asked.width, asked.height) == (8, 16)  # said by the request; the engine tells that the image is wider


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"init_image": np.zeros((8, 8), np.uint8)}, "init_image"),
        ({"init_image": np.zeros((8, 8, 4), np.uint8)}, "init_image"),
        ({"init_image": np.zeros((8, 8, 3))}, "init_image"),
        ({"init_image": np.zeros((0, 8, 3), np.uint8)}, "init_image"),
        ({"init_image": "cat.png"}, "init_image"),
        ({"mask_image": np.zeros((8, 8, 3), np.uint8)}, "mask_image"),
        ({"mask_image": np.zeros((8, 8), bool)}, "mask_image"),
        ({"strength": 0}, "strength"),
        ({"strength": 1.01}, "strength"),
        ({"strength": float("nan")}, "strength"),
        ({"control": [{"name": "c"}]}, "control.0.image"),
        ({"control": [{"name": "c", "image": np.zeros((8, 8, 3), np.uint8), "start": 2}]}, "control.0.start"),
    ],
)
def test_images_that_are_refused(fields, where):
    with pytest.raises(InvalidRequest) as caught:
        as_record(ImageRequest, {**IMAGE, **fields})
    assert caught.value.param == where


def test_only_an_unknown_field_is_told_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"^temprature: unknown field \(fields: max_tokens, temperature,"):
        as_record(ChatRequest, {**CHAT, "temprature": 1})
    with pytest.raises(InvalidRequest, match=r"^stop\.0: String should have at least 1 character$"):
        as_record(ChatRequest, {**CHAT, "stop": ("",)})
    with pytest.raises(InvalidRequest, match=r"^prompt\.1: String should have at least 1 character$"):
        as_record(CompletionRequest, {"model": "m", "prompt": ("a", "")})
    with pytest.raises(InvalidRequest, match=r"^messages: Field required$"):
        as_record(ChatRequest, {"model": "m"})


def test_layers_that_are_left_out_are_told_to_whom_it_concerns() -> None:
    request = with_image_defaults(ImageRequest(**IMAGE, clip_skip=1), GenerationDefaults(), FLUX)
    assert ignored_inputs(request, False, FLUX) == (
        f"clip_skip had no effect: {FLUX} reads its prompts by other layers",
    )
    assert ignored_inputs(request, False, "StableDiffusionPipeline") == ()
    of_class = with_image_defaults(ImageRequest(**IMAGE, clip_skip=1), GenerationDefaults(), "AnimateDiffPipeline")
    assert (of_class.clip_skip, of_class.extra) == (None, {"clip_skip": 1})


def test_a_lora_has_a_strength_in_text_encoders_and_one_in_the_denoiser() -> None:
    uses = ({"name": "a", "scale": 0.8, "text_scale": 0.25}, {"name": "b", "scale": 0.5})
    request = with_image_defaults(ImageRequest(**IMAGE, lora=uses), GenerationDefaults(), FLUX)
    denoise = denoise_request(request)
    assert [(use.name, use.scale) for use in denoise.adapters] == [("a", 0.8), ("b", 0.5)]
    assert conditioning_request(request, denoise, FLUX).adapters == {"a": 0.25, "b": 0.5}
