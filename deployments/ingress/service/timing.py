"""Calls of replicas whose times include the time spent in the ingress."""

from __future__ import annotations

import time
from typing import Any

from cluster.admission.records import Demand
from deployments.ingress.service.retries import RetriedCalls
from deployments.records import TimingsMs


async def timed_call(calls: RetriedCalls, method: str, request: Any, demand: Demand, route: str = "") -> Any:
    """Return the result of a replica's method."""
    start = time.perf_counter()
    result = await calls.call(method, request, demand=demand, route=route)
    account(result.timings_ms, start)
    return result


def account(timings_ms: TimingsMs, start: float) -> None:
    """Count the time spent here but not in the replica as queueing: transport and the wait for a place."""
    elapsed_ms = (time.perf_counter() - start) * 1e3
    inside_ms = timings_ms.get("total", elapsed_ms)
    timings_ms["queue"] = timings_ms.get("queue", 0.0) + max(0.0, elapsed_ms - inside_ms)
    timings_ms["total"] = elapsed_ms
