"""Weight files in their stock format and under their stock names, written with one tensor in memory at a time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from weights.formats.folder import read_json
from weights.formats.gguf import encode_gguf_header, read_gguf, write_gguf
from weights.formats.kuiper import parse_kuiper, read_kuiper, write_kuiper
from weights.formats.safetensors import read_header, write_safetensors
from weights.formats.tensors import FileTensor, ReadableTensor
from weights.records.errors import FormatError, StoreError
from weights.records.manifest import Component, WeightFormat

WRITABLE_FORMATS = ("safetensors", "gguf", "kuiper")
_INDEX_FILES = "*.safetensors.index*.json"  # with a variant: model.safetensors.index.fp16.json


class _Header(Protocol):
    @property
    def tensors(self) -> Mapping[str, FileTensor]: ...


def writable(component: Component) -> Component:
    """Return the component as it can be written: what was a PyTorch pickle, as safetensors."""
    return component if component.format in WRITABLE_FORMATS else as_safetensors(component)


def as_safetensors(component: Component) -> Component:
    """Return the component with its weights in one safetensors file of the name its library looks for."""
    if component.folder == "." and len(component.files) == 1 and component.library not in ("diffusers", "transformers"):
        file = str(PurePosixPath(component.files[0]).with_suffix(".safetensors"))
    else:
        file = "diffusion_pytorch_model.safetensors" if component.library == "diffusers" else "model.safetensors"
    metadata = {"format": "pt"} | component.metadata
    return component.model_copy(update={"format": "safetensors", "files": (file,), "metadata": metadata})


def write_files(
    folder: Path, skeleton: Path, component: Component, tensors: Mapping[str, ReadableTensor]
) -> dict[str, list[str]]:
    """Write `component.files` into `folder` from `tensors`; returns which tensors are in which file.

    `skeleton` is the component's folder with the index of its shards, or the header of its file. Not synced.
    Raises StoreError for a format that cannot be written, FormatError when skeleton and tensors contradict.
    """
    contents = _contents(skeleton, component, tensors)
    for file, names in contents.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        header = skeleton / f"{file}.header"
        match component.format:
            case "safetensors":
                entries = {name: (tensors[name].dtype, tensors[name].shape, tensors[name].read) for name in names}
                write_safetensors(folder / file, entries, component.metadata)
            case "gguf":
                data = _gguf_header(header, component, {name: tensors[name] for name in names})
                write_gguf(folder / file, data, [(tensors[n].nbytes, tensors[n].read) for n in names])
            case "kuiper":
                readers: dict[str, Callable[[], bytes | memoryview]] = {name: tensors[name].read for name in names}
                write_kuiper(folder / file, parse_kuiper(_header(header)), readers)
            case other:
                raise StoreError(f"component {component.name!r}: {other} files cannot be written")
    return contents


def tensor_offsets(path: Path, file_format: WeightFormat) -> dict[str, int]:
    """Return the first byte of each tensor in a file of a writable format, by name."""
    readers: dict[str, Callable[[Path], _Header]] = {"gguf": read_gguf, "kuiper": read_kuiper}
    header = readers.get(file_format, read_header)(path)
    return {name: tensor.offset for name, tensor in header.tensors.items()}


def rewrite_index(folder: Path, component: Component, contents: Mapping[str, list[str]]) -> None:
    """Make the index of the shards in `folder`, if there is one, say what they hold."""
    for path in folder.glob(_INDEX_FILES):
        index = _read_index(path)
        metadata = index.get("metadata")
        index["metadata"] = (metadata if isinstance(metadata, dict) else {}) | {"total_size": component.nbytes}
        index["weight_map"] = {name: file for file, names in contents.items() for name in names}
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _read_index(path: Path) -> dict[str, Any]:
    """Read the index of a sharded checkpoint. Raises FormatError when it is not one."""
    index = read_json(path)
    if not isinstance(index.get("weight_map"), dict):
        raise FormatError(f"{path}: no weight_map")
    return index


def _contents(skeleton: Path, component: Component, tensors: Mapping[str, ReadableTensor]) -> dict[str, list[str]]:
    """Return names of tensors by file. What the index does not mention goes into the first shard."""
    if len(component.files) == 1:
        return {component.files[0]: list(tensors)}
    contents: dict[str, list[str]] = {file: [] for file in component.files}
    if not contents:
        raise StoreError(f"component {component.name!r}: its manifest names no weight files to write")
    if component.format == "gguf":  # each file's header says how many tensors it has; they are in order
        names = iter(tensors)
        return {file: list(itertools.islice(names, _num_tensors(skeleton, file))) for file in contents}
    weight_map: dict[str, Any] = {}
    for path in skeleton.glob(_INDEX_FILES):
        weight_map |= _read_index(path)["weight_map"]
    for name in tensors:
        file = weight_map.get(name)
        contents.get(file if isinstance(file, str) else "", contents[component.files[0]]).append(name)
    return contents


def _gguf_header(path: Path, component: Component, tensors: Mapping[str, ReadableTensor]) -> bytes:
    """Return the header that the file had; a denoiser has names and types of its own, and gets another one."""
    if component.library != "diffusers":
        return _header(path)
    forms = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return encode_gguf_header(component.metadata, forms)


def _num_tensors(skeleton: Path, file: str) -> int:
    return int.from_bytes(_header(skeleton / f"{file}.header")[8:16], "little")


def _header(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}; a weight file cannot be written without it") from None
