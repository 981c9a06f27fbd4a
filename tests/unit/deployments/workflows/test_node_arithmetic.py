"""Arithmetic of nodes: levels of noise, sizes, batches and blends beside plain formulas, and the bounds of inputs."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.seeding import seeded_rng
from kit.workflows import FakeBackend, Told, png_file
from PIL import Image

from deployments.workflows.backend import ModelFacts
from deployments.workflows.files import as_pixels, read_image
from deployments.workflows.images import KONTEXT_SIZES
from deployments.workflows.kinds import Input, choice, growing, integer
from deployments.workflows.records import Refused
from deployments.workflows.resizing import resized
from deployments.workflows.sampling import _clip_skip
from deployments.workflows.table import KINDS
from deployments.workflows.values import (
    PENDING,
    ClipValue,
    ControlNetValue,
    Latent,
    LoraUse,
    ModelValue,
    Prompt,
    VaeValue,
)
from deployments.workflows.videos import _begun

MODEL, CLIP = ModelValue(("base",)), ClipValue(("base",))
FOUR = np.arange(4, dtype=np.float32)[:, None, None]


def call(kind: str, *first: Any, **given: Any) -> Any:
    return KINDS[kind].function(*first, **given)


def one(kind: str, *first: Any, **given: Any) -> Any:
    return call(kind, *first, **given)[0]


@pytest.mark.parametrize(
    ("denoise", "high", "low"),
    [
        (0.5, (5.0, 4.0, 3.0), (3.0, 2.0, 0.0)),
        (0.25, (5.0, 4.0, 3.0, 2.0), (2.0, 0.0)),
        (1.0, (5.0,), (5.0, 4.0, 3.0, 2.0, 0.0)),
    ],
)
def test_levels_are_split_flipped_and_begun(denoise: float, high: Any, low: Any) -> None:
    sigmas = (5.0, 4.0, 3.0, 2.0, 0.0)
    assert call("SplitSigmasDenoise", sigmas=sigmas, denoise=denoise) == (high, low)
    assert call("SplitSigmasDenoise", sigmas=(), denoise=denoise) == ((), ())
    assert call("SplitSigmas", sigmas=sigmas, step=1) == (sigmas[:2], sigmas[1:])
    assert one("FlipSigmas", sigmas=sigmas) == (1e-4, 2.0, 3.0, 4.0, 5.0)
    assert one("FlipSigmas", sigmas=sigmas[:2]) == (4.0, 5.0)
    assert one("FlipSigmas", sigmas=()) == ()
    assert one("SetFirstSigma", sigmas=sigmas, sigma=9.0) == (9.0, *sigmas[1:])
    least = {"steps": 2, "sigma_max": 1.0, "rho": 7.0, "sigma_min": 1e-3}
    assert one("KarrasScheduler", **least)[0] == pytest.approx(1.0)
    with pytest.raises(Refused, match="a level of 0: expected more than 0"):
        call("KarrasScheduler", steps=2, sigma_max=1.0, sigma_min=0.0, rho=7.0)


def test_a_repeated_batch_draws_the_noise_behind_its_last_place() -> None:
    latent = Latent(np.ones((2, 4, 1, 1), np.float32), 2, 8, 8, noise_mask=FOUR[:2], batch_index=(3, 5))
    found = one("RepeatLatentBatch", samples=latent, amount=3)
    assert (found.batch, found.batch_index) == (6, (3, 5, 6, 8, 9, 11))
    assert found.noise_mask.tolist() == [[[value]] for value in (0, 1, 0, 1, 0, 1)]
    assert found.samples.shape == (6, 4, 1, 1)
    same = latent.changed(noise_mask=FOUR[1:2])
    assert len(one("RepeatLatentBatch", samples=same, amount=3).noise_mask) == 1


@pytest.mark.parametrize(("first", "length", "kept"), [(1, 2, [1, 2]), (0, 9, [0, 1, 2, 3]), (9, 1, [3])])
def test_latents_of_a_batch_keep_their_masks_and_places(first: int, length: int, kept: list[int]) -> None:
    latent = Latent(FOUR[..., None], 4, 8, 8, noise_mask=FOUR, batch_index=(4, 5, 6, 7))
    found = one("LatentFromBatch", samples=latent, batch_index=first, length=length)
    assert found.batch == len(kept)
    assert [found.samples[:, 0, 0, 0].tolist(), found.noise_mask[:, 0, 0].tolist()] == [kept, kept]
    assert found.batch_index == tuple(4 + place for place in kept)
    shared = one("LatentFromBatch", samples=latent.changed(noise_mask=FOUR[:1]), batch_index=first, length=length)
    assert len(shared.noise_mask) == 1


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (0, 0, (96, 192)),
        (48, 0, (64, 96)),
        (0, 96, (64, 96)),
        (128, 0, (128, 256)),
        (0, 384, (192, 384)),
        (64, 65, (64, 65)),
    ],
)
def test_a_latents_lacking_side_follows_and_is_64_at_least(width: int, height: int, expected: tuple[int, int]) -> None:
    empty = Latent(width=96, height=192)
    sized = {"upscale_method": "area", "width": width, "height": height, "crop": "disabled"}
    found = one("LatentUpscale", samples=empty, **sized)
    assert (found.width, found.height) == expected
    later = one("LatentUpscale", samples=empty.changed(samples=PENDING), **sized)
    assert later.samples is PENDING


def inputs_of(kind: str) -> dict[str, tuple[Any, ...]]:
    return {one.name: (one.default, one.minimum, one.maximum) for one in KINDS[kind].inputs if one.type == "INT"}


def test_numbers_have_the_bounds_that_comfyui_shows() -> None:
    sides = {"width": (1024, 16, 16_384), "height": (1024, 16, 16_384), "batch_size": (1, 1, 4096)}
    assert inputs_of("EmptySD3LatentImage") == sides
    assert inputs_of("EmptyLatentImage")["width"][0] == 512
    for kind in ("VAEEncodeTiled", "VAEDecodeTiled"):
        assert inputs_of(kind) == {
            "tile_size": (512, 64, 4096),
            "overlap": (64, 0, 4096),
            "temporal_size": (64, 8, 4096),
            "temporal_overlap": (8, 4, 4096),
        }
    for kind, names in {
        "CLIPLoader": ["clip_name"],
        "DualCLIPLoader": ["clip_name1", "clip_name2"],
        "QuadrupleCLIPLoader": [f"clip_name{place}" for place in (1, 2, 3, 4)],
    }.items():
        assert [each.name for each in KINDS[kind].inputs if each.folder] == names


@pytest.mark.parametrize(
    ("wanted", "given", "fits"),
    [
        ("IMAGE", "IMAGE", True),
        ("IMAGE", "MASK", False),
        ("IMAGE,MASK", "MASK", True),
        ("IMAGE", "MASK,IMAGE", True),
        ("*", "MASK", True),
        ("MASK", "*", True),
        ("STRING", "COMBO", True),
        ("COMBO", "STRING", True),
        ("COMBO", "COMBO", True),
        ("STRING", "IMAGE", False),
        ("IMAGE", "COMBO", False),
        ("COMBO", "IMAGE", False),
        ("IMAGE", "STRING", False),
    ],
)
def test_an_output_fits_inputs_of_its_types(wanted: str, given: str, fits: bool) -> None:
    assert Input("x", wanted).takes(given) is fits


def test_adapters_of_no_strength_are_left_out() -> None:
    backend, named = FakeBackend(), {"lora_name": "ink.safetensors"}
    for of_model, of_clip in ((0.0, 0.0), (0.5, 0.0), (0.0, 2.0), (-1.0, 1.0)):
        strengths = {"strength_model": of_model, "strength_clip": of_clip}
        model, clip = call("LoraLoader", backend, model=MODEL, clip=CLIP, **named, **strengths)
        assert model.loras == ((LoraUse("ink", of_model),) if of_model else ())
        assert clip.loras == ((LoraUse("ink", of_clip),) if of_clip else ())
        alone = one("LoraLoaderModelOnly", backend, model=MODEL, **named, strength_model=of_model)
        assert alone.loras == model.loras


def test_a_file_that_no_model_has_is_told_beside_those_that_there_are() -> None:
    with pytest.raises(Refused, match=r"has the file 'gone'; loras: ink\.safetensors\""):
        call("LoraLoaderModelOnly", FakeBackend(), model=MODEL, lora_name="gone", strength_model=1.0)
    with pytest.raises(Refused, match=r"has the file 'gone'; model_patches: none\""):
        call("ModelPatchLoader", FakeBackend(), name="gone")
    backend: Any = SimpleNamespace(models_of=lambda *_: (), files=lambda _: [f"f{number:02}" for number in range(30)])
    with pytest.raises(Refused) as caught:
        call("ModelPatchLoader", backend, name="gone")
    assert caught.value.args[0].endswith("f18, f19")


def test_a_patch_reads_by_the_models_vae_and_a_union_has_a_type() -> None:
    given = {"model": MODEL, "model_patch": ControlNetValue("canny"), "vae": VaeValue(("base",)), "image": PENDING}
    (control,) = one("QwenImageDiffsynthControlnet", **given, strength=0.5).controls
    assert (control.strength, control.scaling) == (0.5, "area")
    assert one("QwenImageDiffsynthControlnet", **given, strength=0.0) == MODEL
    for change, words in (({"mask": PENDING}, "mask"), ({"vae": VaeValue(("flux",))}, "VAE of its model")):
        with pytest.raises(Refused, match=words):
            call("QwenImageDiffsynthControlnet", **given | change, strength=1.0)
    net = ControlNetValue("canny")
    assert one("SetUnionControlNetType", control_net=net, type="auto").mode is None
    assert one("SetUnionControlNetType", control_net=net, type="depth").mode == "depth"


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("ImageScale", {"width": 0, "height": 0}, (20, 40)),
        ("ImageScale", {"width": 10, "height": 0}, (5, 10)),
        ("ImageScale", {"width": 0, "height": 10}, (10, 20)),
        ("ImageScale", {"width": 0, "height": 1}, (1, 2)),
        ("ImageScale", {"width": 1, "height": 0}, (1, 1)),
        ("ImageScale", {"width": 7, "height": 9}, (9, 7)),
    ],
)
def test_an_images_lacking_side_follows(kind: str, given: dict[str, int], expected: tuple[int, int]) -> None:
    image = np.zeros((1, 20, 40, 3), np.float32)
    assert one(kind, image=image, upscale_method="area", crop="disabled", **given).shape[1:3] == expected


def test_images_have_so_many_pixels_or_the_nearest_shape() -> None:
    image = np.zeros((1, 40, 90, 3), np.float32)
    options = {"upscale_method": "area", "megapixels": 900 / 1024**2}
    assert one("ImageScaleToTotalPixels", image=image, **options).shape == (1, 20, 45, 3)
    assert one("ImageScaleToTotalPixels", image=image, **options, resolution_steps=8).shape == (1, 16, 48, 3)
    found = one("FluxKontextImageScale", image=image)
    wide, high = min(KONTEXT_SIZES, key=lambda size: abs(90 / 40 - size[0] / size[1]))
    assert found.shape == (1, high, wide, 3)


@pytest.mark.parametrize(("color", "shade"), [("black", 0.0), ("white", 1.0)])
def test_a_padded_image_stands_in_the_middle(color: str, shade: float) -> None:
    image = seeded_rng().uniform(0.2, 0.8, (1, 10, 20, 3)).astype(np.float32)
    options = {"padding_color": color, "interpolation": "area"}
    found = one("ResizeAndPadImage", image=image, target_width=10, target_height=14, **options)
    expected = np.full((1, 14, 10, 3), shade, np.float32)
    expected[:, 4:9] = resized(image, 10, 5, "area")
    np.testing.assert_allclose(found, expected)
    beside = one("ResizeAndPadImage", image=image, target_width=27, target_height=10, **options)
    np.testing.assert_allclose(beside[:, :, 3:23], image, atol=1e-6)
    assert (beside[:, :, [2, 23]] == shade).all()
    with pytest.raises(Refused, match="pixels"):
        call("ResizeAndPadImage", image=image, target_width=16_000, target_height=16_000, **options)


def blended(one: float, other: float, mode: str) -> float:
    """W3C's compositing, in plain arithmetic."""
    bright = ((16 * one - 12) * one + 4) * one if one <= 0.25 else one**0.5
    return {
        "normal": other,
        "multiply": one * other,
        "screen": one + other - one * other,
        "overlay": 2 * one * other if one <= 0.5 else 2 * (one + other - one * other) - 1,
        "difference": one - other,
        "soft_light": one - (1 - 2 * other) * one * (1 - one)
        if other <= 0.5
        else one + (2 * other - 1) * (bright - one),
    }[mode]


