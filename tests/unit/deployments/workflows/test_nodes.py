"""Functions of nodes beside torch, Python and plain loops, on drawn inputs."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from kit.workflows import FakeBackend, Told, png_file, workflow_of
from PIL import Image

from deployments.workflows.checking import check
from deployments.workflows.evaluation import Evaluation
from deployments.workflows.files import read_image
from deployments.workflows.kinds import Choice
from deployments.workflows.records import Refused
from deployments.workflows.resizing import resized
from deployments.workflows.running import run
from deployments.workflows.table import KINDS
from deployments.workflows.values import Latent


def call(kind: str, **given: Any) -> Any:
    return KINDS[kind].function(**given)[0]


def drawn_images(number: int = 2, channels: int = 3) -> np.ndarray:
    rng = seeded_rng()
    height, width = rng.integers(5, 40, 2)
    return rng.random((number, height, width, channels), np.float32)


@pytest.mark.parametrize("method", ["nearest-exact", "bilinear", "area", "bicubic"])
def test_scaled_images_are_torchs(method: str) -> None:
    for _ in range(6):
        images = drawn_images()
        width, height = (int(side) for side in seeded_rng().integers(3, 70, 2))
        expected = torch.nn.functional.interpolate(
            torch.from_numpy(images).movedim(-1, 1), (height, width), mode=method
        ).movedim(1, -1)
        np.testing.assert_allclose(resized(images, width, height, method), expected.numpy(), atol=2e-5)


def test_lanczos_is_pillows_on_bytes() -> None:
    images = drawn_images(1)
    pixels = (255 * images[0]).astype(np.uint8)
    expected = np.asarray(Image.fromarray(pixels).resize((23, 17), Image.Resampling.LANCZOS)) / 255
    np.testing.assert_allclose(resized(images, 23, 17, "lanczos")[0], expected, atol=1e-6)


def test_a_centred_crop_keeps_the_middle_in_the_new_shape() -> None:
    images = np.zeros((1, 10, 30, 3), np.float32)
    images[:, :, 10:20] = 1
    assert resized(images, 20, 20, "bilinear", "center").min() == 1
    assert resized(images, 20, 20, "bilinear").min() == 0


SIZES: list[tuple[Choice, tuple[int, int]]] = [
    (Choice("scale dimensions", {"width": 40, "height": 0, "crop": "disabled"}), (20, 40)),
    (Choice("scale dimensions", {"width": 0, "height": 0, "crop": "disabled"}), (30, 60)),
    (Choice("scale by multiplier", {"multiplier": 0.5}), (15, 30)),
    (Choice("scale longer dimension", {"longer_size": 30}), (15, 30)),
    (Choice("scale shorter dimension", {"shorter_size": 15}), (15, 30)),
    (Choice("scale width", {"width": 6}), (3, 6)),
    (Choice("scale height", {"height": 3}), (3, 6)),
    (Choice("scale total pixels", {"megapixels": 200 / 1024**2, "multiple": 5}), (10, 20)),
    (Choice("match size", {"match": np.zeros((1, 7, 9), np.float32), "crop": "center"}), (7, 9)),
    (Choice("scale to multiple", {"multiple": 8}), (24, 56)),
]


@pytest.mark.parametrize(("choice", "expected"), SIZES)
def test_ways_to_resize_an_image_or_a_mask(choice: Choice, expected: tuple[int, int]) -> None:
    image = seeded_rng().random((1, 30, 60, 3), np.float32)
    found = call("ResizeImageMaskNode", input=image, resize_type=choice, scale_method="area")
    assert found.shape == (1, *expected, 3)
    mask = call("ResizeImageMaskNode", input=image[..., 0], resize_type=choice, scale_method="area")
    np.testing.assert_allclose(mask, found[..., 0])


def test_sizes_are_bounded() -> None:
    image = np.zeros((1, 8, 8, 3), np.float32)
    for width in (0, 16_000):
        with pytest.raises(Refused, match="pixels"):
            resized(image, width, 16_000, "area")
    with pytest.raises(Refused):
        call("EmptyImage", width=16_000, height=16_000, batch_size=1, color=0)


def test_an_image_is_padded_for_outpainting_and_fades() -> None:
    image = drawn_images(1)
    _, height, width, _ = image.shape
    feather = min(height, width) // 2 - 1
    sides = {"left": 3, "top": 0, "right": 5, "bottom": 2}
    found, mask = KINDS["ImagePadForOutpaint"].function(image=image, feathering=feather, **sides)
    assert found.shape == (1, height + 2, width + 8, 3)
    np.testing.assert_array_equal(found[:, :height, 3 : 3 + width], image)
    expected = np.ones((height + 2, width + 8))
    for row in range(height):
        for column in range(width):
            near = min(height, width - column, column, height - row)
            near = min(column, width - column, height - row)  # the top does not grow
            part = (feather - near) / feather if near < feather else 0
            expected[row, column + 3] = part**2
    np.testing.assert_allclose(mask[0], expected, atol=1e-6)


def test_stitched_images_lie_beside_each_other() -> None:
    one, other = np.zeros((1, 10, 20, 3), np.float32), np.ones((2, 5, 5, 3), np.float32)
    options = {"match_image_size": True, "spacing_width": 3, "spacing_color": "red"}
    found = call("ImageStitch", image1=one, image2=other, direction="right", **options)
    assert found.shape == (2, 10, 20 + 4 + 10, 3)
    assert (found[:, :, 20:24] == (1, 0, 0)).all()
    options = {"match_image_size": False, "spacing_width": 0, "spacing_color": "white"}
    found = call("ImageStitch", image1=one, image2=other, direction="up", **options)
    assert found.shape == (2, 15, 20, 3)
    assert found[:, :5].min() == 1
    assert found[:, 5:].max() == 0


def test_composites_mix_by_the_mask() -> None:
    rng = seeded_rng()
    under, over = rng.random((2, 12, 16, 3), np.float32), rng.random((1, 6, 6, 4), np.float32)
    mask = rng.random((1, 6, 6), np.float32)
    found = call("ImageCompositeMasked", destination=under, source=over, x=13, y=2, resize_source=False, mask=mask)
    expected = under.copy()
    for row in range(6):
        for column in range(3):
            soft = mask[0, row, column]
            expected[:, 2 + row, 13 + column] = (
                soft * over[0, row, column, :3] + (1 - soft) * under[:, 2 + row, 13 + column]
            )
    np.testing.assert_allclose(found, expected, atol=1e-6)


def gaussian(radius: int, sigma: float) -> torch.Tensor:
    line = torch.exp(-(torch.arange(-radius, radius + 1.0) ** 2) / (2 * sigma**2))
    return torch.outer(line, line) / line.sum() ** 2


def test_blurred_and_sharpened_images_are_torchs() -> None:
    image = drawn_images()
    channels_first = torch.from_numpy(image).movedim(-1, 1)
    radius, sigma, alpha = 2, 1.3, 0.4
    padded = torch.nn.functional.pad(channels_first, [radius] * 4, "reflect")
    kernel = gaussian(radius, sigma)
    expected = torch.nn.functional.conv2d(padded, kernel.repeat(3, 1, 1, 1), groups=3).movedim(1, -1)
    found = call("ImageBlur", image=image, blur_radius=radius, sigma=sigma)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    kernel = kernel * -(alpha * 10)
    kernel[radius, radius] += 1 - kernel.sum()
    sharp = torch.nn.functional.conv2d(padded, kernel.repeat(3, 1, 1, 1), groups=3).movedim(1, -1).clamp(0, 1)
    found = call("ImageSharpen", image=image, sharpen_radius=radius, sigma=sigma, alpha=alpha)
    np.testing.assert_allclose(found, sharp.numpy(), atol=1e-4)


def slopes_of(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sobel's slopes of a grey image, across and down, and their lengths."""
    blurred = torch.nn.functional.conv2d(
        torch.nn.functional.pad(torch.from_numpy(image[..., :1]).movedim(-1, 1), [2] * 4, "reflect"),
        gaussian(2, 1.0)[None, None],
    )
    sobel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    padded = torch.nn.functional.pad(blurred, [1] * 4, "replicate")
    slopes = torch.nn.functional.conv2d(padded, torch.stack([sobel, sobel.T])[:, None])
    return slopes[0].numpy(), (slopes.square().sum(1) + 1e-6).sqrt()[0].numpy()


