"""WeightRegistry: the cluster's directory of models. A named, detached actor.

It imports checkpoints into the store, says which models are ready and which are not and why, knows which node holds
which extents, and gives each node its keeper. It never holds weights or references to them, and nothing is lost with
it: the models come back from the config and the registration files, the map of residency from the keepers.

The actor is its parts: what a part does is exposed as the part's own method, and only what takes both of them is
written here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast, overload

import psutil
import ray

from cluster.actor_names import NAMESPACE, cluster_key, registry_name
from cluster.controller.overrides import Overrides
from cluster.keeper.actor import NodeKeeper
from cluster.registry.directory import DirectoryChange, Entry
from cluster.registry.importing import ImportProcess, ImportSettings
from cluster.registry.leaving import leave_when_superseded
from cluster.registry.manifests import ModelSummary
from cluster.registry.node_keepers import NodeKeepers, alive_nodes, nodes_with_keeper
from cluster.registry.registrations import OverridesFile, Registrations
from cluster.registry.residency import ResidencyMap, cluster_residency
from cluster.registry.served_models import MAX_WATCH_S, ServedModels
from cluster.registry.superseding import Use, UseBook
from configs.admission import AdmissionConfig
from configs.batching import BatchingConfig
from configs.cluster import ClusterConfig
from weights.errors import FormatError
from weights.formats.folder import check_inside
from weights.sources.mirrors import SOURCES_FOLDER, mirror_folder, remove_mirror
from weights.store import WeightStore

__all__ = ["WAITING", "WATCHING", "Method", "WeightRegistry", "connect_registry", "registry_class"]

_NODE_POLL_S: Final = 5.0
_SECRET_BYTES: Final = 32
_IMPORT_MEMORY_SHARE: Final = 0.5  # of the machine's
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
        @functools.wraps(method)
        async def on_registrys_loop(self: WeightRegistry, *args: P.args, **kwargs: P.kwargs) -> R:
            call = method(self, *args, **kwargs)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

        # HAZARD: Ray looks for the group at the innermost function, which may be a part's and must not be marked.
        found: Any = on_registrys_loop
        found.__signature__ = inspect.signature(method)
        del found.__wrapped__
        return cast("Method[P, R]", ray.method(concurrency_group=group)(found))

    return grouped


@overload
def _expose(part: str, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Method[P, R]: ...


@overload
def _expose(part: str, method: Callable[Concatenate[Any, P], R]) -> Method[P, R]: ...


def _expose(part: str, method: Any) -> Any:
    """Return an actor method that calls `method` of the registry's attribute `part`, with its signature and docs."""
    is_async = inspect.iscoroutinefunction(method)

    @functools.wraps(method)
    async def call_part(self: WeightRegistry, *args: Any, **kwargs: Any) -> Any:
        answer = method(getattr(self, part), *args, **kwargs)
        return await answer if is_async else answer

    return call_part