@pytest.mark.parametrize("mode", ["normal", "multiply", "screen", "overlay", "difference", "soft_light"])
def test_blends_are_those_of_the_formulas(mode: str) -> None:
    values = np.array([0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 1.0], np.float32)
    grid = [np.repeat(each[None, ..., None], 3, -1) for each in np.meshgrid(values, values)]
    found = one("ImageBlend", image1=grid[0], image2=grid[1], blend_factor=0.3, blend_mode=mode)[0, ..., 0]
    for row, column in np.ndindex(found.shape):
        under, over = float(values[column]), float(values[row])
        expected = under * 0.7 + blended(under, over, mode) * 0.3
        assert found[row, column] == pytest.approx(min(max(expected, 0), 1), abs=1e-6)


async def test_a_files_palette_may_be_transparent_and_a_mask_is_one_channel() -> None:
    picture = Image.new("P", (2, 1))
    picture.putpalette([10, 20, 30, 40, 50, 60])
    picture.putdata([0, 1])
    stream = io.BytesIO()
    picture.save(stream, "PNG", transparency=1)
    images, masks = read_image(stream.getvalue())
    assert masks.tolist() == [[[0, 1]]]
    assert (255 * images[0, 0, 0]).round().tolist() == [10, 20, 30]
    pixels = seeded_rng().integers(0, 255, (3, 4, 4), dtype=np.uint8)
    backend = FakeBackend({"in.png": png_file(pixels)})
    for place, channel in enumerate(("red", "green", "blue", "alpha")):
        (mask,) = await call("LoadImageMask", image="in.png", channel=channel).act(backend, Told())
        values = 1 - pixels[..., 3] / 255 if channel == "alpha" else pixels[..., place] / 255
        np.testing.assert_allclose(mask[0], values, atol=1e-6)


