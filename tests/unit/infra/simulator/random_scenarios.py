"""Random scenarios with faults."""

from __future__ import annotations

import random
from dataclasses import replace

from cluster.placement.state import BATCH, INTERACTIVE, STANDARD, Components
from infra.simulator.scenario import Fault, Scenario, SimModel, SimWorker, poisson, zipf_shares

GB = 10**9


def random_scenario(seed: int, with_faults: bool = False, duration_s: float = 60.0) -> Scenario:
    """Return up to 8 models, some with shared components, on up to 5 unlike workers. Every model fits every worker."""
    chance = random.Random(seed)
    models = []
    for number in range(chance.randrange(1, 9)):
        sizes = {f"own{number}": chance.randrange(1, 8) * GB}
        if chance.random() < 0.5:
            sizes[f"family{number % 2}"] = 4 * GB
        slo = chance.choice([INTERACTIVE, STANDARD, BATCH])
        models.append(SimModel(f"m{number}", Components(sizes), chance.uniform(0.1, 1.5), chance.random(), slo))
    workers = [
        SimWorker(
            f"w{number}",
            f"n{number % 2}",
            chance.choice([12, 20, 40]) * GB,
            chance.randrange(1, 5),
            speed=chance.choice([0.5, 1.0, 2.0]),
            fixed_switch_s=chance.choice([0.0, 0.2]),
            attach_bytes_per_s=chance.choice([2, 10]) * 1e9,
        )
        for number in range(chance.randrange(1, 6))
    ]
    requests = poisson(chance.uniform(0.2, 2.0), zipf_shares([each.id for each in models]), duration_s, chance)
    requests = [replace(request, priority=chance.randrange(1, 4)) for request in requests]
    faults = []
    if with_faults:
        for worker in workers:
            at_s = chance.uniform(0, duration_s)
            kind = chance.choice(["worker_lost", "worker_silent", "worker_lies"])
            faults += [Fault(at_s, kind, worker.id), Fault(at_s + 5, "worker_lost", worker.id)]  # type: ignore[arg-type]
            faults.append(Fault(at_s + chance.uniform(6, 20), "worker_back", worker.id))
        faults += [Fault(chance.uniform(0, duration_s), "clock_jump", "", chance.choice([-3600.0, 3600.0]))]
        models[0] = replace(models[0], num_failing_loads=2)
    return Scenario(tuple(models), tuple(workers), tuple(requests), tuple(faults), chance.random() < 0.7)
