"""What every replica that runs models begins with: its registry, its node's keeper, its host of built models."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import ray
import torch

from cluster.errors import ClusterError
from cluster.keeper.ray_extents import RayExtents
from cluster.ray_calls import get
from cluster.registry.actor import connect_registry
from configs.cluster import ClusterConfig, ModelReplicaConfig
from configs.model import ModelConfig
from deployments.engines.build import import_class
from deployments.engines.protocol import EngineError
from deployments.errors import ServiceError
from deployments.modules.built_modules import Footprint, object_footprint
from deployments.modules.model_host import ModelHost
from weights.errors import WeightsError
from weights.manifest import Component, ModelKind
from weights.store import WeightStore

MAX_PREPARED: Final = 64
KEEPER_TIMEOUT_S: Final = 30.0

logger = logging.getLogger("atelier.replica")


class ReplicaBuilder(Protocol):
    """What makes the components of a replica; see ComponentBuilder."""

    def __call__(self, component: Component, skeleton: Path, tensors: dict[str, torch.Tensor]) -> Any: ...
    def prepare(self, component: Component, skeleton: Path) -> None: ...
    def retire(self, thing: Any) -> None: ...


async def open_host(
    config: ClusterConfig,
    role: str,
    settings: ModelReplicaConfig,
    build: ReplicaBuilder,
    forget_results: Callable[[], None] = lambda: None,
    private_footprint: Footprint = object_footprint,
) -> ModelHost:
    """Connect this replica. `role` names it as a holder of leases; `forget_results` is called on the event loop when
    weights that it had were found damaged: what was kept of their results may be wrong. `private_footprint` says what
    a component costs this replica beside the node's shared memory.
    """
    registry = connect_registry(config)
    node_id = ray.get_runtime_context().get_node_id()
    keeper: Any = await registry.keeper.remote(node_id)
    loop = asyncio.get_running_loop()

    def on_recall(extents: Sequence[str], is_overdue: bool) -> None:
        host.give_up(extents, is_overdue)  # in the thread that asks: the event loop may be busy

    def on_damage(extents: Sequence[str]) -> None:
        loop.call_soon_threadsafe(host.condemn, extents)
        loop.call_soon_threadsafe(forget_results)

    def connect() -> Any:
        return get(registry.keeper.remote(node_id), KEEPER_TIMEOUT_S)

    keeps = settings.device == "cpu"  # other devices need the node's memory only while they upload
    provider = RayExtents(keeper, f"{role}-{uuid.uuid4().hex[:8]}", on_damage, connect, on_recall if keeps else None)

    async def fetch_manifest(model: str, version: str | None) -> Any:
        try:
            return await registry.manifest.remote(model, version)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None

    host = ModelHost(
        fetch_manifest,
        provider,
        WeightStore(config.store.path).models,
        settings.weights_budget_bytes,
        build,
        report=lambda model, error: registry.report_attach.remote(model, error),
        device=settings.device,
        kept=provider if keeps else None,
        private_footprint=private_footprint,
        retire=build.retire,
    )
    provider.start_beating()
    return host


async def prepare_models(
    host: ModelHost,
    models: Iterable[ModelConfig],
    kinds: Collection[ModelKind],
    wanted: Callable[[Component], bool],
    build: ReplicaBuilder,
) -> None:
    """Before the first request: import what the configured models are made of, make their structures, and build those
    to be preloaded. `kinds` are what this service runs. Of a long list, only the beginning and what is preloaded."""
    for number, model in enumerate(models):
        if number >= MAX_PREPARED and not model.preload:
            continue
        try:
            manifest = await host.manifest(model.id)
            if manifest.kind not in kinds:  # the other service's: an LLM is no text encoder
                continue
            for component in filter(wanted, manifest.components.values()):
                await asyncio.to_thread(import_class, component.library, component.class_name)
                await asyncio.to_thread(build.prepare, component, host.skeleton(manifest))
            if model.preload and await host.has_room_for(manifest, wanted):
                async with host.lease(model.id, wanted):
                    pass
        except (ClusterError, WeightsError, ServiceError, EngineError) as error:
            # Not this replica's business yet: the directory shows it, and a request for the model will be told.
            logger.warning("model %s is not prepared: %s", model.id, error)
    # What the libraries made at import is millions of objects that stay; looking through them all again and again
    # makes a switch pause for 300 ms now and then.
    gc.collect()
    gc.freeze()


def limit_threads(num_threads: int | None, num_cpus: float) -> None:
    """Torch takes every core by default, in every replica; each gets its own share instead."""
    torch.set_num_threads(num_threads or max(1, math.ceil(num_cpus)))
