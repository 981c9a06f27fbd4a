"""A deployment without a replica is told from one whose replicas are still starting, by the controller's status."""

from __future__ import annotations

import pytest
from ray.serve.schema import DeploymentStatus, DeploymentStatusOverview, DeploymentStatusTrigger, ReplicaState

from deployments.replicas.replica_calls import ReplicaStates

FAILED = "A replica failed to start with exception. Retrying. Error:\nTraceback:\n  File x\nOSError: no such file: w\n"


class States(ReplicaStates):
    """States of a deployment that was last seen like this."""

    def __init__(self, seen: DeploymentStatusOverview | None) -> None:
        super().__init__("worker", "atelier")
        self._seen = seen

    async def _overview(self) -> DeploymentStatusOverview | None:
        return self._seen


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
async def test_running_starting_and_failing(seen: DeploymentStatusOverview, runs: bool, can: bool) -> None:
    states = States(seen)
    assert (await states.why_none_runs() is None, await states.why_none_can() is None) == (runs, can)


async def test_a_controller_that_does_not_answer_gives_no_reason() -> None:
    assert (await States(None).why_none_runs(), await States(None).why_none_can()) == (None, None)


async def test_the_reason_is_the_error_itself() -> None:
    assert await States(overview("UNHEALTHY", FAILED)).why_none_can() == (
        "no replica of 'worker' is running (UNHEALTHY): OSError: no such file: w"
    )
