"""`infra.bench optimum`: the controller beside the best schedule there is, on drawn small cases.

A case is drawn by its seed: models whose requests come together, over time, in bursts over a steady flow or in waves;
asked for alike or not; 1 to 8 slots; switches of 0.1 to 60 s; models with parts in common or without. What can be
searched exactly is (`oracle.py`); all of them are run without a controller and by `serve.multiplexed`'s rule, too.
"Known only" plans exactly, and anew at each moment, those requests that have come by then. "Known law" also draws those
that may come by the law that drew the case (`foresight.py`), on one worker: what he misses, only the future would tell.
Larger cases, too large to be searched, stand beside a lower bound, which no schedule reaches.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any, Final

from cluster.placement.state import Components, SloClass
from deployments.console.output import Column, print_line, print_table
from infra.bench.foresight import NUM_FUTURES, Future, expecting_latencies
from infra.bench.oracle import (
    best_over_time,
    best_together,
    known_only_latencies,
    late_cost,
    latency_cost,
    least_mean_s,
    switches_s,
)
from infra.simulator.multiplexed import policies_and_multiplexed
from infra.simulator.running import simulate
from infra.simulator.scenario import Scenario, SimModel, SimRequest, SimWorker

PART: Final = 10**9
KINDS: Final = ("together", "steady", "bursts", "waves", "workers")
ONE_OVER_TIME: Final = ("steady", "bursts", "waves")  # one worker, and requests that come over time
RIVALS: Final = ("latency-first", "no-controller", "serve.multiplexed")
KNOWN_ONLY: Final = "known only"
KNOWN_LAW: Final = "known law"
PATIENCE: Final = 1e5
NUM_WORST: Final = 10
MAX_DRAWS: Final = 100  # of a time after a moment; beyond them none is likely there
LATER: Final = 0.05  # of the time that the work takes: by then such a request has come


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case: mean latencies and shares in time, of the optimum and of each rival."""

    seed: int
    kind: str
    requests: int
    switch_s: float
    mean_s: dict[str, float]
    in_time: dict[str, float]

    def note_latencies(self, rival: str, latencies: list[tuple[SimModel, float]]) -> None:
        """Note who has served the requests of the case with these latencies."""
        self.mean_s[rival] = statistics.mean(latency_s for _, latency_s in latencies)
        self.in_time[rival] = 1 - statistics.mean(late_cost(*each) for each in latencies)

    def ratio(self, rival: str) -> float:
        """Return how many times as long the mean latency is as the optimum's."""
        return self.mean_s[rival] / self.mean_s["optimum"]


@dataclass(frozen=True, slots=True)
class Law:
    """The law of a case's requests: their kind, the weight of each model, and about how long the work takes."""

    kind: str
    weights: tuple[float, ...]
    busy_s: float

    def draw_request(self, rng: random.Random, after_s: float = -math.inf) -> tuple[float, int]:
        """Return when a request comes, and for which model, of those after a moment; soon after the last that do."""
        [model] = rng.choices(range(len(self.weights)), self.weights)
        times = (_arrival_s(self.kind, rng, self.busy_s) for _ in range(MAX_DRAWS))
        return next((at_s for at_s in times if at_s > after_s), after_s + LATER * self.busy_s * rng.random()), model


def draw_case(seed: int) -> tuple[str, Scenario]:
    """Return the kind and the scenario of a case."""
    law, scenario = _draw(seed)
    return law.kind, scenario


def _draw(seed: int) -> tuple[Law, Scenario]:
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    num_workers = rng.randint(2, 3) if kind == "workers" else 1
    num_models = rng.randint(2, 6 if kind == "together" else 3)
    slots = rng.choice([1, 2, 4, 8]) if kind == "together" else 1
    switch_s = math.exp(rng.uniform(math.log(0.1), math.log(60.0)))
    shared = rng.choice([0.0, 0.0, 0.5]) * switch_s
    slo = SloClass("drawn", rng.choice([15.0, 60.0, 300.0]))
    models = []
    for number in range(num_models):
        sizes = {f"own{number}": 6 * PART, "base": 4 * PART} if shared else {f"own{number}": 10 * PART}
        growth = rng.choice([0.3, 0.6, 1.0])
        models.append(SimModel(f"m{number}", Components(sizes), rng.choice([0.2, 0.5, 1.0, 2.0, 5.0]), growth, slo))
    workers = tuple(
        SimWorker(f"w{number}", "n", 11 * PART, slots, attach_bytes_per_s=10 * PART / switch_s)
        for number in range(num_workers)
    )
    weights = [1 / rank ** rng.choice([0.0, 1.0, 2.0]) for rank in range(1, num_models + 1)]
    most = {"together": 150, "workers": 9}.get(kind, 24)
    chosen = rng.choices([model.id for model in models], weights, k=rng.randint(min(6, most), most))
    busy_s = sum(next(m.service_s for m in models if m.id == id_) for id_ in chosen) + num_models * switch_s
    times = sorted(_arrival_s(kind, rng, busy_s / num_workers) for _ in chosen)
    law = Law(kind, tuple(weights), busy_s / num_workers)
    return law, Scenario(tuple(models), workers, tuple(map(SimRequest, times, chosen)))


