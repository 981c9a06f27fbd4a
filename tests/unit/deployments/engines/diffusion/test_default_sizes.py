"""The size of an image whose request says none is the one that the stock pipeline of the same folder chooses."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
from kit.tiny.pipelines import make

from configs.model import GenerationDefaults
from deployments.engines.diffusion.families import FAMILIES, family_of
from deployments.engines.diffusion.families.base import MAX_SIDE_PX
from deployments.records import ImageRequest
from deployments.requests.defaults import with_image_defaults
from weights.formats.pipeline_parts import pipeline_variant

NO_TEXTS = [f"{part}{number}" for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")]
NO_MORE = [*NO_TEXTS, "safety_checker", "feature_extractor", "image_encoder"]


class Chosen(Exception):
    """A stock pipeline has chosen a height and a width."""


def stock_sides(stock: Any, **texts: Any) -> tuple[int, int]:
    """Return the width and height that a stock pipeline makes latents of where nobody says them."""
    names = inspect.signature(stock.prepare_latents)

    def note(*arguments: Any, **options: Any) -> None:
        given = names.bind(*arguments, **options).arguments
        raise Chosen(given["width"], given["height"])

    stock.prepare_latents = note
    with pytest.raises(Chosen) as chosen:
        stock(**texts, num_inference_steps=2, output_type="latent")
    return chosen.value.args  # type: ignore[return-value]


def our_sides(class_name: str, folder: Path) -> tuple[int, int]:
    asked = ImageRequest(model="m", prompt="p")
    filled = with_image_defaults(asked, GenerationDefaults(), class_name, pipeline_variant(folder))
    assert filled.width is not None
    assert filled.height is not None
    return filled.width, filled.height


def changed(folder: Path, source: Path, part: str, **values: Any) -> Path:
    """Return a copy of a pipeline's folder with other values in a part's config."""
    shutil.copytree(source, folder)
    file = folder / part / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("stable_diffusion", {"sample_size": 96}),
        ("stable_diffusion", {"sample_size": 32}),
        ("stable_diffusion", {"sample_size": 32, "_diffusers_version": "0.6.0"}),
        ("stable_diffusion", {"sample_size": 32, "_diffusers_version": "0.9.0.dev0"}),
        ("stable_diffusion", {"sample_size": 32, "_diffusers_version": "0.10.2"}),
        ("stable_diffusion", {"sample_size": [24, 40], "_diffusers_version": "0.6.0"}),
        ("sdxl", {"sample_size": 64}),
        ("sdxl", {"sample_size": 128}),
        ("stable_diffusion_3", {}),
        ("stable_diffusion_3", {"sample_size": 64}),
        ("flux", {}),
        ("flux", {"sample_size": 96}),
    ],
    ids=str,
)
def test_the_size_is_that_of_the_denoiser(tmp_path, request, name, values):
    pair = request.getfixturevalue(name)
    folder = changed(tmp_path / "model", pair.folder, pair.denoiser_name, **values)
    class_name = pair.ours.family.class_name
    none = dict.fromkeys(key for key in NO_MORE if key in inspect.signature(type(pair.stock)).parameters)
    stock = getattr(diffusers, class_name).from_pretrained(folder, **none)
    expected = stock_sides(stock, **pair.conditioning(negative=not class_name.startswith("Flux")))
    assert our_sides(class_name, folder) == expected


@pytest.mark.drawn(2)
@pytest.mark.parametrize("class_name", ["Flux2Pipeline", "Flux2KleinPipeline", "QwenImagePipeline", "ZImagePipeline"])
def test_the_size_of_models_that_have_one_of_their_own(tmp_path, class_name):
    stock = make(class_name, tmp_path)
    assert our_sides(class_name, tmp_path) == stock_sides(stock, prompt="a cat")


def test_every_family_has_a_size_where_configs_are_silent(tmp_path):
    usual = {"StableDiffusionPipeline": 512}
    for class_name, family in FAMILIES.items():
        side = usual.get(family.class_name, 1024)
        assert family.defaults.sides(pipeline_variant(tmp_path)) == (side, side), class_name


@pytest.mark.parametrize("size", [0, -4, True, 2.5, "64", None, [64], [64, 0], [1, 2, 3], {"a": 1}], ids=repr)
def test_what_is_no_size_is_none(tmp_path, size):
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text(json.dumps({"sample_size": size, "_diffusers_version": "0.6.0"}))
    assert pipeline_variant(tmp_path) == {}


def test_a_size_beyond_all_images_is_the_largest(tmp_path):
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text('{"sample_size": 1000000000000}')
    family = family_of("StableDiffusionXLPipeline")
    assert family.defaults.sides(pipeline_variant(tmp_path)) == (MAX_SIDE_PX, MAX_SIDE_PX)


@pytest.mark.parametrize(
    ("config", "pixels"),
    [
        ({"block_out_channels": [8, 8, 8]}, 4),
        ({"block_out_channels": [8] * 16}, 2**15),
        ({"block_out_channels": [8] * 17}, None),
        ({"temperal_downsample": [True, False, True]}, 8),
        ({"temperal_downsample": []}, 1),
        ({}, None),
    ],
)
def test_a_latent_has_two_pixels_a_side_for_each_halving_of_the_vae(tmp_path, config, pixels):
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(json.dumps(config))
    assert pipeline_variant(tmp_path).get("pixels_per_latent") == pixels