def test_edges_are_longer_than_the_slopes_before_and_behind_them() -> None:
    image = np.repeat(seeded_rng().random((1, 40, 30, 1), np.float32), 3, -1)
    (across, down), strength = slopes_of(image)
    low = float(np.median(strength))
    found = call("Canny", image=image, low_threshold=low, high_threshold=low)[0, ..., 0] == 1
    expected = np.zeros_like(found)
    for y in range(1, 39):
        for x in range(1, 29):
            turn = math.radians(45 * round(math.degrees(math.atan2(down[y, x], across[y, x])) / 45))
            step_y, step_x = round(math.sin(turn)), round(math.cos(turn))
            both = max(strength[y + step_y, x + step_x], strength[y - step_y, x - step_x])
            expected[y, x] = strength[y, x] > max(both, low)
    inner = slice(1, -1)
    assert (found != expected)[inner, inner].mean() < 0.01  # where two slopes, or two directions, are all but equal
    assert expected.sum() > 30


def test_edges_are_thin_and_weak_ones_hold_on_to_strong_ones() -> None:
    image = np.zeros((1, 32, 48, 3), np.float32)
    ramp = np.linspace(0.15, 0.6, 32, dtype=np.float32)[None, :, None, None]  # stronger towards the bottom
    image[:, :, 20:] = ramp
    image[:, :, 19:20] = ramp / 2  # the middle of the step
    image[:, 2:12, 40:44] += 0.16  # as weak as the top, and alone
    image[:, 2:12, [39, 44]] += 0.08
    _, strength = slopes_of(image)
    low, high = 0.3, 0.9
    edges = call("Canny", image=image, low_threshold=low, high_threshold=high)
    assert edges.shape == image.shape
    found = edges[0, ..., 0] == 1
    assert not found[strength <= low].any()
    # One pixel wide along the step, from its strong end up to its weak one; what is alone and weak is no edge.
    assert (found[:, 17:23].sum(1) == 1).all()
    assert not found[2:12, 38:46].any()
    alone = call("Canny", image=image, low_threshold=low, high_threshold=low)
    assert (alone[0, 4:10, 38:46, 0] == 1).any()


