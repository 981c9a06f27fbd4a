"""The Ray session of a cluster: start it, find it again from another process, end it without leftovers.

A cluster without `ray.address` gets a private Ray whose processes are children of `atelier up`. A small record file
lets `atelier down` and `atelier status` find that process. Ray takes most of a second to import: where it is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Self

import psutil

from cluster.door.places import why_taken
from cluster.process.processes import is_alive
from cluster.records.actor_names import NAMESPACE
from cluster.records.errors import SessionError
from cluster.start.door_plan import check_helper_ports
from configs.cluster import ClusterConfig, RayConfig
from configs.http import GrpcConfig, HttpConfig
from weights.platform.private_folder import private_folder, temporary_folder

__all__ = [
    "SessionFile",
    "SessionRecord",
    "check_can_start",
    "check_http_ports",
    "join_ray",
    "ray_logs",
    "ray_session",
    "record_folder",
    "running_sessions",
    "stop_session",
]

_STOP_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 5.0
_MAX_FOLDER_CHARS: Final = 37  # of the folder of a Ray, in which its sockets have 70 more
_POLL_S = 0.1
_LOOPBACK: Final = "127.0.0.1"
_MODE, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"  # of Ray's own reading
_TOKEN_FILE: Final = "ray_token"  # noqa: S105  # its name
# Of each log of a process: by itself, Ray keeps 3 GB.
_LOG_LIMITS: Final = {"RAY_ROTATION_MAX_BYTES": str(16 * 2**20), "RAY_ROTATION_BACKUP_COUNT": "2"}
# What Ray counts of its own handlers, and of every call, for its dashboard and what asks that.
_NO_COUNTS: Final = {"RAY_event_stats": "0", "RAY_task_events_report_interval_ms": "0"}
_SESSION_NAME: Final = re.compile(r"session_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d{6}_\d+")
_VERSIONS: Final = re.compile(r"Ray: (\S+)\s+Python: (\S+)")  # of Ray and of this process, as Ray words it
_QUIET_S: Final = 600.0  # a Ray that runs writes its state down every 10 s, also one in another container


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A running `atelier up`: its process and where it listens. `started` guards against a reused `pid`.

    `lacking` says which models could not be used when it was `ready`, "" where all could. `ray` is the address of its
    private Ray, "" before it is there and for a Ray of others.
    """

    name: str
    pid: int
    started: float
    url: str
    config: str
    ready: bool = False
    lacking: str = ""
    ray: str = ""

    @property
    def alive(self) -> bool:
        """Return whether that very process runs."""
        try:
            process = psutil.Process(int(self.pid))  # a damaged record may hold anything
            return process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def record_folder() -> Path:
    """Return the user's private folder of session records, created if need be.

    It is $XDG_RUNTIME_DIR/atelier, or a folder in the temporary directory. Raises SessionError when another user could
    write there, who could then choose the processes that `atelier down` ends.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    try:
        return private_folder(Path(base) / "atelier" if base else temporary_folder())
    except OSError as error:
        raise SessionError(str(error)) from None


def running_sessions(folder: Path) -> list[SessionRecord]:
    """Return the user's clusters that are up on this machine, and remove the records of dead processes."""
    sessions = []
    for file in sorted(folder.glob("*.json")):
        try:
            record = SessionRecord(**json.loads(file.read_text()))
            alive = record.alive
        except FileNotFoundError:
            continue  # its process ended just now
        except (ValueError, TypeError):
            alive = False
        if alive:
            sessions.append(record)
        else:
            file.unlink(missing_ok=True)
    return sessions


