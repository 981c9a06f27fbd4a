"""The least number of workers against a look at every number."""

from __future__ import annotations

import random

import pytest
from unit.cluster.simulator.random_scenarios import GB

from cluster.placement.state import Components, SloClass
from cluster.simulator.running import simulate
from cluster.simulator.scenario import Scenario, SimModel, SimWorker
from cluster.simulator.sizing import least_workers
from cluster.simulator.traces import poisson, zipf_shares

MAX = 7


@pytest.mark.parametrize("seed", range(2))
def test_one_worker_less_does_not_suffice(seed: int) -> None:
    slo = SloClass("test", 6.0)
    models = tuple(SimModel(f"m{n}", Components({f"c{n}": GB}), 1.0, 0.6, slo) for n in range(4))
    requests = tuple(poisson(1.5 + seed, zipf_shares([m.id for m in models]), 40.0, random.Random(seed)))

    def scenario_of(num: int) -> Scenario:
        workers = tuple(SimWorker(f"w{n}", "n", GB, attach_bytes_per_s=GB / 1.5) for n in range(num))
        return Scenario(models, workers, requests)

    found = least_workers(scenario_of, "latency-first", 0.9, MAX)
    enough = [num for num in range(1, MAX + 1) if simulate(scenario_of(num), "latency-first")[0].slo_attainment >= 0.9]
    assert found in enough
    assert found - 1 not in enough
    assert least_workers(scenario_of, "latency-first", 0.9, found - 1 or 1) is (None if found > 1 else 1)
