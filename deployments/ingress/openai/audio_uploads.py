"""Audio that comes with a request: WAV files of a form, or base64 in JSON, bounded before a sample of them is read."""

from __future__ import annotations

import base64
import itertools
import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from configs.cluster import LimitsConfig
from deployments.engines.sounds import Sound, why_no_form
from deployments.errors import InvalidRequest

_DATA_URL: Final = "data:audio/"
_PIECE: Final = 2**20  # of base64: between two of them others have Python's lock
_MAX_CHUNKS: Final = 1024
_HEAD: Final = 12
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_OPEN_END: Final = (0, 0xFFFFFFFF)  # sizes that a program writes that cannot go back to say how much came
_DTYPES: Final[Mapping[tuple[int, int], str]] = {  # by format and bits; 24 bits are read as 32
    (_PCM, 8): "u1",
    (_PCM, 16): "<i2",
    (_PCM, 24): "<i4",
    (_PCM, 32): "<i4",
    (_FLOAT, 32): "<f4",
    (_FLOAT, 64): "<f8",
}


class AudioFile(NamedTuple):
    """A file, or its base64, and the name of the request's field that it came in."""

    field: str
    data: str | bytes


def is_wav(data: bytes) -> bool:
    """Return whether a file begins as WAV files do."""
    return data[:4] == b"RIFF" and data[8:_HEAD] == b"WAVE"


def split_extra(extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, AudioFile]]:
    """Return what is in `extra`, and apart from it the data URLs of audio there."""
    found = {
        name: AudioFile(f"extra.{name}", value)
        for name, value in extra.items()
        if isinstance(value, str) and value.startswith(_DATA_URL)
    }
    return {name: value for name, value in extra.items() if name not in found}, found


def decode_audio(files: Mapping[str, AudioFile], limits: LimitsConfig) -> dict[str, Sound]:
    """Return the audio of files by the names of the parameters that it goes to. Blocks.

    Raises InvalidRequest naming the field for what is no WAV file, too long in all, or of another form than is taken.
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
    try:
        places = range(start, len(data), _PIECE)
        return b"".join(base64.b64decode(data[place : place + _PIECE], validate=True) for place in places)
    except ValueError:
        raise ValueError("expected a WAV file in base64, or a data URL with one") from None


def _read_wav(data: bytes, max_s: float, left_s: float) -> Sound:
    """Return the samples of a WAV file of at most `left_s` seconds, what is left of `max_s`. Raises ValueError."""
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
    """Return the first chunk of each name. Raises ValueError for a file that is cut off, or has too many."""
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
    """Return samples from -1 to 1, as they lie in the file."""
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
