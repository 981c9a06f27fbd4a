"""Images of requests, scaled to sizes that a pipeline takes, as diffusers' pipelines do with those they are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.records.input_images import resize_pixels
from deployments.records import ImageRequest


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
    multiple = FAMILIES[class_name].latents.multiple_of(variant)
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
