"""How models come into the directory and leave it, while others are served.

A version is replaced by publishing the new one beside it: requests that hold the one before finish with it, and the
directory names the new one from then on. When it cannot be published, the one before goes on serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.errors import ModelUnavailable, ModelUnknown, RegistrationConflict, RegistrationRefused
from cluster.registry.directory import Directory, Entry, ModelRecord
from cluster.registry.entry_rules import check_entry, listed
from cluster.registry.manifest_cache import ManifestCache
from cluster.registry.registrations import DamagedRegistration, Registration, Registrations
from cluster.registry.summaries import ModelSummary, SummaryFiles, summarize
from weights.errors import ModelNotStored, WeightsError
from weights.maintenance import remove_model
from weights.manifest import Manifest
from weights.store import WeightStore

BringIn = Callable[[Entry], ModelSummary]

logger = logging.getLogger("atelier.registry")


@dataclass(frozen=True, slots=True)
class Unregistered:
    """What was removed, and the adapters that have no base left."""

    id: str
    orphans: tuple[str, ...] = ()


class ServedModels:
    """Lives on one event loop; `bring_in` and reading manifests happen in threads. Call `start` once."""

    def __init__(
        self,
        configured: Mapping[str, Entry],
        store: WeightStore,
        registrations: Registrations,
        bring_in: BringIn,
        epoch: str,
        *,
        check_source: Callable[[Entry], None] = lambda entry: None,
        forget_source: Callable[[str], object] = lambda url: None,
    ) -> None:
        """`check_source` raises WeightsError for a path that may not be registered; `forget_source` hears of a URL
        that no model comes from any more. Both may block.
        """
        self.directory = Directory(epoch)
        self._configured = configured
        self._store = store
        self._registrations = registrations
        self._bring_in = bring_in
        self._check_source = check_source
        self._forget_source = forget_source
        self._wanted: dict[str, Entry] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._manifests = ManifestCache(store.manifest)
        self._writing = asyncio.Lock()
        self._extents: dict[str, tuple[str, ...]] = {}
        self._changed = asyncio.Event()
        # One at a time: writers of one store wait for each other anyway, and memory stays bounded by one checkpoint.
        self._importing = asyncio.Lock()
        # Downloads take long, or fail slowly; local checkpoints do not wait for them.
        self._downloading = asyncio.Lock()

    async def start(self) -> None:
        """Begin with the configured models and what was registered before the last end of the registry."""
        found: dict[str, Registration | DamagedRegistration] = {}
        for item in await asyncio.to_thread(lambda: list(self._registrations.load())):
            id_ = item.id if isinstance(item, DamagedRegistration) else item.entry.id
            if isinstance(item, Registration) and item.replaces != self._configured.get(id_):
                self._registrations.remove(id_)  # the config has been changed since: it says what is wanted now
            else:
                found[id_] = item
        for id_ in [*self._configured, *(id_ for id_ in found if id_ not in self._configured)]:
            registered = found.get(id_)
            if isinstance(registered, DamagedRegistration):
                self._apply(ModelRecord(id_, "unavailable", error=registered.error))
            else:
                self._begin(registered.entry if registered else self._configured[id_])

    async def register(self, entry: Entry, *, wait: bool = True) -> ModelRecord:
        """Bring a model in, or another version of one; `wait` until it is there or has failed.

        Raises RegistrationRefused or RegistrationConflict for an entry that does not fit, before anything changes.
        """
        async with self._writing:
            check_entry(self.directory, entry)
            try:
                await asyncio.to_thread(self._check_source, entry)
            except WeightsError as error:
                raise RegistrationRefused(f"path: {error}") from None
            await self._save(entry)
            task = self._begin(entry)
        if wait:
            await asyncio.shield(task)
        record = self.directory.get(entry.id)
        if record is None:
            raise RegistrationConflict(f"{entry.id!r} was removed while it was being registered")
        return record

    async def unregister(self, id_: str, *, purge: bool = False) -> Unregistered:
        """Serve it no more; `purge` takes it out of the store, too. Requests that run with it finish.

        Raises ModelUnknown, or RegistrationConflict for what the cluster config names.
        """
        async with self._writing:
            if id_ not in self.directory:
                raise self._unknown(id_)
            if id_ in self._configured:
                raise RegistrationConflict(f"model {id_!r} is in the cluster config: take it out there")
            await asyncio.to_thread(self._registrations.remove, id_)
            gone = self._wanted.pop(id_, None)
            self._extents.pop(id_, None)
            self.directory.remove(id_)
            self._tell()
        if gone:
            await self._leave_source(gone)
        if purge:
            await asyncio.shield(self._queue(id_, self._purge(id_, self._tasks.get(id_))))
        return Unregistered(id_, tuple(record.id for record in self.directory if id_ in record.base))

    async def status(self, model: str) -> ModelRecord:
        """Waits while the first version is being registered. Raises ModelUnknown with the known names."""
        while (record := self.directory.get(model)) and record.state == "registering" and model in self._tasks:
            await asyncio.wait([self._tasks[model]])
        if record is None:
            raise self._unknown(model)
        return record

    async def manifest(self, model: str, version: str | None = None) -> Manifest:
        """Of the version that is served, or of `version` (a fingerprint) when that is still known.

        Raises ModelUnknown, or ModelUnavailable with the reason.
        """
        if version and self._manifests.has(model, version):
            return await self._manifests.get(model, version)
        record = await self.status(model)
        if not record.serves:
            raise ModelUnavailable(f"model {model!r} is unavailable: {record.error}")
        return await self._manifests.get(model, record.fingerprint)

    async def changed(self) -> None:
        """Returns after the next change of the directory."""
        await self._changed.wait()

    def report_attach(self, model: str, error: str | None) -> None:
        """A replica could not attach the weights, or could again (None). The directory shows it; requests still try."""
        record = self.directory.get(model)
        if record and record.serves and record.state != "updating":
            self._apply(replace(record, state="unavailable" if error else "ready", error=error or ""))

    def set_loaded(self, model: str, loaded: bool) -> None:
        """Note that its weights were told to go, or are wanted again. Unknown and unusable models are ignored."""
        record = self.directory.get(model)
        if record and record.state == ("unloaded" if loaded else "ready"):
            self._apply(replace(record, state="ready" if loaded else "unloaded"))

    def extents_of_no_other(self, model: str) -> list[str]:
        """Extent ids of `model` that no other loaded model has as well."""
        others = {
            id_
            for other, ids in self._extents.items()
            if other != model and (record := self.directory.get(other)) and record.state != "unloaded"
            for id_ in ids
        }
        return [id_ for id_ in self._extents.get(model, ()) if id_ not in others]

    def extents(self) -> Mapping[str, tuple[str, ...]]:
        """Extent ids by model, of all that is in the store."""
        return self._extents

    async def _save(self, entry: Entry) -> None:
        configured = self._configured.get(entry.id)
        if entry == configured:
            await asyncio.to_thread(self._registrations.remove, entry.id)
        else:
            await asyncio.to_thread(self._registrations.save, Registration(entry=entry, replaces=configured))

    def _begin(self, entry: Entry) -> asyncio.Task[None]:
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
        """What concerns one id happens in the order in which it was asked for; only the last entry counts."""
        if previous:
            await asyncio.wait([previous])
        if self._wanted.get(entry.id) is not entry:
            return
        try:
            async with self._importing if isinstance(entry.path, Path) else self._downloading:
                await self._keep_served_version(entry.id)
                summary = await asyncio.to_thread(self._bring_in, entry)
        except Exception as error:  # of this model; whatever it is, the others go on and nobody waits for it for ever
            summary, reason = None, str(error) or repr(error)
        if self._wanted.get(entry.id) is not entry:
            await self._leave_source(entry)
            return
        if summary is not None:
            before = self.directory.get(entry.id)
            self._serve(entry, summary)
            if before and before.entry:
                await self._leave_source(before.entry)
        else:
            await self._failed(entry, reason)

    async def _keep_served_version(self, id_: str) -> None:
        """Requests that were checked against it may ask for its manifest when the store has the next one already."""
        record = self.directory.get(id_)
        if record and record.serves:
            with contextlib.suppress(Exception):  # a damaged one is what the import mends
                await self._manifests.get(id_, record.fingerprint)

    def _serve(self, entry: Entry, summary: ModelSummary, error: str = "") -> None:
        self._extents[entry.id] = tuple(map(sys.intern, summary.extents))
        self._apply(
            ModelRecord(
                entry.id,
                "ready",
                summary.kind,
                summary.nbytes,
                summary.fingerprint,
                error,
                entry,
                summary.features,
                summary.class_name,
            )
        )

    async def _leave_source(self, entry: Entry) -> None:
        """A copy of what is in object storage goes with the last model that comes from there."""
        if isinstance(entry.path, str) and not any(entry.path == other.path for other in self._wanted.values()):
            try:
                await asyncio.to_thread(self._forget_source, entry.path)
            except (OSError, WeightsError) as error:  # what is left goes with the next gc
                logger.warning("the copy of %s could not be removed: %s", entry.path, error)

    async def _failed(self, entry: Entry, reason: str) -> None:
        record = self.directory.get(entry.id)
        if record and record.serves and record.entry:
            async with self._writing:
                if self._wanted.get(entry.id) is not entry:  # the next update has come meanwhile
                    return
                with contextlib.suppress(RegistrationRefused):
                    await self._save(record.entry)
                self._wanted[entry.id] = record.entry
                error = f"the version before goes on serving, the update failed: {reason}"
                self._apply(replace(record, state="ready", error=error))
        elif stored := await asyncio.to_thread(self._stored, entry):
            self._serve(entry, stored, f"the version in the store is served, the checkpoint cannot be read: {reason}")
        else:
            self._apply(ModelRecord(entry.id, "unavailable", error=reason, entry=entry))

    def _stored(self, entry: Entry) -> ModelSummary | None:
        """What the store has of the very same checkpoint: it needs no source to be served."""
        with contextlib.suppress(Exception):
            manifest = self._store.manifest(entry.id)
            if manifest.source == str(entry.path) and self._store.has_packs(manifest):
                return summarize(manifest, self._store.skeleton(manifest))
        return None

    async def _purge(self, id_: str, previous: asyncio.Task[None] | None) -> None:
        if previous:
            await asyncio.wait([previous])
        if id_ not in self._wanted:
            with contextlib.suppress(ModelNotStored):
                await asyncio.to_thread(remove_model, self._store, id_)
            await asyncio.to_thread(SummaryFiles(self._store).remove, id_)

    def _apply(self, record: ModelRecord) -> None:
        self.directory.apply(record)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _unknown(self, id_: str) -> ModelUnknown:
        return ModelUnknown(f"no model {id_!r} (known: {listed([record.id for record in self.directory])})")
