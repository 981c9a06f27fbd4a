"""The commands that start and stop clusters, render their configs, and show the logs of starts.

Logs of `atelier up --detach` are kept over starts and reboots, the oldest removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
import yaml
from rich.console import Console
from rich.text import Text

from cluster.records.errors import SessionError
from configs.errors import ConfigFileError
from deployments.cli.models import print_models
from deployments.console.client import KEY_VARIABLE, Client
from deployments.console.output import Json, print_json, size
from deployments.console.progress import StartDisplay, usable_line
from weights.platform.private_folder import private_folder, state_folder

if TYPE_CHECKING:
    from cluster.start.session_records import SessionRecord
    from configs.cluster import ClusterConfig, WorkerConfig
    from configs.errors import Problem
    from deployments.preflight import ReadSource

app = typer.Typer()
_out = Console()

DEFAULT_CONFIG: Final = Path("configs/clusters/demo.yaml")
ConfigPath = Annotated[Path, typer.Argument(help="Cluster YAML.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Instead of the config's http.port.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Accept every caller on an address beyond this machine.")]
Address = Annotated[str | None, typer.Option(help="Of the Ray that it is on; default: this machine's.")]

_POLL_S: Final = 0.2
_HEADER: Final = (
    "# Rendered by `atelier render`; deploy with `serve deploy` or as the serveConfigV2 of a KubeRay RayService.\n"
)

_SOCKET: Final = "NOTIFY_SOCKET"

# The digest of a config file that the process before this one has found good. To read what some adapters change, a
# check imports torch and diffusers: hundreds of megabytes, which a process that runs for months should not have.
_FOUND_GOOD: Final = "ATELIER_CHECKED_CONFIG"

UP_IN_PART: Final = 3  # the exit code of a start that left some models unusable
KEPT: Final = 5  # earlier starts of a cluster
_CHUNK_BYTES: Final = 2**16


@app.command()
def up(
    config: ConfigPath = DEFAULT_CONFIG,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when the cluster is ready.")] = False,
    port: Port = None,
    insecure: Insecure = False,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", min=1.0, help="Seconds to wait until it is ready; default: while anything moves."),
    ] = None,
) -> None:
    """Start a cluster and keep it up until Ctrl-C or `atelier down`; say what is up if it is up already."""
    (_start_detached if detach else start_attached)(config, port, insecure, timeout_s)


@app.command()
def down(
    name: Annotated[str | None, typer.Argument(help="Cluster name; default: every cluster of yours.")] = None,
    address: Address = None,
) -> None:
    """Stop clusters, with everything that belongs to them: those of `atelier up` here, and those of a Ray by name."""
    from cluster.start.session_records import record_folder, running_sessions, stop_session

    found = running_sessions(record_folder()) if address is None else []
    sessions = [record for record in found if name in (None, record.name)]
    for record in sessions:
        with _out.status(f"stopping cluster {record.name!r}"):
            stop_session(record)
        _out.print(f"cluster {record.name!r} is down")
    if not sessions:
        _end_deployed(name, address)


def _end_deployed(name: str | None, address: str | None) -> None:
    """End a cluster on a Ray, whoever deployed it: the named one, or the only one at that address.

    Raises SessionError if there is none, or several without a name.
    """

    names, problem = clusters_at(address or "auto")
    if not names and not (name or address):
        _out.print("no cluster is up")  # said, but no error: it is down
        return
    ended = names[0] if address and not name and len(names) == 1 else name
    if ended not in names:
        there = f"there are {', '.join(map(repr, names))}; `atelier down NAME` ends one" if names else problem
        raise SessionError(
            f"no cluster {name!r} is up: {there}" if name else f"no cluster of `atelier up` here: {there}"
        )
    from deployments.console.applications import end_cluster

    with _out.status(f"stopping cluster {ended!r}"):
        end_cluster(ended)
    _out.print(f"cluster {ended!r} is down")


def clusters_at(address: str) -> tuple[list[str], str]:
    """Return the clusters of a Ray, and a reason if there are none."""
    from ray.exceptions import RayError

    from cluster.start.session import join_ray

    try:
        join_ray(address)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        first = str(error).strip().partition("\n")[0]
        return [], f"no Ray answers at {address} ({first})"
    from deployments.console.applications import clusters_here

    return clusters_here(), f"the Ray at {address} has none"


@app.command()
def check(
    config: ConfigPath = DEFAULT_CONFIG, port: Port = None, insecure: Insecure = False, as_json: Json = False
) -> None:
    """Find what is wrong with a cluster config, and with the models that it names, before anything starts.

    `up` refuses the same mistakes with the same options.
    """
    loaded, sources, problems = _checked(config, port, insecure)
    if as_json:
        print_json({"config": str(config), "problems": [asdict(problem) for problem in problems]})
    if problems and not as_json:
        raise ConfigFileError(config, problems)
    if problems:
        raise typer.Exit(2)
    if loaded is None or as_json:
        return
    unseen = [id_ for id_ in loaded.entries if id_ not in sources]
    total = size(sum(source.record.nbytes for source in sources.values()))
    counts = f"{len(sources)} models and adapters, {len(loaded.pipelines)} pipelines, {total}"
    _out.print(f"{config}: {counts}: nothing wrong", markup=False, soft_wrap=True)
    if (each := loaded.worker.num_processes) > 1:
        _out.print(_ranks_line(loaded.worker, each), markup=False, soft_wrap=True)
        from deployments.preflight import computed_by_rank_0, weights_of_ranks

        if shares := ", ".join(
            f"{id_} {size(own)} of {size(whole)}" for id_, own, whole in weights_of_ranks(loaded, sources)
        ):
            _out.print(f"weights of each rank: {shares}", markup=False, soft_wrap=True)
        if alone := ", ".join(computed_by_rank_0(loaded, sources)):
            _out.print(f"computed by rank 0 alone: {alone}", markup=False, soft_wrap=True)
    if unseen:
        _out.print(f"not checked, because they are elsewhere: {', '.join(unseen)}", markup=False, soft_wrap=True)


def _ranks_line(worker: WorkerConfig, each: int) -> str:
    """Return the line on workers of several ranks: their processes and resources."""
    counts = {axis: getattr(worker.ranks, axis) for axis in ("cfg", "sequence", "tensor")}
    axes = ", ".join(f"{axis} {count}" for axis, count in counts.items() if count > 1)
    total = worker.num_replicas * each
    gpus = f" and {total * worker.num_gpus:g} GPUs" if worker.num_gpus else ""
    return (
        f"workers: {worker.num_replicas}, each of {each} ranks ({axes}): {total} processes with "
        f"{total * worker.num_cpus:g} CPUs{gpus}"
    )


@app.command()
def render(config: ConfigPath = DEFAULT_CONFIG) -> None:
    """Print the plain Ray Serve YAML of a cluster config, for `serve deploy`."""
    from configs.loading import load_cluster_config

    sys.stdout.write(_render_serve_yaml(load_cluster_config(config)))


def _render_serve_yaml(config: ClusterConfig) -> str:
    """Return the plain Ray Serve YAML that `serve deploy` and KubeRay take.

    The config is the builder's argument, so a deploy needs only this file. Its HAProxy settings count only if Serve
    starts with this file: a running Serve keeps its proxy.
    """
    from cluster.process.logs import serve_logging
    from cluster.process.tracing import serve_tracing, tracing_environment
    from cluster.ray_seam.serve_proxy import ENVIRONMENT
    from cluster.start.door_plan import plan_unseen_door

    http, is_behind_haproxy = config.http, config.http.proxy == "haproxy"
    door = plan_unseen_door(http.haproxy).environment(config) if is_behind_haproxy else dict(ENVIRONMENT)
    roles = {"ingress": config.ingress, "text_encoder": config.text_encoder, "worker": config.worker}
    document = {
        "http_options": {
            "host": http.haproxy.replica_host if is_behind_haproxy else http.host,
            "port": http.port,
            "request_timeout_s": http.proxy_timeout_s,
        },
        "controller_options": {"runtime_env": {"env_vars": door | tracing_environment(config.tracing)}},
        **serve_logging(config.logging.format),
        **serve_tracing(config.tracing),
        "applications": [
            {
                "name": config.name,
                "route_prefix": http.route_prefix,
                "import_path": "deployments.app:build_app",
                "external_scaler_enabled": config.controller.scaling is not None,
                "args": {"config": config.model_dump(mode="json", exclude_defaults=True)},
                "deployments": [
                    {
                        "name": name,
                        "num_replicas": role.num_replicas,
                        "max_ongoing_requests": role.max_ongoing_requests,
                        "ray_actor_options": role.ray_options,
                    }
                    for name, role in roles.items()
                ],
            }
        ],
    }
    return _HEADER + yaml.safe_dump(document, sort_keys=False)


def load_for_start(path: Path, port: int | None, insecure: bool) -> ClusterConfig:
    """Load the config with the options of `up` and `apply`. Raises ConfigError if it may not start."""
    config, _, problems = _checked(path, port, insecure)
    if config is None or problems:
        raise ConfigFileError(path, problems)
    return config


def _checked(
    path: Path, port: int | None, insecure: bool
) -> tuple[ClusterConfig | None, dict[str, ReadSource], list[Problem]]:
    """Return the config with these options, the facts of its models, and all problems of a start here.

    There are no facts where the process before this one has found the file good.
    """
    from configs.loading import locate_problems, read_cluster_config
    from deployments.ingress.access.keys import KeysFileError, read_key_store

    sources: dict[str, ReadSource] = {}
    found: Sequence[Problem]
    if os.environ.pop(_FOUND_GOOD, None) == _digest(path) != "":
        config, found = read_cluster_config(path)
    else:
        from deployments.preflight import check_config

        config, sources, found = check_config(path)
    if config is None:
        return None, sources, [*found]
    problems: list[tuple[tuple[str | int, ...], str]] = []
    if port is not None:
        http = type(config.http).model_validate(config.http.model_dump() | {"port": port})
        config = config.model_copy(update={"http": http})
        problems += config.shared_ports()
    if insecure:
        config = config.model_copy(update={"access": config.access.model_copy(update={"insecure": True})})
    problems += [(tuple(key.split(".")), text) for key, text in config.open_hosts().items()]
    if config.access.keys_file:
        try:
            read_key_store(config.access.keys_file)
        except KeysFileError as error:
            problems.append((("access", "keys_file"), f"{error}; `atelier keys add NAME --admin` makes a key"))
    return config, sources, [*found, *locate_problems(path, problems)]


def _digest(path: Path) -> str:
    """Return a digest of a file's bytes, "" if there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _start_command(path: Path, port: int | None, insecure: bool, timeout_s: float | None) -> list[str]:
    """Return the command that starts a cluster attached to its process."""
    command = [sys.executable, "-m", "deployments.cli.entry", "up", str(path)]
    if port is not None:
        command += ["--port", str(port)]
    if insecure:
        command.append("--insecure")
    if timeout_s is not None:
        command += ["--timeout", str(timeout_s)]
    return command


