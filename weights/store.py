"""The weight store: packs of bytes, one manifest per model, and meta.json that says which tensor is where.

    store/
      meta.json                 sha256 of a tensor -> extent, offset; extent -> pack, offset, checksum
      .lock                     flock: one writer at a time
      packs/<model>_weight_combined
      models/<model>/manifest.json
      models/<model>/skeleton/  the checkpoint without its weights

Files appear by rename only, packs before meta.json before manifests: a crash leaves nothing half published.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from weights.errors import ModelNotStored, StoreError, StoreVersionError
from weights.manifest import ExtentRef, Manifest, read_manifest

STORE_VERSION: Final = 1


class TensorLocation(BaseModel):
    """Where the bytes of a tensor are."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    extent: str
    offset: int
    nbytes: int


class StoreMeta(BaseModel):
    """Contents of meta.json. Mutable: a writer adds to it under the lock and publishes it whole."""

    model_config = ConfigDict(extra="forbid")
    version: Literal[1] = STORE_VERSION
    tensors: dict[str, TensorLocation] = {}
    extents: dict[str, ExtentRef] = {}


class WeightStore:
    """A store on a local or shared file system. Opening creates nothing; the first writer does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packs = path / "packs"
        self.models = path / "models"
        self._meta_file = path / "meta.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclusive among all processes of all nodes that see this store."""
        for folder in (self.packs, self.models):
            folder.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def read_meta(self) -> StoreMeta:
        """Raises StoreVersionError or StoreError when meta.json is too new or damaged."""
        try:
            return StoreMeta.model_validate_json(self._meta_file.read_bytes())
        except FileNotFoundError:
            return StoreMeta()
        except ValidationError as error:
            first = error.errors()[0]
            if first["loc"] == ("version",):
                raise StoreVersionError(
                    f"{self._meta_file}: store version {first['input']!r}, this library reads version {STORE_VERSION}"
                ) from None
            raise StoreError(f"{self._meta_file}: damaged: {first['msg']}") from None

    def forget_lost_packs(self, meta: StoreMeta) -> None:
        """Take out of `meta` what lived in packs that are gone, so that nothing new refers to it."""
        lost = {extent.id for extent in meta.extents.values() if not (self.packs / extent.pack).exists()}
        meta.extents = {id_: extent for id_, extent in meta.extents.items() if id_ not in lost}
        meta.tensors = {hash_: place for hash_, place in meta.tensors.items() if place.extent not in lost}

    def has_packs(self, manifest: Manifest) -> bool:
        """Whether every pack that the model's bytes are in exists."""
        return all((self.packs / pack).exists() for pack in {extent.pack for extent in manifest.extents.values()})

    def write_meta(self, meta: StoreMeta) -> None:
        self._publish_text(self._meta_file, meta.model_dump_json())

    def manifest(self, model: str) -> Manifest:
        """Raises ModelNotStored with the known names."""
        try:
            return read_manifest(self.models / model / "manifest.json")
        except FileNotFoundError:
            known = ", ".join(self.model_names()) or "none"
            raise ModelNotStored(f"no model {model!r} in {self.path} (stored: {known})") from None

    def model_names(self) -> list[str]:
        return sorted(file.parent.name for file in self.models.glob("*/manifest.json"))

    def skeleton(self, manifest: Manifest) -> Path:
        """The folder with everything of a model but its weights."""
        return self.models / manifest.skeleton

    def new_pack_name(self, model: str) -> str:
        """`<model>_weight_combined`, or a numbered one: a published pack is never overwritten."""
        name, number = f"{model}_weight_combined", 1
        while (self.packs / name).exists():
            number += 1
            name = f"{model}_weight_combined.{number}"
        return name

    @contextlib.contextmanager
    def staged(self, kind: str) -> Iterator[Path]:
        """A private path on the store's own file system, to be renamed into place; gone on failure."""
        path = self.path / f".staged-{kind}-{uuid.uuid4().hex}"
        try:
            yield path
        finally:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def publish_model(self, manifest: Manifest, skeleton: Path) -> None:
        """Put the staged `skeleton` and the manifest in place, replacing an earlier version of the model.

        Skeleton folders carry the fingerprint in their name, so that a replica which still runs the version
        before keeps its files.
        """
        target = self.models / manifest.skeleton
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            shutil.rmtree(target)
        skeleton.rename(target)
        self._publish_text(self.models / manifest.model / "manifest.json", manifest.model_dump_json(indent=1))

    def _publish_text(self, target: Path, text: str) -> None:
        with self.staged("json") as path:
            with path.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            path.replace(target)


def fingerprint(path: Path, settings: dict[str, str | None]) -> str:
    """Changes when a file of the checkpoint does (names, sizes, modification times) or the settings do."""
    files = {
        str(file.relative_to(path)): (file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
    return hashlib.sha256(json.dumps([files, settings]).encode()).hexdigest()[:16]
