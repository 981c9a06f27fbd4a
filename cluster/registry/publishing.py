"""The work on models: imported, served, sized, failed and purged, one after the other for each id.

A version is replaced by publishing the new one beside it: requests that hold the one before finish with it, and the
directory names the new one from then on. When it cannot be published, the one before goes on serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cluster.records.errors import ModelUnservable, RegistrationRefused
from cluster.registry.directory import Entry, ModelRecord, circle_of, rests_on
from cluster.registry.known_entries import KnownEntries
from cluster.registry.manifests import ManifestCache, ModelSummary, SummaryFiles, summarize
from cluster.registry.model_extents import ModelExtents
from cluster.registry.model_loads import ModelLoads
from cluster.registry.room import Room
from cluster.registry.watched_directory import WatchedDirectory
from configs.model import ModelConfig
from weights.operations.maintenance import remove_model
from weights.platform.panics import panics_as_errors
from weights.records.errors import ModelNotStored, WeightsError
from weights.storage.store import WeightStore

_SIZED: Final = ("ready", "unloaded", "does_not_fit")  # states that another room may change

logger = logging.getLogger("atelier.registry")


class ModelSources:
    """The sources of models. All methods may block."""

    def import_model(self, entry: Entry) -> ModelSummary:
        """Import an entry's model into the store and return its summary. Raises any error of the import."""
        raise NotImplementedError

    def check_source(self, entry: Entry) -> None:
        """Raise WeightsError for a path that may not be registered."""

    def forget_source(self, url: str) -> None:
        """Take in that no model comes from that URL any more."""


