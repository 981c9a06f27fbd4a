"""Images that come with a request: files of a form, or base64 in JSON, checked before they are decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from PIL import Image
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from configs.cluster import LimitsConfig
from deployments.errors import InvalidRequest
from deployments.ingress.openai.image_decoder import DecodeReply
from deployments.ingress.openai.image_decoders import DECODERS
from deployments.ingress.responses import call_aside

_MAX_FILES: Final = 8
_MAX_FIELDS: Final = 64
_OPAQUE: Final = 255
BodyT = TypeVar("BodyT", bound=BaseModel)
Pictures = npt.NDArray[np.uint8] | tuple[npt.NDArray[np.uint8], ...]
NamedFiles = str | bytes | Sequence[str | bytes]


@dataclass(frozen=True, slots=True, eq=False)
class DecodedImage:
    """A decoded image: uint8 `pixels` (height, width, 3), and `alpha` (height, width) of one that has transparency.

    `file_size` is its width and height in the file, before it was scaled down.
    """

    pixels: npt.NDArray[np.uint8]
    alpha: npt.NDArray[np.uint8] | None
    file_size: tuple[int, int]

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


def decode_image(data: bytes, field: str, max_pixels: int, max_file_pixels: int | None = None) -> DecodedImage:
    """Decode a PNG, JPEG or WebP file, turned upright as its camera noted; of an animation, the first image.

    One of more than `max_pixels` is scaled down to them; of more than `max_file_pixels` (None: the same), it is
    refused. Blocks while a decoder process works, for a bounded time. Raises InvalidRequest naming `field`, Overloaded.
    """
    return _decoded(*DECODERS.decode(data, field, max_file_pixels or max_pixels, max_pixels))


def decode_base64_image(text: str, field: str, max_pixels: int, max_file_pixels: int | None = None) -> DecodedImage:
    """Decode an image of a JSON body: base64, or a data URL of it. Blocks, and raises, as `decode_image` does."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    data = text.encode("utf-8", "surrogatepass")
    return _decoded(*DECODERS.decode(data, field, max_file_pixels or max_pixels, max_pixels, is_base64=True))


def decode_base64_within(text: str, field: str, limits: LimitsConfig) -> DecodedImage:
    """Decode an image of a JSON body, within the limits of uploads. Blocks, and raises, as `decode_image` does."""
    return decode_base64_image(text, field, limits.max_pixels, limits.max_upload_pixels)


def decode_named(given: Mapping[str, NamedFiles], limits: LimitsConfig) -> dict[str, Pictures]:
    """Decode what goes to parameters of a pipeline's class, by field: an image, several, or the frames of a video.

    Texts are base64, or data URLs of it. Blocks. Raises as `decode_image` does, and InvalidRequest for too many files,
    or too many pixels in all.
    """
    count = sum(1 if isinstance(files, str | bytes) else len(files) for files in given.values())
    if count > limits.max_images:
        raise InvalidRequest(f"images: {count} files, at most {limits.max_images} are allowed", "images")
    left = limits.max_video_pixels
    found: dict[str, Pictures] = {}
    for field, files in given.items():
        decoded = []
        for file in (files,) if isinstance(files, str | bytes) else files:
            pictures = _decode_pictures(file, field, limits, left)
            left -= pictures.size // 3
            decoded.append(pictures)
        if any(one.ndim == 4 for one in decoded):
            if len(decoded) > 1:
                raise InvalidRequest(f"{field}: a video among {len(decoded)} files, expected it alone", field)
            found[field] = tuple(decoded[0])
        else:
            found[field] = decoded[0] if isinstance(files, str | bytes) else tuple(decoded)
    return found


def _decode_pictures(file: bytes | str, field: str, limits: LimitsConfig, left: int) -> npt.NDArray[np.uint8]:
    """Decode an image, (height, width, 3), or a video, (frames, height, width, 3), of at most `left` pixels."""
    if isinstance(file, str):
        if file.startswith(("http:", "https:")):
            raise InvalidRequest(f"{field}: an address, which is not fetched; send the file", field)
        data = (file.partition(",")[2] if file.startswith("data:") else file).encode("utf-8", "surrogatepass")
    else:
        data = file
    bounds = limits.max_upload_pixels, limits.max_pixels
    video = {"max_frames": limits.max_frames, "max_video_pixels": max(left, 0)}
    reply, pixels = DECODERS.decode(data, field, *bounds, is_base64=isinstance(file, str), **video)
    if not reply.frames:
        return _decoded(reply, pixels).pixels
    return np.frombuffer(pixels, np.uint8).reshape(reply.frames, reply.height, reply.width, 3)


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
                    raise InvalidRequest(f"{name}: given more than once", name)
                else:
                    fields[name] = value
    except HTTPException as error:  # how Starlette says what python-multipart found
        raise InvalidRequest(f"the form cannot be read: {error.detail}") from None
    return fields, files


async def validated(class_: type[BodyT], fields: Any, num_bytes: int) -> BodyT:
    """Return the body that fields make. Raises what FastAPI raises for one that is wrong."""
    try:
        return await call_aside(num_bytes, class_.model_validate, fields)
    except ValidationError as error:
        problems = [detail | {"loc": ("body", *detail["loc"])} for detail in error.errors()]
        raise RequestValidationError(problems, body=fields) from None


def _decoded(reply: DecodeReply, data: bytes) -> DecodedImage:
    pixels = np.frombuffer(data, np.uint8).reshape(reply.height, reply.width, reply.channels)
    if reply.channels == 3:
        return DecodedImage(pixels, None, reply.file_size)
    alpha = np.ascontiguousarray(pixels[:, :, 3])
    return DecodedImage(np.ascontiguousarray(pixels[:, :, :3]), alpha, reply.file_size)
