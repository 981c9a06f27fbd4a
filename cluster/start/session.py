"""The Ray of a cluster: check that it can start, start it or join it, and end it without leftovers.

A cluster without `ray.address` gets a private Ray whose processes are children of `atelier up`. Ray takes most of a
second to import: where it is needed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import psutil

from cluster.door.places import why_taken
from cluster.records.actor_names import NAMESPACE
from cluster.records.errors import SessionError
from cluster.start.door_plan import check_helper_ports
from cluster.start.ray_folders import begin_removing_old_sessions, own_folder, usual_folder
from cluster.start.session_records import record_folder, running_sessions
from configs.cluster import ClusterConfig, RayConfig
from configs.http import GrpcConfig, HttpConfig

__all__ = ["check_can_start", "check_http_ports", "join_ray", "ray_session"]

_LOOPBACK: Final = "127.0.0.1"
_MODE, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"  # of Ray's own reading
_TOKEN_FILE: Final = "ray_token"  # noqa: S105  # its name
# Of each log of a process: by itself, Ray keeps 3 GB.
_LOG_LIMITS: Final = {"RAY_ROTATION_MAX_BYTES": str(16 * 2**20), "RAY_ROTATION_BACKUP_COUNT": "2"}
# What Ray counts of its own handlers, and of every call, for its dashboard and what asks that.
_NO_COUNTS: Final = {"RAY_event_stats": "0", "RAY_task_events_report_interval_ms": "0"}
_VERSIONS: Final = re.compile(r"Ray: (\S+)\s+Python: (\S+)")  # of Ray and of this process, as Ray words it


def check_can_start(config: ClusterConfig, folder: Path) -> None:
    """Raise SessionError when the cluster cannot start: it is up already, or a port is taken."""
    for record in running_sessions(folder):
        if record.name == config.name:
            raise SessionError(
                f"cluster {record.name!r} is already up at {record.url} (process {record.pid}); "
                "`atelier apply` changes it, `atelier down` stops it"
            )
    if config.ray.address is None:
        check_http_ports(config.http)
    if config.grpc:  # replicas share this port on purpose, so that another cluster there would go unnoticed later
        _check_port_free(config.grpc)


def check_http_ports(http: HttpConfig) -> None:
    """Raise SessionError when a port is taken on which Serve, or HAProxy before it, is to listen."""
    _check_port_free(http)
    if http.proxy == "haproxy":
        check_helper_ports(http.haproxy)


def _check_port_free(where: HttpConfig | GrpcConfig) -> None:
    """Raise SessionError when the port is taken, naming the process that listens there if it can be seen."""
    section, option = ("http", " or --port") if isinstance(where, HttpConfig) else ("grpc", "")
    if why := why_taken(where.host, where.port):
        raise SessionError(
            f"cannot listen on {where.host}:{where.port}: {why}{_listener(where.port)}; "
            f"choose another port with `{section}: {{port: ...}}`{option}"
        )


def _listener(port: int) -> str:
    """Return the process that listens on the port as text, "" when it cannot be seen."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("inet"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                name = psutil.Process(connection.pid).name() if connection.pid else "unknown"
                return f" (process {connection.pid}, {name})"
    return ""


@contextlib.contextmanager
def ray_session(config: ClusterConfig) -> Iterator[None]:
    """Start Ray, or connect to it, for the length of the block. A private Ray ends with the block.

    On a Ray that was running before, `end_actors` (`ending.py`) ends what belongs to the cluster. Raises SessionError.
    """
    import ray
    from ray.exceptions import AuthenticationError

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray starts its workers at nice 15, which would put them behind everything else on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    private = config.ray.address is None
    try:
        if private:
            _start_private_ray(config.ray, config.name)
        else:
            join_ray(str(config.ray.address))
    except (ConnectionError, ValueError, RuntimeError, OSError, AuthenticationError) as error:
        asked = "" if private or os.environ.get(_MODE) == "token" else f"; does it ask for a token? ({_MODE}=token)"
        raise SessionError(f"Ray cannot be {'started' if private else 'reached'}: {error}{asked}") from error
    try:
        if private and ray.util.get_node_ip_address() != _LOOPBACK:
            raise SessionError(
                f"Ray listens on {ray.util.get_node_ip_address()} although it was started for {_LOOPBACK}"
            )
        yield
    finally:
        ray.shutdown()


