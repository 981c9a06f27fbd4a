"""Serve's controller: the number of a deployment's replicas and when they are replaced, the address of its proxies,
and the paths they serve; and the demands of replicas that Ray has no place for.

Serve lets somebody else decide the number in an application that was run with `external_scaler_enabled` (Ray 2.60).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import ray

from cluster.ray_seam import shims
from cluster.records.errors import RayIncompatible

if TYPE_CHECKING:
    from configs.cluster import ReplicaConfig

CALL_S: Final = 10.0
_TINY: Final = 1e-3  # a type of accelerator is a resource of which an actor takes this much


class ServeReplicas:
    """One deployment. Raises Ray's errors while Serve's controller is away, ValueError for what it does not know."""

    def __init__(self, app: str, deployment: str) -> None:
        self._app = app
        self._deployment = deployment

    async def target(self) -> int:
        """Return how many replicas Serve has been asked for."""
        controller = await asyncio.to_thread(_serve_controller)
        async with asyncio.timeout(CALL_S):
            details = await controller.get_serve_instance_details.remote()
        found = details.get("applications", {}).get(self._app, {}).get("deployments", {}).get(self._deployment)
        if found is None:
            raise ValueError(f"Serve runs no deployment {self._deployment!r} of an application {self._app!r}")
        return int(found["target_num_replicas"])

    async def set_target(self, num_replicas: int) -> None:
        """Ask for so many replicas."""
        from ray.serve.handle import DeploymentHandle  # Serve takes a second to import

        deployment_id = DeploymentHandle(self._deployment, self._app).deployment_id
        controller = await asyncio.to_thread(_serve_controller)
        async with asyncio.timeout(CALL_S):
            await controller.update_deployment_replicas.remote(deployment_id, num_replicas)


def replaced_by_version(deployment: Any, version: str) -> Any:
    """Return the deployment such that Serve replaces its replicas when `version` is another one, and not otherwise.

    By itself Serve replaces them whenever the application is run. With an equal version replicas that start later get
    the arguments of the first time. Replacements start before those that they replace end, one by one.
    """
    from ray.serve.schema import DeploymentSchema  # Serve takes a second to import

    shims.require(shims.SERVE_CONTROL)
    can_surge = "max_surge_percent" in DeploymentSchema.model_fields  # Ray 2.60; before, one ends and the next starts
    one_by_one = {"max_surge_percent": 1} if can_surge else {}  # of the replicas, rounded up
    return deployment.options(version=version, _internal=True, **one_by_one)


@dataclass(frozen=True, slots=True)
class ReplicaCount:
    """The replicas of a deployment: those that run, those whose process has not begun, and how many are wanted."""

    num_running: int
    num_unplaced: int
    num_wanted: int


@dataclass(frozen=True, slots=True)
class DeployedApp:
    """An application on Serve: its replicas by deployment, and why it could not be deployed, "" while it can.

    `environments` are those of the replicas by deployment. `is_settled`: all replicas are as they were asked for.
    """

    replicas: Mapping[str, ReplicaCount]
    failure: str = ""
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    is_settled: bool = False


def deployed_app(app: str) -> DeployedApp:
    """Return an application as Serve's controller knows it; without replicas before it does. Blocks.

    Raises ValueError without a Serve, and Ray's errors while its controller is away.
    """
    shims.require(shims.SERVE_CONTROL)
    details = _details(_serve_controller())
    found = details.get("applications", {}).get(app, {})
    deployments = found.get("deployments", {})
    status = found.get("status")
    return DeployedApp(
        {name: _counted(deployment) for name, deployment in deployments.items()},
        str(found["message"]) if status == "DEPLOY_FAILED" else "",
        {name: _environment(deployment) for name, deployment in deployments.items()},
        status == "RUNNING",
    )


def _environment(deployment: Mapping[str, Any]) -> dict[str, str]:
    options = deployment["deployment_config"].get("ray_actor_options") or {}
    return dict((options.get("runtime_env") or {}).get("env_vars") or {})


def _counted(deployment: Mapping[str, Any]) -> ReplicaCount:
    states = [(one["state"], one.get("node_id")) for one in deployment.get("replicas", ())]
    num_running = sum(state == "RUNNING" for state, _ in states)
    num_unplaced = sum(state == "STARTING" and node is None for state, node in states)
    return ReplicaCount(num_running, num_unplaced, int(deployment["target_num_replicas"]))


def proxy_host() -> str | None:
    """Return the address that Serve's proxies listen on, None when Serve was told none. For a process of Serve's."""
    shims.require(shims.SERVE_CONTROL)
    details = _details(_serve_controller())
    host = details.get("http_options", {}).get("host")
    return str(host) if host else None


def serving_nodes() -> set[str]:
    """Return the ids of the nodes whose proxy answers; none while Serve does not say. Blocks."""
    shims.require(shims.SERVE_CONTROL)
    try:
        details = _details(_serve_controller())
    except (ValueError, ray.exceptions.RayError):  # no actor of that name, or it is away
        return set()
    return {node_id for node_id, proxy in details.get("proxies", {}).items() if proxy["status"] == "HEALTHY"}


@dataclass(frozen=True, slots=True)
class RunningServe:
    """Serve on a Ray: the port of all its applications, and the path of each one by name."""

    http_port: int
    routes: dict[str, str]


def running_serve() -> RunningServe | None:
    """Return the Serve of the Ray that this process has joined, None where there is none. Blocks."""
    shims.require(shims.SERVE_CONTROL)
    try:
        controller = _serve_controller()
    except ValueError:  # Ray's own, for no actor of that name
        return None
    details = _details(controller)
    routes = {name: found["route_prefix"] for name, found in details["applications"].items()}
    return RunningServe(int(details["http_options"]["port"]), routes)


def _serve_controller() -> Any:
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)


def _details(controller: Any) -> dict[str, Any]:
    found: dict[str, Any] = ray.get(controller.get_serve_instance_details.remote(), timeout=CALL_S)
    return found


def unplaced_demands() -> list[dict[str, float]]:
    """Return the resources of each actor that waits for a node, those of equal ones once; of ranks, those of each
    rank. Blocks.

    They are what Ray would show to its autoscaler, also where none runs. Raises RayIncompatible, and Ray's errors while
    it does not answer.
    """
    demands = _cluster_status().resource_demands
    return [
        dict(shape.bundle)
        for demand in (*demands.ray_task_actor_demand, *demands.placement_group_demand)
        for shape in demand.bundles_by_count
    ]


def draining_nodes() -> set[str]:
    """Return the ids of the nodes that end as soon as nothing runs on them; none where Ray does not say. Blocks."""
    try:
        nodes = _cluster_status().active_nodes
    except (RayIncompatible, ray.exceptions.RayError, OSError):
        return set()
    return {node.node_id for node in nodes if node.node_status == "DRAINING"}


def _cluster_status() -> Any:
    shims.require(shims.DEMANDS)
    from ray.autoscaler.v2.sdk import get_cluster_status  # it takes a moment to import

    return get_cluster_status(ray.get_runtime_context().gcs_address, timeout=int(CALL_S))


def demand_of(settings: ReplicaConfig) -> Mapping[str, float]:
    """Return the resources of one process of a replica as Ray names them in a demand, and in a bundle of ranks."""
    placement = settings.placement
    resources = {"CPU": settings.num_cpus, "GPU": settings.num_gpus, **placement.resources}
    if placement.accelerator_type:
        resources[f"accelerator_type:{placement.accelerator_type}"] = _TINY
    return {name: amount for name, amount in resources.items() if amount}