def draw_large(seed: int) -> Scenario:
    """Return a larger case: workers with room for some of many models, which come in a flow or all at once."""
    rng = random.Random(f"large {seed}")
    num_workers, num_models, slots = rng.randint(4, 16), rng.randint(8, 40), rng.choice([1, 4, 8])
    switch_s, growth = math.exp(rng.uniform(math.log(0.1), math.log(30.0))), rng.choice([0.3, 0.6, 1.0])
    slo = SloClass("drawn", 60.0)
    models = tuple(
        SimModel(f"m{number}", Components({f"own{number}": 10 * PART}), rng.choice([0.2, 0.5, 1.0, 2.0]), growth, slo)
        for number in range(num_models)
    )
    budget = rng.choice([11, 22, 44]) * PART
    workers = tuple(
        SimWorker(f"w{number}", "n", budget, slots, attach_bytes_per_s=10 * PART / switch_s)
        for number in range(num_workers)
    )
    weights = [1 / rank ** rng.choice([0.0, 1.0]) for rank in range(1, num_models + 1)]
    chosen = rng.choices(models, weights, k=rng.randint(200, 600))
    work_s = sum(model.batch_service_s(slots) for model in chosen) / num_workers
    last_s = 0.1 if rng.random() < 0.3 else work_s / rng.uniform(0.3, 0.9)
    times = sorted(rng.uniform(0.0, last_s) for _ in chosen)
    return Scenario(models, workers, tuple(SimRequest(at_s, one.id) for at_s, one in zip(times, chosen, strict=True)))


def _arrival_s(kind: str, rng: random.Random, busy_s: float) -> float:
    """Return when a request comes: in about as long as the work takes."""
    if kind == "together":
        return rng.uniform(0.0, 0.01)
    if kind == "bursts" and rng.random() < 0.6:
        return rng.choice([0.1, 0.5]) * busy_s + rng.uniform(0.0, 0.05)
    if kind == "waves":
        return rng.choice([0.0, 0.4, 0.8]) * busy_s + abs(rng.gauss(0.0, 0.06)) * busy_s
    return rng.uniform(0.0, 1.2) * busy_s


def measure_case(seed: int) -> Outcome:
    """Return a case's figures."""
    law, scenario = _draw(seed)

    def best(cost: Callable[[SimModel, float], float]) -> float:
        return best_together(scenario, cost) if law.kind == "together" else best_over_time(scenario, False, cost)

    outcome = _outcome(seed, law.kind, scenario, best(latency_cost), 1 - best(late_cost))
    if law.kind == "together":  # all is known at once
        outcome.mean_s[KNOWN_ONLY], outcome.in_time[KNOWN_ONLY] = outcome.mean_s["optimum"], outcome.in_time["optimum"]
    else:
        outcome.note_latencies(KNOWN_ONLY, known_only_latencies(scenario))
    if law.kind in ONE_OVER_TIME:
        outcome.note_latencies(KNOWN_LAW, _known_law_latencies(law, scenario, seed))
    return outcome


def _known_law_latencies(law: Law, scenario: Scenario, seed: int) -> list[tuple[SimModel, float]]:
    models, [worker] = scenario.models, scenario.workers
    index = {model.id: number for number, model in enumerate(models)}
    coming = [(request.at_s, index[request.model]) for request in scenario.requests]

    def futures_of(now_s: float, num_come: int) -> list[Future]:
        rng = random.Random(f"{seed} {now_s}")
        left = range(len(coming) - num_come)
        return [sorted(law.draw_request(rng, now_s) for _ in left) for _ in range(NUM_FUTURES)]

    service_s = [model.service_s / worker.speed for model in models]
    found = expecting_latencies(coming, switches_s(models, worker), service_s, futures_of)
    return [(models[model], latency_s) for model, latency_s in found]


