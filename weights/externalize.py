"""A checkpoint folder -> manifest + pack, in the `combined` layout: one pack per model, equal tensors stored once.

Tensors are 512-byte aligned (the external-weight file format of Ascend GE), extents 4 KiB aligned for direct I/O.
Each component begins an extent of its own, so that pipelines that share a component share whole extents.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import xxhash

from weights.dtypes import cast, cast_target
from weights.errors import FormatError
from weights.formats.checkpoint import Checkpoint, SourceComponent, read_checkpoint
from weights.manifest import (
    EXTENT_ALIGNMENT,
    TENSOR_ALIGNMENT,
    Component,
    ExtentRef,
    Manifest,
    TensorRef,
    extent_id,
)
from weights.store import StoreMeta, TensorLocation, WeightStore, fingerprint

MAX_EXTENT_BYTES = 256 * 2**20


def externalize(
    store: WeightStore, model: str, source: Path, *, component: str | None = None, dtype: str = "auto"
) -> Manifest:
    """Bring the checkpoint at `source` into the store as `model`, or return what is there when it is unchanged.

    Raises FormatError (names file and tensor) and leaves the store as it was.
    """
    if not source.is_dir():
        raise FormatError(f"{source}: no such folder")
    mark = fingerprint(source, {"component": component, "dtype": dtype})
    with store.locked():
        manifest_file = store.models / model / "manifest.json"
        if manifest_file.exists():
            known = store.manifest(model)
            if known.fingerprint == mark and store.has_packs(known):
                return known
        checkpoint = read_checkpoint(source, component=component)
        return _write(store, model, checkpoint, dtype, mark)


def _write(store: WeightStore, model: str, checkpoint: Checkpoint, dtype: str, mark: str) -> Manifest:
    meta = store.read_meta()
    store.forget_lost_packs(meta)
    num_known = len(meta.extents)
    with store.staged("pack") as pack_file, store.staged("skeleton") as skeleton:
        with pack_file.open("wb") as file:
            pack = _PackWriter(file, store.new_pack_name(model), meta)
            components = {
                part.name: _add_component(pack, checkpoint.path, part, dtype) for part in checkpoint.components
            }
            file.flush()
            os.fsync(file.fileno())
        _copy_skeleton(checkpoint, skeleton)
        used = {ref.extent for part in components.values() for ref in part.tensors.values()}
        manifest = Manifest(
            model=model,
            kind=checkpoint.kind,
            class_name=checkpoint.class_name,
            skeleton=f"{model}/skeleton-{mark}",
            source=str(checkpoint.path),
            fingerprint=mark,
            components=components,
            extents={id_: meta.extents[id_] for id_ in sorted(used)},
        )
        if len(meta.extents) > num_known:
            pack_file.rename(store.packs / pack.name)
            store.write_meta(meta)
        store.publish_model(manifest, skeleton)
    return manifest


def _add_component(pack: _PackWriter, root: Path, part: SourceComponent, dtype: str) -> Component:
    refs: dict[str, TensorRef] = {}
    with pack.component():
        for name, entry in part.tensors.items():
            target = cast_target(entry.dtype, dtype)
            data = cast(entry.read(), entry.dtype, target)
            refs[name] = pack.add(data, target, entry.shape)
    return Component(
        name=part.name,
        library=part.library,
        class_name=part.class_name,
        folder=part.folder,
        # An extent's id is known when it is complete, so references are resolved at the end of the component.
        tensors={name: pack.resolve(ref) for name, ref in refs.items()},
        config_hash=_hash_file(root / part.folder / "config.json"),
        metadata=part.metadata,
        format=part.format,
        files=part.files,
    )


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


@dataclass
class _OpenExtent:
    start: int
    hashes: list[str] = field(default_factory=list)
    locations: dict[str, tuple[int, int]] = field(default_factory=dict)


class _PackWriter:
    """Appends tensors that the store does not have yet; hands out references to those that it has."""

    def __init__(self, file: BinaryIO, name: str, meta: StoreMeta) -> None:
        self.name = name
        self._file = file
        self._meta = meta
        self._extent: _OpenExtent | None = None
        self._digest = xxhash.xxh3_128()

    @contextlib.contextmanager
    def component(self) -> Iterator[None]:
        yield
        self._close_extent()

    def add(self, data: bytes | memoryview, dtype: str, shape: tuple[int, ...]) -> TensorRef:
        sha256 = hashlib.sha256(data).hexdigest()
        is_stored = sha256 in self._meta.tensors or (self._extent and sha256 in self._extent.locations)
        if not is_stored:
            self._append(sha256, data)
        return TensorRef(extent="", offset=0, nbytes=len(data), dtype=dtype, shape=shape, sha256=sha256)

    def resolve(self, ref: TensorRef) -> TensorRef:
        location = self._meta.tensors[ref.sha256]
        return ref.model_copy(update={"extent": location.extent, "offset": location.offset})

    def _append(self, sha256: str, data: bytes | memoryview) -> None:
        position = self._file.tell()
        position += -position % TENSOR_ALIGNMENT
        if self._extent and position + len(data) - self._extent.start > MAX_EXTENT_BYTES:
            self._close_extent()
        if self._extent is None:
            self._pad(EXTENT_ALIGNMENT, in_extent=False)
            self._extent = _OpenExtent(self._file.tell())
            self._digest.reset()
        else:
            self._pad(TENSOR_ALIGNMENT, in_extent=True)
        self._extent.hashes.append(sha256)
        self._extent.locations[sha256] = (self._file.tell() - self._extent.start, len(data))
        self._file.write(data)
        self._digest.update(data)

    def _pad(self, alignment: int, *, in_extent: bool) -> None:
        padding = bytes(-self._file.tell() % alignment)
        self._file.write(padding)
        if in_extent:
            self._digest.update(padding)

    def _close_extent(self) -> None:
        if self._extent is None:
            return
        extent, self._extent = self._extent, None
        id_ = extent_id(extent.hashes)
        self._meta.extents[id_] = ExtentRef(
            id=id_,
            pack=self.name,
            offset=extent.start,
            nbytes=self._file.tell() - extent.start,
            checksum=self._digest.hexdigest(),
        )
        for sha256, (offset, nbytes) in extent.locations.items():
            self._meta.tensors[sha256] = TensorLocation(extent=id_, offset=offset, nbytes=nbytes)


def _copy_skeleton(checkpoint: Checkpoint, target: Path) -> None:
    target.mkdir()
    for file in checkpoint.skeleton_files():
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.path / file, target / file)