def test_batches_are_joined_cut_and_repeated() -> None:
    one, other = drawn_images(2), drawn_images(1, 4)
    found = call("BatchImagesNode", images={"image0": one, "image1": other})
    assert found.shape == (3, *one.shape[1:3], 4)
    np.testing.assert_array_equal(found[:2, ..., :3], one)
    assert (found[:2, ..., 3] == 1).all()
    np.testing.assert_array_equal(call("ImageFromBatch", image=found, batch_index=-2, length=9), found[1:])
    assert call("RepeatImageBatch", image=one, amount=3).shape[0] == 6
    _, height, width, _ = one.shape
    assert KINDS["GetImageSize"].function(image=one) == (width, height, 2)


@pytest.mark.parametrize("tapered", [True, False])
def test_masks_grow_and_shrink_a_pixel_at_a_time(tapered: bool) -> None:
    mask = (seeded_rng().random((1, 14, 17)) > 0.8).astype(np.float32)
    expected = mask[0]
    for _ in range(2):
        before = expected.copy()
        for row, column in np.ndindex(before.shape):
            around = [
                before[row + dy, column + dx]
                for dy in (-1, 0, 1)
                for dx in (-1, 0, 1)
                if 0 <= row + dy < 14 and 0 <= column + dx < 17 and not (tapered and dx and dy)
            ]
            expected = expected.copy()
            expected[row, column] = max(around)
    np.testing.assert_array_equal(call("GrowMask", mask=mask, expand=2, tapered_corners=tapered)[0], expected)
    shrunk = call("GrowMask", mask=1 - mask, expand=-2, tapered_corners=tapered)
    np.testing.assert_array_equal(shrunk[0], 1 - expected)
    assert call("GrowMask", mask=mask, expand=16_384, tapered_corners=tapered).min() == 1


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("multiply", [0.0, 0.24]),
        ("add", [0.6, 1.0]),
        ("subtract", [0.0, 0.2]),
        ("and", [0, 0]),
        ("or", [1, 1]),
        ("xor", [1, 1]),
    ],
)
def test_masks_are_composed(operation: str, expected: list[float]) -> None:
    one, other = np.array([[[0.0, 0.6]]], np.float32), np.array([[[0.6, 0.4]]], np.float32)
    found = call("MaskComposite", destination=one, source=other, x=0, y=0, operation=operation)
    np.testing.assert_allclose(found[0, 0], expected, atol=1e-6)


