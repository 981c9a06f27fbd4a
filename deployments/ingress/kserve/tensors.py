"""Tensors and records of the Open Inference Protocol, the same for REST and gRPC, and the codec of tensor data. Pure.

The codec takes JSON or raw bytes, as the protocol writes them, to arrays and back. `rest/messages.py` and
`grpc/codec.py` make and read the records; `inference.py` answers them.

Sources: KServe v2, "Tensor Data"; Triton, "Binary Tensor Data Extension". Everything is checked before memory of the
claimed size is taken, and the only error, for any input, is InvalidRequest. Raw data is little-endian, as is every
machine that this runs on, so arrays are read-only views of the arrived bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from configs.distribution import installed_version
from deployments.pipelines.records import NUMPY_DTYPES, Datatype, TensorSpec, TensorValue, bytes_data, text_tensor
from deployments.records.errors import InvalidRequest

MAX_RANK: Final = 32
MAX_ELEMENTS: Final = 2**31 - 1
# Writing JSON takes about 50 bytes of memory for an element: for ten large images that would be gigabytes.
MAX_JSON_ELEMENTS: Final = 2**22
# JSON has no notation for them: both specifications send them as raw bytes only.
BINARY_ONLY: Final = ("FP16", "BF16")
_LENGTH: Final = struct.Struct("<I")  # before each element of BYTES
_JSON_TYPES: Final[dict[str, tuple[frozenset[type], str]]] = {
    "BOOL": (frozenset({bool}), "true or false"),
    "BYTES": (frozenset({str}), "text"),
    "FP32": (frozenset({int, float}), "numbers"),
    "FP64": (frozenset({int, float}), "numbers"),
}
_INTEGERS: Final = (frozenset({int}), "whole numbers")
Parameters: TypeAlias = Mapping[str, bool | int | float | str]
# The only version of every model: a changed model takes its place, requests under way finish on the old one.
VERSION: Final = "1"
SHARED_MEMORY: Final = "shared_memory_region"  # the parameter of tensors that do not travel
_SHARED_OFFSET: Final = "shared_memory_offset"
_SHARED_SIZE: Final = "shared_memory_byte_size"
_MAX_CLASSES: Final = 2**31 - 1
MAX_TENSORS: Final = 256  # inputs or wanted outputs of a request: no more are looked at
# Triton's names of the extensions that this server has.
_EXTENSIONS: Final = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
)


def checked_datatype(name: str, datatype: object) -> Datatype:
    """Return the datatype. Raises InvalidRequest naming the known ones."""
    for known in get_args(Datatype):
        if datatype == known:
            return known
    raise InvalidRequest(f"{name}: unknown datatype {shown(datatype)} (known: {', '.join(get_args(Datatype))})", name)


def checked_shape(name: str, shape: Sequence[object]) -> tuple[int, ...]:
    """Return the shape. Raises InvalidRequest for dimensions that are no sizes, and for too many elements.

    A size of 0 does not excuse the others: numpy makes no array of shape (0, 2**62).
    """
    if len(shape) > MAX_RANK:
        raise InvalidRequest(f"{name}: {len(shape)} dimensions, at most {MAX_RANK} are allowed", name)
    sizes = []
    for size in shape:
        if type(size) is not int or size < 0:
            raise InvalidRequest(f"{name}: {shown(size)} in the shape is not a size (0 or more)", name)
        sizes.append(size)
    if math.prod(max(size, 1) for size in sizes) > MAX_ELEMENTS:
        raise InvalidRequest(f"{name}: the shape has more than {MAX_ELEMENTS} elements", name)
    return tuple(sizes)


def check_count(name: str, shape: Sequence[int], num_elements: int) -> None:
    """Raise InvalidRequest unless a tensor of `shape` has `num_elements`."""
    if num_elements != math.prod(shape):
        raise InvalidRequest(f"{name}: {num_elements} elements, but shape {list(shape)} has {math.prod(shape)}", name)


def check_range(name: str, datatype: Datatype, *ends: int) -> None:
    """Raise InvalidRequest unless whole numbers, the least and the largest, fit the datatype."""
    bounds = np.iinfo(NUMPY_DTYPES[datatype])
    for value in ends:
        if not bounds.min <= value <= bounds.max:
            raise InvalidRequest(
                f"{name}: {shown(value)} is out of range of {datatype} ({bounds.min} to {bounds.max})", name
            )


def from_json(name: str, datatype: Datatype, shape: tuple[int, ...], data: Sequence[Any]) -> TensorValue:
    """Return JSON data as a tensor. `data` is flat in row-major order, or nested like `shape`, a checked one."""
    if datatype in BINARY_ONLY:
        raise InvalidRequest(f"{name}: {datatype} cannot be written as JSON; send it as binary data", name)
    flat = _flattened(name, shape, data)
    check_count(name, shape, len(flat))
    types, wanted = _JSON_TYPES.get(datatype, _INTEGERS)
    if not types.issuperset(map(type, flat)):
        wrong = next(value for value in flat if type(value) not in types)
        raise InvalidRequest(f"{name}: {datatype} takes {wanted}, got {shown(wrong)}", name)
    return TensorValue(name, datatype, _array(name, datatype, flat).reshape(shape))


def to_json(value: TensorValue) -> list[Any]:
    """Return the elements, flat and row-major.

    Raises InvalidRequest for values that JSON cannot express; the message recommends binary data.
    """
    check_json(value)
    flat = value.data.reshape(-1)
    if value.datatype == "BYTES":
        try:
            return [bytes(element).decode() for element in flat]
        except UnicodeDecodeError:
            raise InvalidRequest(f"{_ask_for_binary(value)}; it is not UTF-8 text", value.name) from None
    if value.datatype in ("FP32", "FP64") and not np.isfinite(flat).all():
        raise InvalidRequest(
            f"{_ask_for_binary(value)}; it has numbers that are not finite, which JSON cannot write", value.name
        )
    numbers: list[Any] = flat.tolist()
    return numbers


def check_json(value: TensorValue) -> None:
    """Raise InvalidRequest for a datatype or a size that is never written as JSON."""
    if value.datatype in BINARY_ONLY:
        raise InvalidRequest(f"{_ask_for_binary(value)}; {value.datatype} cannot be written as JSON", value.name)
    if value.data.size > MAX_JSON_ELEMENTS:
        raise InvalidRequest(
            f"{_ask_for_binary(value)}; as JSON at most {MAX_JSON_ELEMENTS} elements are written", value.name
        )


def from_bytes(name: str, datatype: Datatype, shape: tuple[int, ...], data: bytes | memoryview) -> TensorValue:
    """Return raw data as a tensor, whose array is a view of `data` save for BYTES. `shape` is a checked one."""
    if datatype == "BYTES":
        return TensorValue(name, datatype, bytes_data(_elements(name, shape, data)).reshape(shape))
    dtype = NUMPY_DTYPES[datatype]
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise InvalidRequest(f"{name}: {len(data)} bytes, but {datatype} of shape {list(shape)} has {expected}", name)
    if datatype == "BOOL" and expected and np.frombuffer(data, np.uint8).max() > 1:
        raise InvalidRequest(f"{name}: a BOOL is a byte of 0 or 1", name)
    return TensorValue(name, datatype, np.frombuffer(data, dtype).reshape(shape))


def to_bytes(value: TensorValue) -> bytes:
    """Return the data as raw bytes; each element of BYTES has its length before it."""
    if value.datatype != "BYTES":
        return value.data.tobytes()
    elements = [bytes(element) for element in value.data.reshape(-1)]
    return b"".join(part for element in elements for part in (_LENGTH.pack(len(element)), element))


def texts(value: TensorValue) -> list[str]:
    """Return the elements of a BYTES tensor as text. Raises InvalidRequest when one is not UTF-8."""
    try:
        return [bytes(element).decode() for element in value.data.reshape(-1)]
    except UnicodeDecodeError:
        raise InvalidRequest(f"{value.name}: not UTF-8 text", value.name) from None


def _flattened(name: str, shape: tuple[int, ...], data: Sequence[Any]) -> list[Any]:
    if not any(type(item) is list for item in data):
        return list(data)
    level: list[Any] = [data]
    for depth, size in enumerate(shape):
        for item in level:
            if not isinstance(item, list) or len(item) != size:
                found = f"a list of {len(item)}" if isinstance(item, list) else shown(item)
                raise InvalidRequest(
                    f"{name}: data is nested unlike shape {list(shape)}: {found} where dimension {depth} "
                    f"has a list of {size}",
                    name,
                )
        level = [inner for item in level for inner in item]
    return level


def _array(name: str, datatype: Datatype, flat: list[Any]) -> npt.NDArray[Any]:
    if datatype == "BYTES":
        try:
            return bytes_data([text.encode() for text in flat])
        except UnicodeEncodeError:
            raise InvalidRequest(f"{name}: a text contains an unpaired surrogate", name) from None
    dtype = NUMPY_DTYPES[datatype]
    if dtype.kind in "iu" and flat:
        check_range(name, datatype, min(flat), max(flat))
    if dtype.kind == "f":
        return _floats(name, datatype, flat)
    return np.array(flat, dtype)


def _floats(name: str, datatype: Datatype, flat: list[Any]) -> npt.NDArray[Any]:
    try:
        with np.errstate(over="ignore"):
            array = np.array(flat, np.float64).astype(NUMPY_DTYPES[datatype])
    except OverflowError:  # an int of more than 1,024 bits
        array = np.array([math.inf])
    if not np.isfinite(array).all():
        raise InvalidRequest(f"{name}: a number is out of range of {datatype}", name)
    return array


def _elements(name: str, shape: tuple[int, ...], data: bytes | memoryview) -> list[bytes]:
    num_elements = math.prod(shape)
    if num_elements * _LENGTH.size > len(data):
        raise InvalidRequest(
            f"{name}: {len(data)} bytes are too few for {num_elements} elements with 4 bytes of length each", name
        )
    elements, position = [], 0
    for index in range(num_elements):
        start = position + _LENGTH.size
        length = _LENGTH.unpack_from(data, position)[0] if start <= len(data) else 0
        position = start + length
        if position > len(data):
            raise InvalidRequest(f"{name}: element {index} reaches beyond the {len(data)} bytes of data", name)
        elements.append(bytes(data[start:position]))
    if position != len(data):
        raise InvalidRequest(
            f"{name}: {len(data) - position} bytes are left after the {num_elements} elements of shape {list(shape)}",
            name,
        )
    return elements


def _ask_for_binary(value: TensorValue) -> str:
    return f"{value.name}: ask for it as binary data (parameter binary_data of the output)"


def shown(value: object) -> str:
    """Return a wrong value for a message, always short."""
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to write down very long ones
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def classify_output(value: TensorValue, num_classes: int, labels: Sequence[str] = ()) -> TensorValue:
    """Return the highest values of an output with their places, as text, instead of the output.

    That is `value:index` of the `num_classes` highest elements of each item: BYTES (items, at most num_classes); with
    `labels`, one for each element of an item, `value:index:label`. The first dimension counts items; the others are
    one row of classes. Of equal values the earlier comes first, and NaN comes last.
    """
    if value.datatype == "BYTES":
        raise InvalidRequest(f"output {value.name!r} is text: it has no highest values", value.name)
    num_items = value.shape[0] if value.shape else 1
    data = value.data.astype(np.uint8) if value.data.dtype == np.bool_ else value.data
    rows = data.reshape(num_items, -1) if data.size else data.reshape(num_items, 0)
    best = [_descending(row)[:num_classes] for row in rows]
    named = [f":{label}" for label in labels] if len(labels) == rows.shape[1] else [""] * rows.shape[1]
    cells = [f"{row[index]}:{index}{named[index]}" for row, order in zip(rows, best, strict=True) for index in order]
    found = text_tensor(value.name, cells)
    return TensorValue(value.name, "BYTES", found.data.reshape(num_items, min(num_classes, rows.shape[1])))


def _descending(row: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    if row.dtype.kind not in "biu":  # bfloat16 is of no kind that numpy knows
        row = row.astype(np.float64)
        row = np.where(np.isnan(row), -np.inf, row)
    # Ascending and stable from the end: reversed, that is descending with the earlier of equal values first.
    return (len(row) - 1 - np.argsort(row[::-1], kind="stable"))[::-1]


@dataclass(frozen=True, slots=True)
class RegionPart:
    """A part of a region of shared memory: `nbytes` from `offset` on."""

    region: str
    offset: int
    nbytes: int

    def parameters(self) -> Parameters:
        """Return the parameters of a tensor that lies there."""
        return {SHARED_MEMORY: self.region, _SHARED_OFFSET: self.offset, _SHARED_SIZE: self.nbytes}


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A named tensor in shared memory."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    part: RegionPart


@dataclass(frozen=True, slots=True)
class OutputWish:
    """An output named in the request.

    `binary`: its data is to travel as raw bytes (REST only). `num_classes` above 0 asks for the classification
    extension: the so many highest values with their indices, as text, instead of the tensor. With `part`, the data goes
    there.
    """

    name: str
    binary: bool = False
    num_classes: int = 0
    parameters: Parameters = field(default_factory=dict)
    part: RegionPart | None = None


def read_part(name: str, parameters: Parameters) -> RegionPart:
    """Return the part of a region in the parameters of tensor `name`. Raises InvalidRequest."""
    region, offset = parameters[SHARED_MEMORY], parameters.get(_SHARED_OFFSET, 0)
    nbytes = parameters.get(_SHARED_SIZE)
    if not isinstance(region, str) or type(offset) is not int or type(nbytes) is not int or min(offset, nbytes) < 0:
        expected = f"{SHARED_MEMORY} takes a name, {_SHARED_OFFSET} and {_SHARED_SIZE} take numbers of bytes"
        raise InvalidRequest(f"{name}: {expected}; got {shown([region, offset, nbytes])}", name)
    return RegionPart(region, offset, nbytes)


def read_wish(name: str, parameters: Parameters, *, binary: bool) -> OutputWish:
    """Return the wish for an output by its parameters. Raises InvalidRequest for unsupported ones."""
    part = read_part(name, parameters) if SHARED_MEMORY in parameters else None
    num_classes = parameters.get("classification", 0)
    if type(num_classes) is not int or not 0 <= num_classes <= _MAX_CLASSES:
        raise InvalidRequest(
            f"output {name!r}: classification takes a number of classes, got {shown(num_classes)}", name
        )
    return OutputWish(name, binary, num_classes, parameters, part)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request for inference. `version` "" is the served one. No `outputs` means all of them.

    If tensors are in shared memory, `owner` is the uid and the tenant of their owner.
    """

    model: str
    inputs: tuple[TensorValue, ...]
    version: str = ""
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
    outputs: tuple[OutputWish, ...] = ()
    shared_inputs: tuple[SharedTensor, ...] = ()
    owner: tuple[int, str] | None = None

    @property
    def has_shared(self) -> bool:
        """Return whether tensors are in shared memory, or go there."""
        return bool(self.shared_inputs) or any(wish.part is not None for wish in self.outputs)


@dataclass(frozen=True, slots=True)
class InferResponse:
    """The answer to one request, or a piece of it. `id` is the request's.

    `outputs` are in the order that the request named them, or in the model's own.
    `timings_ms` by phase are those of the slowest of several parts; "queue" and "total" are always there.
    """

    model: str
    version: str
    outputs: tuple[TensorValue, ...]
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    shared_outputs: tuple[SharedTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The metadata of a model: its inputs and outputs. Shapes include the batch dimension; -1 is any size.

    `parameters` is text about the model that the protocol leaves to the server: kind, fingerprint, description.
    """

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """The metadata of the server: its version, and its extensions of the protocol."""

    name: str
    version: str
    extensions: tuple[str, ...]


def server_metadata(*more_extensions: str) -> ServerMetadata:
    """Return the metadata of this server; the config may enable more extensions."""
    return ServerMetadata("atelier", installed_version() or "0", (*_EXTENSIONS, *more_extensions))
