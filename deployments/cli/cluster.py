"""The commands that start and stop clusters."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from rich.console import Console

from cluster.errors import SessionError
from cluster.session import SessionRecord, record_folder, running_sessions, stop_session
from configs.cluster import ClusterConfig
from deployments.cli.client import Client
from deployments.cli.status import print_models
from deployments.pipelines.checked_config import load_checked_config

out = Console()
_POLL_S = 0.2
START_TIMEOUT_S = 360.0


def load_with_port(path: Path, port: int | None) -> ClusterConfig:
    config = load_checked_config(path)
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
    from deployments.cli.running import cluster_up, stop_on_signals

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
    log = record_folder() / f"{config.name}.log"
    command = [sys.executable, "-m", "deployments.cli.main", "up", str(path)]
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