def test_masks_and_channels_and_transparency() -> None:
    image = drawn_images(2, 4)
    colors, mask = KINDS["SplitImageWithAlpha"].function(image=image)
    np.testing.assert_allclose(call("JoinImageWithAlpha", image=colors, alpha=mask), image, atol=1e-6)
    np.testing.assert_array_equal(call("ImageToMask", image=image, channel="green"), image[..., 1])
    with pytest.raises(Refused):
        call("ImageToMask", image=colors, channel="alpha")
    np.testing.assert_array_equal(call("MaskToImage", mask=mask)[..., 2], mask)
    whole = np.array([[[[1, 0.5, 0], [1, 1, 1]]]], np.float32)
    assert call("ImageColorToMask", image=whole, color=0xFF8000).tolist() == [[[1, 0]]]
    feathered = call("FeatherMask", mask=np.ones((1, 1, 4), np.float32), left=2, top=0, right=4, bottom=0)
    np.testing.assert_allclose(feathered[0, 0], [0.5 * 1, 1 * 0.75, 0.5, 0.25])


def test_an_image_is_read_with_its_transparency_and_turned() -> None:
    pixels = seeded_rng().integers(0, 256, (5, 7, 4), dtype=np.uint8)
    images, masks = read_image(png_file(pixels))
    np.testing.assert_allclose(images[0], pixels[..., :3] / 255, atol=1e-6)
    np.testing.assert_allclose(masks[0], 1 - pixels[..., 3] / 255, atol=1e-6)
    _, masks = read_image(png_file(pixels[..., :3]))
    assert masks.shape == (1, 64, 64)
    assert not masks.any()
    deep = io.BytesIO()  # of 16 bits, which ComfyUI divides by 255
    Image.fromarray(np.array([[0, 65_000, 65_535]], np.uint16)).save(deep, "PNG")
    images, _ = read_image(deep.getvalue())
    np.testing.assert_allclose(255 * images[0][0], np.repeat([[0], [254], [255]], 3, axis=1), atol=1e-4)


async def test_inpainting_grays_and_grows_the_mask() -> None:
    pixels = np.full((16, 16, 3), 255, np.uint8)
    workflow = workflow_of(
        vae=("VAELoader", {"vae_name": "ae.safetensors"}),
        load=("LoadImage", {"image": "in.png"}),
        solid=("SolidMask", {"value": 0.0, "width": 16, "height": 16}),
        dot=("SolidMask", {"value": 1.0, "width": 2, "height": 2}),
        mask=(
            "MaskComposite",
            {"destination": ("solid", 0), "source": ("dot", 0), "x": 4, "y": 4, "operation": "add"},
        ),
        encode=(
            "VAEEncodeForInpaint",
            {"pixels": ("load", 0), "vae": ("vae", 0), "mask": ("mask", 0), "grow_mask_by": 6},
        ),
        decode=("VAEDecode", {"samples": ("encode", 0), "vae": ("vae", 0)}),
        save=("SaveImage", {"images": ("decode", 0), "filename_prefix": "x"}),
    )
    backend = FakeBackend({"in.png": png_file(pixels)})
    await run(workflow, backend, Told())
    # Four pixels of 64 are gray.
    assert backend.saved[0][2][0, 0, 0] == int(255 * (60 + 4 * 0.5) / 64)
    assert backend.saved[0][2][0, 15, 0] == 255


def test_a_latents_batch_is_repeated_cut_and_scaled() -> None:
    latent = Latent(batch=2, width=64, height=32)
    assert call("RepeatLatentBatch", samples=latent, amount=3).batch == 6
    cut = call("LatentFromBatch", samples=latent, batch_index=1, length=5)
    assert (cut.batch, cut.batch_index) == (1, (1,))
    samples = seeded_rng().random((1, 4, 4, 8), np.float32)
    full = Latent(samples, 1, 64, 32)
    larger = call("LatentUpscaleBy", samples=full, upscale_method="bicubic", scale_by=1.5)
    assert (larger.width, larger.height, larger.samples.shape) == (96, 48, (1, 4, 6, 12))
    expected = torch.nn.functional.interpolate(torch.from_numpy(samples), (6, 12), mode="bicubic")
    np.testing.assert_allclose(larger.samples, expected.numpy(), atol=1e-5)
    with pytest.raises(Refused, match="bislerp"):
        call("LatentUpscaleBy", samples=full, upscale_method="bislerp", scale_by=1.5)


