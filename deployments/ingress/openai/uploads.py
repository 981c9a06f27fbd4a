"""Images and audio of a request: files of a form, or base64 in JSON, checked before they are decoded.

Audio is WAV, bounded before a sample of it is read.
"""

from __future__ import annotations

import base64
import itertools
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from PIL import Image
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from configs.cluster import LimitsConfig
from deployments.engines.records.sounds import Sound, why_no_form
from deployments.ingress.messages.responses import call_aside
from deployments.ingress.openai.image_decoder import DecodeReply
from deployments.ingress.openai.image_decoders import DECODERS
from deployments.records.errors import InvalidRequest

_MAX_FILES: Final = 8
_MAX_FIELDS: Final = 64
_MAX_FPS: Final = 120
_OPAQUE: Final = 255
_MEMBER: Final = re.compile(r"(\w+)\[\]\[(\w+)\]")  # of the objects in a list, in OpenAI's clients
BodyT = TypeVar("BodyT", bound=BaseModel)
Pictures = npt.NDArray[np.uint8] | tuple[npt.NDArray[np.uint8], ...]
NamedFiles = str | bytes | Sequence[str | bytes]
_DATA_URL: Final = "data:audio/"
_SPACES: Final = ("\n", "\r", "\t", " ")  # between characters of base64
_PIECE: Final = 2**20  # of base64: between two pieces other threads get Python's lock
_MAX_CHUNKS: Final = 1024
_HEAD: Final = 12
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_OPEN_END: Final = (0, 0xFFFFFFFF)  # sizes written by a program that could not go back to set them
_DTYPES: Final[Mapping[tuple[int, int], str]] = {  # by format and bits; 24 bits are read as 32
    (_PCM, 8): "u1",
    (_PCM, 16): "<i2",
    (_PCM, 24): "<i4",
    (_PCM, 32): "<i4",
    (_FLOAT, 32): "<f4",
    (_FLOAT, 64): "<f8",
}


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
    def with_alpha(self) -> npt.NDArray[np.uint8]:
        """Return (height, width, 4), or 3 where the file has no transparency."""
        return self.pixels if self.alpha is None else np.dstack([self.pixels, self.alpha])

    @property
    def to_repaint(self) -> npt.NDArray[np.uint8] | None:
        """Return 255 where the image is fully transparent, else 0; None if it nowhere is. OpenAI's rule for masks."""
        if self.alpha is None or self.alpha.all():
            return None
        return np.where(self.alpha == 0, np.uint8(_OPAQUE), np.uint8(0))

    def as_mask(self) -> npt.NDArray[np.uint8]:
        """Return a mask file as (height, width): 255 is painted anew.

        These are the transparent parts of a file that has any, as OpenAI does it; else the white parts, as diffusers
        and its user interfaces do it.
        """
        transparent = self.to_repaint
        return np.asarray(Image.fromarray(self.pixels).convert("L")) if transparent is None else transparent


def decode_image(data: bytes, field: str, max_pixels: int, max_file_pixels: int | None = None) -> DecodedImage:
    """Decode a PNG, JPEG or WebP file, turned upright as its camera noted; of an animation, the first image.

    An image of more than `max_pixels` is scaled down to them; one of more than `max_file_pixels` (None: the same) is
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
    """Decode the images for parameters of a pipeline's class, by field: an image, several, or the frames of a video.

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


def decode_video(data: bytes, field: str, limits: LimitsConfig) -> tuple[npt.NDArray[np.uint8], float]:
    """Decode the frames of a video, (number, height, width, 3), and how many are a second.

    Blocks, and raises, as `decode_image` does; InvalidRequest for a file that is no video.
    """
    bounds, most = (limits.max_upload_pixels, limits.max_pixels), limits.max_video_pixels
    reply, pixels = DECODERS.decode(data, field, *bounds, max_frames=limits.max_frames, max_video_pixels=most)
    if not reply.frames or not 1 <= reply.rate <= _MAX_FPS:
        shown = f"{reply.rate:g} frames a second" if reply.frames else "an image"
        raise InvalidRequest(f"{field}: {shown}, expected a video of 1 to {_MAX_FPS} frames a second", field)
    return np.frombuffer(pixels, np.uint8).reshape(reply.frames, reply.height, reply.width, 3), reply.rate


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


