"""WeightRegistry: the cluster's directory of models. A named, detached actor.

It imports checkpoints into the store, says which models are ready and which are not and why, knows which node holds
which extents, gives each node its keeper, and keeps the jobs. It never holds weights or references to them, and nothing
is lost with it: the models come back from the config and the registration files, the map of residency from the keepers,
jobs from their book.

The actor is its parts. What a part answers as it is, is exposed as the part's method; the rest is written here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

import psutil
import ray

from cluster.jobs.disk import FOLDER as JOBS_FOLDER
from cluster.jobs.disk import REGISTRATIONS, files_folder
from cluster.jobs.files import FileOwner
from cluster.jobs.hooks import HookOwner
from cluster.jobs.owner import JobOwner
from cluster.jobs.parts import PartOwner
from cluster.keeper.actor import KeeperSettings, NodeKeeper
from cluster.peers.protocol import Located, Question, ResidencyReport
from cluster.process.logs import configure_logs
from cluster.process.ray_calls import OWN_PLACE, call_actor, get, node_addresses
from cluster.ray_seam.serve_control import draining_nodes
from cluster.records.actor_names import NAMESPACE, cluster_key, registry_name
from cluster.records.errors import RegistrationRefused
from cluster.registry.directory import DirectoryChange, Entry, ModelRecord
from cluster.registry.extent_locations import GroupNews, Revision, cluster_residency
from cluster.registry.importing import ImportProcess, ImportProgress, ImportSettings
from cluster.registry.manifests import ModelSummary
from cluster.registry.model_loads import ModelLoads
from cluster.registry.node_keepers import NodeKeepers
from cluster.registry.node_rounds import NodeRounds
from cluster.registry.publishing import ModelSources
from cluster.registry.registrations import KeptFile, Registrations, applied_file, overrides_file
from cluster.registry.room import Room
from cluster.registry.runtime_settings import RuntimeSettings
from cluster.registry.served_models import ServedModels
from cluster.registry.users import Users
from cluster.registry.watched_directory import MAX_WATCH_S
from configs.admission import ControllerConfig
from configs.cluster import ClusterConfig
from configs.model import ModelConfig
from weights.formats.folder import check_inside
from weights.platform.processor import auto_dtype, processor_flags
from weights.platform.syntax_trees import parse_in_turn
from weights.records.errors import FormatError, SourceRefused
from weights.sources.mirrors import SOURCES_FOLDER, mirror_folder, remove_mirror
from weights.storage.store import WeightStore

__all__ = [
    "WAITING",
    "WATCHING",
    "Method",
    "WeightRegistry",
    "connect_registry",
    "find_registry",
    "registry_class",
    "tell_registry",
]

_TELL_TIMEOUT_S: Final = 30.0
_SECRET_BYTES: Final = 32
_IMPORT_MEMORY_SHARE: Final = 0.5  # of the machine's
# The engines, a layer above, decide what can be served: found by name, and in the import process alone.
_SERVABLE: Final = "deployments.engines.servable:why_unservable"
_NEEDS: Final = "deployments.engines.needs:needs_of_manifest"
# Concurrent calls of each group: a caller that watches or waits costs one coroutine, and no slot of the other calls.
MAX_CALLS: Final = 10_000
WATCHING: Final = "watching"
WAITING: Final = "waiting"

logger = logging.getLogger("atelier.registry")

P = ParamSpec("P")
R = TypeVar("R")


# A method of the registry actor.
Method = Callable[Concatenate["WeightRegistry", P], Coroutine[Any, Any, R]]


def _in_group(group: str) -> Callable[[Method[P, R]], Method[P, R]]:
    """Count a method's calls in a concurrency group of their own.

    Ray runs each group on an event loop of its own, and the registry has one: the call runs on the registry's.
    """

    def grouped(method: Method[P, R]) -> Method[P, R]:
        @functools.wraps(ray.method(concurrency_group=group)(method))
        async def on_registrys_loop(self: WeightRegistry, *args: P.args, **kwargs: P.kwargs) -> R:
            call = method(self, *args, **kwargs)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

        return cast("Method[P, R]", on_registrys_loop)

    return grouped


def _expose(part: str, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Method[P, R]:
    """Return an actor method that calls `method` of the registry's attribute `part`, with its signature and docs."""

    @functools.wraps(method)
    async def call_part(self: WeightRegistry, *args: P.args, **kwargs: P.kwargs) -> R:
        return await method(getattr(self, part), *args, **kwargs)

    return cast("Method[P, R]", call_part)