class WeightRegistry:
    """The registry actor. It is async: a call that waits holds no thread."""

    async def __init__(self, config: ClusterConfig, peer_secret: bytes) -> None:  # type: ignore[misc]  # Ray awaits it
        self._loop = asyncio.get_running_loop()
        store = WeightStore(config.store.path)
        memory_bytes = int(psutil.virtual_memory().total * _IMPORT_MEMORY_SHARE)
        options = config.store.object_storage.options()
        settings = ImportSettings(store=store.path, options=options, memory_bytes=memory_bytes)
        # One for local checkpoints, one for downloads, which never hold up the local ones; as ServedModels queues them.
        local, remote = ImportProcess(settings), ImportProcess(settings)

        allowed = tuple(root.resolve() for root in config.allowed_roots)

        def roots_of(entry: Entry) -> tuple[Path, ...] | None:
            return None if config.trusts(entry) else allowed

        def check_source(entry: Entry) -> None:
            with contextlib.suppress(FormatError):  # a missing one is reported by its import
                if isinstance(entry.path, Path):
                    check_inside(entry.path, roots_of(entry))

        def import_model(entry: Entry) -> ModelSummary:
            return (local if isinstance(entry.path, Path) else remote).import_model(entry, roots_of(entry))

        self._uses = UseBook(time.monotonic)
        registrations = Registrations(store.path / "registrations" / config.name)
        self._models = ServedModels(
            config.entries,
            store,
            registrations,
            import_model,
            epoch=uuid.uuid4().hex,
            check_source=check_source,
            forget_source=lambda url: remove_mirror(mirror_folder(store.path / SOURCES_FOLDER, url)),
        )
        self._keepers = NodeKeepers(
            str(store.packs),
            config.store.node_budget_bytes,
            registry_name(config),
            _keeper_options(config),
            key=cluster_key(config),
            extents_of=self._models.extents,
            is_known=self._models.directory.__contains__,
            on_replica=self._uses.note,
        )
        self._residency = self._keepers.residency
        self._peer_secret = peer_secret
        self._overrides = OverridesFile(store.path / "overrides" / f"{config.name}.json")
        self._encoder_batching: BatchingConfig | None = None
        self._admission: AdmissionConfig | None = None
        await self._models.begin_imports()
        self._polling = asyncio.ensure_future(self._follow_nodes(config))

    # models

    register = _in_group(WAITING)(_expose("_models", ServedModels.register))
    find_model = _in_group(WAITING)(_expose("_models", ServedModels.find_model))
    list_models = _expose("_models", ServedModels.list_models)
    manifest = _expose("_models", ServedModels.manifest)
    report_attach = _expose("_models", ServedModels.report_attach)
    want = _expose("_models", ServedModels.want)

    @_in_group(WATCHING)
    async def watch(self, revision: int, epoch: str, timeout_s: float, for_replica: bool = True) -> DirectoryChange:
        """Return changes of the directory, as `ServedModels.watch`. Replicas that watch are why a registry stays."""
        with self._uses.watching() if for_replica else contextlib.nullcontext():
            return await self._models.watch(revision, epoch, timeout_s)

    @_in_group(WAITING)
    async def unregister(self, model: str, purge: bool = False) -> tuple[str, ...]:
        """Remove a model and its pin; see `ServedModels.unregister`."""
        orphans = await self._models.unregister(model, purge)
        await self._keepers.set_pinned(model, False)
        return orphans

    # nodes

    keeper = _expose("_keepers", NodeKeepers.keeper)
    report_residency = _expose("_residency", ResidencyMap.report_residency)
    locate = _expose("_residency", ResidencyMap.locate)
    nodes_with = _expose("_residency", ResidencyMap.nodes_with)

    async def expect_replicas(self) -> None:
        """Stay for replicas that have been deployed, and may take a while to come."""
        self._uses.expect()

    async def use(self) -> Use:
        """Return whether replicas use this control plane."""
        return self._use()

    def _use(self) -> Use:
        return self._uses.use(is_unclear=self._keepers.has_silent)

    async def peer_secret(self) -> bytes:
        """Return the secret by which the cluster's keepers know each other."""
        return self._peer_secret

    # models on nodes

    @_in_group(WAITING)
    async def prefetch(self, model: str) -> dict[str, str]:
        """Load the model into the memory of every node. Return what went wrong by node, "" for nothing."""
        manifest = await self._models.manifest(model)
        extents = list(manifest.extents.values())
        return _errors(await self._keepers.call_keepers(NodeKeeper.prefetch, extents, timeout_s=MAX_WATCH_S))

    async def pin(self, model: str, pinned: bool = True) -> dict[str, str]:
        """Keep the model in the memory of every node that has it, or no longer. Return what went wrong by node.

        A pin follows the model to its next version, and ends with it.
        """
        await (self._models.manifest(model) if pinned else self._models.find_model(model))
        return _errors(await self._keepers.set_pinned(model, pinned))

    async def evict(self, model: str) -> list[str]:
        """Evict the model from the memory of every node, except extents that other models share.

        Returns the names of those who hold some of it, by lease or pin. Without any, the model counts as unloaded until
        it is wanted again.
        """
        await self._models.manifest(model)
        holders = await self._keepers.drop(self._models.extents_of_no_other(model))
        if not holders:
            self._models.set_loaded(model, False)
        return holders

    async def residency(self, models: Sequence[str], node_offset: int, max_nodes: int) -> dict[str, Any]:
        """Return the figures of some nodes, and what they hold of these models, as JSON-able values.

        Nodes are in the order of their ids; `num_nodes` is the number of all. See `cluster_residency`.
        """
        all_nodes = self._keepers.nodes()
        nodes = all_nodes[node_offset : node_offset + max_nodes]
        call = self._keepers.call_keepers
        stats, residents = await asyncio.gather(
            call(NodeKeeper.stats, nodes=nodes), call(NodeKeeper.residents, nodes=nodes)
        )
        extents = self._models.extents()
        wanted = {model: extents[model] for model in models if model in extents}
        found = await asyncio.to_thread(cluster_residency, stats, residents, wanted)
        return {"num_nodes": len(all_nodes), **found}

    # settings at run time

    async def set_encoder_batching(self, batching: BatchingConfig) -> None:
        """Set the dynamic batching of text encoders that start from now on. The config counts again after a restart."""
        self._encoder_batching = batching

    async def encoder_batching(self) -> BatchingConfig | None:
        """Return the dynamic batching that was set, None as long as it is the config's."""
        return self._encoder_batching

    async def set_admission(self, admission: AdmissionConfig) -> None:
        """Set the bounds and weights of admission queues that start from now on. As with batching, until a restart."""
        self._admission = admission

    async def admission(self) -> AdmissionConfig | None:
        """Return the admission settings that were set, None as long as they are the config's."""
        return self._admission

    async def set_overrides(self, overrides: Overrides) -> None:
        """Keep what operators order over the controller's head, also for the next registry. Raises OverrideRefused."""
        await asyncio.to_thread(self._overrides.save, overrides)

    async def overrides(self) -> Overrides:
        """Return what operators have ordered over the controller's head."""
        return await asyncio.to_thread(self._overrides.read_overrides)

    async def _follow_nodes(self, config: ClusterConfig) -> None:
        # A private Ray has one node, which will have replicas: its keeper starts at the same time as they do.
        to_start = config.ray.address is None
        while ray.is_initialized():
            try:
                alive = await asyncio.to_thread(alive_nodes)
                running = alive if to_start else await asyncio.to_thread(nodes_with_keeper, cluster_key(config))
                await self._keepers.follow(alive, running)
                to_start = False
                await leave_when_superseded(config, self._use)
            except Exception:  # Ray's own: the next round may do better
                logger.exception("the nodes could not be looked at")
            await asyncio.sleep(_NODE_POLL_S)


def _keeper_options(config: ClusterConfig) -> dict[str, Any]:
    # A private Ray has one node: its keeper listens for nobody else.
    host = "127.0.0.1" if config.ray.address is None else None
    return {"host": host, "populate": config.ray.preallocate, "verify": config.store.verify}


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


def connect_registry(config: ClusterConfig) -> Any:
    """Return the handle of the cluster's registry; the first caller starts it."""
    actor = registry_class().options(
        name=registry_name(config),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
    )
    # A restarted actor gets the arguments of its first start: the secret stays.
    return actor.remote(config, secrets.token_bytes(_SECRET_BYTES))
