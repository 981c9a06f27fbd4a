"""What Ray shows to its autoscaler, also where none runs: demands that it has no place for, nodes that are to go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray

from cluster.ray_seam import shims

if TYPE_CHECKING:
    from configs.cluster import ReplicaConfig

_ANSWER_S = 10
_TINY = 1e-3  # a type of accelerator is a resource of which an actor takes this much


def unplaced_demands() -> list[dict[str, float]]:
    """Return the resources of each actor that waits for a node, those of equal ones once. Blocks.

    Raises RayIncompatible, and Ray's errors while it does not answer.
    """
    return [
        dict(shape.bundle)
        for demand in _cluster_status().resource_demands.ray_task_actor_demand
        for shape in demand.bundles_by_count
    ]


def draining_nodes() -> set[str]:
    """Return the ids of the nodes that end as soon as nothing runs on them; none where Ray does not say. Blocks.

    Raises Ray's errors while it does not answer.
    """
    if shims.problems(shims.DEMANDS):
        return set()
    return {node.node_id for node in _cluster_status().active_nodes if node.node_status == "DRAINING"}


def _cluster_status() -> Any:
    shims.require(shims.DEMANDS)
    from ray.autoscaler.v2.sdk import get_cluster_status  # it takes a moment to import

    return get_cluster_status(ray.get_runtime_context().gcs_address, timeout=_ANSWER_S)


def demand_of(settings: ReplicaConfig) -> Mapping[str, float]:
    """Return the resources of one replica as Ray names them in a demand."""
    placement = settings.placement
    resources = {"CPU": settings.num_cpus, "GPU": settings.num_gpus, **placement.resources}
    if placement.accelerator_type:
        resources[f"accelerator_type:{placement.accelerator_type}"] = _TINY
    return {name: amount for name, amount in resources.items() if amount}