class _Imports(ModelSources):
    """Imports models in processes of its own: one for local checkpoints, and one for downloads.

    Those never hold up the local ones, as `ServedModels` queues them.
    """

    def __init__(self, config: ClusterConfig, store: WeightStore) -> None:
        settings = ImportSettings(
            store=store.path,
            options=config.store.object_storage.options(),
            memory_bytes=int(psutil.virtual_memory().total * _IMPORT_MEMORY_SHARE),
            # Workers of other nodes are taken to be alike.
            auto_dtype=auto_dtype(config.worker.device, processor_flags()),
            check=_SERVABLE,
            measure=_NEEDS,
        )
        self._store = store
        self.config = config  # whose sources are trusted; the registry sets another one
        self._local, self._remote = ImportProcess(settings), ImportProcess(settings)

    def import_model(self, entry: Entry) -> ModelSummary:
        """Import the model; block until that is done. Raises as `ImportProcess.import_model` does."""
        process = self._local if isinstance(entry.path, Path) else self._remote
        try:
            return process.import_model(entry, _roots_of(entry, self.config))
        except FormatError as error:
            if isinstance(entry.path, Path) and not entry.path.exists() and (node := _node_of_several()):
                raise FormatError(
                    f"{error} on node {node}, where the registry reads models: put it there, at the same path"
                ) from None
            raise

    def check_source(self, entry: Entry) -> None:
        """Raise SourceRefused for a source outside of the config's roots."""
        _check_source(entry, self.config)

    def forget_source(self, url: str) -> None:
        """Remove the copy of an object storage URL."""
        remove_mirror(mirror_folder(self._store.path / SOURCES_FOLDER, url))

    def import_progress(self) -> list[ImportProgress]:
        """Return how far the imports are that run."""
        return [found for process in (self._local, self._remote) if (found := process.progress)]


