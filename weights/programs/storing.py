"""Storage that all programs share: the graph as the skeleton's one file, the constants as the one component."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from weights.formats.tensors import SourceTensor
from weights.loading.loader import load_model
from weights.loading.provider import ExtentProvider, LocalExtents
from weights.platform.durable import disk_errors, replaced
from weights.programs.signature import COMPONENT
from weights.records.errors import FormatError, StoreError, WeightsError
from weights.records.manifest import Component, Layout, Manifest, WeightFormat
from weights.storage.hashing import hash_tensors
from weights.storage.publishing import Draft, DraftComponent, publish_draft
from weights.storage.store import WeightStore, check_model_name


@dataclass(frozen=True, slots=True)
class MemoryTensor:
    """A `SourceTensor` whose bytes are in memory, or come from a file by a way of their own."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def read(self) -> memoryview:
        return self.data


def store_program(
    store: WeightStore,
    model: str,
    source: str,
    graph: tuple[str, bytes],
    tensors: Mapping[str, SourceTensor],
    format_: WeightFormat,
    *,
    metadata: dict[str, str],
    layout: Layout,
) -> Manifest:
    """Store a "program": `graph` (file name, contents) and `tensors`, deduplicated with the whole store.

    `config_hash` of its component is the sha256 of the graph. Raises StoreError, and then nothing is published.
    """
    check_model_name(model)
    file, contents = graph
    hashed = hash_tensors({COMPONENT: tensors})[COMPONENT]
    record = Component(
        name=COMPONENT,
        library="torch" if format_ == "exported" else "onnx",
        class_name=None,
        folder=".",
        tensors={},
        config_hash=hashlib.sha256(contents).hexdigest(),
        metadata=metadata,
        format=format_,
        files=(file,),
    )
    constants = [(name, tensor.dtype, tensor.shape, tensor.sha256) for name, tensor in hashed.items()]
    identity = json.dumps([record.library, record.config_hash, metadata, constants], sort_keys=True)
    mark = hashlib.sha256(identity.encode()).hexdigest()[:16]

    def write_skeleton(target: Path) -> None:
        target.mkdir()
        (target / file).write_bytes(contents)

    def known() -> Manifest | None:
        manifest = store.find_sound_manifest(model)  # a damaged one is to be written
        if manifest is None or (manifest.fingerprint, manifest.layout) != (mark, layout):
            return None
        return manifest if store.pack_files.has_all(manifest) else None

    draft = Draft(
        model=model,
        kind="program",
        class_name=None,
        source=source,
        fingerprint=mark,
        skeleton=f"{model}/skeleton-{mark}",
        components=[DraftComponent(record, hashed)],
        write_skeleton=write_skeleton,
        recheck=known,
    )
    return publish_draft(store, draft, layout)


def stored_program(store: WeightStore, model: str, file: str, format_name: str) -> tuple[Component, Path, bytes]:
    """Return a program's component, its graph file, and the file's contents, whose sha256 was checked.

    Raises WeightsError when the model is no such program, StoreError when the graph is another one than was stored.
    """
    manifest = store.manifest(model)
    component = manifest.components.get(COMPONENT)
    path = store.skeleton(manifest) / file
    if manifest.kind != "program" or component is None or not path.is_file():
        raise WeightsError(f"{model} is a model of kind {manifest.kind!r} without a {file}, not {format_name}")
    return component, path, checked_graph(component, path)


def checked_graph(component: Component, path: Path) -> bytes:
    """Return the contents of a program's graph file. Raises StoreError when they are not those that were stored."""
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from None
    found = hashlib.sha256(contents).hexdigest()
    if found != component.config_hash:
        raise StoreError(f"{path}: has sha256 {found}, the manifest says {component.config_hash}")
    return contents


def noted_names(component: Component, key: str) -> set[str]:
    """Return the names that the component's metadata lists under `key`. Raises FormatError when it does not."""
    try:
        names = json.loads(component.metadata[key])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("not a list of names")
    except (KeyError, ValueError, RecursionError) as error:
        raise FormatError(f"metadata of component {component.name}: {key!r}: {error}") from None
    return set(names)


def program_tensors(store: WeightStore, model: str, provider: ExtentProvider | None) -> dict[str, torch.Tensor]:
    """Load a program's constants by name, as views of what `provider` gives (None: a private read)."""
    manifest = store.manifest(model)
    return load_model(manifest, provider or LocalExtents(store.packs), [COMPONENT])[COMPONENT]


@contextlib.contextmanager
def published(target: Path, nbytes: int) -> Iterator[Path]:
    """Yield a path beside `target` that becomes it at the end, or is removed. Raises StoreError."""
    with disk_errors(target.parent, nbytes), replaced(target) as partial:
        yield partial