def _start_private_ray(config: RayConfig, name: str) -> None:
    """Start a Ray of one node on loopback, with its token, and without the processes that nobody needs."""
    import ray

    from cluster.ray_seam.loopback import ray_on_loopback
    from cluster.ray_seam.processes import without_spare_processes

    _guard_ray_token()
    folder = own_folder(name)
    begin_removing_old_sessions(Path(folder) if folder else usual_folder())
    for variable, value in {**_LOG_LIMITS, **({} if config.dashboard else _NO_COUNTS)}.items():
        os.environ.setdefault(variable, value)
    with contextlib.ExitStack() as around:
        around.enter_context(ray_on_loopback())
        if not config.dashboard:
            around.enter_context(without_spare_processes())
        ray.init(
            address="local",
            num_cpus=config.num_cpus,
            object_store_memory=config.object_store_bytes,
            include_dashboard=config.dashboard,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=folder,
        )
    if folder:
        _write_address(folder)


def _write_address(folder: str) -> None:
    """Write down the address of this process's Ray where Ray looks for that of `auto`; only `ray start` does so."""
    import ray

    (Path(folder) / "ray_current_cluster").write_text(str(ray.get_runtime_context().gcs_address))


def join_ray(address: str = "auto") -> None:
    """Connect this process to a Ray that runs, by default that of this machine, where `atelier up` starts one.

    Handles work in this process from then on. One that is connected stays as it is. Raises ConnectionError when there
    is no Ray, SessionError for one of another version or Python.
    """
    import ray

    from cluster.ray_seam.loopback import ray_on_loopback

    if ray.is_initialized():
        return
    mine = _private_ray() if address == "auto" and not os.environ.get("RAY_ADDRESS") else ""
    # HAZARD: Ray takes 127.0.0.1 in an address for the machine's other one, and looks in vain for a Ray there.
    is_private = bool(mine) or (address == "auto" and any(map(_is_on_loopback, _ray_processes())))
    with contextlib.ExitStack() as around:
        if is_private:
            around.enter_context(ray_on_loopback())
            _take_ray_token()
        where = {"_temp_dir": mine} if mine else {}
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error", **where)
        except RuntimeError as error:
            if other := _other_versions(address, error):
                raise SessionError(other) from None
            raise


def _private_ray() -> str:
    """Return the folder of the first Ray of this user's clusters, "" without one: other Rays may run beside it.

    HAZARD: with an address that is given to it, Ray would not look for a token.
    """
    return next((record.ray for record in running_sessions(record_folder()) if record.ray), "")


def _other_versions(address: str, error: RuntimeError) -> str:
    """Return in a sentence what Ray says in several lines of a process with other versions than it has itself."""
    found = [f"Ray {ray} and Python {python}" for ray, python in _VERSIONS.findall(str(error))]
    if len(found) != 2:
        return ""
    return f"the Ray at {address} is {found[0]}, and here is {found[1]}: install its versions here"


def _is_on_loopback(pid: int) -> bool:
    """Return whether a process of Ray listens on loopback, as its command line tells."""
    with contextlib.suppress(psutil.Error):
        return "--node-ip-address=127.0.0.1" in psutil.Process(pid).cmdline()
    return False


def _ray_processes() -> list[int]:
    """Return the ids of processes that are Ray's control service."""
    return [process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == "gcs_server"]


def _guard_ray_token() -> None:
    """Let nobody else join the Ray that this process starts: with a token beside the session records, mode 0600.

    Ray's ports are open to the network, and who joins can run any code. Ray's own place for tokens would lock every
    Ray that this user starts later. An environment that names a token, or wants none (RAY_AUTH_MODE=disabled), is left
    as it is. Raises OSError, SessionError.
    """
    # HAZARD: setting RAY_AUTH_MODE here would not reach Ray's own copy of it; `ray.init` sets both when it is unset.
    if not _decides_about_tokens(os.environ):
        path = record_folder() / _TOKEN_FILE
        _make_private_token(path)
        os.environ[_TOKEN_PATH] = str(path)


def _take_ray_token() -> None:
    """Use the token that `atelier up` has made, to join its Ray; nothing without one."""
    path = record_folder() / _TOKEN_FILE
    if not _decides_about_tokens(os.environ) and path.exists():
        os.environ[_TOKEN_PATH] = str(path)


def _decides_about_tokens(environ: Mapping[str, str]) -> bool:
    return environ.get(_MODE, "token") != "token" or bool(environ.keys() & {"RAY_AUTH_TOKEN", _TOKEN_PATH})


def _make_private_token(path: Path) -> None:
    """Create the token, or close the file of one that is there to everybody else."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        os.fchmod(file.fileno(), 0o600)
        if not file.read().strip():
            file.seek(0)
            file.write(secrets.token_hex(32))
