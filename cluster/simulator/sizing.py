"""The number of workers that keep a promise, found by simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cluster.simulator.running import POLICIES, Policy, keeps_promise
from cluster.simulator.scenario import Scenario


def least_workers(
    scenario_of: Callable[[int], Scenario],
    policy: str,
    least_share: float,
    max_workers: int,
    policies: Mapping[str, Policy] = POLICIES,
) -> int | None:
    """Return the least number of workers with which this share of the requests is answered within their targets.

    `scenario_of` makes the cluster with a number of workers. The number is doubled until it suffices, then halved in;
    None: `max_workers` do not suffice either. More workers are taken to be no worse.
    """

    def suffices(num_workers: int) -> bool:
        return keeps_promise(scenario_of(num_workers), policy, least_share, policies)

    low, high = 1, 1
    while not suffices(high):
        if high >= max_workers:
            return None
        low, high = high + 1, min(2 * high, max_workers)
    while low < high:
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle + 1
    return high
