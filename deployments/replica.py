"""What every replica that runs models begins with: its registry, its node's keeper, its host of built models."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import ray
import torch

from cluster.errors import ClusterError
from cluster.keeper import RayExtents
from cluster.registry import connect_registry
from configs.cluster import ClusterConfig
from configs.model import ModelConfig
from deployments.engines.build import import_class
from deployments.errors import ServiceError
from deployments.model_host import Builder, ModelHost
from weights.errors import WeightsError
from weights.manifest import Component
from weights.store import WeightStore

logger = logging.getLogger("atelier.replica")


async def open_host(config: ClusterConfig, role: str, budget_bytes: int, build: Builder) -> ModelHost:
    """Connect this replica. `role` names it as a holder of leases."""
    registry = connect_registry(config)
    keeper: Any = await registry.keeper.remote(ray.get_runtime_context().get_node_id())
    provider = RayExtents(keeper, holder=f"{role}-{uuid.uuid4().hex[:8]}")

    async def fetch_manifest(model: str) -> Any:
        try:
            return await registry.manifest.remote(model)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None

    return ModelHost(
        fetch_manifest,
        provider,
        WeightStore(config.store.path).models,
        budget_bytes,
        build,
        report=lambda model, error: registry.report_attach.remote(model, error),
    )


async def prepare_models(host: ModelHost, models: Iterable[ModelConfig], wanted: Callable[[Component], bool]) -> None:
    """Before the first request: import what the configured models are made of, and build those to be preloaded."""
    for model in models:
        try:
            manifest = await host.manifest(model.id)
            for component in filter(wanted, manifest.components.values()):
                await asyncio.to_thread(import_class, component.library, component.class_name)
            if model.preload and host.has_room_for(manifest, wanted):
                async with host.lease(model.id, wanted):
                    pass
        except (ClusterError, WeightsError, ServiceError) as error:
            # Not this replica's business yet: the directory shows it, and a request for the model will be told.
            logger.warning("model %s is not prepared: %s", model.id, error)


def limit_threads(num_threads: int | None, num_cpus: float) -> None:
    """Torch takes every core by default, in every replica; each gets its own share instead."""
    torch.set_num_threads(num_threads or max(1, math.ceil(num_cpus)))
