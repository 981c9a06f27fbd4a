"""`infra.bench schedule`: switching under the controller and under others, in the simulator.

Every simulation is a task of its own, on all cores; a part is shown as soon as its tasks are done.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from multiprocessing import get_context
from typing import Any, Final

from cluster.placement.autoscaling import ScalingMemory, target_replicas
from cluster.placement.state import ClusterState, Components, ModelState, SloClass, WorkerState
from cluster.placement.switching import plan_switches
from configs.admission import ScalingConfig
from deployments.console.output import Column, print_line, print_table
from infra.bench.oracle import oracle_mean_latency_s
from infra.simulator.multiplexed import policies_and_multiplexed
from infra.simulator.running import least_workers, simulate
from infra.simulator.scenario import Scenario, SimModel, SimWorker, poisson, zipf_shares

GB: Final = 10**9
TARGET: Final = SloClass("bench", 30.0)
# What a switch costs: measured on the demo models here (BENCHMARKS.md, "Switching"), and that of a 30 GB pipeline.
SWITCHES: Final = {"measured, demo models": 0.0018, "30 GB at 25 GB/s": 30 / 25, "30 GB at 6 GB/s": 30 / 6}
ZIPF_LOADS: Final = (0.5, 1.5, 3.0, 4.5)  # requests per second for 4 workers that can do 5.7
SIZING_SLO: Final = 0.95
_HEADERS: Final = {"slo_attainment": "in time", "mean_s": "mean s", "p95_s": "p95 s", "p99_s": "p99 s"}
POLICIES: Final = tuple(policies_and_multiplexed())
TITLES: Final = {"oracle": "latency over the oracle's", "sizing": "workers for 95 % within 30 s"}


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


def _simulate_zipf(
    num_models: int, num_workers: int, duration_s: float, switch_s: float, case: tuple[float, str, int]
) -> dict[str, Any]:
    rate, policy, seed = case
    scenario = _scenario_of(num_models, num_workers, rate, duration_s, seed, switch_s)
    return simulate(scenario, policy, policies_and_multiplexed(seed))[0].as_record()


def _measure_zipf(
    pool: Executor,
    num_models: int,
    num_workers: int,
    rates: Sequence[float],
    duration_s: float,
    seeds: Sequence[int],
    switch_s: float,
) -> list[dict[str, Any]]:
    """Return figures by rate and policy, means over the seeds; what is infinite in one is None."""
    cases = list(product(rates, POLICIES, seeds))
    found = pool.map(partial(_simulate_zipf, num_models, num_workers, duration_s, switch_s), cases)
    runs: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for (rate, policy, _), figures in zip(cases, found, strict=True):
        runs.setdefault((rate, policy), []).append(figures)
    rows = []
    for (rate, name), of_seeds in runs.items():
        row: dict[str, Any] = {"rate": rate, "policy": name}
        for key in of_seeds[0].keys() - {"policy"}:
            values = [one[key] for one in of_seeds]
            row[key] = None if None in values else statistics.mean(values)
        rows.append(row)
    return rows


def _beside_oracle(case: tuple[float, int]) -> dict[str, float]:
    """Return mean latencies over the oracle's: 10 requests for 3 models on 2 workers of one slot, switch 3 s."""
    rate, seed = case
    whole = _scenario_of(3, 2, rate, 400.0, seed, 3.0)
    workers = tuple(replace(worker, slots=1) for worker in whole.workers)
    small = replace(whole, workers=workers, requests=whole.requests[:10])
    best_s = oracle_mean_latency_s(small, ahead=False)
    ratios = {"oracle_that_switches_ahead": oracle_mean_latency_s(small, ahead=True) / best_s}
    policies = policies_and_multiplexed(seed)
    return ratios | {policy: simulate(small, policy, policies)[0].mean_s / best_s for policy in policies}


def _measure_oracle(pool: Executor, num_cases: int) -> list[dict[str, Any]]:
    """Return the means of as many random cases of each rate."""
    rates = (0.1, 0.3, 1.0, 3.0)
    cases = list(product(rates, range(num_cases)))
    found = list(zip(cases, pool.map(_beside_oracle, cases), strict=True))
    rows = []
    for rate in rates:
        ratios = [one for (at, _), one in found if at == rate]
        means = {key: statistics.mean([one[key] for one in ratios]) for key in ratios[0]}
        rows.append({"rate": rate, "cases": num_cases, **means})
    return rows


def _least_workers(duration_s: float, seed: int, case: tuple[int, tuple[str, float], float, str]) -> int | None:
    num_models, (_, switch_s), rate, policy = case
    make = partial(_cluster_of, num_models, rate, duration_s, seed, switch_s)
    return least_workers(make, policy, SIZING_SLO, 2 * num_models + int(rate), policies_and_multiplexed(seed))


