"""The directory of models with its watchers. Lives on one event loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from cluster.records.errors import ModelUnknown
from cluster.registry.directory import Directory, DirectoryChange, ModelRecord
from weights.records.errors import listed

MAX_WATCH_S: Final = 60.0


class WatchedDirectory(Directory):
    """A directory that wakes its watchers at every change."""

    def __init__(self, epoch: str) -> None:
        super().__init__(epoch)
        self._has_changed = asyncio.Event()  # another one after each change

    def apply(self, record: ModelRecord) -> ModelRecord:
        applied = super().apply(record)
        self._wake()
        return applied

    def remove(self, id_: str) -> None:
        super().remove(id_)
        self._wake()

    async def watch(self, revision: int, epoch: str, timeout_s: float) -> DirectoryChange:
        """Return the changes after `revision` of `epoch` as soon as there are some, or none after `timeout_s`."""
        try:
            async with asyncio.timeout(min(timeout_s, MAX_WATCH_S)):
                while not (change := self.changes_since(revision, epoch)):
                    await self._has_changed.wait()
        except TimeoutError:
            pass
        return change

    def set_loaded(self, model: str, loaded: bool) -> None:
        """Show that a model was evicted, or is wanted again. Ignores unknown and unusable models."""
        record = self.get(model)
        if record and record.state == ("unloaded" if loaded else "ready"):
            self.apply(replace(record, state="ready" if loaded else "unloaded"))

    def is_loaded(self, model: str) -> bool:
        """Return whether the model is there and not evicted."""
        record = self.get(model)
        return record is not None and record.state != "unloaded"

    def unknown(self, id_: str) -> ModelUnknown:
        """Return the error for an unknown id, with the known ones."""
        return ModelUnknown(f"no model {id_!r} (known: {listed([record.id for record in self])})")

    def _wake(self) -> None:
        self._has_changed.set()
        self._has_changed = asyncio.Event()
