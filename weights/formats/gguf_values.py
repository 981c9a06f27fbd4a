"""The values of a GGUF header: numbers, strings and arrays, read forward from a file that nobody has checked yet.

Strings are u64 length + UTF-8; a typed value is i32 type + value; an array is i32 type, u64 count, elements; all
little-endian. Source: ggml/docs/gguf.md, "File Structure".
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from weights.errors import FormatError
from weights.formats.untrusted import shown

# The largest real headers (262k tokens with merges) have some 20 MB. Strings take several times their bytes in
# memory, so a damaged file must not get to fill it.
MAX_HEADER_BYTES = 128 * 2**20
_CHUNK_BYTES = 2**20

# An array of numbers is a read-only numpy array, an array of strings a tuple.
GgufValue = int | float | bool | str | tuple[str, ...] | npt.NDArray[Any]

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class HeaderCursor:
    """Reads a header from its start and keeps its bytes. No length is believed before it fits what is left."""

    def __init__(self, path: Path, file: BinaryIO, file_bytes: int) -> None:
        self.buffer = bytearray()
        self.position = 0
        self._path = path
        self._file = file
        self._file_bytes = file_bytes
        self._limit_bytes = min(file_bytes, MAX_HEADER_BYTES)

    def error(self, what: str) -> FormatError:
        return FormatError(f"{self._path}: {what}")

    def u32(self, what: str) -> int:
        self._load(4, what)
        (value,) = _U32.unpack_from(self.buffer, self.position)
        self.position += 4
        return int(value)

    def u64(self, what: str) -> int:
        self._load(8, what)
        (value,) = _U64.unpack_from(self.buffer, self.position)
        self.position += 8
        return int(value)

    def count(self, what: str, item_bytes: int) -> int:
        """A u64 that announces so many items of `item_bytes` at least."""
        count = self.u64(what)
        self._refuse_beyond_end(count * item_bytes, f"{what} of {count}")
        return count

    def numbers(self, dtype: np.dtype[Any], count: int, what: str) -> npt.NDArray[Any]:
        num_bytes = count * dtype.itemsize
        self._load(num_bytes, what)
        array = np.frombuffer(self.buffer[self.position : self.position + num_bytes], dtype)
        array.flags.writeable = False
        self.position += num_bytes
        return array

    def text(self, what: str, max_bytes: int | None = None) -> str:
        num_bytes = self.u64(f"length of {what}")
        if max_bytes is not None and num_bytes > max_bytes:
            raise self.error(f"{what} at byte {self.position} has {num_bytes} bytes, at most {max_bytes} are allowed")
        self._load(num_bytes, what)
        raw = self.buffer[self.position : self.position + num_bytes]
        self.position += num_bytes
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error.reason}") from None

    def texts(self, count: int, what: str) -> tuple[str, ...]:
        # Vocabularies have hundreds of thousands: the loop touches the buffer itself and fills it by the chunk.
        buffer, begin, found = self.buffer, self.position, list[str]()
        try:
            for _ in range(count):
                if begin + 8 > len(buffer):
                    self.position = begin
                    self._load(8, what)
                end = begin + 8 + _U64.unpack_from(buffer, begin)[0]
                if end > len(buffer):
                    self.position = begin
                    self._load(end - begin, what)
                found.append(buffer[begin + 8 : end].decode("utf-8"))
                begin = end
        except UnicodeDecodeError as error:
            raise self.error(f"{what}, element {len(found)}, is not UTF-8: {error.reason}") from None
        self.position = begin
        return tuple(found)

    def skip_to(self, position: int) -> None:
        """Go forward over padding; where the file ends first, to its end."""
        self._load(max(0, min(position, self._file_bytes) - self.position), "padding")
        self.position = min(position, self._file_bytes)

    def _load(self, num_bytes: int, what: str) -> None:
        """Have the next `num_bytes` in the buffer."""
        end = self.position + num_bytes
        self._refuse_beyond_end(num_bytes, what)
        while len(self.buffer) < end:
            wanted = min(max(_CHUNK_BYTES, end - len(self.buffer)), self._limit_bytes - len(self.buffer))
            part = self._file.read(wanted)
            if not part:
                raise self.error(f"ends at byte {len(self.buffer)}, inside of {what}")
            self.buffer += part

    def _refuse_beyond_end(self, num_bytes: int, what: str) -> None:
        if self.position + num_bytes > self._limit_bytes:
            raise self.error(
                f"{what} at byte {self.position} takes {num_bytes} bytes, but the header cannot go beyond byte "
                f"{self._limit_bytes} (the file has {self._file_bytes} bytes, a header at most {MAX_HEADER_BYTES})"
            )


def read_value(cursor: HeaderCursor, key: str) -> GgufValue:
    """A typed value. Raises FormatError for an unknown type, a bool that is not 0 or 1, an array of arrays."""
    what = f"value of {shown(key)}"
    kind = cursor.u32(f"type of {shown(key)}")
    if kind == _STRING:
        return cursor.text(what)
    if kind == _ARRAY:
        return _read_array(cursor, key)
    if kind not in _NUMBERS:
        raise cursor.error(f"{what} has the unknown type {kind} (known: 0 to 12)")
    number = cursor.numbers(_NUMBERS[kind], 1, what)[0].item()
    if kind != _BOOL:
        return number
    if number not in (0, 1):
        raise cursor.error(f"{what} is a bool of {number}, expected 0 or 1")
    return bool(number)


def _read_array(cursor: HeaderCursor, key: str) -> GgufValue:
    what = f"array {shown(key)}"
    kind = cursor.u32(f"type of {what}")
    if kind == _ARRAY:
        raise cursor.error(f"{what} is an array of arrays, which GGUF readers refuse")
    if kind == _STRING:
        return cursor.texts(cursor.count(what, item_bytes=8), what)
    if kind not in _NUMBERS:
        raise cursor.error(f"{what} has the unknown type {kind} (known: 0 to 12)")
    array = cursor.numbers(_NUMBERS[kind], cursor.count(what, _NUMBERS[kind].itemsize), what)
    if kind != _BOOL:
        return array
    if array.size and array.max() > 1:
        raise cursor.error(f"{what} has a bool of {array.max()}, expected 0 or 1")
    return array.view(np.bool_)
