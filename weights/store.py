"""The weight store: packs of bytes, one manifest per model, and meta.json that says which tensor is where.

    store/
      meta.json                 extent -> pack, offset, checksum, its tensors by sha256
      .lock                     flock: one writer at a time
      .staged-*/                what a writer is about to publish; claimed by it (weights/storage/staging.py)
      packs/<model>_weight_combined, packs/weight_<sha256>, packs/<model>_inline/
      models/<model>/manifest.json
      models/<model>/skeleton-<fingerprint>/  the checkpoint without its weights

Files appear by rename only, synced, and in this order: packs, meta.json, skeleton, manifest. Whatever a crash leaves
behind, everything that a manifest names is there. The manifests are the truth; the rest follows from them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from weights.errors import ModelNotStored, StoreError, StoreVersionError
from weights.formats.checkpoint import skeleton_files
from weights.formats.encoder_files import has_parts, parts_hash
from weights.manifest import ExtentRef, Manifest, read_manifest
from weights.reading.blocks import resolve_pack
from weights.storage.durable import copy_tree, make_folder, move, remove, sync, sync_tree
from weights.storage.meta import STORE_VERSION, StoreMeta, meta_of
from weights.storage.staging import claimed_folder

STAGED: Final = ".staged-*"
_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class WeightStore:
    """A store on a local or shared file system. Opening creates nothing; the first writer does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packs = path / "packs"
        self.models = path / "models"
        self._meta_file = path / "meta.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclusive among all processes of all nodes that see this store. Raises StoreError when it is read-only."""
        try:
            for folder in (self.packs, self.models):
                make_folder(folder)
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be written: {error.strerror or error}") from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def read_meta(self) -> StoreMeta:
        """Raises StoreVersionError or StoreError when meta.json is too new or damaged."""
        try:
            return StoreMeta.model_validate_json(self._meta_file.read_bytes())
        except FileNotFoundError:
            return StoreMeta()
        except OSError as error:
            raise StoreError(f"{self._meta_file}: {error.strerror or error}") from error
        except ValidationError as error:
            first = next((e for e in error.errors() if e["loc"] == ("version",)), error.errors()[0])
            if first["loc"] != ("version",):
                raise StoreError(f"{self._meta_file}: damaged: {first['msg']}; `gc` makes it again") from None
            if first["input"] == 1:  # another encoding of what the manifests say
                return meta_of(self.manifests().values())
            raise StoreVersionError(
                f"{self._meta_file}: store version {first['input']!r}, this library reads version {STORE_VERSION}"
            ) from None

    def write_meta(self, meta: StoreMeta) -> None:
        self._publish_text(self._meta_file, meta.model_dump_json())

    def pack_file(self, pack: str) -> Path:
        """Where a pack is. Raises StoreError when symlinks lead out of the store."""
        return resolve_pack(self.packs, pack)

    def holds(self, extent: ExtentRef) -> bool:
        """Whether the extent's pack is there and long enough. Its bytes are not read."""
        try:
            return self.pack_file(extent.pack).stat().st_size >= extent.offset + extent.nbytes
        except (OSError, StoreError):
            return False

    def has_packs(self, manifest: Manifest) -> bool:
        """Whether everything that the model's bytes are in exists."""
        return all(self.holds(extent) for extent in manifest.extents.values())

    def forget_lost_packs(self, meta: StoreMeta) -> None:
        """Take out of `meta` what lived in packs that are gone, so that nothing new refers to it."""
        meta.keep_extents(lambda id_: self.holds(meta.extent(id_)))

    def manifest(self, model: str) -> Manifest:
        """Raises ModelNotStored with the known names."""
        if _MODEL_NAME.fullmatch(model):
            path = self.models / model / "manifest.json"
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                try:
                    return self._with_parts(read_manifest(path))
                except (IsADirectoryError, PermissionError) as error:
                    raise StoreError(f"{path}: {error.strerror}") from error
        known = ", ".join(self.model_names()) or "none"
        raise ModelNotStored(f"no model {model!r} in {self.path} (stored: {known})")

    def model_names(self) -> list[str]:
        return sorted(file.parent.name for file in self.models.glob("*/manifest.json"))

    def manifests(self) -> dict[str, Manifest]:
        """All of them, by model. Raises naming the file when one cannot be read."""
        return {model: self.manifest(model) for model in self.model_names()}

    def skeleton(self, manifest: Manifest) -> Path:
        """The folder with everything of a model but its weights."""
        return self.models / manifest.skeleton

    def new_pack_name(self, stem: str) -> str:
        """`stem`, or a numbered one: a published pack is never overwritten."""
        name, number = stem, 1
        while os.path.lexists(self.packs / name):
            number += 1
            name = f"{stem}.{number}"
        return name

    def _with_parts(self, manifest: Manifest) -> Manifest:
        """A manifest of before has no `parts_hash`: it is told from the skeleton, which has the same files."""
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
        """A private path, in `folder` or on the store's own file system, to be moved into place; gone at the end."""
        with claimed_folder((folder or self.path) / STAGED.replace("*", uuid.uuid4().hex)) as claim:
            yield claim / kind

    def add_packs(self, staged: Mapping[str, Path]) -> None:
        """Move staged files or folders, synced, to packs/, by name. From another file system they are copied first."""
        with contextlib.ExitStack() as copies:
            for name, path in staged.items():
                try:
                    path.replace(self.packs / name)
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
                    copy = copies.enter_context(self.staged("pack"))
                    copy_tree(path, copy)
                    sync_tree(copy)
                    copy.replace(self.packs / name)
        sync(self.packs)

    def remove_packs(self, names: Iterable[str]) -> None:
        """Delete files or folders of packs/; symlinks are not followed."""
        for name in names:
            remove(self.packs / name)
        sync(self.packs)

    def publish_model(self, manifest: Manifest, skeleton: Path) -> None:
        """Put the staged `skeleton` and the manifest in place, replacing an earlier version of the model.

        Skeleton folders carry the fingerprint in their name, so that a replica which still runs the version
        before keeps its files. One that is there is complete, and stays: it came by rename as well.
        """
        target = self.models / manifest.skeleton
        make_folder(target.parent)
        if not target.exists():
            sync_tree(skeleton)
            move(skeleton, target)
        self._publish_text(self.models / manifest.model / "manifest.json", manifest.model_dump_json(indent=1))

    def _publish_text(self, target: Path, text: str) -> None:
        with self.staged("json") as path:
            path.write_text(text, encoding="utf-8")
            sync(path)
            move(path, target)


def check_model_name(model: str) -> None:
    """Raises StoreError for what would not be a plain file name."""
    if not _MODEL_NAME.fullmatch(model):
        raise StoreError(f"model name {model!r}: expected letters, digits, '.', '_' and '-', 128 at most")