class WeightRegistry:
    """The registry actor. It is async: a call that waits holds no thread."""

    async def __init__(self, config: ClusterConfig, peer_secret: bytes) -> None:  # type: ignore[misc]  # Ray awaits it
        configure_logs(config.logging.format)
        parse_in_turn()
        self._began_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        store = WeightStore(config.store.path)
        self._applied = applied_file(store.path, config.name)
        first, config = config, await asyncio.to_thread(_applied_config, self._applied, config)
        self._config = config
        self._configuring = asyncio.Lock()
        registered = store.path / REGISTRATIONS / config.name
        self._imports = _Imports(config, store)
        self._models = ServedModels(
            config.entries,
            store,
            Registrations(registered),
            self._imports,
            epoch=uuid.uuid4().hex,
            room=Room.of(config),
        )
        self._keepers = NodeKeepers(
            str(store.packs),
            config.store.node_budget_bytes,
            cluster_key(config),
            _keeper_settings(config),
            models=self._models.extents,
            draining_nodes=draining_nodes,
        )
        self._residency, self._loads = self._keepers.residency, self._models.loads
        self._peer_secret = peer_secret
        self._own_node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        self._users = Users(had_some=_is_restarted())
        self._settings = RuntimeSettings(overrides_file(store.path, config.name))
        self._settings.follow(first, config)
        self._jobs = JobOwner(
            store.path / JOBS_FOLDER / config.name,
            config.jobs,
            was_restarted=_is_restarted(),
            registrations=registered,
        )
        self._files, self._hooks, self._parts = self._jobs.files, self._jobs.hooks, self._jobs.parts
        await self._models.begin_imports()
        self._nodes = NodeRounds(config, self._keepers, self._models, self._users, was_restarted=_is_restarted())
        self._polling = asyncio.ensure_future(self._nodes.follow())

    async def up_s(self) -> float:
        """Return for how long this process has been the registry. By that callers know whether they asked it."""
        return time.monotonic() - self._began_s

    # config

    async def config(self) -> ClusterConfig:
        """Return the config that holds now."""
        return self._config

    async def controller_config(self) -> ControllerConfig:
        """Return the settings of placement, which the controller polls."""
        return self._config.controller

    async def configure(self, config: ClusterConfig) -> None:
        """Use another config, also after a restart: begin to take in its models, remove those that it no longer has.

        Does not wait for imports. Raises RegistrationRefused for a config that needs another control plane, or that
        the disk does not take; nothing has changed then. Whatever else it raises, the config that holds then has the
        entries that were taken in by then: the next one is compared with that.
        """
        async with self._configuring:
            if config == self._config:
                return
            if cluster_key(config) != cluster_key(self._config):
                raise RegistrationRefused(
                    f"the control plane of {self._config.name!r} has to start anew for this config"
                )
            await asyncio.to_thread(self._applied.save, config)
            before, self._imports.config = self._config, config  # which imports are begun with
            try:
                await self._models.configure(config.entries, Room.of(config))
                self._settings.follow(before, config)
                self._jobs.config = self._files.config = config.jobs
            except BaseException:
                config = before.with_entries(self._models.configured)
                with contextlib.suppress(RegistrationRefused):
                    await asyncio.to_thread(
                        self._applied.save, before
                    )  # a registry that restarts begins with all of it
                raise
            finally:
                self._config = self._imports.config = config
                for model in before.entries.keys() - config.entries.keys():
                    await self._keepers.set_pinned(model, False)

    # models

    @_in_group(WAITING)
    async def register(self, entry: Entry, wait: bool = True) -> ModelRecord:
        """Import a model, or another version of one: see `ServedModels.register`."""
        return await self._models.register(entry, wait)

    @_in_group(WAITING)
    async def find_model(self, model: str) -> ModelRecord:
        """Return the model's record; wait while its first version is imported. Raises ModelUnknown with known names."""
        return await self._models.find_model(model)

    register_workflow = _expose("_models", ServedModels.register_workflow)
    list_models = _expose("_models", ServedModels.list_models)
    manifest = _expose("_models", ServedModels.manifest)
    model_files = _expose("_models", ServedModels.model_files)
    model_details = _expose("_models", ServedModels.model_details)
    solver_config = _expose("_models", ServedModels.solver_config)
    report_attach = _expose("_loads", ModelLoads.report_attach)
    want = _expose("_models", ServedModels.want)

    async def import_progress(self) -> list[ImportProgress]:
        """Return how far the imports are that run."""
        return self._imports.import_progress()

    @_in_group(WATCHING)
    async def watch(self, revision: int, epoch: str, timeout_s: float, replica: str | None = None) -> DirectoryChange:
        """Return changes, as `WatchedDirectory.watch` does. The control plane stays while `replica` runs."""
        self._users.add(replica)
        return await self._models.directory.watch(revision, epoch, timeout_s)

    @_in_group(WAITING)
    async def unregister(self, model: str, purge: bool = False) -> tuple[str, ...]:
        """Remove a model and its pin; see `ServedModels.unregister`."""
        orphans = await self._models.unregister(model, purge)
        await self._keepers.set_pinned(model, False)
        return orphans

    # nodes

    async def report_residency(self, node_id: str, report: ResidencyReport) -> None:
        """Take in what the memory of a node has and has not any more: see `ResidencyMap.report_residency`."""
        self._residency.report_residency(node_id, report)

    async def follow_groups(
        self, revision: Revision, added: Mapping[str, Sequence[str]], removed: Sequence[str]
    ) -> GroupNews:
        """Return which groups of extents nodes hold whole, as far as it has changed."""
        return self._residency.follow_groups(revision, added, removed)

    async def keeper(self, node_id: str, replica: str | None = None) -> Any:
        """Return the keeper of a node, as `NodeKeepers.keeper`. The control plane stays while `replica` runs."""
        self._users.add(replica)
        self._loads.follow_replicas(self._users.names)
        return self._keepers.keeper(node_id)

    async def locate(self, node_id: str, question: Question, load: int = 0) -> Located:
        """Locate extents, as `ResidencyMap.locate`. Another node begins to read those that the caller cannot read."""
        found = self._residency.locate(node_id, question, load)
        known = found.offers.keys() | found.reading.keys()
        if left := [extent for extent in question.unreadable if extent.id not in known]:
            self._keepers.read_for_others(left, self._own_node)
        return found

    async def peer_secret(self) -> bytes:
        """Return the secret by which the cluster's keepers know each other."""
        return self._peer_secret

    # models on nodes

    @_in_group(WAITING)
    async def prefetch(self, model: str) -> dict[str, str]:
        """Load the model into the memory of every node. Return the problems by node, "" for none."""
        await self._models.check_fits(model)
        manifest = await self._models.manifest(model)
        extents = list(manifest.extents.values())
        return _errors(await self._keepers.call_keepers(NodeKeeper.prefetch, extents, timeout_s=MAX_WATCH_S))

    async def pin(self, model: str, pinned: bool = True) -> dict[str, str]:
        """Pin or unpin the model in the memory of every node that has it. Return the problems by node.

        A pin follows the model to its next version, and ends with it.
        """
        if pinned:
            await self._models.check_fits(model)
        await (self._models.manifest(model) if pinned else self._models.find_model(model))
        return _errors(await self._keepers.set_pinned(model, pinned))

    async def evict(self, model: str) -> list[str]:
        """Evict the model from the memory of every node, except extents that other models share.

        Returns the names of those who hold some of it, by lease or pin. Without any, the model counts as unloaded until
        it is wanted again.
        """
        await self._models.manifest(model)
        holders = await self._keepers.drop(self._models.extents.of_no_other(model))
        if not holders:
            self._models.directory.set_loaded(model, False)
        return holders

    async def residency(self, models: Sequence[str], node_offset: int, max_nodes: int) -> dict[str, Any]:
        """Return the figures of some nodes, and their extents of these models, as JSON-able values.

        Nodes are in the order of their ids; `num_nodes` is the number of all. See `cluster_residency`.
        """
        all_nodes = self._keepers.nodes()
        nodes = all_nodes[node_offset : node_offset + max_nodes]
        call = self._keepers.call_keepers
        stats, residents = await asyncio.gather(
            call(NodeKeeper.stats, nodes=nodes), call(NodeKeeper.residents, nodes=nodes)
        )
        extents = self._models.extents.by_model
        wanted = {model: extents[model] for model in models if model in extents}
        found = await asyncio.to_thread(cluster_residency, stats, residents, wanted)
        return {"num_nodes": len(all_nodes), "node_problems": self._nodes.problems, **found}

    # settings at run time

    set_encoder_batching = _expose("_settings", RuntimeSettings.set_encoder_batching)
    encoder_batching = _expose("_settings", RuntimeSettings.encoder_batching)
    set_admission = _expose("_settings", RuntimeSettings.set_admission)
    admission = _expose("_settings", RuntimeSettings.admission)
    set_overrides = _expose("_settings", RuntimeSettings.set_overrides)
    overrides = _expose("_settings", RuntimeSettings.overrides)

    # jobs

    add_job = _expose("_jobs", JobOwner.add_job)
    find_job = _expose("_jobs", JobOwner.find_job)
    list_jobs = _expose("_jobs", JobOwner.list_jobs)
    watch_job = _in_group(WATCHING)(_expose("_jobs", JobOwner.watch_job))
    cancel_job = _expose("_jobs", JobOwner.cancel_job)
    forget_job = _expose("_jobs", JobOwner.forget_job)
    take_jobs = _in_group(WATCHING)(_expose("_jobs", JobOwner.take_jobs))
    beat_jobs = _expose("_jobs", JobOwner.beat_jobs)
    release_jobs = _expose("_jobs", JobOwner.release_jobs)
    end_job = _expose("_jobs", JobOwner.end_job)
    add_part = _expose("_parts", PartOwner.add_part)
    follow_result = _in_group(WATCHING)(_expose("_parts", PartOwner.follow_result))
    read_body = _expose("_files", FileOwner.read_body)
    read_result = _expose("_files", FileOwner.read_result)
    begin_file = _expose("_files", FileOwner.begin_file)
    begin_model = _expose("_files", FileOwner.begin_model)
    append_file = _expose("_files", FileOwner.append_file)
    end_file = _expose("_files", FileOwner.end_file)
    find_file = _expose("_files", FileOwner.find_file)
    list_files = _expose("_files", FileOwner.list_files)
    forget_file = _expose("_files", FileOwner.forget_file)
    read_file = _expose("_files", FileOwner.read_file)
    begin_lines = _expose("_files", FileOwner.begin_lines)
    take_hooks = _in_group(WATCHING)(_expose("_hooks", HookOwner.take_hooks))
    end_hook = _expose("_hooks", HookOwner.end_hook)
    end_lines = _expose("_files", FileOwner.end_lines)