async def read_form(request: Request, max_part_bytes: int) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    """Return the fields and the files of a form, by name; `image[]`, as clients name lists, is `image`.

    `lora[][name]`, once for each object of a list, is a list `lora` of objects that have a `name`.
    Raises InvalidRequest for another body, and for a field that came twice.
    """
    fields, files, _ = await read_named_form(request, max_part_bytes)
    return fields, files


async def read_named_form(
    request: Request, max_part_bytes: int
) -> tuple[dict[str, Any], dict[str, list[bytes]], dict[str, list[str]]]:
    """Return a form as `read_form` does, and the names that the files have on their client."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidRequest("expected a body of multipart/form-data with the image as a file")
    fields: dict[str, Any] = {}
    lists: dict[str, dict[str, list[str]]] = {}
    files: dict[str, list[bytes]] = {}
    names: dict[str, list[str]] = {}
    try:
        async with request.form(max_files=_MAX_FILES, max_fields=_MAX_FIELDS, max_part_size=max_part_bytes) as form:
            for key, value in form.multi_items():
                name = key.removesuffix("[]")
                if isinstance(value, UploadFile):
                    files.setdefault(name, []).append(await value.read())
                    names.setdefault(name, []).append(value.filename or "")
                elif found := _MEMBER.fullmatch(key):
                    lists.setdefault(found[1], {}).setdefault(found[2], []).append(value)
                elif name in fields:
                    raise InvalidRequest(f"{name}: given more than once", name)
                else:
                    fields[name] = value
    except HTTPException as error:  # Starlette's form of python-multipart's errors
        raise InvalidRequest(f"the form cannot be read: {error.detail}") from None
    for name, members in lists.items():
        if name in fields:
            raise InvalidRequest(f"{name}: given more than once", name)
        fields[name] = _objects_of(name, members)
    return fields, files, names


def _objects_of(name: str, members: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return the objects whose members came by name. Raises InvalidRequest if a member's object is ambiguous."""
    (first, values), *others = members.items()
    for member, given in others:
        if len(given) != len(values):
            raise InvalidRequest(
                f"{name}: {len(values)} of {name}[][{first}] and {len(given)} of {name}[][{member}] came, and their "
                f"pairing is ambiguous: give each of the list all members, or send {name} as JSON",
                name,
            )
    return [dict(zip(members, row, strict=True)) for row in zip(*members.values(), strict=True)]


async def validated(class_: type[BodyT], fields: Any, num_bytes: int) -> BodyT:
    """Return the body made of fields. Raises FastAPI's error for a wrong one."""
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


class AudioFile(NamedTuple):
    """A file, or its base64, and the name of its field in the request."""

    field: str
    data: str | bytes


def is_wav(data: bytes) -> bool:
    """Return whether a file begins as WAV files do."""
    return data[:4] == b"RIFF" and data[8:_HEAD] == b"WAVE"


def split_extra(extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, AudioFile]]:
    """Split `extra`: return it without data URLs of audio, and those."""
    found = {
        name: AudioFile(f"extra.{name}", value)
        for name, value in extra.items()
        if isinstance(value, str) and value.startswith(_DATA_URL)
    }
    return {name: value for name, value in extra.items() if name not in found}, found


