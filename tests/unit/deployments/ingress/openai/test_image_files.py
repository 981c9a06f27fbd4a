"""Image files of answers: pixels survive, and the files say how they were made."""

from __future__ import annotations

import io
import json
import re
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deployments.ingress.openai.image_files import ImageDescription, ImageFormat, describe_image, encode_image
from deployments.records import CacheUse, ImageRequest, ImageResult, LoraUse


def random_image(seed: int) -> np.ndarray:
    """A smooth image, which JPEG keeps well, with some noise."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 200, 40)[:, None, None] + np.linspace(0, 50, 24)[None, :, None]
    return (ramp + rng.integers(0, 5, (40, 24, 3))).astype(np.uint8)


@pytest.mark.parametrize("format_", ["png", "jpeg", "webp"])
def test_a_file_has_its_pixels_and_its_description(format_: ImageFormat) -> None:
    image, description = random_image(3), {"model": "flux", "seed": 2**53 + 1, "note": 'é "quoted"'}
    read = Image.open(io.BytesIO(encode_image(image, format_, description=ImageDescription(description, "x"))))
    assert (read.format, read.size) == (format_.upper(), (24, 40))
    difference = np.abs(np.asarray(read.convert("RGB"), int) - image)
    assert difference.max() == 0 if format_ == "png" else difference.mean() < 4
    text: Any = read.info["Description"] if format_ == "png" else read.getexif()[0x010E]
    assert json.loads(text) == description


def test_png_chunks_are_as_the_specification_has_them() -> None:
    """Read without PIL: length, type, data, CRC; a tEXt chunk is keyword, zero byte, Latin-1 text."""
    data = encode_image(random_image(5), "png", description=ImageDescription({"seed": 7}, "a seven\nSeed: 7"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    texts, place = {}, 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        assert struct.unpack(">I", data[place + 8 + length :][:4])[0] == zlib.crc32(kind + body)
        if kind == b"tEXt":
            key, _, text = body.partition(b"\0")
            texts[key.decode("latin-1")] = text.decode("latin-1")
        place += 12 + length
    assert texts == {"Software": "Atelier", "Description": '{"seed": 7}', "parameters": "a seven\nSeed: 7"}


def test_compression_is_the_quality_of_lossy_formats_alone() -> None:
    image = np.random.default_rng(1).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    for format_ in ("jpeg", "webp"):
        small, large = (encode_image(image, format_, compression=quality) for quality in (5, 95))  # type: ignore[arg-type]
        assert len(small) < len(large) / 2
    assert encode_image(image, "png", compression=5) == encode_image(image, "png", compression=95)


def test_a_description_says_what_makes_the_image_again() -> None:
    request = ImageRequest(model="flux", prompt="x", n=2, lora=(LoraUse(name="bold", scale=0.5),))
    request = request.model_copy(
        update={"scheduler": "DDIMScheduler", "scheduler_options": {"timestep_spacing": "trailing"}}
    )
    images = [random_image(1), random_image(2)]
    result = ImageResult("flux", images, 9, 4, {}, None, CacheUse(0, 0))
    assert describe_image(request, result, 1).facts == {
        "model": "flux",
        "size": "24x40",
        "index": 1,
        "seed": 9,
        "num_inference_steps": 4,
        "scheduler": "DDIMScheduler",
        "scheduler_options": {"timestep_spacing": "trailing"},
        "lora": [{"name": "bold", "scale": 0.5}],
    }
    of_pipeline = ImageResult("sum-to-digit", images, None, None, {}, None, CacheUse(0, 0))
    plain = ImageRequest(model="sum-to-digit", prompt="x")
    assert describe_image(plain, of_pipeline, 0).facts == {"model": "sum-to-digit", "size": "24x40", "index": 0}


def webui_parameters(text: str) -> dict[str, str]:
    """Read a text as the WebUI does. Source: `parse_generation_parameters` in its modules/infotext_utils.py."""
    *lines, last = text.strip().split("\n")
    pairs = re.findall(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)', last)
    assert len(pairs) >= 2
    prompt, negative, is_negative = "", "", False
    for line in lines:
        if line.startswith("Negative prompt:"):
            is_negative, line = True, line[16:].strip()
        if is_negative:
            negative += ("" if negative == "" else "\n") + line
        else:
            prompt += ("" if prompt == "" else "\n") + line
    found = {name: json.loads(value) if value.startswith('"') else value for name, value in pairs}
    return found | {"Prompt": prompt, "Negative prompt": negative}


def test_a_png_has_its_parameters_as_the_webui_reads_them() -> None:
    request = ImageRequest(
        model="flux",
        prompt="a seven,\nbold: 五",
        negative_prompt="blur",
        n=2,
        lora=(LoraUse(name="bold", scale=0.5),),
        scheduler="EulerAncestralDiscreteScheduler",
        init_image=random_image(1),
        strength=0.7,
    )
    images = [random_image(1), random_image(2)]
    result = ImageResult("my: model", images, 2**53 + 1, 4, {}, None, CacheUse(0, 0), guidance_scale=3.5)
    data = encode_image(images[1], "png", description=describe_image(request, result, 1))
    assert webui_parameters(Image.open(io.BytesIO(data)).info["parameters"]) == {
        "Prompt": "a seven,\nbold: 五 <lora:bold:0.5>",
        "Negative prompt": "blur",
        "Steps": "4",
        "Sampler": "Euler a",
        "CFG scale": "3.5",
        "Seed": str(2**53 + 1),
        "Size": "24x40",
        "Model": "my: model",
        "Batch size": "2",
        "Batch pos": "1",
        "Denoising strength": "0.7",
        "Version": "Atelier",
    }
    of_pipeline = ImageResult("sum-to-digit", images, None, None, {}, None, CacheUse(0, 0))
    plain = ImageRequest(model="sum-to-digit", prompt="x")
    assert describe_image(plain, of_pipeline, 0).parameters == "x\nSize: 24x40, Model: sum-to-digit, Version: Atelier"


def test_transparency_is_kept_where_a_format_has_it_and_told_where_not() -> None:
    image = np.dstack([random_image(6), np.arange(40 * 24, dtype=np.uint8).reshape(40, 24)])
    read = Image.open(io.BytesIO(encode_image(image, "png")))
    np.testing.assert_array_equal(np.asarray(read), image)
    assert Image.open(io.BytesIO(encode_image(image, "webp"))).mode == "RGBA"
    result = ImageResult("qwen", [image], 9, 4, {}, None, CacheUse(0, 0), ("a note",))
    flat = result.opaque("a JPEG")
    np.testing.assert_array_equal(flat.images[0], image[..., :3])
    assert flat.warnings == (
        "a note",
        "a JPEG has no transparency: the colors that the model drew are given without it",
    )
    assert flat.opaque("a JPEG") is flat
    assert Image.open(io.BytesIO(encode_image(flat.images[0], "jpeg"))).size == (24, 40)
