"""What every replica that runs models begins with: its registry, its node's keeper, its host of built models."""

from __future__ import annotations

import math
import uuid
from typing import Any

import ray
import torch

from cluster.keeper import RayExtents
from cluster.registry import connect_registry
from configs.cluster import ClusterConfig
from deployments.model_host import Builder, ModelHost
from weights.store import WeightStore


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

    return ModelHost(fetch_manifest, provider, WeightStore(config.store.path).models, budget_bytes, build)


def limit_threads(num_threads: int | None, num_cpus: float) -> None:
    """Torch takes every core by default, in every replica; each gets its own share instead."""
    torch.set_num_threads(num_threads or max(1, math.ceil(num_cpus)))
