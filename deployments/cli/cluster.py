"""The commands that start and stop clusters, and the one that renders a config for others to start."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
import yaml
from rich.console import Console
from rich.text import Text

from deployments.cli.client import KEY_VARIABLE, Client
from deployments.cli.models import print_models
from deployments.cli.progress import StartDisplay

if TYPE_CHECKING:
    from cluster.session import SessionRecord
    from configs.cluster import ClusterConfig

app = typer.Typer()
_out = Console()

DEFAULT_CONFIG: Final = Path("configs/clusters/demo.yaml")
ConfigPath = Annotated[Path, typer.Argument(help="Cluster YAML.")]

START_TIMEOUT_S: Final = 360.0
_POLL_S: Final = 0.2
_HEADER: Final = (
    "# Rendered by `atelier render`; deploy with `serve deploy` or as the serveConfigV2 of a KubeRay RayService.\n"
)


@app.command()
def up(
    config: ConfigPath = DEFAULT_CONFIG,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when the cluster is ready.")] = False,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Instead of the config's http.port.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let everybody in who reaches an address beyond this machine.")
    ] = False,
) -> None:
    """Start a cluster and keep it up until Ctrl-C or `atelier down`."""
    (_start_detached if detach else _start_attached)(config, port, insecure)


@app.command()
def down(
    name: Annotated[str | None, typer.Argument(help="Cluster name; default: every cluster of yours.")] = None,
) -> None:
    """Stop clusters of this machine, with everything that belongs to them."""
    from cluster.session import record_folder, running_sessions, stop_session

    sessions = [record for record in running_sessions(record_folder()) if name in (None, record.name)]
    if not sessions:  # said, but no error: it is down
        _out.print(f"no cluster {name!r} is up" if name else "no cluster is up")
    for record in sessions:
        with _out.status(f"stopping cluster {record.name!r}"):
            stop_session(record)
        _out.print(f"cluster {record.name!r} is down")


@app.command()
def render(config: ConfigPath = DEFAULT_CONFIG) -> None:
    """Print the plain Ray Serve YAML of a cluster config, for `serve deploy`."""
    from configs.loading import load_cluster_config

    sys.stdout.write(_render_serve_yaml(load_cluster_config(config)))


def _render_serve_yaml(config: ClusterConfig) -> str:
    """Return the plain Ray Serve YAML that `serve deploy` and KubeRay take.

    The config travels inside as the builder's argument, so this one file is all that a deploy needs. HAProxy's part of
    it holds where Serve starts with this file: a Serve that runs keeps the proxy that it has.
    """
    from cluster.door.door_plan import plan_unseen_door
    from cluster.door.serve_proxy import ENVIRONMENT

    http, is_behind_haproxy = config.http, config.http.proxy == "haproxy"
    door = plan_unseen_door(http.haproxy).environment(config) if is_behind_haproxy else dict(ENVIRONMENT)
    roles = {"ingress": config.ingress, "text_encoder": config.text_encoder, "worker": config.worker}
    document = {
        "http_options": {
            "host": http.haproxy.replica_host if is_behind_haproxy else http.host,
            "port": http.port,
            "request_timeout_s": http.proxy_timeout_s,
        },
        "controller_options": {"runtime_env": {"env_vars": door}},
        "applications": [
            {
                "name": "atelier",
                "route_prefix": "/",
                "import_path": "deployments.app:build_app",
                "args": {"config": config.model_dump(mode="json", exclude_defaults=True)},
                "deployments": [
                    {
                        "name": name,
                        "num_replicas": role.num_replicas,
                        "max_ongoing_requests": role.max_ongoing_requests,
                        "ray_actor_options": {"num_cpus": role.num_cpus, "num_gpus": role.num_gpus},
                    }
                    for name, role in roles.items()
                ],
            }
        ],
    }
    return _HEADER + yaml.safe_dump(document, sort_keys=False)


def _load_for_start(path: Path, port: int | None, insecure: bool) -> ClusterConfig:
    """Load the config with the options of `up`. Raises ConfigError when it may not start so."""
    from configs.loading import located_problems
    from deployments.ingress.access.keys_file import KeysFileError, read_book
    from deployments.pipelines.checked_config import load_checked_config

    config = load_checked_config(path)
    if port is not None:
        http = type(config.http).model_validate(config.http.model_dump() | {"port": port})
        config = config.model_copy(update={"http": http})
    if insecure:
        config = config.model_copy(update={"access": config.access.model_copy(update={"insecure": True})})
    problems = [(tuple(key.split(".")), text) for key, text in config.open_hosts().items()]
    if config.access.keys_file:
        try:
            read_book(config.access.keys_file)
        except KeysFileError as error:
            problems.append((("access", "keys_file"), f"{error}; `atelier keys add NAME --admin` makes a key"))
    if problems:
        raise located_problems(path, problems)
    return config


def _start_attached(path: Path, port: int | None, insecure: bool) -> None:
    """Start the cluster in this process and wait for Ctrl-C, SIGTERM or `atelier down`."""
    config = _load_for_start(path, port, insecure)
    stop = threading.Event()
    with StartDisplay(f"starting cluster {config.name!r}", _out) as display:
        from deployments.cli.running import cluster_up, stop_on_signals

        stop_on_signals(stop)
        with cluster_up(config, str(path.resolve()), stop, display.show) as url:
            display.close()
            _out.print(f"cluster {config.name!r} is up at {url} after {display.elapsed_s:.1f} s")
            if config.access.keys_file is None or os.environ.get(KEY_VARIABLE):
                print_models(Client(url).models())
            _out.print(f"docs: {url}/docs   stop: Ctrl-C or `atelier down`")
            stop.wait()
            _out.print(f"stopping cluster {config.name!r}")


def _start_detached(path: Path, port: int | None, insecure: bool) -> None:
    """Start the cluster in a process of its own and return when it answers. Its output goes to a log file."""
    from cluster.session import record_folder

    config = _load_for_start(path, port, insecure)
    log = record_folder() / f"{config.name}.log"
    command = [sys.executable, "-m", "deployments.cli.main", "up", str(path)]
    if port is not None:
        command += ["--port", str(port)]
    if insecure:
        command.append("--insecure")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True)
    title = f"starting cluster {config.name!r} (log: {log})"
    with _out.status(Text(title)) as shown:
        record = _wait_for_record(config.name, process, log, lambda news: shown.update(Text(f"{title}\n{news}")))
    _out.print(f"cluster {config.name!r} is up at {record.url} (process {record.pid}); stop: `atelier down`")


def _wait_for_record(
    name: str, process: subprocess.Popen[bytes], log: Path, show: Callable[[str], None]
) -> SessionRecord:
    """Return the record of a cluster once it answers. `show` gets the newest line of its log meanwhile."""
    from cluster.errors import SessionError
    from cluster.session import record_folder, running_sessions

    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        for record in running_sessions(record_folder()):
            if record.name == name and record.pid == process.pid and record.ready:
                return record
        if process.poll() is not None:
            raise SessionError(f"the cluster did not start:\n{_last_lines(log, 5)}")
        show(_last_lines(log, 1))
        time.sleep(_POLL_S)
    process.terminate()
    raise SessionError(f"the cluster was not ready within {START_TIMEOUT_S:.0f} s; log: {log}")


def _last_lines(log: Path, count: int) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])