def decode_audio(files: Mapping[str, AudioFile], limits: LimitsConfig) -> dict[str, Sound]:
    """Return the audio of files by the names of their parameters. Blocks.

    Raises InvalidRequest naming the field for a file that is no WAV, too long in all, or of an unsupported form.
    """
    left_s, found = limits.max_audio_s, dict[str, Sound]()
    for name, file in files.items():
        try:
            found[name] = _read_wav(_bytes_of(file.data), limits.max_audio_s, left_s)
        except ValueError as error:
            raise InvalidRequest(f"{file.field}: {error}", file.field) from None
        left_s -= found[name].seconds
    return found


def _bytes_of(data: str | bytes) -> bytes:
    """Return a file that may be in base64, or a data URL of it. Raises ValueError."""
    if isinstance(data, bytes):
        return data
    if data.startswith(("http:", "https:")):
        raise ValueError("an address, which is not fetched; send the file")
    start = data.find(",") + 1 if data.startswith("data:") else 0
    for space in _SPACES:
        data = data.replace(space, "")
    try:
        places = range(start, len(data), _PIECE)
        return b"".join(base64.b64decode(data[place : place + _PIECE], validate=True) for place in places)
    except ValueError:
        raise ValueError("expected a WAV file in base64, or a data URL with one") from None


def _read_wav(data: bytes, max_s: float, left_s: float) -> Sound:
    """Return the samples of a WAV file of at most `left_s` seconds, the rest of `max_s`. Raises ValueError."""
    if not is_wav(data):
        raise ValueError(f"{len(data)} bytes that are no WAV file")
    chunks = _chunks_of(data)
    if not {b"fmt ", b"data"} <= chunks.keys() or len(chunks[b"fmt "]) < 16:
        raise ValueError("a WAV file that does not say its form, or has no samples")
    head = bytes(chunks[b"fmt "])
    kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", head[:16])
    if kind == _EXTENSIBLE and len(head) >= 26:
        kind = int.from_bytes(head[24:26], "little")
    if (dtype := _DTYPES.get((kind, bits))) is None:
        raise ValueError(f"a WAV file of {bits} bits in format {kind}, expected PCM of 8 to 32 bits or floats")
    frame_bytes = channels * bits // 8
    number = len(chunks[b"data"]) // frame_bytes if frame_bytes else 0
    if reason := why_no_form(channels, rate, number):
        raise ValueError(reason)
    if number / rate > left_s:
        raise ValueError(f"{number / rate:g} seconds of audio, at most {max_s:g} of all files are allowed")
    values = _values_of(chunks[b"data"][: number * frame_bytes], dtype, bits)
    return Sound(np.ascontiguousarray(values.reshape(number, channels).T), rate)


def _chunks_of(data: bytes) -> dict[bytes, memoryview]:
    """Return the first chunk of each name. Raises ValueError for a file that is cut off or has too many chunks."""
    found: dict[bytes, memoryview] = {}
    view, place = memoryview(data), _HEAD
    for count in itertools.count():
        if place + 8 > len(data) or b"data" in found:
            return found
        if count == _MAX_CHUNKS:
            raise ValueError(f"a WAV file of more than {_MAX_CHUNKS} chunks")
        name, size = data[place : place + 4], int.from_bytes(data[place + 4 : place + 8], "little")
        left = len(data) - place - 8
        if name == b"data" and size in _OPEN_END:
            size = left
        if size > left:
            raise ValueError(f"a WAV file that ends after {left} of {size} bytes of a chunk")
        found.setdefault(name, view[place + 8 : place + 8 + size])
        place += 8 + size + size % 2
    return found


def _values_of(data: memoryview, dtype: str, bits: int) -> npt.NDArray[np.float32]:
    """Return samples from -1 to 1, in the file's order."""
    if bits == 24:  # to the upper bytes of 32
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        values = wide.reshape(-1).view(dtype)
    else:
        values = np.frombuffer(data, dtype)
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    if values.dtype.kind == "u":
        return (values.astype(np.float32) - np.float32(128)) / np.float32(128)
    return values.astype(np.float32) / np.float32(2.0 ** (8 * values.dtype.itemsize - 1))
