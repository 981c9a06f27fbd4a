"""GGUF files, versions 2 and 3: the header, checked before any tensor byte is trusted; writing a file again.

Format: `GGUF`, u32 version, i64 tensors, i64 keys, the keys, the tensor infos, padding, the tensors one after another,
each padded to `general.alignment`. Source: ggml/docs/gguf.md; as strict as the C++ reader (gguf.cpp) or stricter.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from weights.dtypes import tensor_nbytes
from weights.errors import FormatError
from weights.formats.gguf_values import GgufValue, HeaderCursor, read_value
from weights.formats.tensors import FileTensor
from weights.formats.untrusted import shown

DEFAULT_ALIGNMENT = 32
MAX_NAME_BYTES = 63  # GGML_MAX_NAME without its NUL
MAX_KEY_BYTES = 2**16 - 1
MAX_DIMS = 4
MAX_TENSORS = 2**17  # ten times the largest known file; a tensor takes ten times its entry in memory
MAX_KEYS = 2**16
_VERSIONS = (2, 3)
_MIN_KEY_BYTES, _MIN_INFO_BYTES = 14, 24  # of an entry in the header

# enum ggml_type. Ids that are missing here were removed from ggml, or never reach a file.
GGML_TYPES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What the header says. Shapes are in torch order (out, in); `raw` is every byte before the first tensor."""

    version: int
    alignment: int
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, FileTensor]
    raw: bytes


def read_gguf(path: Path) -> GgufHeader:
    """Parse and check the header of `path`; its tensors are not read. Raises FormatError naming file and tensor."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            header = _parse(path, file, file_bytes)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    end, name = len(header.raw), "header"
    for name, tensor in header.tensors.items():
        end = tensor.offset + tensor.nbytes
        if end > file_bytes:
            raise FormatError(f"{path}: truncated: tensor {name!r} ends at byte {end}, the file has {file_bytes} bytes")
    if file_bytes > _aligned(end, header.alignment):
        raise FormatError(f"{path}: {file_bytes - end} bytes after the last tensor ({name!r}) belong to no tensor")
    return header


def write_gguf(path: Path, header: bytes, tensors: Iterable[tuple[int, Callable[[], bytes | memoryview]]]) -> None:
    """Write a file from `header` (`GgufHeader.raw`) and the bytes of its tensors, (nbytes, read) in declared order.

    The result has the bytes of the file that the header is from, if that one was padded after its last tensor, as
    every known writer does. Not synced to disk: that is the caller's to decide.
    Raises FormatError for a damaged header, and for tensors that are not the ones that it declares.
    """
    parsed = _parse(path, io.BytesIO(header), len(header))
    given = list(tensors)
    if parsed.raw != header or len(given) != len(parsed.tensors):
        raise FormatError(
            f"{path}: the header of {len(header)} bytes ends at byte {len(parsed.raw)} and declares "
            f"{len(parsed.tensors)} tensors, {len(given)} came"
        )
    with path.open("wb") as file:
        file.write(header)
        for (name, tensor), (nbytes, read) in zip(parsed.tensors.items(), given, strict=True):
            data = memoryview(read())
            if not tensor.nbytes == nbytes == data.nbytes:
                raise FormatError(f"{path}: tensor {name!r} takes {tensor.nbytes} bytes, {data.nbytes} came")
            file.write(data)
            file.write(bytes(-file.tell() % parsed.alignment))


def _parse(path: Path, file: BinaryIO, file_bytes: int) -> GgufHeader:
    cursor = HeaderCursor(path, file, file_bytes)
    version = _read_version(cursor)
    num_tensors = cursor.count("tensor count", _MIN_INFO_BYTES)
    num_keys = cursor.count("key count", _MIN_KEY_BYTES)
    if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
        raise cursor.error(
            f"{num_tensors} tensors and {num_keys} keys are more than any model has (limits {MAX_TENSORS}, {MAX_KEYS})"
        )
    metadata: dict[str, GgufValue] = {}
    for _ in range(num_keys):
        key = cursor.text("key", MAX_KEY_BYTES)
        if not key or key in metadata:
            raise cursor.error(f"key {shown(key)} " + ("appears twice" if key else "is empty"))
        metadata[key] = read_value(cursor, key)
    alignment = _alignment(cursor, metadata)
    infos = _read_infos(cursor, num_tensors)
    start = _aligned(cursor.position, alignment)
    tensors: dict[str, FileTensor] = {}
    position = 0
    for name, (dtype, shape, nbytes, offset) in infos.items():
        if offset != position:
            raise cursor.error(f"tensor {name!r} is at offset {offset}, expected {position} (declared order, no holes)")
        tensors[name] = FileTensor(path, start + offset, nbytes, dtype, shape)
        position = _aligned(position + nbytes, alignment)
    cursor.skip_to(start)
    return GgufHeader(version, alignment, metadata, tensors, bytes(cursor.buffer[: cursor.position]))


def _read_version(cursor: HeaderCursor) -> int:
    magic = cursor.numbers(np.dtype("u1"), 4, "magic").tobytes()
    if magic != b"GGUF":
        raise cursor.error(f"begins with {magic!r}, expected b'GGUF'; not a GGUF file")
    version = cursor.u32("version")
    if version in _VERSIONS:
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in _VERSIONS:
        raise cursor.error(f"big-endian GGUF version {swapped}; only little-endian files are read")
    raise cursor.error(f"GGUF version {version} (known: 2, 3)")


def _alignment(cursor: HeaderCursor, metadata: Mapping[str, GgufValue]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1) or alignment >= 2**32:
        raise cursor.error(f"general.alignment is {shown(alignment)}, expected a power of two")
    return alignment


def _read_infos(cursor: HeaderCursor, num_tensors: int) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Name -> dtype, shape, bytes, offset in the data section; in declared order."""
    infos: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = cursor.text("tensor name", MAX_NAME_BYTES)
        if name in infos:
            raise cursor.error(f"tensor {name!r} appears twice")
        what = f"tensor {name!r}"
        num_dims = cursor.u32(what)
        if num_dims > MAX_DIMS:
            raise cursor.error(f"{what} has {num_dims} dimensions, at most {MAX_DIMS} are allowed")
        dims = [cursor.u64(what) for _ in range(num_dims)]
        kind, offset = cursor.u32(what), cursor.u64(what)
        if 0 in dims or math.prod(dims) >= 2**60:
            raise cursor.error(f"{what} has dimensions {dims}, expected positive numbers with a product below 2^60")
        if kind not in GGML_TYPES:
            raise cursor.error(f"{what} has the unknown ggml type {kind} (known: {', '.join(GGML_TYPES.values())})")
        shape = tuple(reversed(dims))
        try:
            nbytes = tensor_nbytes(GGML_TYPES[kind], shape)
        except ValueError as error:
            raise cursor.error(f"{what}: {error}") from None
        infos[name] = GGML_TYPES[kind], shape, nbytes, offset
    return infos


def _aligned(position: int, alignment: int) -> int:
    return position + -position % alignment
