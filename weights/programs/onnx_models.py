"""ONNX models with their initializers in the store.

The skeleton's model.onnx has every stored tensor as external data whose location is the tensor's name in the
manifest, so it stays true wherever the bytes move. Format: onnx.proto and ONNX's "External Data" document.

A model's signature is read from its graph, and what keeps it from being served. ONNX names sizes that may differ, and
has no ranges for them: they are 1 to `UNBOUNDED` where the model's metadata_props name none. Format: onnx.proto.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from weights.formats.tensors import FileTensor, SourceTensor
from weights.formats.untrusted import is_shape, num_elements, shown
from weights.loading.loader import windows
from weights.loading.provider import ExtentProvider, LocalExtents
from weights.platform.torch_dtypes import DTYPE_NAMES
from weights.programs.onnx_sessions import onnxruntime, open_session
from weights.programs.signature import (
    COMPONENT,
    SERVED_DTYPES,
    SIGNATURE,
    UNBOUNDED,
    UNSERVABLE,
    ProgramSignature,
    ProgramTensor,
    named_shapes,
)
from weights.programs.storing import MemoryTensor, checked_graph, published, store_program, stored_program
from weights.records.dtypes import ITEM_BYTES
from weights.records.errors import FormatError, WeightsError
from weights.records.manifest import MAX_RANK, Component, Layout, Manifest, TensorRef
from weights.storage.store import WeightStore

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

__all__ = ["RANGES", "externalize_onnx", "graph_for_session", "load_onnx", "read_onnx_signature", "write_onnx"]

RANGES: Final = "ranges"  # of metadata_props: {"length": [1, 512]} as JSON, by the names of sizes

_Shapes = dict[str, tuple[int | str, ...]]


def read_onnx_signature(model: ModelProto, dtypes: Mapping[int, str]) -> ProgramSignature:
    """Return the signature. `dtypes` has the store's names of ONNX's types.

    Raises WeightsError, with what is in the way, for a model that is not to be served.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    if not inputs or not model.graph.output:
        raise WeightsError(f"it {'gives' if inputs else 'takes'} no tensors")
    shapes: _Shapes = {value.name: _shape("input", value) for value in inputs}
    names, tables = named_shapes(shapes), _tables(model)
    return ProgramSignature(
        tuple(
            ProgramTensor(
                value.name,
                _dtype(value, dtypes),
                tuple(names.get(size, size) if isinstance(size, str) else size for size in shapes[value.name]),
                tables.get(value.name),
            )
            for value in inputs
        ),
        tuple(
            ProgramTensor(
                value.name,
                _dtype(value, dtypes),
                tuple(_output_size(size, names) for size in _shape("output", value)),
            )
            for value in model.graph.output
        ),
        _ranges(model, names),
    )


def _shape(role: str, value: ValueInfoProto) -> tuple[int | str, ...]:
    """Return numbers and names; a size of which the model says nothing has a name of its own."""
    if value.type.WhichOneof("value") != "tensor_type":
        raise WeightsError(f"its {role} {shown(value.name)} is no tensor")
    if not value.type.tensor_type.HasField("shape"):
        raise WeightsError(f"its {role} {shown(value.name)} has no shape; onnx.shape_inference may find it")
    if any(
        isinstance(text, bytes) for text in (value.name, *(dim.dim_param for dim in value.type.tensor_type.shape.dim))
    ):
        raise WeightsError(f"its {role} {shown(_text(value.name))} has a name that is no UTF-8")
    return tuple(
        dim.dim_value if dim.dim_value > 0 else dim.dim_param or f"{value.name}?{number}"
        for number, dim in enumerate(value.type.tensor_type.shape.dim)
    )


def _output_size(size: int | str, names: Mapping[str, str]) -> int | str:
    """Return an output's size by the names of the inputs', or a term of them.

    HAZARD: one that no input has may follow from any of them, so that its rows are no rows and nothing is cut: such
    a term has all names.
    """
    if isinstance(size, int) or size in names:
        return size if isinstance(size, int) else names[size]
    known = set(re.findall(r"[A-Za-z_]\w*", size))
    if known and known <= names.keys():
        return re.sub(r"[A-Za-z_]\w*", lambda found: names[found[0]], size)
    return f"of {', '.join(names.values())}"


