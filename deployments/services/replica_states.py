"""What Serve's controller knows of the replicas of a deployment: asked beside the requests, not behind them."""

from __future__ import annotations

import asyncio
import logging

from ray import serve
from ray.serve.schema import DeploymentStatusOverview, ReplicaState

logger = logging.getLogger("atelier.replica")


class ReplicaStates:
    """Of one deployment; without `app`, of the application that this replica belongs to."""

    def __init__(self, deployment: str, app: str | None = None) -> None:
        self._deployment = deployment
        self._app = app or serve.get_replica_context().app_name

    async def why_none_runs(self) -> str | None:
        """None when at least one replica runs, or when the controller does not answer."""
        overview = await self._overview()
        return overview and why_none_runs(self._deployment, overview)

    async def why_none_can(self) -> str | None:
        """None also while a replica is starting, for the first time or in the place of one that died."""
        overview = await self._overview()
        return overview and why_none_can(self._deployment, overview)

    async def _overview(self) -> DeploymentStatusOverview | None:
        try:
            status = await asyncio.to_thread(serve.status)
        except Exception as error:  # of Ray or Serve; the calls that wait have their deadlines
            logger.warning("Serve's controller does not answer: %s", str(error).partition("\n")[0])
            return None
        app = status.applications.get(self._app)
        return app.deployments.get(self._deployment) if app else None


def why_none_runs(deployment: str, overview: DeploymentStatusOverview) -> str | None:
    """The deployment's own words, when it has no replica that runs."""
    if overview.replica_states.get(ReplicaState.RUNNING, 0):
        return None
    return f"no replica of {deployment!r} is running ({overview.status.value}): {_last_line(overview.message)}"


def why_none_can(deployment: str, overview: DeploymentStatusOverview) -> str | None:
    """As `why_none_runs`, but replicas that are starting are waited for, as long as their start has not failed.

    Serve tries again for ever where a replica ran before, and then tells the failure in its message only (Ray 2.60).
    """
    has_failed = overview.status.value == "DEPLOY_FAILED" or "failed to start" in overview.message
    return why_none_runs(deployment, overview) if has_failed else None


def _last_line(message: str) -> str:
    """Of a traceback, the error itself."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it says nothing about why"
