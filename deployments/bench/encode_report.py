"""How the figures of `atelier bench encode` are shown."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

INSIDE_TARGET_MS = 1.0


def print_encode_figures(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    console = Console()
    console.print(_throughput(figures["throughput"]))
    console.print(_padding(figures["throughput"]))
    for model, found in figures["reload_ms"].items():
        console.print(f"{model} loaded for each request: {found['p50']:.0f} ms per request ({_range(found)})")
    console.print(_hits(figures))
    for line in _lines(figures):
        console.print(line)


def _throughput(models: dict[str, Any]) -> Table:
    table = Table("requests over HTTP", "side", "requests/s", "range", "p50 ms", "p99 ms", "Atelier / peer")
    for model, found in models.items():
        for num_callers, sides in found["callers"].items():
            ratio = sides["ratio"]
            shown = f"{ratio['median']:.2f} ({ratio['range'][0]:.2f} to {ratio['range'][1]:.2f})"
            for name in [name for name in sides if name not in ("ratio", "padding")]:
                one = sides[name]
                rates = f"{one['range'][0]:.1f} to {one['range'][1]:.1f}"
                times = [f"{one[key]:.1f}" for key in ("p50_ms", "p99_ms")]
                row = f"{model}, {num_callers} callers"
                table.add_row(row, name, f"{one['requests_per_s']:.1f}", rates, *times, shown)
    return table


def _padding(models: dict[str, Any]) -> Table:
    table = Table(
        "padding, of all positions", "Atelier", "in order of arrival, same calls", "calls of 32", "texts/call"
    )
    for model, found in models.items():
        for num_callers, sides in found["callers"].items():
            one = sides["padding"]
            shares = [f"{one[name]:.1%}" for name in ("counted", "arrival_same_size", "arrival_max_size")]
            table.add_row(f"{model}, {num_callers} callers", *shares, f"{one['texts_per_batch']:.1f}")
    return table


def _hits(figures: dict[str, Any]) -> Table:
    table = Table("the same text again", "p50 ms", "p95 ms", "range")
    rows = {
        f"{model}, {where}": found[key]
        for model, found in figures["hits"].items()
        for where, key in ((f"in the replica (target {INSIDE_TARGET_MS:g} ms)", "inside_ms"), ("HTTP", "http_ms"))
    }
    rows |= {
        f"{what}, {place}": found for what, places in figures["lookups"].items() for place, found in places.items()
    }
    for name, found in rows.items():
        table.add_row(name, f"{found['p50']:.2f}", f"{found['p95']:.2f}", _range(found))
    return table


def _lines(figures: dict[str, Any]) -> list[str]:
    same, live = figures["identical"], figures["live_entries"]
    lines = [
        f"{same['callers']} callers at once of one text over {way}, {same['replicas']} replicas: encoded "
        f"{same[way]['encoded']} times (target 1) in {same[way]['wall_s']:.1f} s"
        for way in ("http", "handles")
    ]
    lines.append(
        f"live T5-XXL encodings per GiB: {live['trimmed']['per_gib']:.0f} trimmed "
        f"(mean {live['trimmed']['mean_tokens']:.1f} tokens), {live['stock']['per_gib']:.0f} padded to 512: "
        f"{live['ratio']:.1f} times; sentence embeddings of {live['sentence']['width']}: "
        f"{live['sentence']['per_gib']:.0f}"
    )
    for num_callers, found in figures["overhead"].items():
        for name, added in found["added_p50_ms"].items():
            lines.append(f"{num_callers} callers, cached texts: {added:+.1f} ms beside {name}")
    return lines


def _range(found: dict[str, Any]) -> str:
    return f"{found['low']:.2f} to {found['high']:.2f}"