class Publishing:
    """The work on the models of a directory. Lives on one event loop; imports happen in threads.

    What has no place in the `room` is listed so; without one all has.
    """

    def __init__(
        self,
        directory: WatchedDirectory,
        known: KnownEntries,
        store: WeightStore,
        sources: ModelSources,
        manifests: ManifestCache,
        room: Room | None,
    ) -> None:
        self.extents = ModelExtents(directory)
        self.loads = ModelLoads(directory)
        self.tasks: dict[str, asyncio.Task[None]] = {}  # by id
        self._directory = directory
        self._known = known
        self._store = store
        self._sources = sources
        self._manifests = manifests
        self._room = room
        self._wanted: dict[str, Entry] = {}
        # One import at a time: writers of one store wait for each other anyway, and one checkpoint bounds the memory.
        self._importing = asyncio.Lock()
        # Downloads take long, or fail slowly; local checkpoints do not wait for them.
        self._downloading = asyncio.Lock()

    def begin(self, entry: Entry) -> asyncio.Task[None]:
        """Begin to import the entry, and to serve it in the place of the version before."""
        self.loads.forget_model(entry.id)
        record = self._directory.get(entry.id)
        if record and record.serves:
            self._directory.apply(replace(record, state="updating", error=""))
        else:
            self._directory.apply(ModelRecord(entry.id, "registering", entry=entry))
        self._wanted[entry.id] = entry
        return self._queue(entry.id, self._publish(entry, self.tasks.get(entry.id)))

    def withdraw(self, id_: str) -> Entry | None:
        """Serve the model no more. Return what was wanted of it."""
        wanted = self._wanted.pop(id_, None)
        self.extents.note(id_, ())
        self.loads.forget_model(id_)
        self._directory.remove(id_)
        return wanted

    def purge(self, id_: str) -> asyncio.Task[None]:
        """Begin to remove a model that was withdrawn from the store."""
        return self._queue(id_, self._purge(id_, self.tasks.get(id_)))

    def fit_into(self, room: Room | None) -> None:
        """Show which models have a place in another room; None for the one before."""
        self._room = room or self._room
        for record in [record for record in self._directory if record.state in _SIZED]:
            fits = replace(record, state="ready", error="") if record.state == "does_not_fit" else record
            if (found := self._sized(fits)) != record:
                self._directory.apply(found)

    async def leave_source(self, entry: Entry) -> None:
        """Remove the local copy of an object storage URL with the last model that comes from there."""
        if isinstance(entry.path, str) and not any(entry.path == other.path for other in self._wanted.values()):
            try:
                await asyncio.to_thread(self._sources.forget_source, entry.path)
            except (OSError, WeightsError) as error:  # the next gc removes the rest
                logger.warning("the copy of %s could not be removed: %s", entry.path, error)

    async def _publish(self, entry: Entry, previous: asyncio.Task[None] | None) -> None:
        """Import the entry and serve it, after earlier work on its id, and the models that it is like or an adapter of.

        Only the last entry of an id counts. One that rests on itself, as registrations and a config together can make
        it, waits for none of them and fails.
        """
        circle = circle_of(entry, self._wanted)
        others = () if circle else rests_on(entry)
        if earlier := [task for task in (previous, *map(self.tasks.get, others)) if task]:
            await asyncio.wait(earlier)
        if self._wanted.get(entry.id) is not entry:
            return
        try:
            if circle:
                raise ModelUnservable(f"it rests on itself ({' on '.join(circle)}), so that nothing can come first")
            async with self._importing if isinstance(entry.path, Path) else self._downloading:
                with panics_as_errors():
                    await self._keep_served_version(entry.id)
                    summary = await asyncio.to_thread(self._sources.import_model, entry)
        except Exception as error:  # whatever it is, it fails this model alone, and those who wait for it are answered
            summary, problem = None, error
        if self._wanted.get(entry.id) is not entry:
            await self.leave_source(entry)
            return
        if summary is not None:
            before = self._directory.get(entry.id)
            self._serve(entry, summary)
            if before and before.serves and before.fingerprint != summary.fingerprint:
                self._compare_adapters(entry.id)
            if before and before.entry:
                await self.leave_source(before.entry)
        else:
            await self._failed(entry, problem)

    def _compare_adapters(self, base: str) -> None:
        """Look again at the adapters of a model whose version is another now: they were found to fit the one before."""
        for record in [record for record in self._directory if base in record.base]:
            if wanted := self._wanted.get(record.id):
                self.begin(wanted)

    async def _keep_served_version(self, id_: str) -> None:
        """Cache the served manifest: requests for that version may come when the store has the next one already."""
        record = self._directory.get(id_)
        if record and record.serves:
            with contextlib.suppress(Exception):  # the import mends a damaged one
                await self._manifests.get(id_, record.fingerprint)

    def _serve(self, entry: Entry, summary: ModelSummary, error: str = "") -> None:
        self.extents.note(entry.id, summary.extents)
        self._directory.apply(self._sized(ModelRecord(entry.id, "ready", error=error, entry=entry, **summary.facts)))

    async def _failed(self, entry: Entry, problem: Exception) -> None:
        reason = str(problem) or repr(problem)
        record = self._directory.get(entry.id)
        if record and record.serves and record.entry:
            async with self._known.writing:
                if self._wanted.get(entry.id) is not entry:  # the next update has come meanwhile
                    return
                with contextlib.suppress(RegistrationRefused):
                    await self._known.save(record.entry)
                self._wanted[entry.id] = record.entry
                error = f"the version before goes on serving, the update failed: {reason}"
                self._directory.apply(self._sized(replace(record, state="ready", error=error)))
            return
        # What cannot be served from its source cannot be served from the store either.
        is_sound = not isinstance(problem, ModelUnservable)
        stored = await asyncio.to_thread(self._find_stored, entry) if is_sound else None
        if self._wanted.get(entry.id) is not entry:  # it was removed meanwhile, and must not come back
            await self.leave_source(entry)
        elif stored:
            self._serve(entry, stored, f"the version in the store is served, the checkpoint cannot be read: {reason}")
        else:
            self._directory.apply(ModelRecord(entry.id, "unavailable", error=reason, entry=entry))

    def _sized(self, record: ModelRecord) -> ModelRecord:
        """Return the record of a model in the store, as one that does not fit where the room is too small for it."""
        entry = record.entry
        if self._room is None or not isinstance(entry, ModelConfig):
            return record
        lacks = [one.text for one in self._room.shortages(record.id, record.needs, entry.gpu_layers)]
        return replace(record, state="does_not_fit", error="; ".join(lacks)) if lacks else record

    def _find_stored(self, entry: Entry) -> ModelSummary | None:
        """Return the summary of the very same checkpoint in the store, which needs no source to be served."""
        with contextlib.suppress(Exception):
            manifest = self._store.find_manifest(entry.id)
            if manifest and manifest.source == str(entry.path) and self._store.pack_files.has_all(manifest):
                return summarize(manifest, self._store.skeleton(manifest))
        return None

    async def _purge(self, id_: str, previous: asyncio.Task[None] | None) -> None:
        if previous:
            await asyncio.wait([previous])
        if id_ not in self._wanted:
            with contextlib.suppress(ModelNotStored):
                if self._store.has_model(id_):  # else an error would name all models of the store
                    await asyncio.to_thread(remove_model, self._store, id_)
            await asyncio.to_thread(SummaryFiles(self._store).remove_summary, id_)

    def _queue(self, id_: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self.tasks[id_] = task

        def forget(done: asyncio.Task[None]) -> None:
            if self.tasks.get(id_) is done:
                del self.tasks[id_]

        task.add_done_callback(forget)
        return task
