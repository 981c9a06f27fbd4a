"""Images of requests, scaled to sizes that a pipeline takes, as diffusers' pipelines do with those they are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from deployments.engines.diffusion.families import FAMILIES
from deployments.records import ImageRequest

_PIXELS_PER_LATENT: Final = 8  # of stock's VAEs, where the pipeline's configs do not say
_WHITE_FROM: Final = 128  # of a mask
_MAX_GROWTH: Final = 4  # of the image between the two passes of a resize


def resize_pixels(pixels: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Return an image, uint8 (height, width, 3), in another size (width, height); or a mask (height, width), which
    stays black and white.

    As diffusers' VaeImageProcessor does it. Rows go first where columns would make the image in between far larger than
    both: PIL makes 64x65536 pixels 65536x64 by way of 65536x65536.
    """
    image = Image.fromarray(pixels)
    most = _MAX_GROWTH * max(image.width * image.height, size[0] * size[1])
    if size[0] * image.height > most:
        image = image.resize((image.width, size[1]), Image.Resampling.LANCZOS)
    resized = np.asarray(image.resize(size, Image.Resampling.LANCZOS))
    return resized if pixels.ndim == 3 else np.where(resized >= _WHITE_FROM, np.uint8(255), np.uint8(0))


def with_fitting_images(
    asked: ImageRequest, request: ImageRequest, class_name: str, variant: Mapping[str, bool | int]
) -> tuple[ImageRequest, tuple[str, ...]]:
    """Return the request with its images in a size that its pipeline takes, and the warnings that say so.

    Sides are rounded down to the pipeline's multiple, as diffusers' VaeImageProcessor has it. `asked` is the request
    before `with_image_defaults`: a side that it says itself is not changed. Takes milliseconds for large images: not
    on the event loop.
    """
    if class_name not in FAMILIES:  # diffusers' own code resizes them
        return request, ()
    if request.width is None or request.height is None or not (request.init_image is not None or request.control):
        return request, ()
    given = request.scaled_from or (request.width, request.height)
    multiple = FAMILIES[class_name].size_multiple(int(variant.get("pixels_per_latent", _PIXELS_PER_LATENT)))
    width = asked.width or max(multiple, request.width - request.width % multiple)
    height = asked.height or max(multiple, request.height - request.height % multiple)
    if (width, height) == given:
        return request, ()
    shown = "images of {}x{} pixels were scaled to {}x{}".format(*given, width, height)
    why = "the largest allowed" if request.scaled_from else f"sides of {request.model!r} are multiples of {multiple}"
    warning = f"{shown}: {why}"
    if (width, height) == (request.width, request.height):
        return request, (warning,)
    update: dict[str, Any] = {"width": width, "height": height}
    for name in ("init_image", "mask_image"):
        if (pixels := getattr(request, name)) is not None:
            update[name] = resize_pixels(pixels, (width, height))
    update["control"] = tuple(
        use.model_copy(update={"image": resize_pixels(use.image, (width, height))}) for use in request.control
    )
    return request.model_copy(update=update), (warning,)
