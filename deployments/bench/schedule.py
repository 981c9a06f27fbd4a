"""`atelier bench schedule`: switching under the controller and under others, in the simulator."""

from __future__ import annotations

import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from cluster.control.autoscaling import ScalingMemory, ScalingPolicy, target_replicas
from cluster.control.checking import usable_state
from cluster.control.state import Components, ModelState, SloClass, WorkerState
from cluster.control.switching import plan_switches
from cluster.simulator.oracle import oracle_mean_latency_s
from cluster.simulator.running import POLICIES, PolicyName, simulate
from cluster.simulator.scenario import Scenario, SimModel, SimWorker
from cluster.simulator.sizing import least_workers
from cluster.simulator.traces import poisson, zipf_shares

GB: Final = 10**9
TARGET: Final = SloClass("bench", 30.0)
# What a switch costs: measured on the demo models here (BENCHMARKS.md, "Switching"), and that of a 30 GB pipeline.
SWITCHES: Final = {"measured, demo models": 0.0018, "30 GB at 25 GB/s": 30 / 25, "30 GB at 6 GB/s": 30 / 6}
ZIPF_LOADS: Final = (0.5, 1.5, 3.0, 4.5)  # requests per second for 4 workers that can do 5.7
SIZING_SLO: Final = 0.95


def _scenario_of(
    num_models: int,
    num_workers: int,
    rate: float,
    duration_s: float,
    seed: int,
    switch_s: float,
    slo: SloClass = TARGET,
) -> Scenario:
    """Return Poisson arrivals with Zipf shares on workers that hold one model each and run four requests at once.

    A request alone takes 1 s, a batch of four 2.8 s.
    """
    models = tuple(
        SimModel(f"m{number:03d}", Components({f"own{number}": 30 * GB}), 1.0, 0.6, slo) for number in range(num_models)
    )
    workers = tuple(
        SimWorker(f"w{number:02d}", f"n{number // 8}", 30 * GB, 4, attach_bytes_per_s=30 * GB / switch_s)
        for number in range(num_workers)
    )
    shares = zipf_shares([model.id for model in models])
    return Scenario(models, workers, tuple(poisson(rate, shares, duration_s, random.Random(seed))))


def _measure_zipf(
    num_models: int, num_workers: int, rates: Sequence[float], duration_s: float, seeds: Sequence[int], switch_s: float
) -> list[dict[str, Any]]:
    """Return figures by rate and policy, means over the seeds; what is infinite in one is None."""
    rows = []
    for rate in rates:
        for policy in POLICIES:
            runs = [
                simulate(_scenario_of(num_models, num_workers, rate, duration_s, seed, switch_s), policy, seed)[
                    0
                ].as_record()
                for seed in seeds
            ]
            row: dict[str, Any] = {"rate": rate, "policy": policy}
            for key in runs[0].keys() - {"policy"}:
                values = [run[key] for run in runs]
                row[key] = None if None in values else statistics.mean(values)
            rows.append(row)
    return rows


def _measure_oracle(num_cases: int) -> list[dict[str, Any]]:
    """Return mean latency over the oracle's: 10 requests for 3 models on 2 workers of one slot, switch 3 s."""
    rows = []
    for rate in (0.1, 0.3, 1.0, 3.0):
        ratios: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        ahead: list[float] = []
        for seed in range(num_cases):
            whole = _scenario_of(3, 2, rate, 400.0, seed, 3.0)
            workers = tuple(replace(worker, slots=1) for worker in whole.workers)
            case = replace(whole, workers=workers, requests=whole.requests[:10])
            best = oracle_mean_latency_s(case, ahead=False)
            ahead.append(oracle_mean_latency_s(case, ahead=True) / best)
            for policy in POLICIES:
                ratios[policy].append(simulate(case, policy, seed)[0].mean_s / best)
        means = {policy: statistics.mean(values) for policy, values in ratios.items()}
        rows.append({"rate": rate, "cases": num_cases, "oracle_that_switches_ahead": statistics.mean(ahead), **means})
    return rows


def _measure_sizing(num_models: int, rates: Sequence[float], duration_s: float, seed: int) -> list[dict[str, Any]]:
    """Return the least number of workers that keep 95 % of the requests within 30 s, by switch cost and rate."""
    rows = []
    policies: tuple[PolicyName, ...] = ("latency-first", "serve.multiplexed")
    for label, switch_s in SWITCHES.items():
        for rate in rates:
            row: dict[str, Any] = {"switch": label, "switch_s": switch_s, "models": num_models, "rate": rate}
            make = partial(_cluster_of, num_models, rate, duration_s, seed, switch_s)
            for policy in policies:
                row[policy] = least_workers(make, policy, SIZING_SLO, 2 * num_models + int(rate), seed)
            rows.append(row)
    return rows


