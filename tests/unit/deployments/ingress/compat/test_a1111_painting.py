"""The first latents of img2img and its results, beside the WebUI's formulas as PIL and SciPy compute them."""

from __future__ import annotations

import itertools
import time
from fractions import Fraction

import numpy as np
import pytest
from kit.drawing import seeds
from PIL import Image
from scipy.ndimage import gaussian_filter1d

from deployments.ingress.compat.a1111_painting import (
    CROPPED,
    FILLED,
    MAX_BLUR,
    ORIGINAL,
    Painting,
    PaintOptions,
    Region,
    _blurred,
    paint,
    region_of,
    resized,
    with_ratio,
)
from deployments.ingress.openai.uploads import DecodedImage

SHARP = PaintOptions(blur_x=0, blur_y=0, fill=ORIGINAL, only_masked=False)


def decoded(pixels: np.ndarray, alpha: np.ndarray | None = None) -> DecodedImage:
    if pixels.ndim == 2:
        pixels = pixels[:, :, None].repeat(3, 2)
    return DecodedImage(pixels, alpha, (pixels.shape[1], pixels.shape[0]))


def noise(seed: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def mask_of(height: int, width: int, region: Region) -> np.ndarray:
    found = np.zeros((height, width), np.uint8)
    found[region.top : region.bottom, region.left : region.right] = 255
    return found


@pytest.mark.parametrize("size", [(40, 24), (24, 40), (16, 16)])
@pytest.mark.parametrize("mode", [0, CROPPED, FILLED])
def test_an_image_is_resized_as_there(mode: int, size: tuple[int, int]) -> None:
    image, (width, height) = Image.fromarray(noise(1, 30, 20)), size
    found = np.asarray(resized(mode, image, width, height))
    assert found.shape == (height, width, 3)
    if mode == 0:
        expected = image.resize(size, Image.Resampling.LANCZOS)
    else:
        scale = (max if mode == CROPPED else min)(Fraction(width, 20), Fraction(height, 30))
        inner = int(20 * scale), int(30 * scale)
        small = image.resize(inner, Image.Resampling.LANCZOS)
        left, top = width // 2 - inner[0] // 2, height // 2 - inner[1] // 2
        expected = Image.new("RGB", size)
        expected.paste(small, (left, top))
        if mode == FILLED and left > 0:  # the WebUI's own calls, by boxes without an extent
            expected.paste(small.resize((left, height), box=(0, 0, 0, height)), (0, 0))
            expected.paste(small.resize((left, height), box=(inner[0], 0, inner[0], height)), (left + inner[0], 0))
        elif mode == FILLED and top > 0:
            expected.paste(small.resize((width, top), box=(0, 0, width, 0)), (0, 0))
            expected.paste(small.resize((width, top), box=(0, inner[1], width, inner[1])), (0, top + inner[1]))
    np.testing.assert_array_equal(found, np.asarray(expected))


@seeds(50)
def test_what_a_mask_leaves_out_does_not_change(seed: int) -> None:
    rng = np.random.default_rng(seed)
    height, width = (int(side) for side in rng.integers(5, 9, 2) * 8)
    left, top = (int(one) for one in rng.integers(0, (width // 2, height // 2)))
    region = Region(left, top, left + int(rng.integers(4, 24)), top + int(rng.integers(4, 24)))
    mask, image = mask_of(height, width, region), noise(seed, height, width)
    blur = int(rng.integers(0, 4))
    options = PaintOptions(blur_x=blur, blur_y=blur, fill=int(rng.integers(2)), only_masked=False)
    begun = paint(decoded(image), decoded(mask), width, height, options)
    made = noise(seed + 1, height, width)
    found = begun.finished(made)
    soft = mask
    for axis in (1, 0) if blur else ():
        wide = gaussian_filter1d(soft.astype(np.float64), blur, axis=axis, truncate=2.5, mode="mirror")
        soft = np.round(wide).astype(np.uint8)
    assert (found[soft == 0] == image[soft == 0]).all()
    assert (found[soft >= 129] == made[soft >= 129]).all()
    over = np.minimum(255, 2.0 * soft)[:, :, None] / 255
    assert np.abs(found - (image * (1 - over) + made * over)).max() <= 4  # of premultiplied bytes
    cells = np.asarray(Image.fromarray(soft).resize((width // 8, height // 8))) >= 128
    np.testing.assert_array_equal(begun.mask, np.kron(cells, np.full((8, 8), 255)).astype(np.uint8))
    if options.fill == ORIGINAL:
        np.testing.assert_array_equal(begun.image, image)


@seeds(30)
def test_wide_blurs_are_those_of_a_gaussian(seed: int) -> None:
    """Each axis is rounded, as OpenCV rounds it: what lies between two bytes may be either."""
    rng = np.random.default_rng(seed)
    height, width = (int(side) for side in rng.integers(1, 400, 2))
    across, down = (int(one) for one in rng.integers(0, 65, 2))
    mask = rng.integers(0, 256, (height, width), np.uint8)
    expected = mask.astype(np.float64)
    for axis, sigma in ((1, across), (0, down)):
        if sigma:
            expected = np.round(gaussian_filter1d(expected, sigma, axis=axis, truncate=2.5, mode="mirror"))
    found = np.asarray(_blurred(Image.fromarray(mask), across, down)).astype(float)
    assert np.abs(found - expected).max() <= 1
    assert (found != expected).mean() < 0.02


def test_a_wide_blur_of_a_large_mask_takes_no_pass_for_each_weight() -> None:
    """321 weights on two axes of four million pixels: a pass for each took 8 s."""
    mask = Image.fromarray(np.kron(np.eye(2, dtype=np.uint8) * 255, np.ones((1024, 1024), np.uint8)))
    begun = time.process_time()
    _blurred(mask, MAX_BLUR, MAX_BLUR)
    assert time.process_time() - begun < 4


def test_what_is_masked_is_filled_with_what_is_around_it() -> None:
    image = np.full((64, 64, 3), (200, 100, 50), np.uint8)
    mask = mask_of(64, 64, Region(20, 20, 44, 44))
    image[mask == 255] = 0
    options = PaintOptions(blur_x=0, blur_y=0, only_masked=False)
    found = paint(decoded(image), decoded(mask), 64, 64, options).image
    assert np.abs(found.astype(int) - (200, 100, 50)).max() <= 8


@seeds(50)
def test_only_what_is_masked_is_made_in_the_size_of_the_request(seed: int) -> None:
    rng = np.random.default_rng(seed)
    image = noise(seed, 96, 128)
    left, top = int(rng.integers(0, 90)), int(rng.integers(0, 60))
    region = Region(left, top, left + int(rng.integers(2, 30)), top + int(rng.integers(2, 30)))
    options = PaintOptions(blur_x=0, blur_y=0, fill=ORIGINAL, padding=int(rng.integers(0, 8)))
    begun = paint(decoded(image), decoded(mask_of(96, 128, region)), 64, 48, options)
    assert begun.region is not None
    part = Image.fromarray(image).crop(begun.region).resize((64, 48), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(
        begun.image, np.asarray(resized(FILLED, Image.fromarray(image).crop(begun.region), 64, 48))
    )
    if begun.region.width * 48 == begun.region.height * 64:
        np.testing.assert_array_equal(begun.image, np.asarray(part))
    found = begun.finished(np.full((48, 64, 3), 7, np.uint8))
    painted = mask_of(96, 128, region) == 255
    assert (found[~painted] == image[~painted]).all()
    assert (found[painted] == 7).all()


@seeds(50)
def test_a_region_grows_to_the_ratio_of_the_size_within_the_image(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(40):
        left, top = int(rng.integers(0, 100)), int(rng.integers(0, 60))
        region = Region(left, top, left + int(rng.integers(1, 28)), top + int(rng.integers(1, 36)))
        width, height = (int(one) for one in rng.integers(1, 20, 2) * 8)
        found = with_ratio(region, width, height, 128, 96)
        assert found.left <= region.left <= region.right <= found.right
        assert found.top <= region.top <= region.bottom <= found.bottom
        assert 0 <= found.left <= found.right <= 128
        assert 0 <= found.top <= found.bottom <= 96
        is_whole = found.width == 128 or found.height == 96
        assert is_whole or abs(found.width - found.height * width / height) <= max(1, width / height)


def test_the_region_of_a_mask_has_its_padding() -> None:
    mask = Image.fromarray(mask_of(32, 48, Region(4, 6, 10, 20)))
    assert region_of(mask, 0) == (4, 6, 10, 20)
    assert region_of(mask, 5) == (0, 1, 15, 25)
    assert region_of(mask, 100) == (0, 0, 48, 32)
    assert region_of(Image.new("L", (8, 8)), 4) is None


@pytest.mark.parametrize(("only_masked", "inverted"), itertools.product([False, True], repeat=2))
def test_a_mask_that_paints_nothing_keeps_or_paints_all(only_masked: bool, inverted: bool) -> None:
    image = noise(2, 16, 16)
    options = PaintOptions(blur_x=0, blur_y=0, is_inverted=inverted, fill=ORIGINAL, only_masked=only_masked)
    begun, made = paint(decoded(image), decoded(np.zeros((16, 16), np.uint8)), 16, 16, options), noise(3, 16, 16)
    is_kept = not only_masked and not inverted
    np.testing.assert_array_equal(begun.finished(made), image if is_kept else made)


def test_transparency_means_what_it_means_there() -> None:
    """The opaque part of a mask is painted; an image is laid on white."""
    image, alpha = noise(4, 16, 16), np.where(np.arange(16) < 8, 0, 255).astype(np.uint8)[None].repeat(16, 0)
    begun = paint(decoded(image, alpha), None, 16, 16, SHARP)
    assert (begun.image[:, :8] == 255).all()
    np.testing.assert_array_equal(begun.image[:, 8:], image[:, 8:])
    assert begun.mask is None
    masked = paint(decoded(image), decoded(noise(5, 16, 16), alpha), 16, 16, SHARP)
    np.testing.assert_array_equal(masked.mask, alpha)


def test_a_mask_of_other_sides_is_scaled() -> None:
    image, mask = noise(6, 32, 32), mask_of(64, 64, Region(32, 0, 64, 64))
    for only_masked in (False, True):
        options = PaintOptions(blur_x=0, blur_y=0, fill=ORIGINAL, only_masked=only_masked)
        found = paint(decoded(image), decoded(mask), 32, 32, options).finished(np.zeros((32, 32, 3), np.uint8))
        assert (found[:, :12] == image[:, :12]).all()
        assert (found[:, 20:] == 0).all()


def test_a_result_of_other_sides_is_laid_in_as_well() -> None:
    begun = paint(decoded(noise(7, 20, 20)), decoded(mask_of(20, 20, Region(0, 0, 20, 10))), 20, 20, SHARP)
    assert begun.finished(np.zeros((16, 16, 3), np.uint8)).shape == (20, 20, 3)
    made = np.zeros((16, 16, 3), np.uint8)
    assert Painting(made).finished(made) is made


def test_an_image_that_is_far_too_narrow_becomes_one_column() -> None:
    narrow = np.zeros((400, 2, 3), np.uint8)
    narrow[:, 1] = 255
    found = np.asarray(resized(FILLED, Image.fromarray(narrow), 10, 10))
    assert len(np.unique(found)) == 1
    assert 0 < found[0, 0, 0] < 255