def _node_of_several() -> str:
    """Return the address of this process's node where Ray has others, else ""."""
    return ray.util.get_node_ip_address() if ray.is_initialized() and len(node_addresses()) > 1 else ""


def _is_restarted() -> bool:
    """Return whether this actor has died before, and Ray has started it again."""
    return ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed


def _applied_config(file: KeptFile[ClusterConfig], first: ClusterConfig) -> ClusterConfig:
    """Return the config to begin with: the last one applied to this actor before it died, or the first."""
    if not _is_restarted():
        file.remove()
        return first
    applied = file.read()
    return applied if applied is not None and cluster_key(applied) == cluster_key(first) else first


def _keeper_settings(config: ClusterConfig) -> KeeperSettings:
    return KeeperSettings(populate=config.ray.preallocate, verify=config.store.verify, log_format=config.logging.format)


def _check_source(entry: Entry, config: ClusterConfig) -> None:
    """Raise SourceRefused for a source outside of the config's roots."""
    with contextlib.suppress(FormatError):  # a missing one is reported by its import
        roots = _roots_of(entry, config)
        if isinstance(entry.path, Path):
            check_inside(entry.path, roots)
        if isinstance(entry, ModelConfig) and isinstance(entry.like, Path):
            check_inside(entry.like, roots)
        for path in entry.own_parts.values() if isinstance(entry, ModelConfig) else ():
            check_inside(path, roots)
        if isinstance(entry.path, str) and not (config.trusts(entry) or config.may_download(entry.path)):
            raise SourceRefused(f"{entry.path}: no hf:// pattern of model_roots fits it")