def test_texts() -> None:
    assert call("StringConcatenate", string_a="a", string_b="b", delimiter=", ") == "a, b"
    assert call("StringReplace", string="aXbX", find="X", replace="yy") == "ayybyy"
    assert call("StringSubstring", string="hello", start=1, end=-1) == "ell"
    assert call("StringLength", string="hello") == 5
    assert call("CaseConverter", string="hello you", mode="Title Case") == "Hello You"
    assert call("StringTrim", string=" x ", mode="Left") == "x "
    assert call("StringContains", string="Hello", substring="hell", case_sensitive=False) is True
    assert call("StringCompare", string_a="Hello", string_b="lo", mode="Ends With", case_sensitive=True) is True
    assert call("StringFormat", f_string="{a}-{b}{{}}", values={"a": 1, "b": "x"}) == "1-x{}"
    assert call("JsonExtractString", json_string='say {no} {"k": 5, "n": null} {"k": 6}', key="k") == "5"
    assert call("JsonExtractString", json_string='{"n": null}', key="n") == ""
    for pattern in ("{a.__class__}", "{a!r}", "{c}", "{0}", "{", "{a:>9999999999}"):
        with pytest.raises(Refused):
            call("StringFormat", f_string=pattern, values={"a": 1})


PATTERNS = [r"b(\w)", r"[aeiou]", r"(\d+)-(\d+)", r"^x", r"nothing", r"(b)?c"]
FLAGS = {"case_insensitive": True, "multiline": True, "dotall": False}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_find_what_pythons_find(pattern: str) -> None:
    text = "ab Bc 12-34\nxyz 5-6 bd"
    flags = re.IGNORECASE | re.MULTILINE
    found = re.search(pattern, text, flags)
    options = {"string": text, "regex_pattern": pattern, **FLAGS}
    assert call("RegexMatch", **options) is (found is not None)
    assert call("RegexExtract", mode="First Match", group_index=1, **options) == (found[0] if found else "")
    every = re.findall(pattern, text, flags)
    joined = "\n".join(one[0] if isinstance(one, tuple) else one for one in every)
    assert call("RegexExtract", mode="All Matches", group_index=1, **options) == joined
    group = (found[1] or "") if found and found.re.groups else ""
    assert call("RegexExtract", mode="First Group", group_index=1, **options) == group
    for count in (0, 1):
        expected = re.sub(pattern, r"<\g<0>>", text, count=count, flags=flags)
        assert call("RegexReplace", replace=r"<\g<0>>", count=count, **options) == expected


def test_patterns_that_take_for_ever_are_given_up() -> None:
    options = {"string": "a" * 60 + "!", "regex_pattern": r"(a|a)*$", **FLAGS}
    with pytest.raises(Refused, match="took more than"):
        call("RegexMatch", **options)
    assert call("RegexMatch", string="x", regex_pattern="(", **FLAGS) is False
    with pytest.raises(Refused, match="not a pattern"):
        call("RegexReplace", string="x", regex_pattern="(", replace="", **FLAGS)


def test_texts_do_not_grow_without_end() -> None:
    with pytest.raises(Refused, match="characters"):
        call("StringReplace", string="a" * 10_000, find="a", replace="b" * 10_000)
    with pytest.raises(Refused, match="characters"):
        call("RegexReplace", string="a" * 10_000, regex_pattern="a", replace="b" * 10_000, **FLAGS)


SMALL = np.zeros((1, 5, 5, 3), np.float32)
CLIP: dict[str, Any] = {"images": SMALL, "filename_prefix": "x", "codec": "vp9", "fps": 8.0, "crf": 32.0}
LEVELS: dict[str, Any] = {"steps": 3, "sigma_max": 1.0, "sigma_min": 0.5}
STRETCHED: dict[str, Any] = {"steps": 3, "max_shift": 2.0, "base_shift": 1.0, "stretch": True, "terminal": 0.1}


