"""Tables of the figures of `atelier bench merge`."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

WORST = 10  # patterns shown


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