def _dtype(value: ValueInfoProto, dtypes: Mapping[int, str]) -> str:
    number = value.type.tensor_type.elem_type
    if (found := dtypes.get(number, "")) not in SERVED_DTYPES:
        raise WeightsError(f"its tensor {shown(value.name)} is of type {found or number}, which requests cannot have")
    return found


def _ranges(model: ModelProto, names: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    text = next((entry.value for entry in model.metadata_props if entry.key == RANGES), "{}")
    try:
        given_bounds = json.loads(text)
        bounds = {size: (int(least), int(most)) for size, (least, most) in given_bounds.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        bounds = {"": (1, 0)}
    if not all(size in names and 1 <= least <= most for size, (least, most) in bounds.items()):
        raise WeightsError(
            f"{RANGES!r} of its metadata_props are {shown(text)}, expected the least and the largest of sizes by name "
            f"({', '.join(names) or 'it has none'}), as JSON"
        )
    return {name: bounds.get(size, (1, UNBOUNDED)) for size, name in names.items()}


def _tables(model: ModelProto) -> dict[str, int]:
    """Return the number of rows of the table that an input's values look up, by input."""
    rows = {tensor.name: tensor.dims[0] for tensor in model.graph.initializer if tensor.dims}
    found: dict[str, int] = {}
    for node in model.graph.node:
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        if node.op_type == "Gather" and not node.domain and len(node.input) == 2 and axis == 0:
            table, ids = node.input
            if table in rows:
                found[ids] = min(rows[table], found.get(ids, rows[table]))
    return found


_MODEL_FILE: Final = "model.onnx"
# Smaller tensors of nodes stay in the graph, and smaller initializers return to it: shape inference reads them there.
# The limit is that of onnx.external_data_helper.
MIN_EXTERNAL_BYTES: Final = 1024
_PAGE_BYTES: Final = 4096  # ONNX recommends offsets that can be mapped
_INLINE: Final = "inline"  # metadata: names of tensors that stayed in the graph, as JSON
_MAX_PROTOBUF_BYTES: Final = 2**31 - 1
# TensorProto.DataType -> our name. Source: onnx.proto.
_DTYPES: Final = {
    1: "F32",
    2: "U8",
    3: "I8",
    4: "U16",
    5: "I16",
    6: "I32",
    7: "I64",
    9: "BOOL",
    10: "F16",
    11: "F64",
    12: "U32",
    13: "U64",
    14: "C64",
    16: "BF16",
    17: "F8_E4M3",
    19: "F8_E5M2",
    24: "F8_E8M0",
}
# Bits of an element for what the store has no name for: COMPLEX128, FLOAT8E4M3FNUZ, FLOAT8E5M2FNUZ, UINT4, INT4,
# FLOAT4E2M1, UINT2, INT2, FLOAT6E2M3, FLOAT6E3M2. Packed types fill bytes without gaps.
_OTHER_BITS: Final = {15: 128, 18: 8, 20: 8, 21: 4, 22: 4, 23: 4, 25: 2, 26: 2, 27: 6, 28: 6}
_DATA_FIELDS: Final = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")


def externalize_onnx(store: WeightStore, model: str, path: Path, *, layout: Layout = "combined") -> Manifest:
    """Bring the ONNX model at `path` into the store: its graph into the skeleton, its tensors into packs.

    Tensors are initializers, also those of subgraphs, and attributes of at least MIN_EXTERNAL_BYTES, from the model
    file or from external data in its folder. Those of a dtype that the store has no name for (4-bit integers,
    strings, ...) stay in the graph and are listed in the component's metadata["inline"].
    The metadata say what it takes and gives, or why it cannot be served.
    Raises FormatError for a damaged model and for external data outside of the folder, WeightsError without `onnx`.
    """
    _onnx()
    proto = _parse(path, _read(path))
    tensors: dict[str, SourceTensor] = {}
    kept = []
    signature = _signature(proto)
    for name, tensor, is_initializer in _all_tensors(proto):
        source = _tensor_source(path, name, tensor)
        if source is None:
            kept.append(name)
        if source is None or source.nbytes == 0 or (not is_initializer and source.nbytes < MIN_EXTERNAL_BYTES):
            _make_inline(path, name, tensor)
            continue
        tensors[name] = source
        _set_location(tensor, name, 0, source.nbytes)
    graph = (_MODEL_FILE, _serialized(path, proto))
    if SIGNATURE in signature and (reason := _why_not_run(path, proto, tensors)):
        signature = {UNSERVABLE: reason}
    metadata = {_INLINE: json.dumps(kept), **signature}
    return store_program(store, model, str(path), graph, tensors, "onnx", metadata=metadata, layout=layout)


def load_onnx(store: WeightStore, model: str, provider: ExtentProvider | None = None) -> ModelProto:
    """Load the self-contained model. Raises WeightsError when it is no ONNX model or larger than 2 GiB."""
    manifest = store.manifest(model)
    proto, stored = _stored(store, model)
    nbytes = sum(ref.nbytes for _, ref, _ in stored)
    if nbytes + proto.ByteSize() > _MAX_PROTOBUF_BYTES:
        raise WeightsError(
            f"{model}: {nbytes} bytes of tensors do not fit into one ONNX file (2 GiB); write it with external data"
        )
    buffers = (provider or LocalExtents(store.packs)).fetch(manifest.extents_of([COMPONENT]))
    for tensor, ref, _ in stored:
        _set_raw(tensor, buffers[ref.extent][ref.offset : ref.offset + ref.nbytes].tobytes())
    return proto


def write_onnx(
    store: WeightStore, model: str, target: Path, *, external: bool, provider: ExtentProvider | None = None
) -> None:
    """Write the model as `target`; with `external`, its large initializers into `<target>.data` beside it.

    Offsets there are multiples of 4 KiB, equal tensors are written once. Both files appear complete or not at all.
    Raises StoreError when the disk refuses, and what `load_onnx` raises.
    """
    if not external:
        _write(target, _serialized(target, load_onnx(store, model, provider)))
        return
    proto, stored = _stored(store, model)
    data_file, offsets, end = target.with_name(f"{target.name}.data"), dict[str, int](), 0
    for tensor, ref, is_initializer in stored:
        if is_initializer and ref.nbytes >= MIN_EXTERNAL_BYTES:
            if ref.sha256 not in offsets:
                offsets[ref.sha256] = end
                end += ref.nbytes + -ref.nbytes % _PAGE_BYTES
            _set_location(tensor, data_file.name, offsets[ref.sha256], ref.nbytes)
    if not offsets:
        write_onnx(store, model, target, external=False, provider=provider)
        return
    with published(data_file, end) as partial, partial.open("xb") as file:
        for window in windows(store.manifest(model).extents_of([COMPONENT])):
            buffers = (provider or LocalExtents(store.packs)).fetch(window)
            for tensor, ref, _ in stored:
                if ref.extent in buffers:
                    data = buffers[ref.extent][ref.offset : ref.offset + ref.nbytes]
                    if _location_of(tensor).get("location") == data_file.name:
                        file.seek(offsets[ref.sha256])
                        file.write(data.data)
                    else:
                        _set_raw(tensor, data.tobytes())
    _write(target, _serialized(target, proto))


def graph_for_session(
    component: Component, folder: Path, tensors: Mapping[str, torch.Tensor]
) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Return the graph of the skeleton `folder` for `open_session`, and the initializers that it has outside, by name.

    Those are of the main graph and at least MIN_EXTERNAL_BYTES, and are not copied. Raises StoreError and FormatError
    for a damaged graph and for one that takes other tensors.
    """
    path = folder / _MODEL_FILE
    proto = _parse(path, checked_graph(component, path))
    outside = {}
    for name, tensor, is_outside in _external_tensors(path, proto):
        stored = tensors.get(name)
        if stored is None:
            raise FormatError(f"{path}: tensor {shown(name)} is not in the store")
        dtype, shape = DTYPE_NAMES.get(stored.dtype), list(stored.shape)
        if (dtype, shape) != (_DTYPES.get(tensor.data_type), list(tensor.dims)):
            raise FormatError(
                f"{path}: tensor {shown(name)} is {dtype} {shape}, the graph takes {_DTYPES.get(tensor.data_type)} "
                f"{shown(list(tensor.dims))}"
            )
        if is_outside:
            outside[tensor.name] = stored
        else:
            _set_raw(tensor, stored.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return _serialized(path, proto), outside


def _external_tensors(path: Path, proto: ModelProto) -> Iterator[tuple[str, TensorProto, bool]]:
    """Yield (name in the store, tensor, is handed to a session apart) of a graph's tensors that are stored."""
    num_own = len(proto.graph.initializer)  # they come first
    for number, (_, tensor, _) in enumerate(_all_tensors(proto)):
        if _is_external(tensor):
            is_large = _nbytes(path, _text(tensor.name), tensor) >= MIN_EXTERNAL_BYTES
            yield _location_of(tensor).get("location", ""), tensor, is_large and number < num_own


def _signature(proto: ModelProto) -> dict[str, str]:
    """Return the metadata that says what the model takes and gives, or why it cannot be served."""
    try:
        return {SIGNATURE: read_onnx_signature(proto, _DTYPES).to_json()}
    except WeightsError as error:
        return {UNSERVABLE: str(error)}


def _why_not_run(path: Path, proto: ModelProto, tensors: Mapping[str, SourceTensor]) -> str:
    """Return why onnxruntime cannot run a graph with these tensors outside; "" where it can, or is not here to tell.

    Nothing is computed, so zeros stand for the weights: memory that nobody writes to takes none.
    """
    try:
        package = onnxruntime()
    except WeightsError:
        return ""
    graph = type(proto)()
    graph.CopyFrom(proto)
    values = {}
    for name, tensor, is_outside in _external_tensors(path, graph):
        if is_outside:
            zeros = np.zeros(tuple(tensor.dims), f"u{ITEM_BYTES[tensors[name].dtype]}")
            values[tensor.name] = package.OrtValue.ortvalue_from_numpy_with_onnx_type(zeros, tensor.data_type)
        else:
            _set_raw(tensor, bytes(tensors[name].read()))
    try:
        open_session(path, _serialized(path, graph), values, optimized=False)
    except WeightsError as error:
        return str(error).removeprefix(f"{path}: ")
    return ""


def _stored(store: WeightStore, model: str) -> tuple[ModelProto, list[tuple[TensorProto, TensorRef, bool]]]:
    """Return the graph of the skeleton, and its tensors that are in the store."""
    component, path, contents = stored_program(store, model, _MODEL_FILE, "an ONNX model")
    proto, stored = _parse(path, contents), []
    for name, tensor, is_initializer in _all_tensors(proto):
        if _is_external(tensor):
            ref = component.tensors.get(_location_of(tensor).get("location", ""))
            if ref is None:
                raise FormatError(f"{path}: tensor {name!r} refers to {_location_of(tensor)}, which the manifest lacks")
            stored.append((tensor, ref, is_initializer))
    return proto, stored


def _read(path: Path) -> bytes:
    try:
        nbytes = path.stat().st_size
        if nbytes > _MAX_PROTOBUF_BYTES:
            raise FormatError(f"{path}: {nbytes} bytes, an ONNX model has 2 GiB at most")
        return path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None


def _parse(path: Path, contents: bytes) -> ModelProto:
    try:
        proto: ModelProto = _onnx().load_model_from_string(contents)
    except _decode_error() as error:
        raise FormatError(f"{path}: not an ONNX model: {error}") from None
    if not proto.HasField("graph"):
        raise FormatError(f"{path}: not an ONNX model: it has no graph")
    return proto


def _serialized(path: Path, proto: ModelProto) -> bytes:
    if proto.ByteSize() > _MAX_PROTOBUF_BYTES:
        raise WeightsError(f"{path}: the graph without stored tensors takes more than the 2 GiB of an ONNX file")
    return proto.SerializeToString(deterministic=True)


def _write(target: Path, data: bytes) -> None:
    with published(target, len(data)) as partial:
        partial.write_bytes(data)


def _onnx() -> Any:
    try:
        return importlib.import_module("onnx")
    except ImportError:
        raise WeightsError("ONNX models need the onnx package: pip install 'atelier-serve[onnx]'") from None


def _decode_error() -> type[Exception]:
    error: type[Exception] = importlib.import_module("google.protobuf.message").DecodeError
    return error


def _all_tensors(model: ModelProto) -> Iterator[tuple[str, TensorProto, bool]]:
    """Yield (name, tensor, is an initializer), also of subgraphs, functions and training graphs, in stable order.

    Names are paths of the graphs that they are in, and unique.
    """
    seen: dict[str, int] = {}
    for name, tensor, is_initializer in _of_model(model):
        seen[name] = seen.get(name, 0) + 1
        yield (f"{name}#{seen[name]}" if seen[name] > 1 else name), tensor, is_initializer


def _of_model(model: ModelProto) -> Iterator[tuple[str, TensorProto, bool]]:
    yield from _of_graph(model.graph, "")
    for function in model.functions:
        yield from _of_nodes(function.node, f"{_text(function.domain)}:{_text(function.name)}/")
    for number, training in enumerate(model.training_info):
        yield from _of_graph(training.initialization, f"training_{number}/initialization/")
        yield from _of_graph(training.algorithm, f"training_{number}/algorithm/")


def _of_graph(graph: GraphProto, prefix: str) -> Iterator[tuple[str, TensorProto, bool]]:
    for tensor in graph.initializer:
        yield prefix + (_text(tensor.name) or "initializer"), tensor, True
    for sparse in graph.sparse_initializer:
        name = prefix + (_text(sparse.values.name) or "sparse")
        yield f"{name}/values", sparse.values, False
        yield f"{name}/indices", sparse.indices, False
    yield from _of_nodes(graph.node, prefix)


def _of_nodes(nodes: Iterable[NodeProto], prefix: str) -> Iterator[tuple[str, TensorProto, bool]]:
    for node in nodes:
        name = prefix + (_text(node.name) or _text(next(iter(node.output), "")) or _text(node.op_type))
        for attribute in node.attribute:
            yield from _of_attribute(attribute, f"{name}/{_text(attribute.name)}")


def _of_attribute(attribute: AttributeProto, name: str) -> Iterator[tuple[str, TensorProto, bool]]:
    for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
        yield name, tensor, False
    for sparse in (
        *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []),
        *attribute.sparse_tensors,
    ):
        yield f"{name}/values", sparse.values, False
        yield f"{name}/indices", sparse.indices, False
    for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
        yield from _of_graph(graph, f"{name}/")


def _text(value: str | bytes) -> str:
    """Decode to text. HAZARD: protobuf gives a string that is not UTF-8 as bytes, whatever its annotations say."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _tensor_source(path: Path, name: str, tensor: TensorProto) -> SourceTensor | None:
    """Return the bytes of a tensor of the model at `path`; None when the store has no name for its dtype.

    External data is not read yet. Raises FormatError for sizes that do not fit and for files outside the folder.
    """
    nbytes = _nbytes(path, name, tensor)
    dtype = _DTYPES.get(tensor.data_type)
    if dtype is None:
        return None
    shape = tuple(tensor.dims)
    if _is_external(tensor):
        return _external(path, name, tensor, nbytes, dtype, shape)
    data = _own_bytes(path, name, tensor)
    if len(data) != nbytes:
        raise FormatError(
            f"{path}: tensor {shown(name)}: {dtype} {shown(list(shape))} takes {nbytes} bytes, it has {len(data)}"
        )
    return MemoryTensor(path, dtype, shape, memoryview(data))


def _make_inline(path: Path, name: str, tensor: TensorProto) -> None:
    """Move external data of any dtype into the tensor itself."""
    if _is_external(tensor):
        nbytes = _nbytes(path, name, tensor)
        _set_raw(tensor, _external(path, name, tensor, nbytes, "U8", (nbytes,)).read())


def _set_raw(tensor: TensorProto, data: bytes) -> None:
    """Make `data` the tensor's own bytes."""
    _clear(tensor)
    tensor.raw_data = data


def _set_location(tensor: TensorProto, location: str, offset: int, nbytes: int) -> None:
    """Make the tensor refer to `nbytes` bytes of `location`."""
    _clear(tensor)
    tensor.data_location = tensor.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(nbytes))):
        tensor.external_data.add(key=key, value=value)


