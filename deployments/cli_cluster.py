"""The commands that start, stop and look at clusters."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.errors import SessionError
from cluster.session import SessionRecord, record_folder, running_sessions, stop_session
from configs.cluster import ClusterConfig
from configs.loading import load_cluster_config
from deployments.client import Client

out = Console()
_POLL_S = 0.2
START_TIMEOUT_S = 360.0


def load_with_port(path: Path, port: int | None) -> ClusterConfig:
    config = load_cluster_config(path)
    if port is None:
        return config
    http = type(config.http).model_validate(config.http.model_dump() | {"port": port})
    return config.model_copy(update={"http": http})


def run_attached(path: Path, port: int | None) -> None:
    """Start the cluster in this process and wait for Ctrl-C, SIGTERM or `atelier down`."""
    config = load_with_port(path, port)
    start = time.monotonic()
    stop = threading.Event()
    status = out.status(f"starting cluster {config.name!r}")
    status.start()
    from deployments.running import cluster_up, stop_on_signals

    stop_on_signals(stop)
    try:
        with cluster_up(config, str(path.resolve()), stop) as url:
            status.stop()
            out.print(f"cluster {config.name!r} is up at {url} after {time.monotonic() - start:.1f} s")
            print_models(Client(url).models())
            out.print(f"docs: {url}/docs   stop: Ctrl-C or `atelier down`")
            stop.wait()
            out.print(f"stopping cluster {config.name!r}")
    finally:
        status.stop()


def run_detached(path: Path, port: int | None) -> None:
    """Start the cluster in a process of its own and return when it answers. Its output goes to a log file."""
    config = load_with_port(path, port)
    folder = record_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = folder / f"{config.name}.log"
    command = [sys.executable, "-m", "deployments.cli", "up", str(path)]
    if port is not None:
        command += ["--port", str(port)]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True)
    with out.status(f"starting cluster {config.name!r} (log: {log})"):
        record = _wait_for_record(config.name, process, log)
    out.print(f"cluster {config.name!r} is up at {record.url} (process {record.pid}); stop: `atelier down`")


def stop(name: str | None) -> None:
    """Stop the named cluster, or all. Not finding one is said, and is no error: it is down."""
    sessions = [record for record in running_sessions(record_folder()) if name in (None, record.name)]
    if not sessions:
        out.print(f"no cluster {name!r} is up" if name else "no cluster is up")
    for record in sessions:
        with out.status(f"stopping cluster {record.name!r}"):
            stop_session(record)
        out.print(f"cluster {record.name!r} is down")


def show_status(client: Client, as_json: bool) -> None:
    cluster = client.cluster()
    if as_json:
        sys.stdout.write(json.dumps(cluster) + "\n")
        return
    out.print(f"cluster [bold]{cluster['cluster']}[/bold] at {client.url}")
    print_models(cluster["models"])
    nodes = Table("node", "extents", "resident", "leased", "budget", "read", "read GB/s", title="weights per node")
    for node in cluster["nodes"]:
        speed = node["read_bytes"] / node["read_s"] / 1e9 if node["read_s"] else 0.0
        sizes = [_size(node[name]) for name in ("resident_bytes", "leased_bytes", "budget_bytes", "read_bytes")]
        nodes.add_row(node["node_id"][:12], str(node["num_extents"]), *sizes, f"{speed:.2f}")
    out.print(nodes)
    for encoder in cluster["text_encoders"]:
        cache = encoder["cache"]
        out.print(
            f"text encoder: {encoder['modules']} modules, {_size(encoder['resident_bytes'])}; cache {cache['entries']} "
            f"entries, {_size(cache['nbytes'])}, {cache['hits'] + cache['joined']} hits, {cache['misses']} misses"
        )
    for worker in cluster["workers"]:
        size = _size(worker["resident_bytes"])
        out.print(f"worker: {worker['modules']} modules, {size}; {worker['denoising']} requests denoising")


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


def _wait_for_record(name: str, process: subprocess.Popen[bytes], log: Path) -> SessionRecord:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        for record in running_sessions(record_folder()):
            if record.name == name and record.pid == process.pid and record.ready:
                return record
        if process.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            raise SessionError(f"the cluster did not start:\n{tail}")
        time.sleep(_POLL_S)
    process.terminate()
    raise SessionError(f"the cluster was not ready within {START_TIMEOUT_S:.0f} s; log: {log}")


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
