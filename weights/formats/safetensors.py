"""safetensors files: headers checked against the published format before any tensor byte is trusted; writing.

Format: u64 little-endian header length, JSON header, then the buffer; offsets are relative to the buffer and must
tile it exactly. Source: the safetensors README, "Format".
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weights.formats.tensors import FileTensor
from weights.formats.untrusted import is_shape, is_size, num_elements, shown
from weights.records.dtypes import ITEM_BYTES
from weights.records.errors import FormatError
from weights.records.manifest import MAX_RANK

MAX_HEADER_BYTES = 100_000_000  # the format's own limit; keeps a damaged length from becoming an allocation
_MAX_DIGITS = 19  # of 2^63 - 1
_RANKS = {dtype: rank for rank, dtype in enumerate(ITEM_BYTES)}


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A checked header: tensors by name, metadata."""

    tensors: Mapping[str, FileTensor]
    metadata: Mapping[str, str]


def read_header(path: Path) -> SafetensorsHeader:
    """Parse and check the header of `path`. Raises FormatError naming file and tensor."""
    try:
        file_bytes = path.stat().st_size
        raw = _read_raw(path, file_bytes)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    header = _parse_json(path, raw)
    metadata = _metadata(path, header.pop("__metadata__", None))
    start = 8 + len(raw)
    tensors = {name: _entry(path, name, value, start) for name, value in header.items()}
    _check_tiling(path, tensors, start, file_bytes)
    return SafetensorsHeader(tensors, metadata)


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...], Callable[[], bytes | memoryview]]],
    metadata: Mapping[str, str],
) -> None:
    """Write `tensors`, name -> (dtype, shape, read), one after another: one tensor's bytes in memory at a time.

    Order and padding are the stock writer's. Not synced to disk: that is the caller's to decide.
    Raises FormatError for a dtype that the format lacks, and when `read` gives fewer or more bytes than the shape.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    for name, (dtype, _, _) in tensors.items():
        if dtype not in ITEM_BYTES:
            raise FormatError(f"{path}: tensor {name!r}: safetensors has no {dtype} (known: {', '.join(ITEM_BYTES)})")
        if name == "__metadata__":
            raise FormatError(f"{path}: no tensor can be called '__metadata__' in a safetensors file")
    order = sorted(tensors, key=lambda name: (-_RANKS[tensors[name][0]], name))
    position = 0
    for name in order:
        dtype, shape, _ = tensors[name]
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise FormatError(f"{path}: a name is not text: {error.reason}") from None
    text += b" " * (-len(text) % 8)  # so that the tensors of a mapped file are aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            begin, end = header[name]["data_offsets"]
            data = memoryview(tensors[name][2]())
            if data.nbytes != end - begin:
                raise FormatError(f"{path}: tensor {name!r} takes {end - begin} bytes, {data.nbytes} came")
            file.write(data)


def _read_raw(path: Path, file_bytes: int) -> bytes:
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise FormatError(f"{path}: {file_bytes} bytes, too short for a safetensors header (8 bytes at least)")
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > MAX_HEADER_BYTES or 8 + header_bytes > file_bytes:
            raise FormatError(
                f"{path}: header length {header_bytes} does not fit a file of {file_bytes} bytes "
                f"(limit {MAX_HEADER_BYTES}); truncated, or not a safetensors file"
            )
        return file.read(header_bytes)


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise FormatError(f"{path}: {shown(twice)} appears twice in the header")
        return found

    try:
        header = json.loads(
            raw.decode("utf-8"), object_pairs_hook=refuse_duplicates, parse_int=_integer, parse_constant=_refuse
        )
    except RecursionError:
        raise FormatError(f"{path}: header is not UTF-8 JSON: nested too deep") from None
    except ValueError as error:
        raise FormatError(f"{path}: header is not UTF-8 JSON: {error}") from None
    if not isinstance(header, dict):
        raise FormatError(f"{path}: header is a JSON {type(header).__name__}, expected an object")
    return header


def _integer(digits: str) -> float:
    """Return a size, or infinity for a number too long to be one: thousands of digits are never computed with."""
    if len(digits) > _MAX_DIGITS:
        return math.inf
    return -0.0 if digits == "-0" else int(digits)  # as JSON has it; Python's 0 would pass for a size


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise FormatError(f"{path}: __metadata__ must map strings to strings")
    for text in (*value, *value.values()):
        _check_text(path, text)
    return value


def _check_text(path: Path, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # an escaped half of a surrogate pair
        raise FormatError(f"{path}: header is not UTF-8 JSON: {shown(text)} has half a character") from None


def _entry(path: Path, name: str, value: Any, start: int) -> FileTensor:
    _check_text(path, name)
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise FormatError(
            f"{path}: tensor {shown(name)}: expected dtype, shape and data_offsets, got {shown(value)}"
        ) from None
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        known = ", ".join(ITEM_BYTES)
        raise FormatError(f"{path}: tensor {shown(name)}: unknown dtype {shown(dtype)} (known: {known})")
    if not (is_shape(shape) and is_size(begin) and is_size(end)):
        raise FormatError(
            f"{path}: tensor {shown(name)}: shape (of {MAX_RANK} sizes at most) and offsets must be non-negative "
            f"integers below 2^63, got {shown(value)}"
        )
    count = num_elements(shape)
    if count is None or end - begin != count * ITEM_BYTES[dtype]:
        expected = "2^64 or more" if count is None else count * ITEM_BYTES[dtype]
        raise FormatError(
            f"{path}: tensor {shown(name)}: {dtype} {shown(shape)} takes {expected} bytes, its offsets give "
            f"{end - begin}"
        )
    return FileTensor(path, start + begin, end - begin, dtype, tuple(shape))


def _check_tiling(path: Path, tensors: Mapping[str, FileTensor], start: int, file_bytes: int) -> None:
    position = start
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != position:
            what = "overlaps the tensor before it" if entry.offset < position else "leaves a hole before it"
            raise FormatError(f"{path}: tensor {shown(name)} at byte {entry.offset} {what} (expected byte {position})")
        position += entry.nbytes
        if position > file_bytes:
            raise FormatError(
                f"{path}: truncated: tensor {shown(name)} ends at byte {position}, the file has {file_bytes} bytes"
            )
    if position != file_bytes:
        raise FormatError(f"{path}: {file_bytes - position} bytes after the last tensor belong to no tensor")
