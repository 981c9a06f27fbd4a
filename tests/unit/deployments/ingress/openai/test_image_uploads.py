"""Images that come with requests: the pixels that arrive at the worker, and what is refused before it."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import struct
import zlib
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from kit.seeding import seeded_rng
from PIL import ExifTags, Image
from unit.deployments.ingress.http_fakes import CONFIG, IMAGE, Replicas, problem

from deployments.ingress.openai.uploads import decode_base64_image, decode_image
from deployments.records.errors import InvalidRequest

MOST = CONFIG.ingress.limits.max_pixels


def pixels(width: int = 24, height: int = 16, channels: int = 3) -> np.ndarray:
    return seeded_rng().integers(0, 256, (height, width, channels)).astype(np.uint8).squeeze()


def file_of(array: np.ndarray, format_: str = "PNG", mode: str | None = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(buffer, format_, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("mode", "format_"), [("RGB", "PNG"), ("L", "PNG"), ("P", "PNG"), ("RGB", "WEBP"), ("1", "PNG")]
)
def test_every_mode_becomes_rgb(mode: str, format_: str) -> None:
    data = file_of(pixels(), format_, mode, **({"lossless": True} if format_ == "WEBP" else {}))
    decoded = decode_image(data, "image", MOST)
    assert (decoded.pixels == np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))).all()
    assert (decoded.alpha, decoded.to_repaint, decoded.size) == (None, None, (24, 16))


def test_sixteen_bits_keep_their_upper_half() -> None:
    array = seeded_rng().integers(0, 2**16, (6, 5)).astype(np.uint16)
    decoded = decode_image(file_of(array), "image", MOST)
    assert (decoded.pixels == (array // 256)[:, :, None]).all()


def test_a_photo_is_turned_as_its_camera_noted() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # the camera was turned: rotate by 90 degrees clockwise
    array = pixels(10, 4)
    decoded = decode_image(file_of(array, exif=exif), "image", MOST)
    assert (decoded.pixels == np.rot90(array, -1)).all()


def test_wholly_transparent_parts_are_painted_anew() -> None:
    array = pixels(channels=4)
    array[:, :, 3] = seeded_rng().choice(np.array([0, 1, 255], np.uint8), array.shape[:2])
    for data in (file_of(array), file_of(array, "WEBP", lossless=True, exact=True)):
        decoded = decode_image(data, "image", MOST)
        assert decoded.to_repaint is not None
        assert ((decoded.to_repaint == 255) == (array[:, :, 3] == 0)).all()
        assert (decoded.as_mask() == decoded.to_repaint).all()
    opaque = file_of(np.dstack([array[:, :, :3], np.full(array.shape[:2], 255, np.uint8)]))
    assert decode_image(opaque, "image", MOST).to_repaint is None


def test_a_mask_without_transparency_is_white_where_it_paints() -> None:
    array = seeded_rng().choice(np.array([0, 255], np.uint8), (16, 24))
    assert (decode_image(file_of(array), "mask", MOST).as_mask() == array).all()


def png_of(width: int, height: int) -> bytes:
    """A PNG that says a size and has no pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "no PNG, JPEG or WebP"),
        (b"GIF89a" + bytes(100), "no PNG, JPEG or WebP"),
        (file_of(pixels(), "GIF"), "no PNG, JPEG or WebP"),
        (file_of(pixels(), "TIFF"), "no PNG, JPEG or WebP"),
        (png_of(2**31 - 1, 2**31 - 1), "cannot be read: Image size .4611686014132420609 pixels"),
        (png_of(65, 64), "65x64 pixels, at most 4096"),
        (png_of(20, 20), "cannot be read"),
        (file_of(pixels())[:200], "cannot be read"),
        (file_of(pixels(), "JPEG")[:-300], "cannot be read"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "no PNG|cannot be read"),
    ],
)
def test_what_is_no_image_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^image: .*({text})") as caught:
        decode_image(data, "image", MOST)
    assert caught.value.param == "image"


def test_flipped_bytes_never_raise_anything_else() -> None:
    for format_ in ("PNG", "JPEG", "WEBP"):
        data = file_of(pixels(), format_)
        for _ in range(150):
            damaged = np.frombuffer(data, np.uint8).copy()
            places = seeded_rng().integers(0, len(damaged), 4)
            damaged[places] = seeded_rng().integers(0, 256, 4)
            with contextlib.suppress(InvalidRequest):
                decode_image(damaged.tobytes(), "image", MOST)


@pytest.mark.parametrize("text", ["", "???", "data:image/png;base64,", "data:image/png", "AAAA", "Ā"])
def test_what_is_no_base64_image_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^x: "):
        decode_base64_image(text, "x", MOST)