def _measure_sizing(
    pool: Executor, nums_models: Sequence[int], rates: Sequence[float], duration_s: float, seed: int
) -> list[dict[str, Any]]:
    """Return the least number of workers that keep 95 % of the requests within 30 s, by switch cost and rate."""
    policies = ("latency-first", "serve.multiplexed")
    cases = list(product(nums_models, SWITCHES.items(), rates, policies))
    rows: dict[tuple[int, str, float], dict[str, Any]] = {}
    for case, least in zip(cases, pool.map(partial(_least_workers, duration_s, seed), cases), strict=True):
        num_models, (label, switch_s), rate, policy = case
        new_row = {"switch": label, "switch_s": switch_s, "models": num_models, "rate": rate}
        rows.setdefault((num_models, label, rate), new_row)[policy] = least
        sys.stderr.write(f"sizing: {num_models} models, {rate:g}/s, switch {label}: {policy} {least or 'never'}\n")
    return list(rows.values())


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
    """Return the CPU milliseconds of a tick of `number` models and workers, and the memory of the process."""
    models, workers, held = _large_state(number, 0)
    state = ClusterState({each.id: each for each in models}, {each.id: each for each in workers}, held)
    found: dict[str, list[float]] = {"plan": [], "scale": [], "tick": []}
    for _ in range(rounds):
        moments = [time.process_time()]
        plan = plan_switches(state)
        moments.append(time.process_time())
        target_replicas(state, ScalingConfig(min_workers=0, max_workers=number), ScalingMemory(), number, 0.0)
        moments.append(time.process_time())
        parts = [1000 * (after - before) for before, after in pairwise(moments)]
        for name, value in zip(found, (*parts, sum(parts)), strict=True):
            found[name].append(value)
    figures: dict[str, Any] = {f"{name}_ms": statistics.median(values) for name, values in found.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    low = min(found["tick"])
    return {"models": number, "workers": number, "orders": len(plan.decisions), "peak_rss_bytes": peak,
            "lowest_tick_ms": low, **figures}  # fmt: skip


# The tick comes first, while the process is small and nothing else runs.
PARTS: Final[dict[str, Callable[[Executor, Sequence[int]], Any]]] = {
    "tick": lambda pool, seeds: _measure_tick(10_000, 15),
    "zipf_12_on_4": lambda pool, seeds: _measure_zipf(pool, 12, 4, ZIPF_LOADS, 600.0, seeds, 5.0),
    "zipf_500_on_64": lambda pool, seeds: _measure_zipf(pool, 500, 64, (20.0, 40.0), 120.0, seeds[:1], 5.0),
    "oracle": lambda pool, seeds: _measure_oracle(pool, 20),
    "sizing": lambda pool, seeds: _measure_sizing(pool, (6, 12, 48), (1.0, 3.0, 6.0), 200.0, 1),
}


def measure_schedule(num_seeds: int, parts: Iterable[str] = PARTS) -> Iterator[tuple[str, Any]]:
    """Yield the simulated figures, part by part."""
    # Not forked: who calls this may have threads, of a progress display for example.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        for name in parts:
            yield name, PARTS[name](pool, range(1, num_seeds + 1))


def print_schedule_figures(figures: Iterable[tuple[str, Any]], as_json: bool) -> None:
    """Print each part as soon as it is there: tables, or one JSON object that grows."""
    for number, (name, part) in enumerate(figures):
        if as_json:
            sys.stdout.write(("{" if not number else ", ") + f"{json.dumps(name)}: {json.dumps(part)}")
            sys.stdout.flush()
        elif isinstance(part, dict):
            print_line(f"{name}: {', '.join(f'{key} {value:.1f}' for key, value in part.items())}")
        elif "policy" in part[0]:  # the rest is in the JSON
            known = ("rate", "policy", "switches", "goodput", "slo_attainment", "mean_s", "p95_s", "p99_s")
            columns = [Column(_HEADERS.get(key, key), align="left" if key == "policy" else "right") for key in known]
            print_table(columns, [[_cell(row[key]) for key in known] for row in part], title=name)
        elif next(iter(part[0])) == "rate":
            _print_by_rate(TITLES.get(name, name), part)
        else:
            columns = [Column(key.replace("_", " "), "text" if key == "switch" else "whole") for key in part[0]]
            print_table(
                columns, [[_cell(value) for value in row.values()] for row in part], title=TITLES.get(name, name)
            )
    if as_json:
        sys.stdout.write("}\n")


def _print_by_rate(title: str, found: Sequence[dict[str, Any]]) -> None:
    """Print a row for each figure, of a policy mostly, and a column for each rate."""
    names = [name for name in found[0] if name != "rate"]
    columns = [Column("requests/s"), *(Column(_cell(one["rate"]), align="right") for one in found)]
    print_table(
        columns, [[name.replace("_", " "), *(_cell(one[name]) for one in found)] for name in names], title=title
    )


def _cell(value: Any) -> str:
    if value is None:
        return "never"
    return value if isinstance(value, str) else f"{value:.4g}"
