"""How figures are shown."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table


def print_figures(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    table = Table("what", "Atelier ms", "stock ms", "stock / Atelier", "of ours from the cache")
    for line in figures["figures"]:
        cached = "" if line["cached"] is None else f"{line['cached']} of {line['answers']}"
        row = (f"{line['ours_ms']:.1f}", f"{line['stock_ms']:.1f}", f"{line['ratio']:.2f}", cached)
        table.add_row(line["what"], *row)
    console = Console()
    console.print(table)
    overhead = "  ".join(f"{kind} {ms:.1f} ms" for kind, ms in figures["http_overhead_ms"].items())
    console.print(f"HTTP over the handle call: {overhead}   (medians of {figures['rounds']} rounds or more)")


def print_load_figures(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    console = Console()
    warm = figures["warm"]
    table = Table("loader", "cold GB/s", "range", "warm GB/s", "range", "peak RSS")
    for name, gbps, rss in _load_rows(figures):
        low, high = figures["range_gbps"].get(name, (gbps, gbps))
        raw = {"raw O_DIRECT": warm["raw_gbps"], "raw O_DIRECT beside a core that hashes": warm["raw_busy_gbps"]}
        warm_gbps = {"ours": warm["ours_gbps"], **raw, **warm["peers"]}[name]
        warm_low, warm_high = warm["range_gbps"].get(name, (warm_gbps, warm_gbps))
        table.add_row(
            name,
            f"{gbps:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{warm_gbps:.2f}",
            f"{warm_low:.2f} to {warm_high:.2f}",
            f"{rss / 1e9:.2f} GB" if rss else "",
        )
    console.print(table)
    best = figures["ratio_best_peer"]
    console.print(
        f"{figures['bytes'] / 1e9:.2f} GB in {figures['num_tensors']} tensors, medians of {figures['rounds']} rounds; "
        f"raw reads {figures['raw_reads']}; ours / raw {figures['ratio_raw']:.2f}"
        + (f", ours / best peer {best:.2f}" if best else "")
        + "; "
        f"verification costs {figures['verification_cost']:.1%}; "
        + ("all loaders gave the same bytes" if figures["verified"] else "[red]loaders gave DIFFERENT bytes[/red]")
    )


def _load_rows(figures: dict[str, Any]) -> list[tuple[str, float, int]]:
    peers = [(name, gbps, figures["peers_peak_rss_bytes"][name]) for name, gbps in figures["peers"].items()]
    ours = [
        ("raw O_DIRECT", figures["raw_gbps"], 0),
        ("raw O_DIRECT beside a core that hashes", figures["raw_busy_gbps"], 0),
        ("ours", figures["ours_gbps"], figures["peak_rss_bytes"]),
    ]
    return ours + sorted(peers, key=lambda row: -row[1])


def print_dedup_figures(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    table = Table("layout", "given", "stored", "on disk", "stored / given")
    for layout, found in figures.items():
        sizes = [f"{found[name] / 1e6:.2f} MB" for name in ("given_bytes", "stored_bytes", "disk_bytes")]
        table.add_row(layout, *sizes, f"{found['stored_per_given']:.3f}")
    Console().print(table)


def print_eviction_figures(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    table = Table("budget / popular bytes", "LRU that counts models / ours", "LRU over bytes / ours")
    for share, found in figures["shares"].items():
        table.add_row(share, f"{found['by_count']:.2f}", f"{found['by_bytes']:.2f}")
    Console().print(table)
