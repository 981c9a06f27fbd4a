"""GGUF files, versions 2 and 3: the header, checked before any tensor byte is trusted; files written, again or anew.

Format: `GGUF`, u32 version, i64 tensors, i64 keys, the keys, the tensor infos, padding, the tensors one after another,
each padded to `general.alignment`. Source: ggml/docs/gguf.md; as strict as the C++ reader (gguf.cpp) or stricter.

A model is one file, or a split set `<name>-00001-of-0000N.gguf` that belongs together.
"""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from weights.formats.tensors import FileTensor
from weights.formats.untrusted import shown
from weights.records.dtypes import tensor_nbytes
from weights.records.errors import FormatError

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
_DEFAULT_ALIGNMENT = 32
MAX_NAME_BYTES = 127  # GGML_MAX_NAME without its NUL is 63; those who pack denoisers build ggml with 128
_MAX_KEY_BYTES = 2**16 - 1
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
_TYPE_IDS = {name: number for number, name in GGML_TYPES.items()}


class _HeaderCursor:
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
        """Read a u64 that announces so many items of at least `item_bytes`."""
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
        """Go forward over padding, at most to the file's end."""
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


def _read_value(cursor: _HeaderCursor, key: str) -> GgufValue:
    """Read a typed value. Raises FormatError for an unknown type, a bool not 0 or 1, an array of arrays."""
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


def _read_array(cursor: _HeaderCursor, key: str) -> GgufValue:
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


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A checked header. Shapes are in torch order (out, in); `raw` is every byte before the first tensor."""

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


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse a file that holds a header only (`GgufHeader.raw`), as the store keeps it. Raises FormatError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    return _parse(path, io.BytesIO(raw), len(raw))


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
    cursor = _HeaderCursor(path, file, file_bytes)
    version = _read_version(cursor)
    num_tensors = cursor.count("tensor count", _MIN_INFO_BYTES)
    num_keys = cursor.count("key count", _MIN_KEY_BYTES)
    if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
        raise cursor.error(
            f"{num_tensors} tensors and {num_keys} keys are more than any model has (limits {MAX_TENSORS}, {MAX_KEYS})"
        )
    metadata: dict[str, GgufValue] = {}
    for _ in range(num_keys):
        key = cursor.text("key", _MAX_KEY_BYTES)
        if not key or key in metadata:
            raise cursor.error(f"key {shown(key)} " + ("appears twice" if key else "is empty"))
        metadata[key] = _read_value(cursor, key)
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


def _read_version(cursor: _HeaderCursor) -> int:
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


def _alignment(cursor: _HeaderCursor, metadata: Mapping[str, GgufValue]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1) or alignment >= 2**32:
        raise cursor.error(f"general.alignment is {shown(alignment)}, expected a power of two")
    return alignment


def _read_infos(cursor: _HeaderCursor, num_tensors: int) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
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


def encode_gguf_header(metadata: Mapping[str, GgufValue], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return the bytes before the first tensor; `tensors` maps names to (dtype, shape in torch order), in file order.

    Integers are written as u32 where they fit, floats as f32. Raises FormatError for what the format cannot express.
    """
    parts = [b"GGUF", struct.pack("<IQQ", _VERSIONS[-1], len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), _value(key, value)]
    position = 0
    for name, (dtype, shape) in tensors.items():
        if len(name.encode()) > MAX_NAME_BYTES:
            raise FormatError(f"tensor name {name!r} has more than {MAX_NAME_BYTES} bytes, which GGUF cannot hold")
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts += [_text(name), dims, struct.pack("<IQ", _TYPE_IDS[dtype], position)]
        nbytes = tensor_nbytes(dtype, shape)
        position = _aligned(position + nbytes, _DEFAULT_ALIGNMENT)
    header = b"".join(parts)
    return header + bytes(-len(header) % _DEFAULT_ALIGNMENT)


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
    kind = _BOOL if value.dtype == np.bool_ else next(kind for kind, dtype in _NUMBERS.items() if dtype == value.dtype)
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + np.ascontiguousarray(value).tobytes()


