"""ONNX models with their initializers in the store.

The skeleton's model.onnx has every stored tensor as external data whose location is the tensor's name in the
manifest, so it stays true wherever the bytes move.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weights.errors import FormatError, WeightsError
from weights.formats.tensors import SourceTensor
from weights.loading.placement import windows
from weights.manifest import Layout, Manifest, TensorRef
from weights.programs.onnx_tensors import (
    MAX_PROTOBUF_BYTES,
    all_tensors,
    bring_inline,
    is_external,
    location_of,
    set_location,
    set_raw,
    tensor_source,
)
from weights.programs.storing import COMPONENT, published, store_program, stored_program
from weights.provider import ExtentProvider, LocalExtents
from weights.store import WeightStore

__all__ = ["externalize_onnx", "load_onnx", "write_onnx"]

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

_MODEL_FILE: Final = "model.onnx"
# Smaller tensors of nodes stay in the graph, and smaller initializers return to it: shape inference reads them there.
# The limit is that of onnx.external_data_helper.
MIN_EXTERNAL_BYTES: Final = 1024
_PAGE_BYTES: Final = 4096  # ONNX recommends offsets that can be mapped
_INLINE: Final = "inline"  # metadata: names of tensors that stayed in the graph, as JSON


def externalize_onnx(store: WeightStore, model: str, path: Path, *, layout: Layout = "combined") -> Manifest:
    """Bring the ONNX model at `path` into the store: its graph into the skeleton, its tensors into packs.

    Tensors are initializers, also those of subgraphs, and attributes of at least MIN_EXTERNAL_BYTES, from the model
    file or from external data in its folder. Those of a dtype that the store has no name for (4-bit integers,
    strings, ...) stay in the graph and are listed in the component's metadata["inline"].
    Raises FormatError for a damaged model and for external data outside of the folder, WeightsError without `onnx`.
    """
    _onnx()
    proto = _parse(path, _read(path))
    tensors: dict[str, SourceTensor] = {}
    kept = []
    for name, tensor, is_initializer in all_tensors(proto):
        source = tensor_source(path, name, tensor)
        if source is None:
            kept.append(name)
        if source is None or source.nbytes == 0 or (not is_initializer and source.nbytes < MIN_EXTERNAL_BYTES):
            bring_inline(path, name, tensor)
            continue
        tensors[name] = source
        set_location(tensor, name, 0, source.nbytes)
    graph = (_MODEL_FILE, _serialized(path, proto))
    metadata = {_INLINE: json.dumps(kept)}
    return store_program(store, model, str(path), graph, tensors, "onnx", metadata=metadata, layout=layout)


def load_onnx(store: WeightStore, model: str, provider: ExtentProvider | None = None) -> ModelProto:
    """Load the self-contained model. Raises WeightsError when it is no ONNX model or larger than 2 GiB."""
    manifest = store.manifest(model)
    proto, stored = _stored(store, model)
    nbytes = sum(ref.nbytes for _, ref, _ in stored)
    if nbytes + proto.ByteSize() > MAX_PROTOBUF_BYTES:
        raise WeightsError(
            f"{model}: {nbytes} bytes of tensors do not fit into one ONNX file (2 GiB); write it with external data"
        )
    buffers = (provider or LocalExtents(store.packs)).fetch(manifest.extents_of([COMPONENT]))
    for tensor, ref, _ in stored:
        set_raw(tensor, buffers[ref.extent][ref.offset : ref.offset + ref.nbytes].tobytes())
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
            set_location(tensor, data_file.name, offsets[ref.sha256], ref.nbytes)
    if not offsets:
        write_onnx(store, model, target, external=False, provider=provider)
        return
    with published(data_file, end) as partial, partial.open("xb") as file:
        for window in windows(store.manifest(model).extents_of([COMPONENT])):
            buffers = (provider or LocalExtents(store.packs)).fetch(window)
            for tensor, ref, _ in stored:
                if ref.extent in buffers:
                    data = buffers[ref.extent][ref.offset : ref.offset + ref.nbytes]
                    if location_of(tensor).get("location") == data_file.name:
                        file.seek(offsets[ref.sha256])
                        file.write(data.data)
                    else:
                        set_raw(tensor, data.tobytes())
    _write(target, _serialized(target, proto))


def _stored(store: WeightStore, model: str) -> tuple[ModelProto, list[tuple[TensorProto, TensorRef, bool]]]:
    """Return the graph of the skeleton, and its tensors that are in the store."""
    component, path, contents = stored_program(store, model, _MODEL_FILE, "an ONNX model")
    proto, stored = _parse(path, contents), []
    for name, tensor, is_initializer in all_tensors(proto):
        if is_external(tensor):
            ref = component.tensors.get(location_of(tensor).get("location", ""))
            if ref is None:
                raise FormatError(f"{path}: tensor {name!r} refers to {location_of(tensor)}, which the manifest lacks")
            stored.append((tensor, ref, is_initializer))
    return proto, stored


def _read(path: Path) -> bytes:
    try:
        nbytes = path.stat().st_size
        if nbytes > MAX_PROTOBUF_BYTES:
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
    if proto.ByteSize() > MAX_PROTOBUF_BYTES:
        raise WeightsError(f"{path}: the graph without stored tensors takes more than the 2 GiB of an ONNX file")
    return proto.SerializeToString(deterministic=True)


def _write(target: Path, data: bytes) -> None:
    with published(target, len(data)) as partial:
        partial.write_bytes(data)


def _onnx() -> Any:
    try:
        return importlib.import_module("onnx")
    except ImportError:
        raise WeightsError("ONNX models need the onnx package: pip install atelier[onnx]") from None


def _decode_error() -> type[Exception]:
    error: type[Exception] = importlib.import_module("google.protobuf.message").DecodeError
    return error
