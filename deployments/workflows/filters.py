"""Filters: edges, blurred and sharpened images."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from deployments.workflows.kinds import Kind, Output, integer, link, number
from deployments.workflows.records import Refused

Array: TypeAlias = npt.NDArray[np.float32]

_GRAY: Final = np.array([0.299, 0.587, 0.114], np.float32)
_BLUR: Final = (2, 1.0)  # radius and sigma before edges are sought
_EPSILON: Final = 1e-6
# The neighbours of a pixel (down, right), by the angle of its gradient in eighths of a circle.
_NEIGHBOURS: Final = ((0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1))


def _gaussian(radius: int, sigma: float) -> Array:
    places = np.arange(-radius, radius + 1, dtype=np.float32)
    weights = np.exp(-(places**2) / np.float32(2 * sigma * sigma))
    return np.asarray(weights / weights.sum(), np.float32)


def _correlated(images: Array, weights: Array, axis: int, mode: str) -> Array:
    """Return images (number, height, width, ...) weighed along an axis; their edges are padded as numpy's modes do."""
    radius = len(weights) // 2
    if mode == "reflect" and images.shape[axis] <= radius:
        raise Refused(f"an image of {images.shape[2]}x{images.shape[1]} pixels is too small for a radius of {radius}")
    pads = [(0, 0)] * images.ndim
    pads[axis] = (radius, radius)
    padded = np.pad(images, pads, mode=mode)  # type: ignore[call-overload]
    size = images.shape[axis]
    parts = (np.take(padded, np.arange(at, at + size), axis) * weight for at, weight in enumerate(weights))
    result = next(parts)
    for part in parts:
        result += part
    return np.asarray(result, np.float32)


def _blurred(images: Array, radius: int, sigma: float) -> Array:
    weights = _gaussian(radius, sigma)
    return _correlated(_correlated(images, weights, 1, "reflect"), weights, 2, "reflect")


def _canny(image: Array, low_threshold: float, high_threshold: float) -> tuple[Array]:
    """Return the edges as kornia's `canny` finds them."""
    smooth = _blurred(image[..., :3] @ _GRAY, *_BLUR)
    slope, mean = np.array([-1, 0, 1], np.float32), np.array([1, 2, 1], np.float32)
    across = _correlated(_correlated(smooth, slope, 2, "edge"), mean, 1, "edge")
    down = _correlated(_correlated(smooth, slope, 1, "edge"), mean, 2, "edge")
    strength = np.sqrt(across * across + down * down + np.float32(_EPSILON))
    eighth = np.rint(np.rad2deg(np.arctan2(down, across)) / 45).astype(np.int64) % 8
    padded = np.pad(strength, ((0, 0), (1, 1), (1, 1)))
    _, height, width = strength.shape
    beside = np.stack([padded[:, 1 + y : 1 + y + height, 1 + x : 1 + x + width] for y, x in _NEIGHBOURS])
    both = np.maximum(*(np.take_along_axis(beside, ((eighth + turn) % 8)[None], 0)[0] for turn in (0, 4)))
    strength = np.where(strength > both, strength, 0)
    weak, strong = strength > low_threshold, strength > high_threshold
    edges = np.stack([_joined(*one) for one in zip(weak, strong, strict=True)])
    return (np.repeat(edges[..., None].astype(np.float32), 3, -1),)


def _joined(weak: npt.NDArray[np.bool_], strong: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return the strong pixels, and the weak ones that touch them, or one another all the way to them."""
    height, width = weak.shape
    found = strong & weak
    rows, columns = np.nonzero(found)
    while len(rows):
        around = [(rows + y, columns + x) for y, x in _NEIGHBOURS]
        rows, columns = (np.concatenate(side) for side in zip(*around, strict=True))
        inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        rows, columns = rows[inside], columns[inside]
        is_new = weak[rows, columns] & ~found[rows, columns]
        rows, columns = np.divmod(np.unique(rows[is_new] * width + columns[is_new]), width)
        found[rows, columns] = True
    return found


def _blur(image: Array, blur_radius: int, sigma: float) -> tuple[Array]:
    return (_blurred(image, blur_radius, sigma),)


def _sharpen(image: Array, sharpen_radius: int, sigma: float, alpha: float) -> tuple[Array]:
    """Return the image less its blur, ten times `alpha` as strong: a kernel whose sum is one."""
    by = np.float32(alpha * 10)
    return (np.clip(image + by * (image - _blurred(image, sharpen_radius, sigma)), 0, 1).astype(np.float32),)


_IMAGE: Final = link("image", "IMAGE")
_OUT: Final = (Output("IMAGE"),)

FILTERS: Final = (
    Kind(
        "Canny",
        (_IMAGE, number("low_threshold", 0.4, 0.01, 0.99), number("high_threshold", 0.8, 0.01, 0.99)),
        _OUT,
        _canny,
        category="image",
    ),
    Kind("ImageBlur", (_IMAGE, integer("blur_radius", 1, 1, 31), number("sigma", 1.0, 0.1, 10.0)), _OUT, _blur),
    Kind(
        "ImageSharpen",
        (
            *(_IMAGE, integer("sharpen_radius", 1, 1, 31), number("sigma", 1.0, 0.1, 10.0)),
            number("alpha", 1.0, 0.0, 5.0),
        ),
        _OUT,
        _sharpen,
    ),
)