def start_attached(
    path: Path,
    port: int | None,
    insecure: bool,
    timeout_s: float | None,
    show_page: Callable[[str], object] | None = None,
) -> None:
    """Start the cluster in this process and wait for Ctrl-C, SIGTERM or `atelier down`.

    `show_page` is given its URL once it answers.
    """
    had_torch, digest = "torch" in sys.modules, _digest(path)
    with _out.status(Text(f"checking {path}")):
        config = load_for_start(path, port, insecure)
    if "torch" in sys.modules and not had_torch and show_page is None:  # a page's opener is of this process
        sys.stdout.flush()
        os.execve(  # noqa: S606  # the same process, anew
            sys.executable, _start_command(path, port, insecure, timeout_s), os.environ | {_FOUND_GOOD: digest}
        )
    if tell_if_up(config):
        return
    stop = threading.Event()
    with StartDisplay(f"starting cluster {config.name!r}", _out) as display:
        from deployments.console.running import cluster_up, stop_on_signals

        stop_on_signals(stop, says=True)
        with cluster_up(config, str(path.resolve()), stop, display.show, timeout_s) as url:
            display.close()
            _out.print(f"cluster {config.name!r} is up at {url} after {display.elapsed_s:.1f} s", soft_wrap=True)
            _print_what_is_served(config, url)
            pages = f"create: {url}/   cluster: {url}/cluster   " if config.http.web else ""
            _out.print(f"{pages}docs: {url}/docs   stop: Ctrl-C or `atelier down`", soft_wrap=True)
            if lacking := usable_line(display.last):
                _out.print(lacking, markup=False, highlight=False, soft_wrap=True)
            tell_systemd("READY=1")
            if show_page is not None and config.http.web:
                show_page(f"{url}/")
            stop.wait()
            tell_systemd("STOPPING=1")
            _out.print(f"stopping cluster {config.name!r}")


