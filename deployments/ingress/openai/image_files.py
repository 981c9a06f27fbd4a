"""Image files of answers: format, compression, and how the image was made, written into the file itself."""

from __future__ import annotations

import io
import json
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo

from deployments.records import ImageRequest, ImageResult

ImageFormat = Literal["png", "jpeg", "webp"]
_SOFTWARE: Final = "Atelier"


def encode_image(
    image: npt.NDArray[np.uint8],
    format_: ImageFormat,
    *,
    compression: int | None = None,
    description: dict[str, Any] | None = None,
) -> bytes:
    """Return an image, (height, width, 3) uint8, as a file of that format.

    `compression` is the quality of JPEG and WebP, 0 to 100, where 100 makes the largest files: OpenAI's
    `output_compression`. PNG loses nothing and ignores it. `description` is written as JSON: into PNG's text chunk
    `Description` (PNG specification, section 11.3.3), elsewhere into Exif's `ImageDescription` (tag 0x010E).
    """
    buffer = io.BytesIO()
    options: dict[str, Any] = {}
    if format_ != "png" and compression is not None:
        options["quality"] = compression
    if description is not None:
        options |= _written_description(format_, json.dumps(description))
    Image.fromarray(image).save(buffer, format_.upper(), **options)
    return buffer.getvalue()


def describe_image(request: ImageRequest, result: ImageResult, index: int) -> dict[str, Any]:
    """Return how image `index` of a result was made: what one needs, beside the prompt, to make it again."""
    height, width, _ = result.images[index].shape
    description: dict[str, Any] = {"model": result.model, "size": f"{width}x{height}", "index": index}
    if result.seed is not None:
        description |= {"seed": result.seed, "num_inference_steps": result.num_inference_steps}
    if request.lora:
        description["lora"] = [{"name": use.name, "scale": use.scale} for use in request.lora]
    if request.control:
        description["control"] = [use.model_dump(exclude={"image"}) for use in request.control]
    if request.init_image is not None:
        description["task"] = "image-to-image" if request.mask_image is None else "inpainting"
        description |= {} if request.strength is None else {"strength": request.strength}
    return description


def _written_description(format_: ImageFormat, text: str) -> dict[str, Any]:
    if format_ == "png":
        chunks = PngInfo()
        chunks.add_text("Software", _SOFTWARE)
        chunks.add_text("Description", text)
        return {"pnginfo": chunks}
    exif = Image.Exif()
    exif[ExifTags.Base.Software] = _SOFTWARE
    exif[ExifTags.Base.ImageDescription] = text
    return {"exif": exif}