def _location_of(tensor: TensorProto) -> dict[str, str]:
    """Return location, offset and length as they are in the file: strings that nobody checked."""
    return {_text(entry.key): _text(entry.value) for entry in tensor.external_data}


def _is_external(tensor: TensorProto) -> bool:
    return tensor.data_location == tensor.EXTERNAL


def _clear(tensor: TensorProto) -> None:
    for field in (*_DATA_FIELDS, "external_data", "data_location"):
        tensor.ClearField(field)


def _nbytes(path: Path, name: str, tensor: TensorProto) -> int:
    shape, dtype = list(tensor.dims), _DTYPES.get(tensor.data_type)
    count = num_elements(shape) if is_shape(shape) else None
    if count is None:
        raise FormatError(
            f"{path}: tensor {shown(name)}: shape {shown(shape)}, expected at most {MAX_RANK} sizes from 0 with a "
            "product below 2^64"
        )
    if dtype is not None:
        return count * ITEM_BYTES[dtype]
    if _is_external(tensor) and tensor.data_type not in _OTHER_BITS:
        raise FormatError(f"{path}: tensor {shown(name)}: data type {tensor.data_type} cannot be external")
    return -(-count * _OTHER_BITS.get(tensor.data_type, 0) // 8)


def _own_bytes(path: Path, name: str, tensor: TensorProto) -> bytes:
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    from onnx import numpy_helper

    try:
        return numpy_helper.to_array(tensor).tobytes()
    except (ValueError, TypeError, OverflowError) as error:
        raise FormatError(f"{path}: tensor {shown(name)}: {error}") from None


def _external(
    path: Path, name: str, tensor: TensorProto, nbytes: int, dtype: str, shape: tuple[int, ...]
) -> FileTensor:
    entries = _location_of(tensor)
    file = _inside(path, name, entries.get("location", ""))
    try:
        offset, length = int(entries.get("offset", "0")), int(entries.get("length", str(nbytes)))
    except ValueError:
        raise FormatError(
            f"{path}: tensor {shown(name)}: offset and length must be integers, got {shown(entries)}"
        ) from None
    if offset < 0 or length != nbytes:
        raise FormatError(f"{path}: tensor {shown(name)}: {nbytes} bytes expected, external data has {shown(entries)}")
    file_bytes = file.stat().st_size
    if offset + nbytes > file_bytes:
        raise FormatError(
            f"{path}: tensor {shown(name)} ends at byte {offset + nbytes} of {file.name}, which has {file_bytes} bytes"
        )
    return FileTensor(file, offset, nbytes, dtype, shape)


def _inside(path: Path, name: str, location: str) -> Path:
    """Return the external file. HAZARD: a model can name any file; only plain ones in its folder are read."""
    relative = PurePosixPath(location)
    if not location or "\0" in location or "\\" in location or relative.is_absolute() or ".." in relative.parts:
        raise FormatError(
            f"{path}: tensor {shown(name)}: external data at {shown(location)} is not a path inside the folder"
        )
    file = path.parent
    for part in relative.parts:
        file /= part
        if file.is_symlink():
            raise FormatError(f"{path}: tensor {shown(name)}: external data at {shown(location)}: {file} is a symlink")
    if not file.is_file():
        raise FormatError(
            f"{path}: tensor {shown(name)}: external data at {shown(location)} is no file beside the model"
        )
    return file