def _start_detached(path: Path, port: int | None, insecure: bool, timeout_s: float | None) -> None:
    """Start the cluster in a process of its own and return when it answers. Its output goes to a log file."""
    from deployments.cli.cluster import begin_log

    digest = _digest(path)
    with _out.status(Text(f"checking {path}")):
        config = load_for_start(path, port, insecure)
    if tell_if_up(config):
        return
    log = begin_log(config.name)
    command, environment = _start_command(path, port, insecure, timeout_s), os.environ | {_FOUND_GOOD: digest}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )
    title = f"starting cluster {config.name!r} (log: {log})"
    if not _out.is_terminal:
        _out.print(title, markup=False, highlight=False, soft_wrap=True)
    with _out.status(Text(title)) as shown:

        def show(news: list[str]) -> None:
            if _out.is_terminal:
                shown.update(Text(f"{title}\n{news[-1]}"))
            else:
                _out.print("\n".join(news), markup=False, highlight=False, soft_wrap=True)

        record = _wait_for_record(config.name, process, log, show)
    page = f"; open {record.url}/ in a browser" if config.http.web else ""
    place = f"{record.url} (process {record.pid})"
    _out.print(f"cluster {config.name!r} is up at {place}{page}; stop: `atelier down`", soft_wrap=True)
    if record.lacking:
        _out.print(record.lacking, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(UP_IN_PART)


def tell_if_up(config: ClusterConfig) -> bool:
    """Print where the cluster is, and return True, if it is up with this very config.

    Raises ClientError if it does not answer.
    """
    from cluster.start.session_records import config_digest, record_folder, running_sessions

    wanted = (config.name, config_digest(config), True)
    for record in running_sessions(record_folder()):
        if (record.name, record.digest, record.ready) == wanted:
            place = f"{record.url} (process {record.pid})"
            _out.print(f"cluster {config.name!r} is already up at {place}; stop: `atelier down`", soft_wrap=True)
            _print_what_is_served(config, record.url)
            return True
    return False


def _print_what_is_served(config: ClusterConfig, url: str) -> None:
    """Print the models, unless that needs a key that is not here."""
    if config.access.keys_file is None or os.environ.get(KEY_VARIABLE):
        print_models(Client(url).models())


def _wait_for_record(
    name: str, process: subprocess.Popen[bytes], log: Path, show: Callable[[list[str]], None]
) -> SessionRecord:
    """Return the record of a cluster once it answers. `show` gets the new lines of its log meanwhile.

    The process has its own time limit. Raises SessionError with its last lines.
    """
    from cluster.start.session_records import record_folder, running_sessions

    num_shown = 0
    while True:
        for record in running_sessions(record_folder()):
            if record.name == name and record.pid == process.pid and record.ready:
                return record
        if process.poll() is not None:
            raise SessionError("the cluster did not start:\n" + "\n".join(_lines(log)[-5:]))
        if news := _lines(log)[num_shown:]:
            num_shown += len(news)
            show(news)
        time.sleep(_POLL_S)


def _lines(log: Path) -> list[str]:
    """Return the complete lines of a log; errors without their label, which the caller prints itself."""
    text = log.read_text(errors="replace")
    return [line.removeprefix("error: ") for line in text[: text.rfind("\n") + 1].splitlines()]


def tell_systemd(state: str) -> None:
    """Send a state, such as `READY=1`, as sd_notify(3) does. Without a service manager that listens, do nothing."""
    address = os.environ.get(_SOCKET, "")
    if address[:1] not in ("/", "@"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


def _log_file(name: str) -> Path:
    """Return the log of a cluster's newest start. Raises SessionError when others could write there."""
    try:
        return private_folder(state_folder()) / f"{name}.log"
    except OSError as error:
        raise SessionError(f"no place for logs: {error}") from None


def begin_log(name: str) -> Path:
    """Return the path of a new log; earlier logs are numbered, and `KEPT` of them stay."""
    log = _log_file(name)
    for number in range(KEPT, 0, -1):
        before = log if number == 1 else _earlier(log, number - 1)
        if before.exists():
            before.replace(_earlier(log, number))
    return log


def _earlier(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")


def _known_logs() -> list[str]:
    """Return the names of the clusters that have a log, the last one to write first."""
    found = sorted(state_folder().glob("*.log"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [file.stem for file in found]


def read_on(log: Path, pause_s: float = _POLL_S) -> Iterator[str]:
    """Yield the log's text, then new text, also of the next start's file. Never ends."""
    file = log.open(errors="replace")
    while True:
        while text := file.read(_CHUNK_BYTES):
            yield text
        time.sleep(pause_s)
        if log.exists() and not os.path.samestat(os.fstat(file.fileno()), log.stat()):
            file.close()
            file = log.open(errors="replace")


@app.command()
def logs(
    name: Annotated[str | None, typer.Argument(help="Cluster name; default: the one that wrote last.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    earlier: Annotated[int, typer.Option(min=0, max=KEPT, help="How many starts ago.")] = 0,
) -> None:
    """Print the log of a cluster that was started with `atelier up --detach`."""
    from cluster.start.ray_folders import ray_logs

    known = _known_logs()
    if name is None and known:
        name = known[0]
    if name is None or not re.fullmatch(r"[\w.-]+", name) or name not in known:
        there = f"there are logs of {', '.join(known[:20])}" if known else "`atelier up --detach` writes one"
        raise SessionError(f"no log of cluster {name!r}: {there}" if name else f"no log: {there}")
    log = _log_file(name)
    if earlier:
        log = _earlier(log, earlier)
        if not log.exists():
            raise SessionError(f"no log of {earlier} starts ago: {log} is not there")
    typer.echo(f"{log}; of Ray's processes: {ray_logs(name)}", err=True)
    if follow and not earlier:
        for text in read_on(log):
            sys.stdout.write(text)
            sys.stdout.flush()
    with log.open(errors="replace") as file:
        while text := file.read(_CHUNK_BYTES):
            sys.stdout.write(text)