@pytest.mark.parametrize(
    ("kind", "given", "change", "words"),
    [
        (
            *("RegexMatch", {"string": "x", "regex_pattern": "x" * 2000, **FLAGS}, {"regex_pattern": "x" * 2001}),
            "a pattern of 2001 characters: at most 2000",
        ),
        ("ComfyNumberConvert", {"value": f"0.{'1' * 398}"}, {"value": f"0.{'1' * 399}"}, "more than 400 characters"),
        (
            *("SaveImage", {"images": SMALL, "filename_prefix": "x" * 200}, {"filename_prefix": "x" * 201}),
            "a prefix of 201 characters: at most 200",
        ),
        ("SaveWEBM", CLIP | {"filename_prefix": "x" * 200}, {"filename_prefix": "x" * 201}, "201 characters: at most"),
        ("SaveWEBM", CLIP, {"codec": "av1"}, "av1: videos are saved in VP9"),
        ("ImageBlur", {"image": SMALL, "blur_radius": 4, "sigma": 1.0}, {"blur_radius": 5}, "5x5 .* radius of 5"),
        ("KarrasScheduler", LEVELS | {"rho": 7.0}, {"sigma_min": 0.0}, "a level of 0: expected more than 0"),
        ("KarrasScheduler", LEVELS | {"rho": 7.0}, {"sigma_max": -1.0}, "a level of -1: expected more than 0"),
        ("ExponentialScheduler", LEVELS, {"sigma_min": 0.0}, "a level of 0: expected more than 0"),
        ("LTXVScheduler", STRETCHED, {"steps": 1}, "a single step cannot be stretched"),
        ("LTXVScheduler", STRETCHED, {"latent": Latent(width=64, height=64)}, "expected the latent of a video"),
        (
            "TrimVideoLatent",
            {"samples": Latent(before=2), "trim_amount": 2},
            {"trim_amount": 1},
            "leaves out the 2 that",
        ),
        (
            *("SaveImageAdvanced", {"images": SMALL, "filename_prefix": "x", "format": Choice("png", {})}),
            *({"format": Choice("png", {"bit_depth": "16-bit"})}, "png of 16-bit: images are saved as PNG of 8 bits"),
        ),
        (
            *("SaveImageAdvanced", {"images": SMALL, "filename_prefix": "x", "format": Choice("png", {})}),
            *({"format": Choice("exr", {})}, "exr of 8-bit"),
        ),
    ],
)
def test_what_a_node_takes_is_bounded(kind: str, given: dict[str, Any], change: dict[str, Any], words: str) -> None:
    KINDS[kind].function(**given)
    with pytest.raises(Refused, match=words):
        KINDS[kind].function(**given | change)


@pytest.mark.parametrize(
    ("ratio", "megapixels", "multiple", "expected"),
    [
        ("1:1 (Square)", 1.0, 8, (1024, 1024)),
        ("16:9 (Widescreen)", 0.9, 32, (1280, 736)),
        ("2:3 (Portrait Photo)", 1, 64, (832, 1280)),
    ],
)
def test_a_resolution_by_its_ratio(ratio: str, megapixels: float, multiple: int, expected: tuple[int, int]) -> None:
    kind = KINDS["ResolutionSelector"]
    assert kind.function(aspect_ratio=ratio, megapixels=megapixels, multiple=multiple) == expected


def test_numbers_are_converted() -> None:
    for value, expected in (
        (True, (1.0, 1)),
        (" 7.9 ", (7.9, 7)),
        (2**62 + 1, (float(2**62), 2**62 + 1)),
        (-1.5, (-1.5, -1)),
    ):
        assert KINDS["ComfyNumberConvert"].function(value=value) == expected
    for text in ("no number", "inf", "nan"):
        with pytest.raises(Refused):
            call("ComfyNumberConvert", value=text)


