"""The figures of `atelier bench switch` as tables, beside their targets, or as one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from deployments.bench.switch_simulated import simulated_tables

TARGETS_MS = {"new_replica": 50, "kept_skeleton": 5}
LEGS = {
    "switch_ms": "Atelier",
    "touched_ms": "  every byte read",
    "diffusers_ms": "diffusers, loaded",
    "diffusers_touched_ms": "  every byte read",
    "diffusers_freeing_ms": "  freeing the other",
    "moved_ms": "diffusers, copied",
    "lookup_ms": "diffusers, kept",
}


def print_switch_figures(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    console = Console()
    sizes = figures["bytes"]
    console.print(
        f"Flux pipeline {sizes['flux'] / 1e9:.2f} GB in {figures['num_tensors']} tensors, "
        f"SDXL {sizes['sdxl'] / 1e9:.2f} GB, all {sizes['all'] / 1e9:.2f} GB"
    )
    console.print(_attach_table(figures["attach_ms"]))
    for title, legs in (("synthetic", figures), ("demo", figures["demo"])):
        console.print(_legs_table(title, legs))
        console.print(_bytes_table(title, legs["sibling"]))
    for table in simulated_tables(figures["simulated"]):
        console.print(table)
    for line in _lines(figures):
        console.print(line)


def _attach_table(attaches: dict[str, Any]) -> Table:
    table = _table("Attach of resident Flux", "", "p50 ms", "p95 ms", "range", "n", "target")
    for name, found in attaches.items():
        table.add_row(name, *_times(found), str(TARGETS_MS.get(name, "")))
    return table


def _legs_table(title: str, legs: dict[str, Any]) -> Table:
    table = _table(f"flux -> sdxl -> flux, third leg ({title})", "", "p50 ms", "p95 ms", "range", "n", "x ours")
    for name, text in LEGS.items():
        table.add_row(text, *_times(legs[name]), f"{legs[name]['p50'] / legs['switch_ms']['p50']:.2f}")
    return table


def _bytes_table(title: str, sibling: dict[str, Any]) -> Table:
    table = _table(f"flux -> flux-tuned ({title})", "", "bytes moved", "different", "ratio or time")
    for tier in ("host", "cpu-private"):
        found = sibling[tier]
        table.add_row(tier, f"{found['bytes_moved']:,}", f"{sibling['bytes_different']:,}", f"{found['ratio']:.4f}")
    for tier, same in sibling["same_weights"].items():
        table.add_row(f"renamed: {tier}", f"{same['bytes_moved']:,}", "0", f"{same['ms']['p50']:.1f} ms")
    return table


def _lines(figures: dict[str, Any]) -> list[str]:
    pss, flood, churn, recovery = (figures[name] for name in ("pss", "flood", "churn", "recovery"))
    growth = ", ".join(f"{name} {nbytes / 1e6:+.1f} MB" for name, nbytes in churn["growth_bytes"].items())
    return [
        f"{pss['replicas']} replicas hold {pss['ratio']:.4f} copies (target 1.02), "
        f"{pss['private_bytes'] / 1e6:.1f} MB of that their own",
        f"{flood['callers']} callers of a cold model: {flood['read_ratio']:.2f} x its bytes read",
        f"{churn['switches']} random switches, {churn['switches_per_s']:.1f} per s: {growth}",
        f"keeper killed: attached elsewhere after {recovery['ms']['p50']:.0f} ms "
        f"({recovery['ms']['low']:.0f} to {recovery['ms']['high']:.0f}), {recovery['read_bytes']:,} bytes read",
    ]


def _table(title: str, *headers: str) -> Table:
    return Table(*headers, title=title, title_justify="left")


def _times(found: dict[str, Any]) -> tuple[str, str, str, str]:
    low, high = f"{found['low']:.2f}", f"{found['high']:.2f}"
    return f"{found['p50']:.2f}", f"{found['p95']:.2f}", f"{low} to {high}", str(found["n"])
