"""A tick of 10,000 models on 10,000 workers: within 100 ms (`atelier bench schedule`); a busy machine gets more."""

from __future__ import annotations

import time

from cluster.control.autoscaling import ScalingMemory, ScalingPolicy, target_replicas
from cluster.control.checking import usable_state
from cluster.control.switching import plan_switches
from deployments.bench.schedule import _large_state


def test_a_tick_of_ten_thousand_models_and_workers() -> None:
    models, workers, held = _large_state(10_000, 1)
    seconds = []
    for _ in range(3):
        start_s = time.process_time()
        state = usable_state(models, workers, held)
        plan = plan_switches(state)
        target_replicas(state, ScalingPolicy(0, 20_000), ScalingMemory(), 10_000, 0.0)
        seconds.append(time.process_time() - start_s)
    assert len(plan.decisions) > 100
    assert state.ignored == ()
    assert min(seconds) < 0.6
