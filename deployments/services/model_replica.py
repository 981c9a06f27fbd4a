"""ModelReplica, the base of Worker and TextEncoderService: a Serve replica with models from its node's keeper."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, ParamSpec, TypeVar

import ray
import torch

from cluster.keeper.ray_extents import ExtentUser, RayExtents
from cluster.process.logs import configure_logs
from cluster.process.ray_calls import call_actor, get
from cluster.process.tracing import begin_tracing
from cluster.ray_seam.loopback import replica_calls_on_loopback
from cluster.records.errors import ClusterError
from cluster.registry.actor import Method, WeightRegistry, connect_registry
from cluster.registry.asking import Asking
from cluster.registry.directory import Entry
from cluster.registry.model_files import write_files
from configs.cluster import ClusterConfig, ModelReplicaConfig
from configs.model import ModelConfig
from deployments.engines.building.build import import_class
from deployments.engines.records.protocol import EngineError
from deployments.modules.budget import ModuleBudget
from deployments.modules.cache import ModuleCache
from deployments.modules.encoders import TextEncoderBuilder
from deployments.modules.loading import ComponentBuilder
from deployments.records.errors import ServiceError, as_service_errors
from weights.memory.devices import open_device
from weights.platform.syntax_trees import parse_in_turn
from weights.records.errors import WeightsError
from weights.records.manifest import Component, Manifest, ModelKind
from weights.storage.store import WeightStore

MAX_PREPARED: Final = 64
KEEPER_TIMEOUT_S: Final = 30.0
REGISTRY_RETRY_S: Final = 20.0  # a killed registry is back within seconds
REGISTRY_PAUSE_S: Final = 0.1

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("atelier.replica")


class _ReplicaExtents(ExtentUser):
    """The objects that a replica builds from the extents of its node's keeper."""

    def __init__(self, replica: ModelReplica, here: tuple[str, str | None], *, keeps: bool) -> None:
        self.keeps = keeps
        self._replica = replica
        self._here = here
        self._loop = asyncio.get_running_loop()

    def release_recalled(self, extents: Sequence[str], is_overdue: bool) -> None:
        self._replica.release_recalled(extents, is_overdue)

    def note_damage(self, extents: Sequence[str]) -> None:
        self._loop.call_soon_threadsafe(self._replica.invalidate, extents)

    def find_keeper(self) -> Any:
        return self._replica.find_keeper(*self._here)