async def test_an_edit_reaches_the_worker_with_its_pixels(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    image, mask = pixels(), pixels(channels=4)
    mask[:, :, 3] = seeded_rng().choice(np.array([0, 255], np.uint8), mask.shape[:2])
    found = await client.images.edit(
        model="flux",
        image=("in.png", file_of(image)),
        mask=("mask.png", file_of(mask)),
        prompt="a seven",
        n=2,
        extra_body={"seed": 5, "strength": 0.5, "lora": json.dumps([{"name": "bold", "scale": 0.5}])}
        | {"scheduler_options": json.dumps({"use_karras_sigmas": True, "solver_order": 2, "shift": 1.5})}
        | {"acceleration": '{"interval": 3}', "variation": '{"seed": 7, "strength": 0.25}'},
    )
    (request,) = replicas.requests
    assert (request.init_image == image).all()
    assert ((request.mask_image == 255) == (mask[:, :, 3] == 0)).all()
    assert (request.width, request.height, request.n, request.seed, request.strength) == (24, 16, 2, 5, 0.5)
    assert [(use.name, use.scale) for use in request.lora] == [("bold", 0.5)]
    assert request.scheduler_options == {"use_karras_sigmas": True, "solver_order": 2, "shift": 1.5}
    assert (request.acceleration.interval, request.variation.seed, request.variation.strength) == (3, 7, 0.25)
    assert found.data
    made = Image.open(io.BytesIO(base64.b64decode(found.data[1].b64_json or "")))
    assert made.size == (24, 16)
    described = json.loads(made.info["Description"])
    assert (described["task"], described["strength"], described["seed"]) == ("inpainting", 0.5, 5)


async def test_an_edit_of_another_size_is_resized_with_its_mask(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    image = np.full((16, 24, 4), 200, np.uint8)
    image[:, 12:, 3] = 0  # the right half is transparent
    await client.images.edit(model="flux", image=("in.png", file_of(image)), prompt="x", size="48x32")  # type: ignore[arg-type]
    (request,) = replicas.requests
    assert (request.init_image == 200).all()
    assert request.init_image.shape == (32, 48, 3)
    assert (request.mask_image == np.repeat([[0, 255]], 24, axis=1).repeat(32, axis=0)).all()


async def test_a_variation_needs_no_prompt(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    image = pixels()
    with pytest.warns(DeprecationWarning, match="deprecated"):  # OpenAI's own models no longer have it
        await client.images.create_variation(model="flux", image=("in.png", file_of(image)), n=1)
    (request,) = replicas.requests
    assert (request.prompt, request.mask_image) == (" ", None)
    assert (request.init_image == image).all()


async def test_images_in_json(http: httpx.AsyncClient, replicas: Replicas) -> None:
    image, outline = pixels(), pixels()
    given = {name: base64.b64encode(file_of(array)).decode() for name, array in (("i", image), ("o", outline))}
    control = [{"name": "strokes", "image": f"data:image/png;base64,{given['o']}", "scale": 0.5, "end": 0.8}]
    body = {**IMAGE, "init_image": given["i"], "strength": 0.7, "control": control}
    response = await http.post("/v1/images/generations", json=body)
    assert response.status_code == 200, response.text
    (request,) = replicas.requests
    assert (request.init_image == image).all()
    assert (request.control[0].image == outline).all()
    assert (request.control[0].name, request.control[0].scale, request.control[0].end) == ("strokes", 0.5, 0.8)


FILES = {"image": file_of(pixels())}
FORM = {"model": "flux", "prompt": "x"}


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("fields", "files", "status", "param"),
    [
        (FORM, {}, 400, None),  # httpx sends another content type without files
        (FORM, {"picture": FILES["image"]}, 400, "image"),
        (FORM, {"mask": FILES["image"]}, 400, "image"),
        (FORM, {"image": b"nonsense"}, 400, "image"),
        (FORM, {**FILES, "mask": b"nonsense"}, 400, "mask"),
        (FORM, {**FILES, "mask": file_of(pixels(16, 16))}, 400, "mask"),
        ({"model": "flux"}, FILES, 400, "prompt"),
        ({**FORM, "prompt": ""}, FILES, 400, "prompt"),
        ({"prompt": "x"}, FILES, 400, "model"),
        ({**FORM, "strength": "0"}, FILES, 400, "strength"),
        ({**FORM, "strength": "nan"}, FILES, 400, "strength"),
        ({**FORM, "strength": "1.5"}, FILES, 400, "strength"),
        ({**FORM, "size": "9999x9999"}, FILES, 400, "size"),
        ({**FORM, "lora": "bold"}, FILES, 400, "lora"),
        ({**FORM, "lora": '[{"name": "nothing"}]'}, FILES, 404, "lora"),
        ({**FORM, "lora": "[" + "[]," * 5000 + "[]]"}, FILES, 400, "lora"),
        ({**FORM, "control": "[" + "1," * 5000 + "1]"}, FILES, 400, "control"),
        ({**FORM, "image": "text"}, {"mask": FILES["image"]}, 400, "image"),
        ({**FORM, "model": "chatty"}, FILES, 400, "model"),
    ],
)
async def test_a_bad_form_is_refused_by_name(
    http: httpx.AsyncClient,
    replicas: Replicas,
    fields: dict[str, str],
    files: dict[str, bytes],
    status: int,
    param: str | None,
) -> None:
    response = await http.post("/v1/images/edits", data=fields, files=files)
    error = problem(response)
    assert (response.status_code, error["param"]) == (status, param), error
    assert replicas.requests == []


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "content",
    [b"", b"--x", b"--x\r\n\r\n--x--", b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1', b"\x00" * 500],
)
async def test_a_broken_form_is_a_400(http: httpx.AsyncClient, content: bytes) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    response = await http.post("/v1/images/edits", content=content, headers=headers)
    assert response.status_code == 400
    problem(response)
    for kind in ("multipart/form-data", "multipart/form-data; boundary=", "application/json"):
        response = await http.post("/v1/images/edits", content=content, headers={"content-type": kind})
        assert response.status_code == 400
        problem(response)


async def test_too_many_files_and_fields_are_refused(http: httpx.AsyncClient) -> None:
    files = [("image", ("a.png", FILES["image"]))] * 9
    assert problem(await http.post("/v1/images/edits", data=FORM, files=files))["message"].startswith("the form")
    fields = FORM | {f"field{number}": "1" for number in range(100)}
    assert problem(await http.post("/v1/images/edits", data=fields, files=FILES))["message"].startswith("the form")


async def test_uploads_have_a_limit_of_their_own(http: httpx.AsyncClient) -> None:
    body = {**IMAGE, "init_image": "A" * (CONFIG.ingress.limits.max_body_bytes + 2**16)}
    assert (await http.post("/v1/images/generations", json=body)).status_code == 400  # read, and no image
    huge = CONFIG.ingress.limits.max_upload_bytes + 1
    response = await http.post("/v1/images/edits", headers={"content-length": str(huge)}, content=b"x")
    assert (response.status_code, problem(response)["code"]) == (413, "request_too_large")


async def test_images_of_any_size_are_scaled_and_the_answer_says_so(
    http: httpx.AsyncClient, replicas: Replicas
) -> None:
    answer = await http.post("/v1/images/edits", data=FORM, files={"image": file_of(pixels(45, 30))})
    (request,) = replicas.requests
    assert (request.width, request.height, request.init_image.shape) == (40, 24, (24, 40, 3))
    warning = "images of 45x30 pixels were scaled to 40x24: sides of 'flux' are multiples of 8"
    assert warning in answer.json()["warnings"]
    large = {"image": file_of(pixels(200, 100)), "mask": file_of(pixels(200, 100, 1))}
    answer = await http.post("/v1/images/edits", data=FORM, files=large)
    request = replicas.requests[-1]
    assert (request.width, request.height, request.mask_image.shape) == (88, 40, (40, 88))
    assert "images of 200x100 pixels were scaled to 88x40: the largest allowed" in answer.json()["warnings"]
    sized = await http.post("/v1/images/edits", data={**FORM, "size": "64x32"}, files=large)
    assert (replicas.requests[-1].width, replicas.requests[-1].height) == (64, 32)
    assert sized.json()["warnings"] == ["a note"], "that size was asked for"
    given = {name: base64.b64encode(file_of(pixels(45, 30))).decode() for name in ("init_image", "mask_image")}
    streamed = await http.post("/v1/images/generations", json={**IMAGE, **given, "stream": True})
    assert warning in json.loads(streamed.text.strip().rpartition("data: ")[2])["warnings"]


@pytest.mark.parametrize("break_", ["\n", "\r\n", "\t ", "\n\n"])
@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
def test_lines_of_base64_may_be_broken_anywhere(prefix: str, break_: str) -> None:
    array = pixels()
    text = base64.b64encode(file_of(array)).decode()
    broken = break_.join(text[place : place + 19] for place in range(0, len(text), 19)) + break_
    np.testing.assert_array_equal(decode_base64_image(prefix + broken, "x", MOST).pixels, array)