def check_can_start(config: ClusterConfig, folder: Path) -> None:
    """Raise SessionError when the cluster cannot start: it is up already, or a port is taken."""
    for record in running_sessions(folder):
        if record.name == config.name:
            raise SessionError(
                f"cluster {record.name!r} is already up at {record.url} (process {record.pid}); `atelier down` stops it"
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
    folder = _own_folder(name)
    _begin_removing_old_sessions(Path(folder) if folder else _usual_folder())
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


def ray_folder(name: str) -> Path:
    """Return the folder of the files of this user's private Ray for a cluster, if it has its own."""
    return temporary_folder() / f"r-{zlib.crc32(name.encode()):08x}"


def ray_logs(name: str) -> Path:
    """Return the logs of the last private Ray of a cluster of this user."""
    own = ray_folder(name)
    return (own if own.exists() else _usual_folder()) / "session_latest" / "logs"


def _own_folder(name: str) -> str | None:
    """Return `ray_folder`, made if need be; None for Ray's usual place: where that is named, or paths get too long.

    The usual folder may be another user's, and says which Ray `auto` means: that stays the one of who began it there.
    Raises OSError.
    """
    folder = str(ray_folder(name))
    if os.environ.get("RAY_TMPDIR") or len(folder) > _MAX_FOLDER_CHARS:
        return None
    private_folder(temporary_folder())
    return folder


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


class SessionFile:
    """The record file of this process's cluster. It exists for the length of a `with` block."""

    def __init__(self, config: ClusterConfig, url: str, config_path: str, folder: Path) -> None:
        started = psutil.Process().create_time()
        self._record = SessionRecord(config.name, os.getpid(), started, url, config_path)
        self._file = folder / f"{config.name}.json"

    def __enter__(self) -> Self:
        self._write(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.unlink(missing_ok=True)

    def note_ray(self) -> None:
        """Record where its private Ray, which is up now, has its files, for who joins it."""
        self._record = replace(self._record, ray=_own_folder(self._record.name) or "")
        self._write(self._record)

    def mark_ready(self, lacking: str = "") -> None:
        """Record that the cluster answers requests, and what it lacks."""
        self._write(replace(self._record, ready=True, lacking=lacking))

    def _write(self, record: SessionRecord) -> None:
        staged = self._file.with_suffix(f".{os.getpid()}.tmp")
        staged.write_text(json.dumps(asdict(record)))
        staged.replace(self._file)


def stop_session(record: SessionRecord, timeout_s: float = _STOP_TIMEOUT_S) -> None:
    """End an `atelier up` and all its processes: terminate them, then kill those that remain after `timeout_s`.

    Raises SessionError when a process survives that.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [psutil.Process(record.pid), *psutil.Process(record.pid).children(recursive=True)]
        os.kill(record.pid, signal.SIGTERM)
        for process in _left_of(family, timeout_s):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if remaining := _left_of(family, _KILL_TIMEOUT_S):
            raise SessionError(f"processes that would not end: {', '.join(str(p.pid) for p in remaining)}")


def _left_of(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until the processes have ended, and return those that have not in that time.

    One that has ended and that nobody reaps, as below a container's PID 1, counts as ended.
    """
    end_s = time.monotonic() + timeout_s
    while (left := [process for process in processes if is_alive(process)]) and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    return left


def _ray_processes() -> list[int]:
    """Return the ids of processes that are Ray's control service."""
    return [process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == "gcs_server"]


def _listener(port: int) -> str:
    """Return the process that listens on the port as text, "" when it cannot be seen."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("inet"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                name = psutil.Process(connection.pid).name() if connection.pid else "unknown"
                return f" (process {connection.pid}, {name})"
    return ""


def _begin_removing_old_sessions(folder: Path) -> None:
    """Remove this user's ended Ray sessions in a folder, in a thread, except the last: its logs may be needed."""
    threading.Thread(target=lambda: _remove_old_sessions(folder, time.time()), daemon=True).start()


def _usual_folder() -> Path:
    """Return Ray's default folder of files."""
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"


def _remove_old_sessions(folder: Path, now_s: float) -> None:
    """Remove the ended sessions in Ray's folder but the last one. `now_s` is the time of files."""
    written_s = {path: _last_written_s(path) for path in _sessions(folder)}
    ended = {path for path, last_s in written_s.items() if last_s < now_s - _QUIET_S}
    ended -= {path for path in ended if path.name in _running_sessions()} if ended else set()
    for path in sorted(ended, key=lambda path: written_s[path])[:-1]:
        shutil.rmtree(path, ignore_errors=True)


def _sessions(folder: Path) -> Iterator[Path]:
    """Yield the folders of sessions of this user."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _SESSION_NAME.fullmatch(path.name) and not path.is_symlink() and path.lstat().st_uid == os.geteuid():
                yield path


def _last_written_s(path: Path) -> float:
    """Return when something was last written into a session's logs."""
    last_s = path.lstat().st_mtime
    with contextlib.suppress(OSError), os.scandir(path / "logs") as files:
        for file in files:
            last_s = max(last_s, file.stat(follow_symlinks=False).st_mtime)
    return last_s


def _running_sessions() -> set[str]:
    """Return the sessions that processes of this machine name in their command lines, as Ray's own do."""
    lines = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return {name for line in lines for name in _SESSION_NAME.findall(line)}