def _cluster_of(
    num_models: int, rate: float, duration_s: float, seed: int, switch_s: float, num_workers: int
) -> Scenario:
    return _scenario_of(num_models, num_workers, rate, duration_s, seed, switch_s)


def _large_state(number: int, seed: int) -> tuple[list[ModelState], list[WorkerState], dict[str, frozenset[str]]]:
    """Return `number` models in families of ten on as many workers; half of the models have waiting requests."""
    chance = random.Random(seed)
    parts = [Components({f"own{i}": chance.randrange(1, 20) * GB, f"family{i // 10}": 10 * GB}) for i in range(number)]
    models = [
        ModelState(
            f"m{index}",
            parts[index],
            waiting=chance.randrange(1, 20) if chance.random() < 0.5 else 0,
            oldest_age_s=chance.uniform(0, 10),
            rate_short=chance.random(),
            rate_long=chance.random(),
        )
        for index in range(number)
    ]
    workers = []
    for index in range(number):
        held = chance.randrange(number)
        running = {f"m{held}": 2} if chance.random() < 0.6 else {}
        coming = f"m{chance.randrange(number)}" if chance.random() < 0.05 else None
        workers.append(
            WorkerState(
                f"w{index}", f"n{index // 8}", 80 * GB, parts[held], (f"m{held}",), running, 4, switching_to=coming,
                ready_in_s=1.0, idle_s=5.0,
            )
        )  # fmt: skip
    return models, workers, {f"n{index // 8}": frozenset() for index in range(number)}


def _measure_tick(number: int, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a tick of `number` models and workers, and the memory of the process."""
    models, workers, held = _large_state(number, 0)
    found: dict[str, list[float]] = {"check": [], "plan": [], "scale": [], "tick": []}
    for _ in range(rounds):
        moments = [time.perf_counter()]
        state = usable_state(models, workers, held)
        moments.append(time.perf_counter())
        plan = plan_switches(state)
        moments.append(time.perf_counter())
        target_replicas(state, ScalingPolicy(0, 2 * number), ScalingMemory(), number, 0.0)
        moments.append(time.perf_counter())
        parts = [1000 * (after - before) for before, after in pairwise(moments)]
        for name, value in zip(found, (*parts, sum(parts)), strict=True):
            found[name].append(value)
    figures: dict[str, Any] = {f"{name}_ms": statistics.median(values) for name, values in found.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    low = min(found["tick"])
    return {"models": number, "workers": number, "orders": len(plan.decisions), "peak_rss_bytes": peak,
            "lowest_tick_ms": low, **figures}  # fmt: skip


def measure_schedule(num_seeds: int) -> dict[str, Any]:
    """Return all simulated figures. The tick comes first, while the process is small."""
    seeds = range(1, num_seeds + 1)
    return {
        "tick": _measure_tick(10_000, 15),
        "zipf_12_on_4": _measure_zipf(12, 4, ZIPF_LOADS, 600.0, seeds, 5.0),
        "zipf_500_on_64": _measure_zipf(500, 64, (20.0, 40.0), 120.0, seeds[:1], 5.0),
        "oracle": _measure_oracle(20),
        "sizing": [row for num_models in (6, 12, 48) for row in _measure_sizing(num_models, (1.0, 3.0, 6.0), 200.0, 1)],
    }


def print_schedule_figures(figures: dict[str, Any], as_json: bool) -> None:
    """Print tables, or one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    console = Console()
    console.print({key: round(value, 1) for key, value in figures["tick"].items()})
    for name in ("zipf_12_on_4", "zipf_500_on_64"):
        keys = ("rate", "policy", "switches", "goodput", "slo_attainment", "mean_s", "p50_s", "p95_s", "p99_s",
                "coldest_wait_s", "jain", "moved_bytes")  # fmt: skip
        _print_rows(console, name, keys, figures[name])
    _print_rows(console, "latency over the oracle's", tuple(figures["oracle"][0]), figures["oracle"])
    _print_rows(console, "workers for 95 % within 30 s", tuple(figures["sizing"][0]), figures["sizing"])


def _print_rows(console: Console, title: str, keys: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    table = Table(*keys, title=title)
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in keys))
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "never"
    return value if isinstance(value, str) else f"{value:.4g}"