def measure_large(seed: int) -> Outcome:
    """Return a larger case's figures; its `optimum` is a bound."""
    scenario = draw_large(seed)
    return _outcome(seed, "large", scenario, least_mean_s(scenario), 1.0)


def _outcome(seed: int, kind: str, scenario: Scenario, least_s: float, most_in_time: float) -> Outcome:
    mean_s, in_time = {"optimum": least_s}, {"optimum": most_in_time}
    policies = policies_and_multiplexed(seed)
    for rival in RIVALS:
        figures, _ = simulate(scenario, rival, policies, patience=PATIENCE)
        mean_s[rival], in_time[rival] = figures.mean_s, figures.slo_attainment
    switch_s = 10 * PART / scenario.workers[0].attach_bytes_per_s
    return Outcome(seed, kind, len(scenario.requests), switch_s, mean_s, in_time)


def measure_optimum(cases: int, first_seed: int, large: int = 0) -> list[Outcome]:
    """Return the outcomes of so many cases and larger ones, on all cores."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        small = pool.map(measure_case, range(first_seed, first_seed + cases), chunksize=4)
        return [*small, *pool.map(measure_large, range(first_seed, first_seed + large))]


def summary_of(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Return, for each rival, the ratios to the optimum and how many cases are worse than without a controller."""
    outcomes = list(outcomes)
    rows: dict[str, Any] = {}
    for rival in (*RIVALS, KNOWN_ONLY, KNOWN_LAW):
        if not all(rival in one.mean_s for one in outcomes):
            continue
        ratios = sorted(one.ratio(rival) for one in outcomes)
        rows[rival] = {
            "median": statistics.median(ratios),
            "p95": ratios[math.ceil(0.95 * len(ratios)) - 1],
            "worst": ratios[-1],
            "in_time": statistics.mean(one.in_time[rival] for one in outcomes),
            "slower_than_none": sum(one.mean_s[rival] > 1.03 * one.mean_s["no-controller"] for one in outcomes),
            "later_than_none": sum(one.in_time[rival] < one.in_time["no-controller"] - 0.03 for one in outcomes),
        }
    return rows


def worst_of(outcomes: Iterable[Outcome], num: int = NUM_WORST) -> list[Outcome]:
    """Return the cases in which the controller is farthest from the optimum."""
    return sorted(outcomes, key=lambda one: -one.ratio(RIVALS[0]))[:num]


def print_optimum_figures(outcomes: list[Outcome], as_json: bool) -> None:
    """Print ratios to the optimum and the worst cases, and of larger cases ratios to the bound."""
    large = [one for one in outcomes if one.kind == "large"]
    outcomes = [one for one in outcomes if one.kind != "large"]
    if as_json:
        kinds = {kind: summary_of(those) for kind in KINDS if (those := [one for one in outcomes if one.kind == kind])}
        found = {"summary": summary_of(outcomes), "kinds": kinds, "worst": [asdict(one) for one in worst_of(outcomes)]}
        print(json.dumps(found | ({"large": summary_of(large)} if large else {})))
        return
    best = statistics.mean(one.in_time["optimum"] for one in outcomes)
    print_line(f"{len(outcomes)} cases from seed {outcomes[0].seed}; in time at best {best:.1%}")
    _print_ratios(outcomes)
    for kind in KINDS:
        if those := [one for one in outcomes if one.kind == kind]:
            print_line(f"{len(those)} of them are {kind}")
            _print_ratios(those)
    for one in worst_of(outcomes):
        ratios = ", ".join(f"{rival} {one.ratio(rival):.2f}" for rival in RIVALS)
        print_line(f"seed {one.seed}: {one.kind}, {one.requests} requests, switch {one.switch_s:.1f} s: {ratios}")
    if large:
        print_line(f"{len(large)} larger cases from seed {large[0].seed}, beside a bound that no schedule is below")
        _print_ratios(large)


def _print_ratios(outcomes: list[Outcome]) -> None:
    columns = ["policy", "median", "p95", "worst", "in time", "slower than none", "later than none"]
    print_table(
        [Column(name) for name in columns],
        [
            [rival, *(f"{row[key]:.2f}" for key in ("median", "p95", "worst")), f"{row['in_time']:.1%}",
             str(row["slower_than_none"]), str(row["later_than_none"])]
            for rival, row in summary_of(outcomes).items()
        ],
    )  # fmt: skip
