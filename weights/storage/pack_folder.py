"""The folder of a store's packs."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from weights.platform.durable import copy_tree, remove_path, sync, sync_tree
from weights.reading.blocks import resolve_pack
from weights.records.errors import StoreError
from weights.records.manifest import ExtentRef, Manifest
from weights.storage.staging import staged_path


class PackFolder:
    """The packs of a store by name. A published one never changes, and is never overwritten.

    Copies from another file system are made beneath `store`, the folder that this one is in.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._packs = store / "packs"

    def path_of(self, pack: str) -> Path:
        """Return the path of a pack. Raises StoreError when symlinks lead out of the store."""
        return resolve_pack(self._packs, pack)

    def holds(self, extent: ExtentRef) -> bool:
        """Return True when the packs of the extent, its delta and its bases exist and are long enough.

        Their bytes are not read.
        """
        try:
            return all(self.path_of(run.pack).stat().st_size >= run.offset + run.nbytes for run in extent.runs())
        except (OSError, StoreError):
            return False

    def has_all(self, manifest: Manifest) -> bool:
        """Return True when everything that the model's bytes are in exists."""
        return all(self.holds(extent) for extent in manifest.extents.values())

    def new_name(self, stem: str) -> str:
        """Return `stem`, or a numbered one: a published pack is never overwritten."""
        name, number = stem, 1
        while os.path.lexists(self._packs / name):
            number += 1
            name = f"{stem}.{number}"
        return name

    def add(self, staged: Mapping[str, Path]) -> None:
        """Move staged files or folders, synced, to packs/, by name. From another file system they are copied first."""
        with contextlib.ExitStack() as copies:
            for name, path in staged.items():
                try:
                    path.replace(self._packs / name)
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
                    copy = copies.enter_context(staged_path(self._store, "pack"))
                    copy_tree(path, copy)
                    sync_tree(copy)
                    copy.replace(self._packs / name)
        sync(self._packs)

    def remove(self, names: Iterable[str]) -> None:
        """Delete files or folders of packs/; symlinks are not followed."""
        for name in names:
            remove_path(self._packs / name)
        sync(self._packs)