async def test_a_language_model_writes() -> None:
    on = {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05, "seed": 2**63 + 5}
    nodes: dict[str, Any] = {
        "clip": ("CLIPLoader", {"clip_name": "writer.safetensors", "type": "qwen"}),
        "image": ("EmptyImage", {"width": 8, "height": 8, "batch_size": 1, "color": 0}),
        "write": (
            "TextGenerate",
            {
                "clip": ("clip", 0),
                "prompt": "hello",
                "max_length": 9,
                "sampling_mode": "on",
                "images.image_0": ("image", 0),
            }
            | {f"sampling_mode.{name}": value for name, value in on.items()},
        ),
        "show": ("PreviewAny", {"source": ("write", 0)}),
        "thought": ("PreviewAny", {"source": ("write", 1)}),
    }
    backend = FakeBackend()
    assert check(workflow_of(**nodes), backend).errors == ()
    shown = await run(workflow_of(**nodes), backend, Told())
    assert shown == {"show": {"text": ["hello!"]}, "thought": {"text": ["of hello"]}}
    ((request, num_images),) = backend.asked
    assert (request.max_tokens, request.top_k, request.seed, request.enable_thinking, num_images) == (
        9,
        20,
        5,
        False,
        1,
    )
    nodes["clip"] = ("CLIPLoader", {"clip_name": "clip_l.safetensors", "type": "flux"})
    assert "no language model" in str(check(workflow_of(**nodes), backend).errors[0])


def test_an_image_that_is_repeated_takes_the_bytes_of_one() -> None:
    image = seeded_rng().random((1, 8, 8, 3), np.float32)
    (repeated,) = KINDS["RepeatImageBatch"].function(image=image, amount=200)
    (mask,) = KINDS["ImageToMask"].function(image=repeated, channel="red")
    np.testing.assert_array_equal(mask, np.tile(image[..., 0], (200, 1, 1)))
    walk = Evaluation(workflow_of(), KINDS, None, [], max_bytes=8 * 8 * 4 * 4)
    walk.give("repeat", (repeated,))
    walk.give("mask", (mask,))
    with pytest.raises(MemoryError):
        walk.give("tile", (np.tile(image, (2, 1, 1, 1)),))


def test_frames_are_joined_as_bytes_and_other_images_as_numbers() -> None:
    rng = seeded_rng()
    frames = {f"image{place}": rng.integers(0, 256, (2, 6, 4, 3), np.uint8) for place in range(3)}
    (joined,) = KINDS["BatchImagesNode"].function(images=frames)
    assert joined.dtype == np.uint8
    np.testing.assert_array_equal(joined, np.concatenate(list(frames.values())))
    floats = rng.random((1, 6, 4, 3), np.float32)
    (mixed,) = KINDS["BatchImagesNode"].function(images={"image0": frames["image0"], "image1": floats})
    np.testing.assert_allclose(mixed, np.concatenate([frames["image0"] / np.float32(255), floats]), rtol=1e-6)


@pytest.mark.parametrize(
    ("angles", "words"),
    [
        ((0, 0, 5.0), "front view eye-level shot medium shot"),
        ((22, -30, 0.0), "front view low-angle shot wide shot"),
        ((23, -15, 1.9), "front-right quarter view eye-level shot wide shot"),
        ((90, 15, 2.0), "right side view elevated shot medium shot"),
        ((225, 44, 6.0), "back-left quarter view elevated shot close-up"),
        ((337, 45, 10.0), "front-left quarter view high-angle shot close-up"),
        ((338, 60, 5.9), "front view high-angle shot medium shot"),
        ((360, 14, 5.9), "front view eye-level shot medium shot"),
    ],
)
def test_a_cameras_angle_is_said_in_words(angles: tuple[int, int, float], words: str) -> None:
    names = ("horizontal_angle", "vertical_angle", "zoom")
    given = dict(zip(names, angles, strict=True))
    assert KINDS["CameraAngle"].function(**given, view="camera") == (None, words)


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        ("ImageCrop", {"width": 3, "height": 4, "x": 1, "y": 2}),
        ("ImageFlip", {"flip_method": "y-axis: horizontally"}),
        ("ImageRotate", {"rotation": "90 degrees"}),
        ("RepeatImageBatch", {"amount": 2}),
        ("ImageBatch", {}),
    ],
)
def test_frames_stay_bytes_where_nothing_is_computed(kind: str, inputs: dict[str, Any]) -> None:
    frames = seeded_rng().integers(0, 256, (2, 8, 6, 3), np.uint8)
    names = ("image1", "image2") if kind == "ImageBatch" else ("image",)
    assert all(one.takes_bytes for one in KINDS[kind].inputs if one.name in names)
    (found,) = KINDS[kind].function(**dict.fromkeys(names, frames), **inputs)
    (expected,) = KINDS[kind].function(**dict.fromkeys(names, frames / np.float32(255)), **inputs)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, np.rint(expected * 255))
