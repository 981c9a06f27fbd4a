"""Images that come with a request: files of a form, or base64 in JSON, checked before they are decoded."""

from __future__ import annotations

import base64
import binascii
import io
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from fastapi import Request
from PIL import Image, ImageOps
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from deployments.errors import InvalidRequest

_FORMATS: Final = ("PNG", "JPEG", "WEBP")
_MAX_FILES: Final = 4
_MAX_FIELDS: Final = 64
_OPAQUE: Final = 255


@dataclass(frozen=True, slots=True, eq=False)
class DecodedImage:
    """A decoded image: uint8 `pixels` (height, width, 3), and `alpha` (height, width) of one that has transparency."""

    pixels: npt.NDArray[np.uint8]
    alpha: npt.NDArray[np.uint8] | None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        height, width = self.pixels.shape[:2]
        return width, height

    @property
    def to_repaint(self) -> npt.NDArray[np.uint8] | None:
        """Return 255 where the image is wholly transparent, else 0; None where nothing is. OpenAI's rule for masks."""
        if self.alpha is None or self.alpha.all():
            return None
        return np.where(self.alpha == 0, np.uint8(_OPAQUE), np.uint8(0))

    def as_mask(self) -> npt.NDArray[np.uint8]:
        """Return a mask file as (height, width): 255 is painted anew.

        Those are the transparent parts of a file that has any, as OpenAI has it; else the white parts, as diffusers
        and its user interfaces have it.
        """
        transparent = self.to_repaint
        return np.asarray(Image.fromarray(self.pixels).convert("L")) if transparent is None else transparent


def decode_image(data: bytes, field: str, max_pixels: int) -> DecodedImage:
    """Decode a PNG, JPEG or WebP file, turned upright as its camera noted (Exif `Orientation`).

    The header says the size before any pixel is decoded. Raises InvalidRequest naming `field`.
    """
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as file:
            width, height = file.size
            if width * height > max_pixels:
                raise InvalidRequest(f"{field}: {width}x{height} pixels, at most {max_pixels} are allowed", field)
            return _decoded(ImageOps.exif_transpose(file))
    except Image.UnidentifiedImageError:
        raise InvalidRequest(f"{field}: {len(data)} bytes that are no PNG, JPEG or WebP image", field) from None
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise InvalidRequest(f"{field}: the image cannot be read: {str(error)[:200]}", field) from None


def decode_base64_image(text: str, field: str, max_pixels: int) -> DecodedImage:
    """Decode an image of a JSON body: base64, or a data URL of it. Raises InvalidRequest naming `field`."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{field}: expected an image file in base64, or a data URL with one", field) from None
    return decode_image(data, field, max_pixels)


def resize_pixels(pixels: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Return an image, or a mask (height, width), in another size: (width, height)."""
    method = Image.Resampling.LANCZOS if pixels.ndim == 3 else Image.Resampling.NEAREST
    return np.asarray(Image.fromarray(pixels).resize(size, method))


async def read_form(request: Request, max_part_bytes: int) -> tuple[dict[str, str], dict[str, list[bytes]]]:
    """Return the fields and the files of a form, by name; `image[]`, as clients name lists, is `image`.

    Raises InvalidRequest for another body, and for a field that came twice.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidRequest("expected a body of multipart/form-data with the image as a file")
    fields: dict[str, str] = {}
    files: dict[str, list[bytes]] = {}
    try:
        async with request.form(max_files=_MAX_FILES, max_fields=_MAX_FIELDS, max_part_size=max_part_bytes) as form:
            for key, value in form.multi_items():
                name = key.removesuffix("[]")
                if isinstance(value, UploadFile):
                    files.setdefault(name, []).append(await value.read())
                elif name in fields:
                    raise InvalidRequest(f"{name}: came more than once", name)
                else:
                    fields[name] = value
    except HTTPException as error:  # how Starlette says what python-multipart found
        raise InvalidRequest(f"the form cannot be read: {error.detail}") from None
    return fields, files


def _decoded(file: Image.Image) -> DecodedImage:
    if file.mode.startswith("I;16"):  # PIL's own conversion cuts 16 bits off at 255
        return DecodedImage(np.repeat((np.asarray(file) >> 8).astype(np.uint8)[:, :, None], 3, axis=2), None)
    if not file.has_transparency_data:
        return DecodedImage(np.asarray(file.convert("RGB")), None)
    pixels = np.asarray(file.convert("RGBA"))
    return DecodedImage(np.ascontiguousarray(pixels[:, :, :3]), np.ascontiguousarray(pixels[:, :, 3]))
