"""The images that a request brings, checked and resized before anything is computed of them. Free of torch: the
ingress asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

_WHITE_FROM: Final = 128  # of a mask
_MAX_GROWTH: Final = 4  # of the image between the two passes of a resize


class _ControlImage(Protocol):
    """A ControlNet of a request, as far as it is checked."""

    @property
    def name(self) -> str: ...
    @property
    def image(self) -> npt.NDArray[np.uint8]: ...
    @property
    def scale(self) -> float: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


class _WithImages(Protocol):
    """A request, as far as its images go: that of the service or that of the engine."""

    @property
    def width(self) -> int | None: ...
    @property
    def height(self) -> int | None: ...
    @property
    def init_image(self) -> npt.NDArray[np.uint8] | None: ...
    @property
    def mask_image(self) -> npt.NDArray[np.uint8] | None: ...
    @property
    def strength(self) -> float | None: ...
    @property
    def control(self) -> Sequence[_ControlImage]: ...


def find_bad_image(request: _WithImages) -> tuple[str, str] | None:
    """Return the first field of a request that its images do not fit, and why, or None. Sizes of None fit any image."""
    if request.mask_image is not None and request.init_image is None:
        return "mask_image", "a mask needs an init_image, and keeps its black part"
    if request.strength is not None and not 0 < request.strength <= 1:  # NaN is neither
        return "strength", f"{request.strength!r}: expected more than 0 and at most 1"
    images: list[tuple[str, Any, int]] = [("init_image", request.init_image, 3), ("mask_image", request.mask_image, 2)]
    images += [("control", use.image, 3) for use in request.control]
    for field, image, num_axes in images:
        if image is not None and (reason := _misfit(image, num_axes, request.height, request.width)):
            return field, reason
    for use in request.control:
        if not math.isfinite(use.scale):
            return "control", f"{use.name!r}: scale {use.scale!r}, expected a finite number"
        if not 0 <= use.start < use.end <= 1:
            return "control", f"{use.name!r}: start {use.start} and end {use.end}, expected 0 <= start < end <= 1"
    return None


def why_no_pixels(image: npt.NDArray[Any], num_axes: int) -> str | None:
    """Return why an array is not an image (3 axes) or a mask (2), or None."""
    if image.dtype == np.uint8 and image.ndim == num_axes and image.shape[2:] in ((), (3,)) and image.size:
        return None
    expected = "(height, width, 3)" if num_axes == 3 else "(height, width)"
    return f"expected uint8 {expected}, got {image.dtype} {image.shape}"


def resize_pixels(pixels: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Return an image, uint8 (height, width, 3), in another size (width, height); or a mask (height, width), which
    stays black and white.

    As diffusers' VaeImageProcessor does it. Rows go first where columns would make the image in between far larger than
    both: PIL makes 64x65536 pixels 65536x64 by way of 65536x65536.
    """
    from PIL import Image  # only who resizes needs it

    image = Image.fromarray(pixels)
    most = _MAX_GROWTH * max(image.width * image.height, size[0] * size[1])
    if size[0] * image.height > most:
        image = image.resize((image.width, size[1]), Image.Resampling.LANCZOS)
    resized = np.asarray(image.resize(size, Image.Resampling.LANCZOS))
    return resized if pixels.ndim == 3 else np.where(resized >= _WHITE_FROM, np.uint8(255), np.uint8(0))


def _misfit(image: npt.NDArray[np.uint8], num_axes: int, height: int | None, width: int | None) -> str | None:
    if reason := why_no_pixels(image, num_axes):
        return reason
    if image.shape[:2] != (height or image.shape[0], width or image.shape[1]):
        return f"{image.shape[1]}x{image.shape[0]} pixels, expected the {width}x{height} of the request"
    return None
