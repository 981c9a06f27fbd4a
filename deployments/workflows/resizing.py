"""Images in other sizes, as ComfyUI scales them: torch's interpolation without antialiasing, and Pillow's lanczos.

Written over numpy, since the process that runs workflows has no torch. The last two axes but the channels are scaled.
"""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from deployments.workflows.records import Refused

Array: TypeAlias = npt.NDArray[np.float32]
Crop = Literal["disabled", "center"]

METHODS: Final = ("nearest-exact", "bilinear", "area", "bicubic", "lanczos")
MAX_PIXELS: Final = 2**26  # of all images of a batch together
_CUBIC: Final = -0.75  # torch's


def bounded(number: int, height: int, width: int) -> tuple[int, int, int]:
    """Return these sizes of a batch of images, or refuse them."""
    if min(number, height, width) < 1:
        raise Refused(f"{number} images of {width}x{height} pixels: expected at least one of each")
    if number * height * width > MAX_PIXELS:
        raise Refused(f"{number} images of {width}x{height} pixels: at most {MAX_PIXELS} pixels together")
    return number, height, width


def scaled_to_area(width: int, height: int, area: int, cell: int) -> tuple[int, int]:
    """Return the size of an image of this area with the same ratio, in whole cells."""
    ratio = width / height
    found = round(math.sqrt(area * ratio) / cell) * cell, round(math.sqrt(area / ratio) / cell) * cell
    return max(cell, found[0]), max(cell, found[1])


def resized(images: Array, width: int, height: int, method: str, crop: str = "disabled") -> Array:
    """Return images (number, height, width, channels) in another size; `center` crops them to its shape before."""
    number, old_height, old_width, _ = images.shape
    bounded(number, height, width)
    if crop == "center":
        old_shape, new_shape = old_width / old_height, width / height
        x = y = 0
        if old_shape > new_shape:
            x = round((old_width - old_width * (new_shape / old_shape)) / 2)
        elif old_shape < new_shape:
            y = round((old_height - old_height * (old_shape / new_shape)) / 2)
        images = images[:, y : old_height - y, x : old_width - x]
    if images.shape[1:3] == (height, width) and method != "lanczos":
        return images
    if method == "lanczos":
        return _lanczos(images, width, height)
    return _interpolated(_interpolated(images, 1, height, method), 2, width, method)


def resized_masks(masks: Array, width: int, height: int, method: str, crop: str = "disabled") -> Array:
    """Return masks (number, height, width) in another size."""
    return resized(masks[..., None], width, height, method, crop)[..., 0]


def resized_latents(latents: Array, width: int, height: int, method: str, crop: str = "disabled") -> Array:
    """Return latents (number, channels, height, width) in another size, of theirs."""
    return np.moveaxis(resized(np.moveaxis(latents, 1, -1), width, height, method, crop), -1, 1)


def _lanczos(images: Array, width: int, height: int) -> Array:
    from PIL import Image

    results = []
    for image in images:
        pixels = np.clip(255.0 * image, 0, 255).astype(np.uint8)
        shown = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        scaled = np.asarray(shown.resize((width, height), Image.Resampling.LANCZOS), np.float32) / np.float32(255)
        results.append(scaled[..., None] if scaled.ndim == 2 else scaled)
    return np.stack(results)


def _interpolated(images: Array, axis: int, size: int, method: str) -> Array:
    if images.shape[axis] == size:
        return images
    places, weights = _taps(images.shape[axis], size, method)
    shape = [1] * images.ndim
    shape[axis] = size
    result = np.zeros([size if at == axis else side for at, side in enumerate(images.shape)], np.float32)
    for place, weight in zip(places.T, weights.T, strict=True):
        result += np.take(images, place, axis=axis) * weight.reshape(shape)
    return result


def _taps(old: int, new: int, method: str) -> tuple[npt.NDArray[np.intp], Array]:
    """Return which values make each new one, and their weights, both (new, number of taps)."""
    scale = old / new
    at = np.arange(new)
    if method == "nearest-exact":
        # torch computes this in float32, which shows where a centre falls between two values.
        nearest = np.floor((at.astype(np.float32) + np.float32(0.5)) * np.float32(scale)).astype(np.intp)
        return np.minimum(nearest, old - 1)[:, None], np.ones((new, 1), np.float32)
    if method == "bilinear":
        source = np.maximum((at + 0.5) * scale - 0.5, 0.0)
        low = np.floor(source).astype(np.intp)
        part = (source - low).astype(np.float32)
        return np.stack([low, np.minimum(low + 1, old - 1)], 1), np.stack([1 - part, part], 1)
    if method == "bicubic":
        source = (at + 0.5) * scale - 0.5
        low = np.floor(source).astype(np.intp)
        part = source - low
        places = np.clip(low[:, None] + np.arange(-1, 3), 0, old - 1)
        distances = np.abs(part[:, None] - np.arange(-1, 3))
        return places, _cubic(distances).astype(np.float32)
    if method == "area":
        first = (at * old) // new
        last = -((-(at + 1) * old) // new)
        number = last - first
        offsets = np.arange(int(number.max()))
        weights = np.where(offsets < number[:, None], 1.0 / number[:, None], 0.0).astype(np.float32)
        return np.minimum(first[:, None] + offsets, old - 1), weights
    raise Refused(f"{method!r}: expected one of {', '.join(METHODS)}")


def _cubic(distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    a = _CUBIC
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))


def longer_side_scaled(width: int, height: int, size: int) -> tuple[int, int]:
    """Return the width and height with a longer side of this size."""
    if height > width:
        return round((width / height) * size), size
    if width > height:
        return size, round((height / width) * size)
    return size, size


def shorter_side_scaled(width: int, height: int, size: int) -> tuple[int, int]:
    """Return the width and height with a shorter side of this size."""
    if height < width:
        return round((width / height) * size), size
    if width < height:
        return size, round((height / width) * size)
    return size, size


def pixels_scaled(width: int, height: int, megapixels: float, multiple: int) -> tuple[int, int]:
    """Return the width and height with so many pixels, both multiples of a number."""
    scale = math.sqrt(int(megapixels * 1024 * 1024) / (width * height))
    return max(1, round(width * scale / multiple)) * multiple, max(1, round(height * scale / multiple)) * multiple
