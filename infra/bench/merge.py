"""`infra.bench merge`: dynamic batching at dispatch beside `@serve.batch`, in real Serve.

A batch of the model is a sleep, so that what differs is which requests were in which batch. Ours has default settings
everywhere; `@serve.batch` is shown with its default wait, and with the best of many waits, picked afterwards and for
each figure by itself, which is more than anybody can tune.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ray import serve
from rich.console import Console
from rich.table import Table

from infra.bench.command.figures import summary
from infra.bench.command.machine import private_ray
from infra.bench.merge_replica import (
    MAX_ONGOING,
    AtArrival,
    AtDispatch,
    Empty,
    MergeReplica,
    Outcome,
    Pattern,
    grid,
    scenario,
)

DEFAULT_WAIT_S: Final = 0.01  # of `@serve.batch`
WAITS: Final = (0.0, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5)  # of a batch's time
LIMIT: Final = 1.02  # ours / best, that the grid is held to
STORE_BYTES: Final = 100_000_000
WORST: Final = 10  # patterns shown


@dataclass(frozen=True, slots=True)
class MergeSettings:
    """The number of repetitions of each measurement. `unit_s` is a batch of one item in the grid."""

    unit_s: float = 0.1
    num_requests: int = 64
    num_warm: int = 24
    side_by_side: int = 4  # patterns
    num_patterns: int | None = None  # the first of them; None: all 50
    num_asked: int = 3200
    num_callers: int = 64


def measure_merge(settings: MergeSettings, seed: int = 0) -> dict[str, Any]:
    """Measure, and return the figures as one JSON-able object."""
    with private_ray(STORE_BYTES, preallocate=False):
        try:
            return asyncio.run(_measure(settings, seed))
        finally:
            serve.shutdown()


async def _measure(settings: MergeSettings, seed: int) -> dict[str, Any]:
    replica = _deploy(MergeReplica)
    found = {"scenario": await _scenario(replica), "overhead": await _overhead(replica, settings)}
    patterns = grid(settings.unit_s, settings.num_requests, settings.num_warm, seed)[: settings.num_patterns]
    limit = asyncio.Semaphore(settings.side_by_side)

    async def one(pattern: Pattern) -> dict[str, Any]:
        async with limit:
            waits_s = [wait * settings.unit_s for wait in WAITS]
            return _compared(pattern.name, waits_s, await replica.outcomes.remote(pattern, waits_s))

    return found | {"grid": _in_all(await asyncio.gather(*map(one, patterns))), "seed": seed}


async def _scenario(replica: Any) -> dict[str, Any]:
    pattern = scenario()
    waits_s = [DEFAULT_WAIT_S, *(wait * pattern.service.first_s for wait in WAITS)]
    outcomes: Sequence[Outcome] = await replica.outcomes.remote(pattern, waits_s)
    ours, default = outcomes[0], outcomes[1]
    return _compared(pattern.name, waits_s, outcomes) | {
        "ours": _shown(ours),
        "default": _shown(default),
        "default_makespan_ratio": default.makespan_s / ours.makespan_s,
        "default_latency_ratio": default.mean_latency_s / ours.mean_latency_s,
    }


def _compared(name: str, waits_s: Sequence[float], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Compare ours, the first, with the best of the others; ratios are ours / best."""
    ours, others = outcomes[0], outcomes[1:]
    makespan_s = min(other.makespan_s for other in others)
    best = min(range(len(others)), key=lambda index: others[index].mean_latency_s)
    return {
        "pattern": name,
        "makespan_ratio": ours.makespan_s / makespan_s,
        "latency_ratio": ours.mean_latency_s / others[best].mean_latency_s,
        "best_wait_s": waits_s[best],
        "ours_latency_s": ours.mean_latency_s,
        "tuned": _shown(others[best]),
    }


