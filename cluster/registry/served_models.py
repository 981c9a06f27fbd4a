"""The life of models in the directory: registered, imported, updated, evicted and removed while others are served.

A version is replaced by publishing the new one beside it: requests that hold the one before finish with it, and the
directory names the new one from then on. When it cannot be published, the one before goes on serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cluster.records.errors import (
    ModelTooLarge,
    ModelUnknown,
    ModelUnservable,
    RegistrationConflict,
    RegistrationRefused,
    WeightsUnavailable,
)
from cluster.records.load_failures import LoadFailures, named_error
from cluster.registry.directory import (
    Directory,
    DirectoryChange,
    Entry,
    ModelRecord,
    check_entry,
    circle_of,
    rests_on,
)
from cluster.registry.manifests import ManifestCache, ModelSummary, SummaryFiles, summarize
from cluster.registry.model_files import read_files
from cluster.registry.registrations import Registration, Registrations
from cluster.registry.room import Room
from configs.model import ModelConfig
from weights.operations.maintenance import remove_model
from weights.platform.panics import panics_as_errors
from weights.records.errors import ModelNotStored, WeightsError, listed
from weights.records.manifest import Manifest
from weights.storage.store import WeightStore

ImportModel = Callable[[Entry], ModelSummary]

MAX_WATCH_S: Final = 60.0
_SIZED: Final = ("ready", "unloaded", "does_not_fit")  # states that another room may change

logger = logging.getLogger("atelier.registry")


class ServedModels:
    """The models of a cluster: those of its config and those registered since. Lives on one event loop.

    Imports and the reading of manifests happen in threads. Call `start` once.
    """

    def __init__(
        self,
        configured: Mapping[str, Entry],
        store: WeightStore,
        registrations: Registrations,
        import_model: ImportModel,
        epoch: str,
        *,
        room: Room | None = None,
        check_source: Callable[[Entry], None] = lambda entry: None,
        forget_source: Callable[[str], object] = lambda url: None,
    ) -> None:
        """`import_model` blocks until a checkpoint is in the store. `check_source` raises WeightsError for a path that
        may not be registered. `forget_source` is called with a URL that no model comes from any more. All may block.
        What has no place in the `room` is listed so; without one all has.
        """
        self.directory = Directory(epoch)
        self._configured = configured
        self._store = store
        self._registrations = registrations
        self._import_model = import_model
        self._check_source = check_source
        self._forget_source = forget_source
        self._room = room
        self._wanted: dict[str, Entry] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._manifests = ManifestCache(store)
        self._writing = asyncio.Lock()
        self._extents: dict[str, tuple[str, ...]] = {}
        self._users: dict[str, set[str]] = {}  # models by extent
        self._failures = LoadFailures()
        self._running: frozenset[str] = frozenset()  # replicas, as far as is known
        self._changed = asyncio.Event()
        # One import at a time: writers of one store wait for each other anyway, and one checkpoint bounds the memory.
        self._importing = asyncio.Lock()
        # Downloads take long, or fail slowly; local checkpoints do not wait for them.
        self._downloading = asyncio.Lock()

    async def begin_imports(self) -> None:
        """Begin to import the configured models and those that an earlier life of the registry had registered."""
        found, damaged = await asyncio.to_thread(self._registrations.read_registrations)
        for id_, registration in list(found.items()):
            if registration.replaces != self._configured.get(id_):
                del found[id_]  # the config has changed since: it says what is wanted now
                try:
                    await asyncio.to_thread(self._registrations.remove, id_)
                except RegistrationRefused as error:  # it will be passed over again
                    logger.warning("%s", error)
        for id_ in dict.fromkeys([*self._configured, *sorted(found.keys() | damaged.keys())]):
            if id_ in damaged:
                self._apply(ModelRecord(id_, "unavailable", error=damaged[id_]))
            else:
                self._begin(found[id_].entry if id_ in found else self._configured[id_])

    async def register(self, entry: Entry, wait: bool = True) -> ModelRecord:
        """Import a model, or another version of one; `wait` until that is done or has failed.

        Raises RegistrationRefused or RegistrationConflict for an entry that does not fit, before anything changes.
        """
        async with self._writing:
            check_entry(self.directory, entry)
            try:
                await asyncio.to_thread(self._check_source, entry)
            except WeightsError as error:
                raise RegistrationRefused(str(error), "path") from None
            await self._save(entry)
            task = self._begin(entry)
        if wait:
            await asyncio.shield(task)
        record = self.directory.get(entry.id)
        if record is None:
            raise RegistrationConflict(f"{entry.id!r} was removed while it was being registered")
        return record

    async def unregister(self, id_: str, purge: bool = False) -> tuple[str, ...]:
        """Remove a model from the directory; `purge` removes it from the store as well. Running requests finish.

        Returns the ids of adapters that have this base and stay. Raises ModelUnknown, or RegistrationConflict for what
        the cluster config names.
        """
        async with self._writing:
            if id_ not in self.directory:
                raise self._unknown(id_)
            if id_ in self._configured:
                raise RegistrationConflict(f"model {id_!r} is in the cluster config: take it out there")
            gone = await self._take_out(id_)
        if gone:
            await self._leave_source(gone)
        if purge:
            await asyncio.shield(self._queue(id_, self._purge(id_, self._tasks.get(id_))))
        return tuple(record.id for record in self.directory if id_ in record.base)

    async def configure(self, configured: Mapping[str, Entry], room: Room | None = None) -> list[str]:
        """Serve the entries of another config, in its room, in the place of that before; return the ids that are gone.

        Does not wait for imports. What was registered beside the config stays, unless the config has changed its mind
        about that id. Requests that run with a model that goes finish. Where this fails midway, `configured` says what
        was done, and the next call begins there.
        """
        left: list[Entry | None] = []
        async with self._writing:
            self._configured = holds = dict(self._configured)
            self._room = room or self._room
            for record in [record for record in self.directory if record.state in _SIZED]:
                fits = replace(record, state="ready", error="") if record.state == "does_not_fit" else record
                if (found := self._sized(fits)) != record:
                    self._apply(found)
            gone = [id_ for id_ in holds if id_ not in configured]
            for id_ in gone:
                if id_ in self.directory:
                    left.append(await self._take_out(id_))
                del holds[id_]
            for id_, entry in configured.items():
                if entry != holds.get(id_):
                    await asyncio.to_thread(self._registrations.remove, id_)
                    self._begin(entry)
                    holds[id_] = entry
        for was in left:
            if was:
                await self._leave_source(was)
        return gone

    @property
    def configured(self) -> Mapping[str, Entry]:
        """The entries of the config that are served, or on their way."""
        return self._configured

    async def _take_out(self, id_: str) -> Entry | None:
        """Remove a model from the directory, and its registration. Return what was wanted of it."""
        await asyncio.to_thread(self._registrations.remove, id_)
        wanted = self._wanted.pop(id_, None)
        self._note_extents(id_, ())
        self._failures.forget_model(id_)
        self.directory.remove(id_)
        self._wake_watchers()
        return wanted

    async def find_model(self, model: str) -> ModelRecord:
        """Return the model's record; wait while its first version is imported. Raises ModelUnknown with known names."""
        while (record := self.directory.get(model)) and record.state == "registering" and model in self._tasks:
            await asyncio.wait([self._tasks[model]])
        if record is None:
            raise self._unknown(model)
        return record

    async def check_fits(self, model: str) -> None:
        """Raise ModelTooLarge, with the numbers, for a model that no replica has room for; ModelUnknown for none."""
        record = await self.find_model(model)
        if record.state == "does_not_fit":
            raise ModelTooLarge(f"model {model!r} does not fit: {record.error}")

    async def manifest(self, model: str, version: str | None = None) -> Manifest:
        """Return the manifest of the version that is served, or of `version` (a fingerprint) when that is still known.

        Raises ModelUnknown, or WeightsUnavailable with the reason.
        """
        if not version or not self._manifests.has(model, version):
            record = await self.find_model(model)
            if not record.serves:
                raise WeightsUnavailable(f"model {model!r} is unavailable: {record.error}")
            version = record.fingerprint
        manifest = await self._manifests.get(model, version)
        served = self.directory.get(model)
        if served and served.fingerprint == manifest.fingerprint and model in self._extents:
            self._note_extents(model, manifest.extents)  # `weights convert` makes other extents
        return manifest

    async def model_files(self, model: str, version: str) -> dict[str, bytes]:
        """Return the files of a version that are no weights, by path. Raises what `manifest` does."""
        manifest = await self.manifest(model, version)
        return await asyncio.to_thread(read_files, self._store.models, manifest)

    async def list_models(self) -> list[ModelRecord]:
        """Return the records of all models, in the order in which they came."""
        return list(self.directory)

    async def watch(self, revision: int, epoch: str, timeout_s: float) -> DirectoryChange:
        """Return the changes after `revision` of `epoch` as soon as there are some, or none after `timeout_s`."""
        try:
            async with asyncio.timeout(min(timeout_s, MAX_WATCH_S)):
                while not (change := self.directory.changes_since(revision, epoch)):
                    await self._changed.wait()
        except TimeoutError:
            pass
        return change

    async def report_attach(self, model: str, version: str, replica: str, node: str, error: str | None) -> None:
        """Take in that a replica could not load a version of a model, or could again (None).

        The directory shows the model as unavailable when no replica is left that may. Requests are still tried.
        """
        if error is None:
            self._failures.note_load(model, version, replica)
        else:
            self._failures.note_failure(model, version, replica, time.monotonic(), named_error(replica, node, error))
        self._show_loads(model, version)

    def follow_replicas(self, running: Collection[str]) -> None:
        """Know which replicas run: what those could not load that have ended, others may."""
        shown = self._failures.models()
        self._running = frozenset(running)
        self._failures.keep_replicas(running)
        for model, version in shown:
            self._show_loads(model, version)

    def _show_loads(self, model: str, version: str) -> None:
        record = self.directory.get(model)
        if not (
            record and record.serves and record.state in ("ready", "unavailable") and record.fingerprint == version
        ):
            return
        error = self._failures.why_unavailable(model, version, self._running)
        if error or record.state == "unavailable":
            shown = replace(record, state="unavailable" if error else "ready", error=error)
            if shown != record:
                self._apply(shown)

    async def want(self, model: str) -> None:
        """Count an evicted model as loaded again, because a request wants it."""
        self.set_loaded(model, True)

    def set_loaded(self, model: str, loaded: bool) -> None:
        """Show in the directory that a model was evicted, or is wanted again. Ignores unknown and unusable models."""
        record = self.directory.get(model)
        if record and record.state == ("unloaded" if loaded else "ready"):
            self._apply(replace(record, state="ready" if loaded else "unloaded"))

    def extents_of_no_other(self, model: str) -> list[str]:
        """Return the ids of the model's extents that no other loaded model has."""
        return [
            id_
            for id_ in self._extents.get(model, ())
            if not any(other != model and self._is_loaded(other) for other in self._users[id_])
        ]

    def extents(self) -> Mapping[str, tuple[str, ...]]:
        """Return extent ids by model, of every model with a version in the store."""
        return self._extents

    def _is_loaded(self, model: str) -> bool:
        record = self.directory.get(model)
        return record is not None and record.state != "unloaded"

    def _note_extents(self, model: str, ids: Iterable[str]) -> None:
        """Take these for the extents of the model, instead of those before; none for a model that is gone."""
        before, now = self._extents.get(model, ()), tuple(map(sys.intern, ids))
        if now == before:
            return
        for id_ in before:
            self._users[id_].discard(model)
            if not self._users[id_]:
                del self._users[id_]
        for id_ in now:
            self._users.setdefault(id_, set()).add(model)
        if now:
            self._extents[model] = now
        else:
            self._extents.pop(model, None)

    async def _save(self, entry: Entry) -> None:
        configured = self._configured.get(entry.id)
        if entry == configured:
            await asyncio.to_thread(self._registrations.remove, entry.id)
        else:
            await asyncio.to_thread(self._registrations.save, Registration(entry=entry, replaces=configured))

    def _begin(self, entry: Entry) -> asyncio.Task[None]:
        self._failures.forget_model(entry.id)
        record = self.directory.get(entry.id)
        if record and record.serves:
            self._apply(replace(record, state="updating", error=""))
        else:
            self._apply(ModelRecord(entry.id, "registering", entry=entry))
        self._wanted[entry.id] = entry
        return self._queue(entry.id, self._publish(entry, self._tasks.get(entry.id)))

    def _queue(self, id_: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks[id_] = task

        def forget(done: asyncio.Task[None]) -> None:
            if self._tasks.get(id_) is done:
                del self._tasks[id_]

        task.add_done_callback(forget)
        return task

    async def _publish(self, entry: Entry, previous: asyncio.Task[None] | None) -> None:
        """Import the entry and serve it, after earlier work on its id, and the models that it is like or an adapter of.

        Only the last entry of an id counts. One that rests on itself, as registrations and a config together can make
        it, waits for none of them and fails.
        """
        circle = circle_of(entry, self._wanted)
        others = () if circle else rests_on(entry)
        if earlier := [task for task in (previous, *map(self._tasks.get, others)) if task]:
            await asyncio.wait(earlier)
        if self._wanted.get(entry.id) is not entry:
            return
        try:
            if circle:
                raise ModelUnservable(f"it rests on itself ({' on '.join(circle)}), so that nothing can come first")
            async with self._importing if isinstance(entry.path, Path) else self._downloading:
                with panics_as_errors():
                    await self._keep_served_version(entry.id)
                    summary = await asyncio.to_thread(self._import_model, entry)
        except Exception as error:  # whatever it is, it fails this model alone, and those who wait for it are answered
            summary, problem = None, error
        if self._wanted.get(entry.id) is not entry:
            await self._leave_source(entry)
            return
        if summary is not None:
            before = self.directory.get(entry.id)
            self._serve(entry, summary)
            if before and before.serves and before.fingerprint != summary.fingerprint:
                self._compare_adapters(entry.id)
            if before and before.entry:
                await self._leave_source(before.entry)
        else:
            await self._failed(entry, problem)

    def _compare_adapters(self, base: str) -> None:
        """Look again at the adapters of a model whose version is another now: they were found to fit the one before."""
        for record in [record for record in self.directory if base in record.base]:
            if wanted := self._wanted.get(record.id):
                self._begin(wanted)

    async def _keep_served_version(self, id_: str) -> None:
        """Cache the served manifest: requests for that version may come when the store has the next one already."""
        record = self.directory.get(id_)
        if record and record.serves:
            with contextlib.suppress(Exception):  # the import mends a damaged one
                await self._manifests.get(id_, record.fingerprint)

    def _serve(self, entry: Entry, summary: ModelSummary, error: str = "") -> None:
        self._note_extents(entry.id, summary.extents)
        self._apply(self._sized(ModelRecord(entry.id, "ready", error=error, entry=entry, **summary.facts)))

    async def _leave_source(self, entry: Entry) -> None:
        """Remove the local copy of an object storage URL with the last model that comes from there."""
        if isinstance(entry.path, str) and not any(entry.path == other.path for other in self._wanted.values()):
            try:
                await asyncio.to_thread(self._forget_source, entry.path)
            except (OSError, WeightsError) as error:  # the next gc removes the rest
                logger.warning("the copy of %s could not be removed: %s", entry.path, error)

    async def _failed(self, entry: Entry, problem: Exception) -> None:
        reason = str(problem) or repr(problem)
        record = self.directory.get(entry.id)
        if record and record.serves and record.entry:
            async with self._writing:
                if self._wanted.get(entry.id) is not entry:  # the next update has come meanwhile
                    return
                with contextlib.suppress(RegistrationRefused):
                    await self._save(record.entry)
                self._wanted[entry.id] = record.entry
                error = f"the version before goes on serving, the update failed: {reason}"
                self._apply(self._sized(replace(record, state="ready", error=error)))
            return
        # What cannot be served from its source cannot be served from the store either.
        is_sound = not isinstance(problem, ModelUnservable)
        stored = await asyncio.to_thread(self._find_stored, entry) if is_sound else None
        if self._wanted.get(entry.id) is not entry:  # it was removed meanwhile, and must not come back
            await self._leave_source(entry)
        elif stored:
            self._serve(entry, stored, f"the version in the store is served, the checkpoint cannot be read: {reason}")
        else:
            self._apply(ModelRecord(entry.id, "unavailable", error=reason, entry=entry))

    def _sized(self, record: ModelRecord) -> ModelRecord:
        """Return the record of a model in the store, as one that does not fit where the room is too small for it."""
        entry = record.entry
        if self._room is None or not isinstance(entry, ModelConfig):
            return record
        lacks = [one.text for one in self._room.shortages(record.id, record.needs, entry.gpu_layers)]
        return replace(record, state="does_not_fit", error="; ".join(lacks)) if lacks else record

    def _find_stored(self, entry: Entry) -> ModelSummary | None:
        """Return what the store has of the very same checkpoint, which needs no source to be served."""
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

    def _apply(self, record: ModelRecord) -> None:
        self.directory.apply(record)
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _unknown(self, id_: str) -> ModelUnknown:
        return ModelUnknown(f"no model {id_!r} (known: {listed([record.id for record in self.directory])})")
