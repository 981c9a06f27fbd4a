"""`infra.bench starts`: `atelier up` with template processes and without, in turn, each in a process of its own.

A start is over when /healthz is ok, which waits for every model of the config. All starts share a store that one more
start has filled before. CPU seconds are those of all processes of the cluster, with those that have ended; memory is
their proportional share (PSS), so that pages which copies have in common count once.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

from configs.loading import load_cluster_config
from deployments.console.running import cluster_up
from infra.ports import free_port

_WAYS: Final = (("templates", True), ("without", False))
_TIMEOUT_S: Final = 600
_FIGURES: Final = ("wall_s", "cpu_s", "pss_mib")


def measure_starts(config_path: Path, rounds: int) -> dict[str, Any]:
    """Return medians and ranges by way. Needs a machine without another Ray."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way, _ in _WAYS}
    with tempfile.TemporaryDirectory() as store:
        _start(config_path, store, templates=True)
        for _ in range(rounds):
            for way, templates in _WAYS:
                if figures := _start(config_path, store, templates=templates):
                    found[way].append(figures)
    return {"rounds": rounds} | {way: _summary(starts) for way, starts in found.items() if starts}


def _start(config_path: Path, store: str, *, templates: bool) -> dict[str, float] | None:
    """Return the figures of one start; None for one that failed, as Ray's do when a loaded machine lets them wait."""
    command = [sys.executable, "-m", "infra.bench.starts", str(config_path), store, json.dumps(templates)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=_TIMEOUT_S)
    figures: dict[str, float] | None = None if done.returncode else json.loads(done.stdout.splitlines()[-1])
    return figures


def _summary(starts: list[dict[str, float]]) -> dict[str, Any]:
    """Map each figure to its least, median and largest value, and say of how many starts they are."""
    values = {name: [start[name] for start in starts] for name in _FIGURES}
    figures = {name: [min(each), statistics.median(each), max(each)] for name, each in values.items()}
    return {"starts": len(starts), **figures}


def _start_once(config_path: str, store: str, templates: bool) -> dict[str, float]:
    """Start the cluster in this process, and return what it took."""
    config = load_cluster_config(config_path)
    config = config.model_copy(
        update={
            "name": "starts",
            "store": config.store.model_copy(update={"path": Path(store) / "store"}),
            "http": config.http.model_copy(update={"port": free_port()}),
            "grpc": None,
            "ray": config.ray.model_copy(update={"templates": templates}),
        }
    )
    begun = time.perf_counter()
    with cluster_up(config, config_path):
        wall_s = time.perf_counter() - begun
        own = psutil.Process()
        processes = [own, *own.children(recursive=True)]
        return {"wall_s": wall_s, "cpu_s": _cpu_s(processes), "pss_mib": _pss_mib(processes)}


def _cpu_s(processes: list[psutil.Process]) -> float:
    found = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found += times.user + times.system + times.children_user + times.children_system
    return found


def _pss_mib(processes: list[psutil.Process]) -> float:
    found = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found += process.memory_full_info().pss
    return found / 2**20


def print_start_figures(figures: dict[str, Any], as_json: bool) -> None:
    """Print a table of both ways, or one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    table = Table("median (range)", "starts", "wall s", "CPU s", "memory MiB")
    for way, found in ((way, figures[way]) for way, _ in _WAYS if way in figures):
        cells = (f"{middle:.1f} ({least:.1f} to {most:.1f})" for least, middle, most in map(found.get, _FIGURES))
        table.add_row(way, str(found["starts"]), *cells)
    Console().print(table)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_start_once(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))) + "\n")
