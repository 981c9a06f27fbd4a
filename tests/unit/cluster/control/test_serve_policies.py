"""The policy class through Serve's own records: how Serve makes it, calls it, and keeps its state."""

from __future__ import annotations

import math

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingContext, AutoscalingPolicy

from cluster.control.serve_policies import ReportedTarget

DEPLOYMENT = DeploymentID("worker", "atelier")


def context(
    now_s: float = 100.0, requests: float = 0.0, current: int = 2, state=None, reports=()
) -> AutoscalingContext:
    series = {
        ReplicaID(f"r{number}", DEPLOYMENT): [TimeStampedValue(at_s, value) for at_s, value in points]
        for number, points in enumerate(reports)
    }
    return AutoscalingContext(
        DEPLOYMENT, "worker", "atelier", current, current, [], lambda: requests, lambda: 0.0, {},
        lambda: {"target_replicas": series}, 0, 8, state or {}, None, None, now_s, None,
    )  # fmt: skip


def policy(**kwargs) -> ReportedTarget:
    path = "cluster.control.serve_policies:ReportedTarget"
    made = _resolve_policy_callable(AutoscalingPolicy(policy_function=path, policy_kwargs=kwargs))
    assert isinstance(made, ReportedTarget)
    return made


def test_the_newest_report_counts_within_serves_bounds() -> None:
    target, state = policy()(context(reports=[[(98.0, 3.0), (99.5, 5.0)], [(99.0, 7.0)]]))
    assert target == 5
    # An older report that comes later changes nothing, and the state carries over a tick without reports.
    target, state = policy()(context(100.1, state=state, reports=[[(99.2, 1.0)]]))
    assert target == 5
    assert policy()(context(101.0, state=state))[0] == 5
    assert policy()(context(reports=[[(99.0, 99.0)]]))[0] == 8
    assert policy()(context(reports=[[(99.0, 0.0)]]))[0] == 0


def test_without_a_fresh_report_more_only_for_requests_and_never_less() -> None:
    _, state = policy()(context(reports=[[(99.0, 1.0)]]))
    assert policy()(context(200.0, state=state))[0] == 2
    assert policy()(context(200.0, requests=17.0, state=state))[0] == 5
    assert policy(requests_per_replica=10)(context(200.0, requests=17.0, current=0))[0] == 2
    assert policy()(context(-500.0, state=state))[0] == 2


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, 1e12])
def test_a_report_that_cannot_be_true_is_none(value: float) -> None:
    assert policy()(context(reports=[[(99.0, value)]]))[0] == 2
    assert policy()(context(requests=value, reports=[]))[0] in (2, 8)


def test_a_mistake_in_its_arguments_is_named() -> None:
    with pytest.raises(ValueError, match="requests_per_replica is 0"):
        policy(requests_per_replica=0)
