"""The index of a store and meta.json, which follow from its manifests."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from weights.platform.durable import remove_path, sync
from weights.records.errors import StoreVersionError
from weights.records.manifest import Manifest
from weights.storage.index import STORE_VERSION, IndexDamaged, StoreIndex, StoreMeta, meta_of, remove_index
from weights.storage.staging import publish_file

Result = TypeVar("Result")


class Manifests(Protocol):
    """Reads the manifests of a store."""

    def readable_manifests(self) -> Iterator[Manifest]:
        """Yield the manifests that are sound and of a known version."""
        ...


class IndexFiles:
    """The index and meta.json of the store in a folder."""

    def __init__(self, path: Path, manifests: Manifests) -> None:
        self._path = path
        self._manifests = manifests
        self._index_file = path / "index.sqlite"
        self._meta_file = path / "meta.json"

    def run(self, action: Callable[[StoreIndex], Result]) -> Result:
        """Run `action` on the index. HAZARD: only under the lock, and `action` may be called twice.

        An index that is lost or damaged is made again from the manifests that can be read. Raises StoreVersionError
        when the store is too new, StoreError when the disk refuses.
        """
        try:
            return self._run(action)
        except IndexDamaged:
            remove_index(self._index_file)
            return self._run(action)

    def read_meta(self) -> StoreMeta:
        """Return the present content of meta.json, from the manifests when there is no sound index. Writes nothing.

        Takes memory and time that grow with the store. Raises StoreVersionError when the store is too new.
        """
        found = self.read(StoreIndex.everything)
        return meta_of(self._manifests.readable_manifests()) if found is None else found

    def read(self, action: Callable[[StoreIndex], Result]) -> Result | None:
        """Return the result of `action` on the index; None when there is no sound one. Writes nothing.

        Raises StoreVersionError when the store is too new.
        """
        try:
            with StoreIndex.opened(self._index_file) as index:
                return action(index)
        except IndexDamaged:
            self._refuse_newer_meta()
            return None

    def remove(self) -> None:
        """Delete index and meta.json, which follow from the manifests. Under the lock."""
        remove_index(self._index_file)
        remove_path(self._meta_file)
        sync(self._path)

    def check(self) -> None:
        """Raise IndexDamaged or StoreVersionError when the index exists and cannot be used."""
        if self._index_file.exists():
            with StoreIndex.opened(self._index_file) as index:
                index.check()

    def write_meta(self) -> None:
        """Make meta.json say what the index says, if it does not. Under the lock."""
        text = self.run(lambda index: index.everything()).model_dump_json()
        with contextlib.suppress(FileNotFoundError):
            if self._meta_file.read_bytes() == text.encode():
                return
        publish_file(self._path, self._meta_file, text.encode())

    def _run(self, action: Callable[[StoreIndex], Result]) -> Result:
        if not self._index_file.exists():
            self._refuse_newer_meta()
        with StoreIndex.opened(self._index_file, self._manifests.readable_manifests) as index:
            return action(index)

    def _refuse_newer_meta(self) -> None:
        """Raise StoreVersionError for a newer store: a version to come may have no index again."""
        try:
            content = json.loads(self._meta_file.read_bytes())
        except (OSError, ValueError, RecursionError):  # none, or damaged: it follows from the manifests
            return
        version = content.get("version", STORE_VERSION) if isinstance(content, dict) else STORE_VERSION
        if not isinstance(version, int) or version > STORE_VERSION:
            raise StoreVersionError(
                f"{self._meta_file}: store version {version!r}, this library reads version {STORE_VERSION}"
            )