class ModelReplica:
    """The base of the Serve deployments that run models: connection, residency of models, description.

    A subclass defines the kinds of models that it runs and the components that it builds; its constructor awaits
    `_open`.
    """

    _kinds: ClassVar[Collection[ModelKind]]
    _section: ClassVar[str]  # of the cluster config, that has its settings

    @staticmethod
    def _wants(component: Component) -> bool:
        """Return whether this service builds the component."""
        raise NotImplementedError

    async def _open(
        self,
        config: ClusterConfig,
        holder: str,
        settings: ModelReplicaConfig,
        builder: ComponentBuilder | TextEncoderBuilder,
        num_threads: int | None = None,
    ) -> None:
        """Connect to the registry and to this node's keeper, open the module cache and prepare the configured models.

        `holder` names this replica in its leases. Raises WeightsError for a device that is not there.
        """
        replica_calls_on_loopback()
        begin_tracing(config.tracing)
        self._builder = builder
        keeps = settings.device == "cpu"  # other devices need the node's memory only while they upload
        provider = await self._connect(config, holder, settings, num_threads, keeps=keeps)

        node, name = ray.get_runtime_context().get_node_id(), ray.get_runtime_context().get_actor_name() or holder

        def report_attach(model: str, version: str, error: str | None) -> None:
            call_actor(self._registry, WeightRegistry.report_attach, model, version, name, node, error)
            self._note_load(model, version, error)

        self._module_cache = ModuleCache(
            self._fetch_manifest,
            provider,
            self._models,
            ModuleBudget.of(settings, self._section),
            builder,
            report=report_attach,
            kept=provider if keeps else None,
        )
        provider.start_beating()
        records = await self._call_registry(
            WeightRegistry.list_models
        )  # the config may have changed since it was bound
        models = [record.entry for record in records if isinstance(record.entry, ModelConfig)]
        for model in models:
            self._note_layers(model)
        await prepare_models(self._module_cache, models, self._kinds, self._wants, builder.prepare)

    async def _connect(
        self,
        config: ClusterConfig,
        holder: str,
        settings: ModelReplicaConfig,
        num_threads: int | None,
        *,
        keeps: bool,
    ) -> RayExtents:
        """Open the devices, connect to the registry, and return the extents of this node's keeper."""
        configure_logs(config.logging.format)
        parse_in_turn()
        limit_torch_threads(num_threads, settings.num_cpus)
        for name in (settings.device, *settings.other_devices):
            open_device(name, config.simulated)
        self._connect_registry = partial(connect_registry, config)
        self._asking = Asking()
        self._registry: Any = self._connect_registry()
        self._models = WeightStore(config.store.path).models
        return await self._connect_keeper(holder, keeps=keeps)

    async def _connect_keeper(self, holder: str, *, keeps: bool) -> RayExtents:
        """Return the extents of this node's keeper; with `keeps`, extents leased here may be recalled."""
        context = ray.get_runtime_context()
        here = context.get_node_id(), context.get_actor_name()
        # HAZARD: on the node's first replica, the question for the keeper starts it.
        keeper: Any = await self._call_registry(WeightRegistry.keeper, *here)
        return RayExtents(keeper, holder, _ReplicaExtents(self, here, keeps=keeps))

    def release_recalled(self, extents: Sequence[str], is_overdue: bool) -> None:
        """Release unused modules of these extents. From any thread: the event loop may be busy."""
        self._module_cache.release_recalled(extents, is_overdue)

    def find_keeper(self, node: str, replica: str | None) -> Any:
        """Return the handle of a node's keeper. Blocks. A dead registry is started anew for the next call."""
        try:
            return get(call_actor(self._registry, WeightRegistry.keeper, node, replica), KEEPER_TIMEOUT_S)
        except ray.exceptions.ActorDiedError:
            self._registry = self._connect_registry()
            raise

    async def _call_registry(self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the registry, perhaps twice: wait for a restart, which is not the fault of the requested model.

        A registry that ended with earlier replicas is started anew.
        """
        deadline_s = math.inf
        while True:
            try:
                return await self._asking.ask(self._registry, method, *args, **kwargs)
            except ray.exceptions.RayActorError as error:
                now_s = time.monotonic()
                if now_s > deadline_s:
                    raise
                deadline_s = min(deadline_s, now_s + REGISTRY_RETRY_S)  # the first wait may have been long
                is_gone = isinstance(error, ray.exceptions.ActorDiedError)
            if is_gone:
                self._registry = await asyncio.to_thread(self._connect_registry)
            await asyncio.sleep(REGISTRY_PAUSE_S)

    async def _fetch_manifest(self, model: str, version: str | None) -> Manifest:
        """Ask the registry; also for the model's configs, where this node does not have the store's folder."""
        try:
            manifest = await self._call_registry(WeightRegistry.manifest, model, version)
            if manifest.kind in ("llm", "program"):
                with contextlib.suppress(ray.exceptions.RayTaskError):  # of a version of a model removed since
                    entry = (await self._call_registry(WeightRegistry.find_model, model)).entry
                    self._note_layers(entry)
                    self._note_program(entry, manifest)
            if not await asyncio.to_thread((self._models / manifest.skeleton).is_dir):
                files = await self._call_registry(WeightRegistry.model_files, model, manifest.fingerprint)
                await asyncio.to_thread(write_files, self._models, manifest, files)
            return manifest
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None

    def _note_layers(self, entry: Entry | None) -> None:
        """Follow the config's places of a language model's layers, from its next lease on."""
        if isinstance(entry, ModelConfig):
            self._module_cache.planner.gpu_layers[entry.id] = entry.gpu_layers

    def _note_program(self, entry: Entry | None, manifest: Manifest) -> None:
        """Follow the config's options of a program, from its next lease on."""

    def invalidate(self, extents: Sequence[str]) -> None:
        """Drop all modules of these extents, which were found damaged. On the event loop."""
        self._module_cache.invalidate(extents)

    async def prefetch(self, model: str) -> None:
        """Bring the model as near as free room allows."""
        with as_service_errors():
            if await self._runs(model):
                await self._module_cache.prefetch(model, self._wants)

    async def pin(self, model: str) -> None:
        """Keep the model here once it is here, until `unpin`. Raises Overloaded when the pinned ones do not fit."""
        with as_service_errors():
            if await self._runs(model):
                await self._module_cache.pin(model, self._wants)

    async def unpin(self, model: str) -> None:
        """Let the model be evicted again."""
        self._module_cache.unpin(model)

    async def evict(self, model: str) -> list[str]:
        """Evict the components of this model alone. Return those that running requests or pins hold."""
        return self._module_cache.evict(model)

    async def set_budget(self, budget_bytes: int) -> None:
        """Set the bytes that weights may take here. Raises Overloaded when more is leased or pinned."""
        with as_service_errors():
            self._module_cache.set_budget(budget_bytes)

    async def describe(self) -> dict[str, Any]:
        """Return a snapshot of this replica, as JSON-able values."""
        return self._module_cache.describe() | {"skeletons": asdict(self._builder.skeletons.skeleton_stats())}

    def _note_load(self, model: str, version: str, error: str | None) -> None:
        """Note that this replica failed to load a version of a model, or loaded it again (None)."""

    async def _runs(self, model: str) -> bool:
        return (await self._module_cache.manifests.newest(model)).kind in self._kinds


async def prepare_models(
    module_cache: ModuleCache,
    models: Iterable[ModelConfig],
    kinds: Collection[ModelKind],
    wanted: Callable[[Component], bool],
    prepare: Callable[[Component, Path], None],
) -> None:
    """Import the classes and make the structures of models of these kinds, and build those to be preloaded.

    The first requests then need not wait for it. Of a long list, only the beginning and the preloaded ones.
    """
    for number, model in enumerate(models):
        if number >= MAX_PREPARED and not model.preload:
            continue
        try:
            manifest = await module_cache.manifests.find_version(model.id)
            if manifest.kind not in kinds:  # the other service's: an LLM is no text encoder
                continue
            for component in filter(wanted, manifest.components.values()):
                await asyncio.to_thread(import_class, component.library, component.class_name)
                await asyncio.to_thread(prepare, component, module_cache.skeleton(manifest))
            await asyncio.to_thread(module_cache.forwards.learn_defaults, manifest, wanted)
            if model.preload and await module_cache.has_room_for(manifest, wanted):
                async with module_cache.lease(model.id, wanted):
                    pass
        except (ClusterError, WeightsError, ServiceError, EngineError) as error:
            # The registry reports it, and requests for the model will fail.
            logger.warning("model %s is not prepared: %s", model.id, error)
    # The libraries' imports make millions of objects that stay; looking through them all again and again
    # makes a switch pause for 300 ms now and then.
    gc.collect()
    gc.freeze()
    gc.enable()  # see `replica_classes.py`


def limit_torch_threads(num_threads: int | None, num_cpus: float) -> None:
    """Give this process its own share of the cores: torch takes all of them by default, in every replica."""
    torch.set_num_threads(num_threads or max(1, math.ceil(num_cpus)))