def test_inputs_are_declared_as_comfyui_shows_them() -> None:
    assert integer("seed", 3).has_control
    assert integer("noise_seed").has_control
    assert integer("any", seed=True).has_control
    assert not integer("steps").has_control
    assert [choice("c", ("a", "b")).default, choice("c", ("a", "b"), "b").default, choice("c", ()).default] == [
        "a",
        "b",
        None,
    ]
    grown = growing("images", "IMAGE", ("a", "b", "c"), 2, takes_bytes=True).grows
    assert [(each.name, each.required, each.takes_bytes) for each in grown] == [
        ("a", True, True), ("b", True, True), ("c", False, True),
    ]  # fmt: skip
    scene = inputs_of("WanImageToVideo")
    assert scene == {
        "width": (832, 16, 16_384), "height": (480, 16, 16_384), "length": (81, 1, 16_384), "batch_size": (1, 1, 4096),
    }  # fmt: skip


PROMPT = Prompt(CLIP, "words")


def test_a_control_of_no_strength_controls_nothing() -> None:
    given = {"positive": (PROMPT,), "negative": (PROMPT, PROMPT), "control_net": ControlNetValue("canny")}
    place = {"image": PENDING, "start_percent": 0.25, "end_percent": 1.0}
    assert call("ControlNetApplyAdvanced", **given, **place, strength=0.0) == (given["positive"], given["negative"])
    positive, negative = call("ControlNetApplyAdvanced", **given, **place, strength=2.0)
    for prompt in (*positive, *negative):
        (use,) = prompt.controls
        assert (use.strength, use.start, use.end) == (2.0, 0.25, 1.0)


