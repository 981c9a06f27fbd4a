"""The life of models in the directory: registered, configured, asked for and removed while others are served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from cluster.records.errors import ModelTooLarge, RegistrationConflict, RegistrationRefused, WeightsUnavailable
from cluster.registry.directory import Entry, ModelRecord, check_entry
from cluster.registry.known_entries import KnownEntries
from cluster.registry.manifests import ManifestCache
from cluster.registry.model_files import read_files
from cluster.registry.publishing import ModelSources, Publishing
from cluster.registry.registrations import Registrations
from cluster.registry.room import Room
from cluster.registry.watched_directory import WatchedDirectory
from configs.workflow import WorkflowConfig
from weights.formats.folder import read_json
from weights.formats.language_models import LanguageModelDetails, language_model_details
from weights.formats.pipeline_parts import SOLVER_CONFIG
from weights.records.errors import FormatError, WeightsError
from weights.records.manifest import Manifest
from weights.storage.store import WeightStore


class ServedModels:
    """The models of a cluster: those of its config and those registered since. Lives on one event loop.

    Imports and the reading of manifests happen in threads. Call `begin_imports` once.
    """

    def __init__(
        self,
        configured: Mapping[str, Entry],
        store: WeightStore,
        registrations: Registrations,
        sources: ModelSources,
        epoch: str,
        *,
        room: Room | None = None,
    ) -> None:
        """Models without a place in the `room` are listed so; without a `room` all have one."""
        self.directory = WatchedDirectory(epoch)
        self._store = store
        self._sources = sources
        self._known = KnownEntries(configured, registrations)
        self._manifests = ManifestCache(store)
        self._publishing = Publishing(self.directory, self._known, store, sources, self._manifests, room)
        self.extents, self.loads = self._publishing.extents, self._publishing.loads

    async def begin_imports(self) -> None:
        """Begin to import the configured models and those registered in an earlier life of the registry."""
        for id_, found in (await self._known.read()).items():
            if isinstance(found, str):
                self.directory.apply(ModelRecord(id_, "unavailable", error=found))
            elif isinstance(found, WorkflowConfig):
                self.directory.apply(ModelRecord(id_, "ready", workflow=found))
            else:
                self._publishing.begin(found)

    async def register(self, entry: Entry, wait: bool = True) -> ModelRecord:
        """Import a model, or another version of one; `wait` until that is done or has failed.

        Raises RegistrationRefused or RegistrationConflict for an entry that does not fit, before anything changes.
        """
        async with self._known.writing:
            check_entry(self.directory, entry)
            try:
                await asyncio.to_thread(self._sources.check_source, entry)
            except WeightsError as error:
                raise RegistrationRefused(str(error), "path") from None
            await self._known.save(entry)
            task = self._publishing.begin(entry)
        if wait:
            await asyncio.shield(task)
        record = self.directory.get(entry.id)
        if record is None:
            raise RegistrationConflict(f"{entry.id!r} was removed while it was being registered")
        return record

    async def register_workflow(self, workflow: WorkflowConfig) -> ModelRecord:
        """Serve a workflow, or another version of one. Raises RegistrationConflict for a model's id, NotKept."""
        async with self._known.writing:
            known = self.directory.get(workflow.id)
            if known is not None and known.workflow is None:
                raise RegistrationConflict(f"{workflow.id!r} is a model already; a workflow needs another id", "id")
            await self._known.save(workflow)
            return self.directory.apply(ModelRecord(workflow.id, "ready", workflow=workflow))

    async def unregister(self, id_: str, purge: bool = False) -> tuple[str, ...]:
        """Remove a model from the directory; `purge` removes it from the store as well. Running requests finish.

        Returns the ids of adapters that have this base and stay. Raises ModelUnknown, or RegistrationConflict for what
        the cluster config names.
        """
        async with self._known.writing:
            if id_ not in self.directory:
                raise self.directory.unknown(id_)
            if id_ in self._known.configured:
                raise RegistrationConflict(f"model {id_!r} is in the cluster config: take it out there")
            gone = await self._take_out(id_)
        if gone:
            await self._publishing.leave_source(gone)
        if purge:
            await asyncio.shield(self._publishing.purge(id_))
        return tuple(record.id for record in self.directory if id_ in record.base)

    async def configure(self, configured: Mapping[str, Entry], room: Room | None = None) -> list[str]:
        """Serve the entries of another config, in its room, in the place of that before; return the ids that are gone.

        Does not wait for imports. What was registered beside the config stays, unless the config has changed its mind
        about that id. Requests that run with a model that goes finish. Where this fails midway, `configured` says what
        was done, and the next call begins there.
        """
        left: list[Entry | None] = []
        async with self._known.writing:
            self._known.configured = holds = dict(self._known.configured)
            self._publishing.fit_into(room)
            gone = [id_ for id_ in holds if id_ not in configured]
            for id_ in gone:
                if id_ in self.directory:
                    left.append(await self._take_out(id_))
                del holds[id_]
            for id_, entry in configured.items():
                if entry != holds.get(id_):
                    await self._known.forget(id_)
                    self._publishing.begin(entry)
                    holds[id_] = entry
        for was in left:
            if was:
                await self._publishing.leave_source(was)
        return gone

    @property
    def configured(self) -> Mapping[str, Entry]:
        """The entries of the config that are served, or on their way."""
        return self._known.configured

    async def _take_out(self, id_: str) -> Entry | None:
        """Remove a model from the directory, and its registration. Return its entry."""
        await self._known.forget(id_)
        return self._publishing.withdraw(id_)

    async def find_model(self, model: str) -> ModelRecord:
        """Return the model's record; wait while its first version is imported. Raises ModelUnknown with known names."""
        tasks = self._publishing.tasks
        while (record := self.directory.get(model)) and record.state == "registering" and model in tasks:
            await asyncio.wait([tasks[model]])
        if record is None:
            raise self.directory.unknown(model)
        return record

    async def check_fits(self, model: str) -> None:
        """Raise ModelTooLarge, with the numbers, for a model that no replica has room for; ModelUnknown for none."""
        record = await self.find_model(model)
        if record.state == "does_not_fit":
            raise ModelTooLarge(f"model {model!r} does not fit: {record.error}")

    async def manifest(self, model: str, version: str | None = None) -> Manifest:
        """Return the manifest of the served version, or of `version` (a fingerprint) if that is still known.

        Raises ModelUnknown, or WeightsUnavailable with the reason.
        """
        if not version or not self._manifests.has(model, version):
            record = await self.find_model(model)
            if not record.serves:
                raise WeightsUnavailable(f"model {model!r} is unavailable: {record.error}")
            version = record.fingerprint
        manifest = await self._manifests.get(model, version)
        served = self.directory.get(model)
        if served and served.fingerprint == manifest.fingerprint and model in self.extents.by_model:
            self.extents.note(model, manifest.extents)  # `weights convert` makes other extents
        return manifest

    async def model_files(self, model: str, version: str) -> dict[str, bytes]:
        """Return the files of a version that are no weights, by path. Raises as `manifest` does."""
        manifest = await self.manifest(model, version)
        return await asyncio.to_thread(read_files, self._store.models, manifest)

    async def model_details(self, model: str) -> LanguageModelDetails:
        """Return the facts in a language model's files. Raises as `manifest` does."""
        manifest = await self.manifest(model)
        return await asyncio.to_thread(language_model_details, manifest, self._store.skeleton(manifest))

    async def solver_config(self, model: str) -> dict[str, Any]:
        """Return the config of a pipeline's solver, empty for a model without one. Raises as `manifest` does."""
        skeleton = self._store.skeleton(await self.manifest(model))
        with contextlib.suppress(FormatError):
            return await asyncio.to_thread(read_json, skeleton / SOLVER_CONFIG)
        return {}

    async def list_models(self) -> list[ModelRecord]:
        """Return the records of all models, in the order in which they came."""
        return list(self.directory)

    async def want(self, model: str) -> None:
        """Count an evicted model as loaded again, because a request wants it."""
        self.directory.set_loaded(model, True)
