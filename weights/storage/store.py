"""The weight store: packs of bytes, one manifest per model, and an index that says which tensor is where.

    store/
      index.sqlite              which extents have a tensor, where, and who uses them (weights/storage/index.py)
      meta.json                 the same for other programs: extent -> pack, offset, checksum, its tensors by sha256
      .lock                     flock: one writer at a time
      .staged-*/                what a writer is about to publish; claimed by it (weights/storage/staging.py)
      packs/<model>_weight_combined, packs/weight_<sha256>, packs/<model>_inline/
      models/<model>/manifest.json
      models/<model>/skeleton-<fingerprint>/  the checkpoint without its weights

Files appear by rename only, synced, and in this order: packs, index, skeleton, manifest. Whatever a crash leaves
behind, everything that a manifest names is there. The manifests are the truth; the rest follows from them: the index
is made again when it is lost, and meta.json is written by `gc`, `repair` and `atelier weights index`, never by a
publish, whose cost must not grow with the store. Between them it lacks what is new, and names nothing that is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic_core import PydanticSerializationError

from weights.formats.encoder_files import has_parts, parts_hash
from weights.formats.source import skeleton_files
from weights.formats.tensors import FileTensor
from weights.memory.host_pool import ByteArray
from weights.platform.durable import make_folder, move, sync_tree
from weights.reading.extents import read_extent
from weights.records.errors import (
    ExtentCorrupt,
    FormatError,
    ModelNotStored,
    StoreError,
    StoreVersionError,
    WeightsError,
    listed,
)
from weights.records.manifest import MAX_MANIFEST_BYTES, Component, ExtentRef, Manifest, TensorRef, read_manifest
from weights.storage.index_files import IndexFiles
from weights.storage.pack_folder import PackFolder
from weights.storage.staging import publish_file, staged_path

__all__ = [
    *("DecodedExtents", "StoredTensor", "WeightStore"),
    *("check_model_name", "manifest_text", "stored_tensor", "stored_tensors"),
]

_NUM_DECODED: Final = 2
_MAX_NAMED: Final = 50  # models in a refusal
ManifestMark = tuple[int, int, int]
_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class WeightStore:
    """A store on a local or shared file system. Opening creates nothing; the first writer does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packs = path / "packs"
        self.models = path / "models"
        self.index_file = path / "index.sqlite"
        self.meta_file = path / "meta.json"
        self.pack_files = PackFolder(path)
        self.index = IndexFiles(path, self)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock, exclusive across processes and nodes. Raises StoreError when read-only."""
        try:
            for folder in (self.packs, self.models):
                make_folder(folder)
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be written: {error.strerror or error}") from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def manifest(self, model: str) -> Manifest:
        """Return the manifest of `model`. Raises ModelNotStored with the known names: that looks at all of them."""
        if manifest := self.find_manifest(model):
            return manifest
        known = listed(self.model_names(), _MAX_NAMED)
        raise ModelNotStored(f"no model {model!r} in {self.path} (stored: {known})")

    def find_manifest(self, model: str) -> Manifest | None:
        """Return the manifest of `model`; None when there is none. Raises WeightsError for one that cannot be read."""
        if not _MODEL_NAME.fullmatch(model):
            return None
        path = self.models / model / "manifest.json"
        try:
            return self._with_parts(read_manifest(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror or error}") from error

    def find_sound_manifest(self, model: str) -> Manifest | None:
        """Return the manifest of `model`; None also for one that is damaged. Raises StoreVersionError."""
        try:
            return self.find_manifest(model)
        except StoreVersionError:
            raise
        except WeightsError:
            return None

    def has_model(self, model: str) -> bool:
        """Return whether there is a manifest of `model`, sound or not."""
        return _MODEL_NAME.fullmatch(model) is not None and (self.models / model / "manifest.json").exists()

    def has_manifest(self, model: str, text: bytes) -> bool:
        """Return False when the manifest of `model` is another one, or none; True also when nobody can say."""
        try:
            return (self.models / model / "manifest.json").read_bytes() == text
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def model_names(self) -> list[str]:
        """Return the names of all models, sorted."""
        return sorted(file.parent.name for file in self.models.glob("*/manifest.json"))

    def manifests(self) -> dict[str, Manifest]:
        """Return all manifests by model. Raises naming the file when one cannot be read."""
        return {model: self.manifest(model) for model in self.model_names()}

    def readable_manifests(self) -> Iterator[Manifest]:
        """Yield the manifests that are sound and of a known version."""
        for model in self.model_names():
            with contextlib.suppress(WeightsError):
                yield self.manifest(model)

    def skeleton(self, manifest: Manifest) -> Path:
        """Return the folder with everything of a model but its weights."""
        return self.models / manifest.skeleton

    def _with_parts(self, manifest: Manifest) -> Manifest:
        """Add the `parts_hash` that older manifests lack, told from the skeleton, which has the same files."""
        root = self.skeleton(manifest)
        lacking = [
            part
            for part in manifest.components.values()
            if part.parts_hash is None and has_parts(manifest.kind, part.library)
        ]
        if not lacking or not root.is_dir():
            return manifest
        files = list(skeleton_files(root))
        found = {
            part.name: part.model_copy(update={"parts_hash": parts_hash(root, part.folder, files)}) for part in lacking
        }
        return manifest.model_copy(update={"components": manifest.components | found})

    @contextlib.contextmanager
    def staged(self, kind: str, folder: Path | None = None) -> Iterator[Path]:
        """Yield a private path in `folder` or the store's file system, to be moved into place; then removed."""
        with staged_path(folder or self.path, kind) as path:
            yield path

    def publish_model(self, manifest: Manifest, text: bytes, skeleton: Path) -> None:
        """Put the staged `skeleton` and the manifest, `text`, in place, replacing an earlier version of the model.

        Skeleton folders carry the fingerprint in their name, so that a replica which still runs the version
        before keeps its files. One that is there is complete, and stays: it came by rename as well.
        """
        target = self.models / manifest.skeleton
        make_folder(target.parent)
        if not target.exists():
            sync_tree(skeleton)
            move(skeleton, target)
        self.replace_manifest(manifest.model, text)

    def replace_manifest(self, model: str, text: bytes) -> None:
        """Put the manifest `text` of a model in place, whose packs and skeleton are there."""
        publish_file(self.path, self.models / model / "manifest.json", text)


