"""Serve's autoscaling policy: the way of the controller's `target_replicas` into Serve's own loop.

Serve makes one object of the class, calls it every 0.1 s inside its controller, where nothing may block, and keeps the
state that it returns. It counts requests and knows no models, so the target is decided where the models are known, and
replicas pass it on: a deployment's `record_autoscaling_stats` returns `{"target_replicas": 5}`. The newest report
counts; without a fresh one the policy does what it can with Serve's own counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

__all__ = ["ReportedTarget"]

TARGET: Final = "target_replicas"
MAX_AGE_S: Final = 5.0


class ReportedTarget:
    """The policy class: `AutoscalingPolicy(policy_function="cluster.control.serve_policies:ReportedTarget")`.

    `requests_per_replica` is for the time without a report: so many ongoing requests are one replica's.
    """

    def __init__(self, requests_per_replica: float = 4.0) -> None:
        if not 0 < requests_per_replica < math.inf:
            raise ValueError(f"requests_per_replica is {requests_per_replica!r}; expected a number above 0")
        self._requests_per_replica = requests_per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, within Serve's bounds, and the state for the next call."""
        now_s = context.current_time or 0.0
        state = dict(context.policy_state or {})
        reported = _newest_report(context.raw_metrics or {})
        if reported is not None and reported[0] >= state.get("reported_s", -math.inf):
            state["reported_s"], state["target"] = reported
        age_s = now_s - state.get("reported_s", -math.inf)
        if -MAX_AGE_S <= age_s <= MAX_AGE_S:
            target = state["target"]
        else:
            waiting = max(float(context.total_num_requests or 0.0), 0.0)
            asked = math.ceil(min(waiting, 1e9) / self._requests_per_replica) if waiting < math.inf else 0
            # Requests that nobody explains are a reason for more workers, their absence none for fewer.
            target = max(asked, context.target_num_replicas)
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(target, low), high), state


def _newest_report(raw_metrics: Mapping[str, Mapping[Any, Iterable[Any]]]) -> tuple[float, int] | None:
    """Return (time, target) of the newest target that any replica reported; None without one that can be true."""
    newest: tuple[float, int] | None = None
    for series in raw_metrics.get(TARGET, {}).values():
        for point in series:
            at_s, value = float(point.timestamp), float(point.value)
            if math.isfinite(at_s) and 0 <= value < 1e9 and (newest is None or at_s > newest[0]):
                newest = (at_s, math.ceil(value))
    return newest
