"""`infra.bench idle`: what a cluster of one node costs while nobody asks it for anything, and Ray and Serve alone.

CPU time is that of all processes of the cluster, with those that they have ended, so that other work on the machine
adds little to it. Memory is their proportional share (PSS): anonymous and of files on the one hand, shared memory,
where the weights are, on the other. A cluster runs below a process that does what `atelier up` does, and counts; the
bench's own does not.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil

from configs.cluster import ClusterConfig
from deployments.console.output import Column, print_json, print_line, print_table
from infra.bench.idle_clusters import running_cluster
from infra.ports import free_port

SETTLE_S: Final = 75.0  # by then processes that wait for more work after the start have ended
TARGET_SHARE, TARGET_BYTES = 0.05, 2**30  # of a core, and beside the weights
_TOTAL: Final = "all"
_TEMPLATE: Final = "cluster.ray_seam.templates"


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of resources by processes of one name. `cpu_s` includes their ended children."""

    processes: int = 0
    threads: int = 0
    cpu_s: float = 0.0
    own_bytes: int = 0
    shared_bytes: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


def measure_idle(config: ClusterConfig, seconds: float) -> dict[str, Any]:
    """Start the cluster with a Ray of its own, then Ray and Serve alone, and return what each takes while idle."""
    with tempfile.TemporaryDirectory() as folder:
        update = {
            "name": "idle",
            "store": config.store.model_copy(update={"path": Path(folder) / "store"}),
            "http": config.http.model_copy(update={"port": free_port()}),
            "grpc": None,
            "ray": config.ray.model_copy(update={"address": None}),
        }
        used = config.model_copy(update=update)
        return {which: _measure_cluster(which, used, seconds) for which in ("ours", "floor")}


def _measure_cluster(which: str, config: ClusterConfig, seconds: float) -> dict[str, Any]:
    with running_cluster(which, config) as first:
        time.sleep(SETTLE_S)
        before, start_s = usage_by_name(_family(first)), time.monotonic()
        time.sleep(seconds)
        return idle_figures(before, usage_by_name(_family(first)), time.monotonic() - start_s)


def idle_figures(before: Mapping[str, Usage], after: Mapping[str, Usage], wall_s: float) -> dict[str, Any]:
    """Return a row for each name, the largest use of CPU first, and one of all. Shares are of a core."""
    used = {name: replace(one, cpu_s=one.cpu_s - before.get(name, Usage()).cpu_s) for name, one in after.items()}
    total = sum(used.values(), Usage())
    # Of a name that is gone, the CPU time is with whoever has ended it, from its first second on.
    gone_s = sum(one.cpu_s for name, one in before.items() if name not in after)
    used[_TOTAL] = replace(total, cpu_s=total.cpu_s - gone_s)
    rows = [{"name": name, "share": one.cpu_s / wall_s} | asdict(one) for name, one in used.items()]
    return {"seconds": wall_s, "rows": sorted(rows, key=lambda row: (row["name"] == _TOTAL, -row["share"]))}


def usage_by_name(processes: Iterable[psutil.Process]) -> dict[str, Usage]:
    """Return the use of the processes that still run, by what they are."""
    found: dict[str, Usage] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            name = short_name(process.cmdline()) or process.name()
            found[name] = found.get(name, Usage()) + _usage(process)
    return found


def short_name(command: list[str]) -> str:
    """Return the kind of a process: an actor's class or a replica's deployment, else its program; "" after its end."""
    words = " ".join(command).split()
    if not words:
        return ""
    if words[0].startswith("ray::"):
        return words[0].removeprefix("ray::").partition(".")[0]  # behind the dot is the method that runs just now
    program = Path(words[0]).name
    if not program.startswith("python"):
        return program
    if any(word.startswith(_TEMPLATE) for word in words):
        return "template"
    modules = [word for option, word in pairwise(words) if option == "-m"]
    script = next((word for word in words[1:] if word.endswith(".py")), "")
    return modules[0] if modules else Path(script).name or program


def _family(first: psutil.Process) -> list[psutil.Process]:
    return [first, *first.children(recursive=True)]


def _usage(process: psutil.Process) -> Usage:
    times = process.cpu_times()
    cpu_s = times.user + times.system + times.children_user + times.children_system
    kinds = {}
    for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]:
        kind, number, *_ = line.split()
        kinds[kind] = int(number) * 1024
    shared = kinds["Pss_Shmem:"]
    return Usage(1, process.num_threads(), cpu_s, kinds["Pss:"] - shared, shared)


def print_idle_figures(figures: dict[str, Any], as_json: bool) -> None:
    """Print a table of the processes of each cluster, how ours stands to the targets, and what is Ray's and Serve's.

    Or one JSON object.
    """
    if as_json:
        print_json(figures)
        return
    for which, title in (("ours", "Atelier"), ("floor", "Ray and Serve alone, with one replica")):
        print_usage(title, figures[which])
    total, floor = (figures[which]["rows"][-1] for which in ("ours", "floor"))
    is_met = total["share"] < TARGET_SHARE and total["own_bytes"] < TARGET_BYTES
    print_line(
        f"target: less than {TARGET_SHARE:.0%} of a core and {TARGET_BYTES / 2**30:.0f} GiB beside shared memory: "
        f"{'met' if is_met else 'missed'}"
    )
    print_line(
        f"beyond Ray and Serve alone: {100 * (total['share'] - floor['share']):.1f} % of a core and "
        f"{(total['own_bytes'] - floor['own_bytes']) / 2**20:.0f} MiB"
    )


def print_usage(title: str, figures: Mapping[str, Any]) -> None:
    """Print a table of the processes in `idle_figures`."""
    print_line(f"{title}, over {figures['seconds']:.0f} s")
    right = [Column(name, align="right") for name in ("number", "threads", "% of a core", "MiB", "MiB shared")]
    rows = [
        [
            row["name"],
            str(row["processes"]),
            str(row["threads"]),
            f"{100 * row['share']:.2f}",
            f"{row['own_bytes'] / 2**20:.0f}",
            f"{row['shared_bytes'] / 2**20:.0f}",
        ]
        for row in figures["rows"]
    ]
    print_table([Column("process", "name"), *right], rows)
