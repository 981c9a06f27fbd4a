"""Mean latency beside that of `serve.multiplexed`'s rules, on workers that merge: random arrivals, a virtual clock."""

from __future__ import annotations

import random
from typing import Final

import pytest

from cluster.placement.state import Components
from infra.simulator.multiplexed import policies_and_multiplexed
from infra.simulator.running import simulate
from infra.simulator.scenario import Scenario, SimModel, SimWorker, bursts, poisson

SHARES: Final = {"flux": 0.5, "sdxl": 0.25, "inverted": 0.15, "t0": 0.04, "t1": 0.03, "t2": 0.03}
SERVICE_S: Final = {"sdxl": 0.2}
USUAL_S: Final = 0.14  # alone
NUM_REQUESTS: Final = 220


def demo(kind: str, load: float, switch: float, seed: int) -> Scenario:
    """Return six demo models on two workers with room for one each; `switch` is in usual requests."""
    chance = random.Random(seed)
    growth = chance.uniform(0.25, 0.8)
    rate = load * 2 / USUAL_S
    duration_s = NUM_REQUESTS / rate
    models = tuple(SimModel(id_, Components({f"own-{id_}": 100}), SERVICE_S.get(id_, 0.12), growth) for id_ in SHARES)
    workers = tuple(
        SimWorker(f"w{n}", "n", 100, 16, fixed_switch_s=switch * USUAL_S, attach_bytes_per_s=1e15) for n in range(2)
    )
    if kind == "poisson":
        return Scenario(models, workers, tuple(poisson(rate, SHARES, duration_s, chance)))
    every_s = 15 / rate
    return Scenario(models, workers, tuple(bursts(15, every_s, list(SHARES), duration_s, chance, every_s / 5)))


@pytest.mark.drawn
@pytest.mark.parametrize(
    "load", [pytest.param(0.3, marks=pytest.mark.long), 0.6, pytest.param(0.9, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("switch", [0.01, 0.1, 0.3, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("kind", ["poisson", "bursts"])
def test_it_is_no_slower_than_multiplexing(kind: str, load: float, switch: float) -> None:
    means = {"latency-first": 0.0, "serve.multiplexed": 0.0}
    for seed in range(3):
        for policy in means:
            figures, _ = simulate(demo(kind, load, switch, seed), policy, policies_and_multiplexed(seed))
            assert figures.served == figures.requests
            means[policy] += figures.mean_s
    assert means["latency-first"] <= 1.05 * means["serve.multiplexed"]
