"""What the controller's status says about replicas that are not there."""

from __future__ import annotations

import pytest
from ray.serve.schema import DeploymentStatus, DeploymentStatusOverview, DeploymentStatusTrigger, ReplicaState

from deployments.services.replica_calls import why_none_can, why_none_runs

FAILED = "A replica failed to start with exception. Retrying. Error:\nTraceback:\n  File x\nOSError: no such file: w\n"


def overview(status: str, message: str = "", *, running: int = 0, starting: int = 0) -> DeploymentStatusOverview:
    states = {ReplicaState.RUNNING: running, ReplicaState.STARTING: starting}
    trigger = DeploymentStatusTrigger.UNSPECIFIED
    return DeploymentStatusOverview(DeploymentStatus(status), trigger, states, message)


@pytest.mark.parametrize(
    ("seen", "runs", "can"),
    [
        (overview("HEALTHY", running=1), True, True),
        (overview("UNHEALTHY", "A replica's health check failed.", running=1, starting=1), True, True),
        (overview("UNHEALTHY", FAILED, running=1), True, True),
        (overview("UNHEALTHY", "A replica's health check failed.", starting=1), False, True),
        (overview("UPDATING", starting=1), False, True),
        (overview("UNHEALTHY", FAILED, starting=1), False, False),
        (overview("DEPLOY_FAILED", "The deployment failed to start 3 times in a row."), False, False),
    ],
)
def test_running_starting_and_failing(seen: DeploymentStatusOverview, runs: bool, can: bool) -> None:
    assert (why_none_runs("worker", seen) is None, why_none_can("worker", seen) is None) == (runs, can)


def test_the_reason_is_the_error_itself() -> None:
    assert why_none_can("worker", overview("UNHEALTHY", FAILED)) == (
        "no replica of 'worker' is running (UNHEALTHY): OSError: no such file: w"
    )
