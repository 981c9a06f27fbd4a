"""A tick of 10,000 models on 10,000 workers: within 100 ms (`infra.bench schedule`); here its work is counted."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

from unit.cluster.placement.random_states import cluster

from cluster.placement import on_demand, outlook, switching
from cluster.placement.autoscaling import ScalingMemory, target_replicas
from cluster.placement.switching import plan_switches
from configs.admission import ScalingConfig
from infra.bench.schedule import _large_state


def calls_of_a_tick(number: int) -> tuple[Counter[str], int]:
    """Return the calls of Python functions by name, and the orders of the plan."""
    models, workers, held = _large_state(number, 1)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        state = cluster(models, workers, held)
        plan = plan_switches(state)
        target_replicas(state, ScalingConfig(min_workers=0, max_workers=number), ScalingMemory(), number, 0.0)
    finally:
        sys.setprofile(None)
    return calls, len(plan.decisions)


def test_a_tick_of_ten_thousand_models_and_workers_is_linear() -> None:
    few, _ = calls_of_a_tick(2_500)
    many, num_orders = calls_of_a_tick(10_000)
    assert num_orders > 100
    assert many.total() < 4.4 * few.total()  # four times the cluster
    assert many.total() < 16 * 10_000
    # What is costly is done for the models that are looked at only, on a few workers each.
    most_candidates = 3 * outlook.MAX_CANDIDATES
    ahead = 2 * outlook.MAX_CANDIDATES * outlook.FEW
    assert many["_option_for"] < switching.MAX_NEEDS * most_candidates + ahead
    assert many["switch_s"] <= many["_option_for"] + 4 * on_demand.MAX_STARTS
