"""The images that a request brings, checked before anything is computed of them. Free of torch: the ingress asks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


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
        return "mask_image", "a mask needs an init_image, of which it keeps what is black"
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


def _misfit(image: npt.NDArray[np.uint8], num_axes: int, height: int | None, width: int | None) -> str | None:
    if reason := why_no_pixels(image, num_axes):
        return reason
    if image.shape[:2] != (height or image.shape[0], width or image.shape[1]):
        return f"{image.shape[1]}x{image.shape[0]} pixels, expected the {width}x{height} of the request"
    return None