@pytest.mark.parametrize(
    ("source", "text"),
    [(None, "None"), ("a", "a"), (3, "3"), (True, "True"), (np.zeros((2, 3)), "ndarray (2, 3)"), (Latent(), "Latent")],
)
def test_any_value_is_shown_as_a_text(source: Any, text: str) -> None:
    found = call("PreviewAny", source=source)
    assert (found.outputs, found.shown) == ((text,), {"text": [text]})


@pytest.mark.parametrize(
    ("class_name", "layer", "skipped"),
    [
        ("StableDiffusionPipeline", None, 0),
        ("FluxPipeline", None, 0),
        ("StableDiffusionPipeline", -1, 0),
        ("StableDiffusionPipeline", -3, 2),
        ("StableDiffusionXLPipeline", -2, 0),
        ("StableDiffusionXLPipeline", -5, 3),
        ("StableDiffusionXLPipeline", -1, "-1 has no counterpart with a StableDiffusionXLPipeline"),
        ("FluxPipeline", -1, "-1 has no counterpart with a FluxPipeline"),
    ],
)
def test_layers_are_left_out_behind_the_usual_last_one(class_name: str, layer: int | None, skipped: Any) -> None:
    prompt = replace(PROMPT, clip=replace(CLIP, last_layer=layer))
    if isinstance(skipped, int):
        assert _clip_skip(prompt, ModelFacts(class_name)) == skipped
    else:
        with pytest.raises(Refused, match=skipped):
            _clip_skip(prompt, ModelFacts(class_name))