def _roots_of(entry: Entry, config: ClusterConfig) -> tuple[Path, ...] | None:
    """Return the folders that a local checkpoint must lie in, None for one that the config trusts."""
    if config.trusts(entry):
        return None
    uploads = files_folder(config.store.path, config.name)
    roots = *config.allowed_roots, *([uploads] if isinstance(entry.path, Path) and entry.path.parent == uploads else ())
    return tuple(root.resolve() for root in roots)


def _errors(answers: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each answer that is an exception, "" for the others."""
    return {
        node: str(answer) or type(answer).__name__ if isinstance(answer, BaseException) else ""
        for node, answer in answers.items()
    }


def registry_class(max_calls: int = MAX_CALLS) -> Any:
    """Return WeightRegistry as an actor class. Calls that watch or wait, however many, do not delay the others."""
    groups = {WATCHING: max_calls, WAITING: max_calls}
    return ray.remote(concurrency_groups=groups, max_concurrency=max_calls)(WeightRegistry)


def tell_registry(config: ClusterConfig) -> None:
    """Let the cluster's registry use this config, if one runs that can: one that starts later is started with it.

    Blocks. Raises RegistrationRefused.
    """
    if ray.is_initialized() and (registry := find_registry(registry_name(config))) is not None:
        get(call_actor(registry, WeightRegistry.configure, config), _TELL_TIMEOUT_S)


def find_registry(name: str) -> Any:
    """Return the handle of the registry of that name, None without one."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:  # Ray's own, for no actor of that name
        return None


def connect_registry(config: ClusterConfig) -> Any:
    """Return the handle of the cluster's registry; the first caller starts it."""
    actor = registry_class().options(
        name=registry_name(config),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
        scheduling_strategy=OWN_PLACE,
        **config.ray.control_plane.ray_options,
    )
    # A restarted actor gets the arguments of its first start: the secret stays.
    return actor.remote(config, secrets.token_bytes(_SECRET_BYTES))