_MAX_SPLITS = 9999
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# Beginnings of `general.architecture` that mean a text generator; the rest are encoders, projectors, image models.
# fmt: off
_LLM_FAMILIES = (
    "afmoe", "apertus", "arcee", "arctic", "arwkv7", "baichuan", "bailingmoe", "bitnet", "bloom", "chatglm",
    "codeshell", "cohere2", "command-r", "dbrx", "deci", "deepseek", "dots1", "ernie4_5", "exaone", "falcon",
    "gemma", "glm", "gpt-oss", "gpt2", "gptj", "gptneox", "granite", "grok", "grovemoe", "hunyuan", "internlm2",
    "jais", "jamba", "kimi-linear", "lfm2", "llama", "maincoder", "mamba", "mimo2", "minicpm", "minimax-m2",
    "mistral", "mpt", "nemotron", "olmo", "openelm", "orion", "pangu-embedded", "phi", "plamo", "plm", "qwen",
    "refact", "rwkv", "seed_oss", "smallthinker", "smollm3", "stablelm", "starcoder", "step35", "xverse",
)
# fmt: on
# `general.architecture` of denoisers, as ComfyUI's files have it -> the classes of diffusers that such a file may be.
DENOISERS: Final[Mapping[str, tuple[str, ...]]] = {
    "flux": ("FluxTransformer2DModel", "Flux2Transformer2DModel"),
    "sd3": ("SD3Transformer2DModel",),
    "qwen_image": ("QwenImageTransformer2DModel",),
    "lumina2": ("ZImageTransformer2DModel", "Lumina2Transformer2DModel"),
}
# The same of text encoders.
TEXT_ENCODERS: Final[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
    ("t5", "t5encoder"), ("T5EncoderModel", "UMT5EncoderModel")
)
_NOT_LLMS = {"gemma-embedding", "llama-embed"}


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The files of a model in their order, and what their headers say together."""

    headers: Mapping[Path, GgufHeader]
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, FileTensor]

    @property
    def architecture(self) -> str | None:
        """Name of the architecture in the metadata; None without one."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else None

    @property
    def is_llm(self) -> bool:
        """Return whether the file is a language model, and not an adapter or a projector."""
        name = self.architecture or ""
        return name not in _NOT_LLMS and name.startswith(_LLM_FAMILIES)


def gguf_set(path: Path) -> list[Path]:
    """Return the files that `path`, one of a split set, stands for, in order. Raises FormatError if one is missing."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= _MAX_SPLITS:
        raise FormatError(f"{path}: split {match['number']} of {match['count']} cannot be")
    files = [path.parent / f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise FormatError(f"{file}: missing, one of the {count} files of {path.name}")
    return files


def folder_files(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder holding one model; none without. Raises FormatError for several models."""
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith("."))
    if not files:
        return []
    first = gguf_set(files[0])
    others = [file.name for file in files if file not in first]
    if others:
        raise FormatError(f"{folder}: several GGUF models ({first[0].name}, {', '.join(others)}); name one file")
    return first


def read_gguf_model(files: list[Path]) -> GgufModel:
    """Read the headers of a set. Raises FormatError when the files do not belong together."""
    headers = {file: read_gguf(file) for file in files}
    tensors: dict[str, FileTensor] = {}
    for number, (file, header) in enumerate(headers.items()):
        _check_split(file, header, number, len(files))
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise FormatError(f"{file}: tensor {name!r} is also in {tensors[name].file.name}")
            tensors[name] = tensor
    first = headers[files[0]]
    total = first.metadata.get("split.tensors.count", len(tensors))
    if len(files) > 1 and not _equals(total, len(tensors)):
        raise FormatError(f"{files[0]}: split.tensors.count is {shown(total)}, the files have {len(tensors)} tensors")
    return GgufModel(headers, first.metadata, tensors)


def _check_split(file: Path, header: GgufHeader, number: int, count: int) -> None:
    found = header.metadata.get("split.no", 0), header.metadata.get("split.count", 1)
    if not (_equals(found[0], number) and (_equals(found[1], count) or (count == 1 and _equals(found[1], 0)))):
        raise FormatError(f"{file}: has split.no {shown(found[0])} of {shown(found[1])}, expected {number} of {count}")


def _equals(value: GgufValue, number: int) -> bool:
    return type(value) is int and value == number
