"""The number of a deployment's replicas, asked of Serve's controller and told to it.

Serve lets somebody else decide it in an application that was run with `external_scaler_enabled` (Ray 2.60).
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import ray

CALL_S: Final = 10.0


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
        from ray.serve._private.common import DeploymentID  # Serve takes a second to import

        controller = await asyncio.to_thread(_serve_controller)
        async with asyncio.timeout(CALL_S):
            await controller.update_deployment_replicas.remote(DeploymentID(self._deployment, self._app), num_replicas)


def _serve_controller() -> Any:
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
