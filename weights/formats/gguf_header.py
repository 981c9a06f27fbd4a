"""The header of a GGUF file as bytes, from metadata and the types and shapes of tensors. Format: see `gguf.py`."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weights.dtypes import tensor_nbytes
from weights.errors import FormatError
from weights.formats.gguf import GGML_TYPES, MAX_NAME_BYTES, GgufValue

_ALIGNMENT: Final = 32
_VERSION: Final = 3
_TYPE_IDS: Final = {name: number for number, name in GGML_TYPES.items()}
_STRING, _ARRAY = 8, 9
_ELEMENTS: Final = {
    "u1": 0,
    "i1": 1,
    "u2": 2,
    "i2": 3,
    "u4": 4,
    "i4": 5,
    "f4": 6,
    "b1": 7,
    "u8": 10,
    "i8": 11,
    "f8": 12,
}


def encode_gguf_header(metadata: Mapping[str, GgufValue], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return the bytes before the first tensor; `tensors` maps names to (dtype, shape in torch order), in file order.

    Integers are written as u32 where they fit, floats as f32. Raises FormatError for what the format cannot express.
    """
    parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), _value(key, value)]
    position = 0
    for name, (dtype, shape) in tensors.items():
        if len(name.encode()) > MAX_NAME_BYTES:
            raise FormatError(f"tensor name {name!r} has more than {MAX_NAME_BYTES} bytes, which GGUF cannot hold")
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts += [_text(name), dims, struct.pack("<IQ", _TYPE_IDS[dtype], position)]
        nbytes = tensor_nbytes(dtype, shape)
        position += nbytes + -nbytes % _ALIGNMENT
    header = b"".join(parts)
    return header + bytes(-len(header) % _ALIGNMENT)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: GgufValue) -> bytes:
    """Return type and value. HAZARD: Python's bool is an int as well."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise FormatError(f"{key} is {value}, which GGUF's integers cannot hold")
        return struct.pack("<II", 4, value) if 0 <= value < 2**32 else struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, tuple):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
    return struct.pack("<IIQ", _ARRAY, _ELEMENTS[_form(value)], len(value)) + np.ascontiguousarray(value).tobytes()


def _form(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype.kind}{array.dtype.itemsize}"