def _in_all(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst and the middle ratio, and the patterns beyond the limit."""
    found: dict[str, Any] = {"num_patterns": len(lines), "limit": LIMIT}
    for what in ("makespan_ratio", "latency_ratio"):
        ratios = [line[what] for line in lines]
        found[what] = {"worst": max(ratios), "median": statistics.median(ratios), "best": min(ratios)}
        beyond = sorted((line for line in lines if line[what] > LIMIT), key=lambda line: -line[what])
        found[what]["beyond"] = {line["pattern"]: line[what] for line in beyond}
    return found | {"patterns": list(lines)}


async def _overhead(replica: Any, settings: MergeSettings) -> dict[str, Any]:
    """Return microseconds per request: of Serve calls by so many callers, and of batching alone in a replica."""
    ways = {"empty deployment": Empty, "serve.batch": AtArrival, "batcher behind serve.batch": AtDispatch}
    handles = {name: _deploy(class_) for name, class_ in ways.items()}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(4):  # in turn; the first is for routers that have not met their replicas
        for name, handle in handles.items():
            asked_us = await _ask_us(handle, settings.num_asked // 4, settings.num_callers)
            if round_:
                samples[name].append(asked_us)
    for name in ways:
        serve.delete(_app_name(ways[name]))
    inside = await replica.own_cost_us.remote(settings.num_asked * 4, settings.num_callers)
    return {
        "num_callers": settings.num_callers,
        "serve_us": {name: summary(values) for name, values in samples.items()},
        "inside_us": inside,
    }


async def _ask_us(handle: Any, num_requests: int, num_callers: int) -> float:
    async def caller() -> None:
        for item in range(num_requests // num_callers):
            await handle.answer_item.remote(item)

    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(num_callers)))
    return (time.perf_counter() - start) / (num_requests // num_callers * num_callers) * 1e6


def _deploy(class_: type) -> Any:
    options = {"num_cpus": 0}
    deployment = serve.deployment(class_).options(max_ongoing_requests=MAX_ONGOING, ray_actor_options=options)
    return serve.run(deployment.bind(), name=_app_name(class_), route_prefix=None)


def _app_name(class_: type) -> str:
    return f"bench-{class_.__name__.lower()}"


def _shown(outcome: Outcome) -> dict[str, Any]:
    return {
        "makespan_s": outcome.makespan_s,
        "mean_latency_s": outcome.mean_latency_s,
        "sizes": {str(size): count for size, count in outcome.sizes.items()},
    }


def print_merge_figures(figures: dict[str, Any], as_json: bool) -> None:
    """Print tables, or the figures as one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    console = Console()
    found, grid, overhead = figures["scenario"], figures["grid"], figures["overhead"]
    table = Table("24 requests at 10/s, 0.5 s + 0.01 s, max 8", "makespan s", "mean latency s", "batch sizes")
    tuned = f"serve.batch, best wait ({found['best_wait_s']:g} s)"
    for name, shown in (("serve.batch", found["default"]), (tuned, found["tuned"]), ("Atelier", found["ours"])):
        sizes = ", ".join(f"{count} of {size}" for size, count in shown["sizes"].items())
        table.add_row(name, f"{shown['makespan_s']:.2f}", f"{shown['mean_latency_s']:.2f}", sizes)
    console.print(table)
    console.print(
        f"default / Atelier: makespan {found['default_makespan_ratio']:.2f} (target 3.5), "
        f"mean latency {found['default_latency_ratio']:.2f} (target 5)"
    )
    table = Table(f"{grid['num_patterns']} patterns, Atelier / best wait", "worst", "median", "best", "above limit")
    for what in ("makespan_ratio", "latency_ratio"):
        ratios = [f"{grid[what][key]:.3f}" for key in ("worst", "median", "best")]
        table.add_row(what.removesuffix("_ratio"), *ratios, f"{len(grid[what]['beyond'])} above {grid['limit']}")
    console.print(table)
    for name, ratio in list(grid["latency_ratio"]["beyond"].items())[:WORST]:
        console.print(f"  {name}: mean latency {ratio:.3f}")
    table = Table(f"{overhead['num_callers']} callers", "us per request", "range")
    for name, us in overhead["serve_us"].items():
        table.add_row(f"Serve call: {name}", f"{us['p50']:.0f}", f"{us['low']:.0f} to {us['high']:.0f}")
    for name, us in overhead["inside_us"].items():
        table.add_row(f"inside a replica: {name}", f"{us:.1f}", "")
    console.print(table)
