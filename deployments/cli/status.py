"""The commands that look at a cluster: which models there are, what is resident where, and why it stays."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deployments.cli.client import Client

out = Console()


def show_status(client: Client, as_json: bool) -> None:
    cluster = client.cluster()
    if as_json:
        sys.stdout.write(json.dumps(cluster) + "\n")
        return
    out.print(f"cluster [bold]{cluster['cluster']}[/bold] at {client.url}")
    if "registry" in cluster:
        out.print(f"[red]the directory is unreachable:[/red] {escape(cluster['registry']['unreachable'])}")
    print_models(cluster["models"])
    for sort in ("models", "nodes"):
        shown, total = len(cluster[sort]), cluster.get(f"num_{sort}", 0)
        if shown < total:
            out.print(f"the first {shown} of {total} {sort}; /admin/cluster tells of the others, page by page")
    _print_nodes(cluster["nodes"])
    _print_residency(cluster["models"])
    for encoder in cluster["text_encoders"]:
        _print_replica("text encoder", encoder, _cache_use(encoder))
    for worker in cluster["workers"]:
        _print_replica("worker", worker, f"{worker.get('denoising', 0)} requests denoising")


def show_models(client: Client, as_json: bool) -> None:
    models = client.models()
    if as_json:
        sys.stdout.write(json.dumps({"models": models}) + "\n")
    else:
        print_models(models)


def print_models(models: list[dict[str, Any]]) -> None:
    table = Table("model", "kind", "state", "size", "description")
    for model in models:
        nbytes = model.get("bytes", model.get("nbytes", 0))
        about = model["error"] or model["description"] or (f"for {', '.join(model['base'])}" if model["base"] else "")
        table.add_row(model["id"], model["kind"] or "", model["state"], _size(nbytes), escape(about))
    out.print(table)


def _print_nodes(nodes: list[dict[str, Any]]) -> None:
    table = Table(
        "node", "extents", "resident", "leased", "pinned", "budget", "read", "read GB/s", title="weights per node"
    )
    for node in nodes:
        if "unreachable" in node:
            table.add_row(node["node_id"][:12], escape(f"unreachable: {node['unreachable']}"))
            continue
        speed = node["read_bytes"] / node["read_s"] / 1e9 if node["read_s"] else 0.0
        names = ("resident_bytes", "leased_bytes", "pinned_bytes", "budget_bytes", "read_bytes")
        sizes = [_size(node.get(name, 0)) for name in names]
        table.add_row(node["node_id"][:12], str(node["num_extents"]), *sizes, f"{speed:.2f}")
    out.print(table)


def _print_residency(models: list[dict[str, Any]]) -> None:
    """One row per model and place that has something of it: `why` says who keeps it from being evicted."""
    table = Table("model", "where", "resident", "used", "why", "last switch", title="models in memory")
    for model in models:
        switch = model.get("last_switch") or {}
        for node_id, found in model.get("resident", {}).items():
            why = [*(["pinned"] if found["pinned"] else []), *found["holders"]]
            size, used = f"{_size(found['host_bytes'])} of {_size(model['nbytes'])}", f"{found['hits']} times"
            _add_row(table, model["id"], f"node {node_id[:12]}", size, used, ", ".join(why) or "may go", "")
        for found in model.get("built", []):
            why = [
                *(["pinned"] if found["pinned"] else []),
                *([f"{found['leases']} leases"] if found["leases"] else []),
            ]
            took = f"{switch['switch_ms']:.1f} ms" if switch.get("replica") == found["replica"] else ""
            _add_row(table, model["id"], found["replica"], _size(found["bytes"]), "", ", ".join(why) or "may go", took)
    if table.row_count:
        out.print(table)


def _add_row(table: Table, *cells: str) -> None:
    table.add_row(*map(escape, cells))


def _print_replica(name: str, replica: dict[str, Any], doing: str) -> None:
    if "unreachable" in replica:
        out.print(f"{name}: [red]unreachable:[/red] {escape(replica['unreachable'])}")
    else:
        out.print(f"{name}: {len(replica['modules'])} modules, {_size(replica['resident_bytes'])}; {doing}")


def _cache_use(encoder: dict[str, Any]) -> str:
    cache = encoder.get("cache")
    if not cache:
        return "no cache"
    hits = cache["local"] + cache["joined"] + cache["shared"]
    return f"cache {cache['entries']} entries, {_size(cache['nbytes'])}, {hits} hits, {cache['computed']} misses"


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