async def test_a_preview_shows_the_images_that_there_are() -> None:
    backend = FakeBackend()
    image = np.zeros((1, 2, 2, 3), np.float32)
    for given, sides in (
        ({}, []),
        ({"image_a": image}, ["a_images"]),
        ({"image_b": image, "image_a": image}, ["a_images", "b_images"]),
    ):
        found = await call("ImageCompare", **given).act(backend, Told())
        assert list(found.shown) == sides
    mask = np.array([[[0.0, 1.0]]], np.float32)
    await call("MaskPreview", mask=mask).act(backend, Told())
    assert backend.saved[-1][2].tolist() == [[[0, 0, 0], [255, 255, 255]]]


def test_one_frame_begins_no_video_here() -> None:
    begun = [kind for kind in KINDS.values() if kind.function is _begun]
    assert begun
    size = {"width": 64, "height": 64, "length": 5, "batch_size": 1}
    for kind in begun:
        (latent,) = kind.function(vae=VaeValue(("base",)), **size)
        assert (latent.width, latent.height, latent.frames) == (64, 64, 5)
        with pytest.raises(Refused, match="not from a picture"):
            kind.function(vae=VaeValue(("base",)), **size, start_image=PENDING)


def test_all_frames_of_an_animation_are_images_and_pixels_are_clipped() -> None:
    frames = [Image.new("RGB", (6, 4), (value, 0, 0)) for value in (0, 128, 255)]
    stream = io.BytesIO()
    frames[0].save(stream, "PNG", save_all=True, append_images=frames[1:])
    images, masks = read_image(stream.getvalue())
    assert (images.shape, masks.shape[0]) == ((3, 4, 6, 3), 3)
    assert [int(image[0, 0, 0]) for image in as_pixels(images)] == [0, 128, 255]
    assert as_pixels(np.float32([[[[1.2, -0.1, 0.5]]]]))[0].tolist() == [[[255, 0, 127]]]