def manifest_text(manifest: Manifest) -> bytes:
    """Return the manifest as stored. Raises StoreError if it could not be read again: too large, or no text."""
    try:
        text = manifest.model_dump_json(indent=1).encode()
    except (PydanticSerializationError, UnicodeError):
        raise StoreError(f"model {manifest.model!r}: a name or a metadata value in it is no valid text") from None
    if len(text) > MAX_MANIFEST_BYTES:
        num_tensors = sum(len(component.tensors) for component in manifest.components.values())
        raise StoreError(
            f"model {manifest.model!r}: its manifest takes {len(text)} bytes for {num_tensors} tensors, "
            f"{MAX_MANIFEST_BYTES} at most can be read; nothing was published"
        )
    return text


def check_model_name(model: str) -> None:
    """Raise StoreError unless the name is a plain file name."""
    if not _MODEL_NAME.fullmatch(model):
        raise StoreError(f"model name {model!r}: expected letters, digits, '.', '_' and '-', 128 at most")


def manifest_mark(models: Path, model: str) -> ManifestMark | None:
    """Return modification time (ns), size and inode of a model's manifest file, None without one. `models`: its folder.

    `convert` and `repair` move a version's bytes and leave its fingerprint; this tells.
    """
    try:
        found = (models / model / "manifest.json").stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class DecodedExtents:
    """Extents read whole, deltas decoded; the latest ones stay, since tensors are read in order. Thread-safe."""

    def __init__(self, packs: Path) -> None:
        self._packs = packs
        self._lock = threading.Lock()  # held while one is decoded: the others mostly want the same one
        self._latest: dict[ExtentRef, ByteArray] = {}

    def bytes_of(self, extent: ExtentRef) -> ByteArray:
        """Return the plain bytes. Raises what `read_extent` does."""
        with self._lock:
            if extent not in self._latest:
                while len(self._latest) >= _NUM_DECODED:
                    del self._latest[next(iter(self._latest))]
                self._latest[extent] = read_extent(self._packs, extent)
            return self._latest[extent]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a pack; a SourceTensor like those of checkpoints.

    Of an extent that is stored as a delta, `decoded` gives the plain bytes, and `offset` is one in these.
    """

    name: str
    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    decoded: Callable[[], ByteArray] | None = None
    on_read: Callable[[int], None] | None = field(default=None, compare=False)  # gets the bytes of each read

    def read(self) -> bytes | memoryview:
        """Return the bytes. Raises ExtentCorrupt when they are missing or not the ones that were stored."""
        data: bytes | memoryview
        try:
            if self.decoded:
                data = self.decoded()[self.offset : self.offset + self.nbytes].data
            else:
                data = FileTensor(self.file, self.offset, self.nbytes, self.dtype, self.shape).read()
        except (FormatError, ExtentCorrupt) as error:
            raise ExtentCorrupt(f"tensor {self.name}: {error}") from error
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise ExtentCorrupt(
                f"{self.file}: bytes {self.offset}..{self.offset + self.nbytes} are not those of tensor {self.name}"
            )
        if self.on_read:
            self.on_read(self.nbytes)
        return data


def stored_tensors(
    store: WeightStore, manifest: Manifest, component: Component, on_read: Callable[[int], None] | None = None
) -> Mapping[str, StoredTensor]:
    """Return the component's tensors by name. Raises StoreError for a pack that leads out of the store."""
    decoded = DecodedExtents(store.packs)
    packs = {
        id_: store.pack_files.path_of(manifest.extents[id_].pack)
        for id_ in {r.extent for r in component.tensors.values()}
    }
    return {
        name: stored_tensor(
            packs[ref.extent], manifest.extents[ref.extent], f"{component.name}.{name}", ref, decoded, on_read
        )
        for name, ref in component.tensors.items()
    }


def stored_tensor(
    file: Path,
    extent: ExtentRef,
    name: str,
    ref: TensorRef,
    decoded: DecodedExtents,
    on_read: Callable[[int], None] | None = None,
) -> StoredTensor:
    """Return a tensor, to be called `name`, of an extent that is in `file`."""
    return StoredTensor(
        name=name,
        file=file,
        offset=ref.offset + (extent.offset if extent.has_plain else 0),
        nbytes=ref.nbytes,
        dtype=ref.dtype,
        shape=ref.shape,
        sha256=ref.sha256,
        decoded=None if extent.has_plain else functools.partial(decoded.bytes_of, extent),
        on_read=on_read,
    )
