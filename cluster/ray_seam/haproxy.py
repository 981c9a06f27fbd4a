"""HAProxy on one node: Serve's manager of it, made to listen only where it should and to restart HAProxy at once.

Imported by actors of Serve alone, which `door_plan.DoorPlan.environment` leads here: it needs Serve's private modules.

Serve's controller asks Ray for the list of nodes, in three calls, at each of ten steps a second: in an idle cluster
three quarters of what Ray's own server does, and a third of what the controller does. Here it asks once a second, which
is early enough to hear of a node: its own start takes longer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import shlex
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import ray
from ray.serve._private import controller, haproxy
from ray.serve._private.haproxy import HAProxyApi, HAProxyManager

from cluster.door import haproxy_launcher
from cluster.door.haproxy_rules import METRICS, STATISTICS, rewrite_config, share_of_connections
from cluster.door.places import HTTP_ADDRESS, MAX_PER_ADDRESS, MAX_REQUESTS, METRICS_PORT, STATS_PORT, why_taken
from cluster.ray_seam import shims
from cluster.records.errors import RayIncompatible

_RESTART_PAUSE_S: Final = 0.5
_STOP_PAUSE_S: Final = 0.02  # within which `stop` has forgotten the process that it has ended
_KEPT_LOGS: Final = 8
_SPARE_FILES: Final = 512  # beside the two and a half (splicing) of each connection: listeners, checks, logs
_MAX_CONNECTIONS: Final = re.compile(r"^( +maxconn )(\d+)$", re.MULTILINE)
_ADMIN_SOCKET: Final = re.compile(r"^ +stats socket (\S+) ", re.MULTILINE)

_PAGES: Final = {STATISTICS: STATS_PORT, METRICS: METRICS_PORT}

_logger = logging.getLogger("ray.serve")
_find_haproxy: Final = haproxy.get_haproxy_binary
_starting: ContextVar[Path] = ContextVar("_starting")  # the configuration file of the HAProxy that is being started


def install() -> None:
    """Let the controller, in whose process this is called, start `_DoorManager` on every node, not Serve's.

    And let it ask Ray for all nodes as often as it needs them, not at each step of its loop.
    """
    shims.require(shims.HAPROXY)
    controller.HAProxyManager = ray.remote(num_cpus=0)(_DoorManager)
    look_up_nodes_seldom()


class _DoorManager(HAProxyManager.__ray_actor_class__):
    """Serve's actor that keeps HAProxy running on a node and tells it of the ingress replicas."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        haproxy.HAProxyApi = _DoorProcess  # by that name, the constructor finds what runs HAProxy
        super().__init__(*arguments, **options)


class _DoorProcess(HAProxyApi):
    """HAProxy's processes on this node: the one that listens, and older ones that finish what they have."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        haproxy.get_haproxy_binary = _prepare_start
        self._reloading = asyncio.Lock()
        self._watches = set[asyncio.Task[None]]()

    async def start(self) -> None:
        async with self._reloading:
            await self._start()

    async def _start(self) -> None:
        _starting.set(Path(self.config_file_path))
        try:
            await super().start()
        except Exception as error:
            host, port = _address()
            if why := why_taken(host, port):
                node = ray.util.get_node_ip_address()
                raise RuntimeError(
                    f"HAProxy of node {node} cannot listen on {host}:{port} ({why}): end the program there, or choose "
                    "another `http.port`"
                ) from error
            raise
        self._watch()

    async def _graceful_reload(self) -> None:
        async with self._reloading:
            if self._proc is None or self._proc.returncode is not None:
                await self._start()
                return
            _starting.set(Path(self.config_file_path))
            await super()._graceful_reload()
            self._watch()

    def _watch(self) -> None:
        """Check the process that listens now, and start another one when it dies.

        Each process has a watch of its own: after a reload the one before may take as long as its requests to end.
        """
        self._check_admin_socket()
        watch = asyncio.create_task(self._start_again_after(self._proc))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    def _check_admin_socket(self) -> None:
        """Raise RayIncompatible when others could command the HAProxy that was started, and end it."""
        try:
            _check_admin_socket(Path(self.config_file_path))
        except RayIncompatible:
            if self._proc is not None:
                self._proc.kill()
            raise

    async def _start_again_after(self, watched: asyncio.subprocess.Process | None) -> None:
        """Start HAProxy again when this process of it has died. Serve would notice after 30 s."""
        assert watched is not None
        await watched.wait()
        await asyncio.sleep(_STOP_PAUSE_S)
        while True:
            async with self._reloading:
                if self._proc is not watched:  # stopped, or a reload has put another process in its place
                    return
                _logger.warning(f"HAProxy ended with {watched.returncode}; starting it again.")
                prune_logs(Path(self.config_file_path).parent)
                try:
                    await self._start()
                    return  # the new process has a watch of its own
                except Exception:
                    _logger.exception("HAProxy did not start again.")
            await asyncio.sleep(_RESTART_PAUSE_S)


def prune_logs(folder: Path) -> None:
    """Remove all files of HAProxy's processes but the newest: Serve makes two for each process that it starts.

    Serve prunes them where it ends a process, and not where one dies.
    """
    written = sorted(folder.glob("*.std???.log"), key=lambda file: file.stat().st_mtime)
    for file in written[:-_KEPT_LOGS]:
        file.unlink(missing_ok=True)


def _prepare_start() -> str:
    """Change the configuration that Serve has just written, and return the program that starts HAProxy with it.

    Serve asks for the program right before it starts it.
    """
    file = _starting.get()
    host, port = _address()
    text, max_connections = _fit_connections(file.read_text())
    per_address = int(os.environ.get(MAX_PER_ADDRESS, 0)) or share_of_connections(max_connections)
    pages = [page for page, variable in _PAGES.items() if variable in os.environ]
    file.write_text(rewrite_config(text, host, port, int(os.environ[MAX_REQUESTS]), per_address, pages))
    launcher = file.with_name("haproxy")
    command = shlex.join([sys.executable, "-IS", haproxy_launcher.__file__, str(os.getpid()), _find_haproxy()])
    launcher.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    launcher.chmod(0o700)
    return str(launcher)


def _address() -> tuple[str, int]:
    """Return host and port that HAProxy listens on, of every node."""
    host, _, port = os.environ[HTTP_ADDRESS].rpartition(":")
    return host, int(port)


def _fit_connections(text: str) -> tuple[str, int]:
    """Return the configuration with no more connections than there may be files, and their number.

    HAProxy does not start with more. Raises ValueError when the configuration has no such number.
    """
    found = _MAX_CONNECTIONS.search(text)
    if found is None:
        raise ValueError("HAProxy's configuration of this Ray has no maxconn")
    number, files = int(found[2]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files != resource.RLIM_INFINITY:
        number = max(1, min(number, (files - _SPARE_FILES) * 2 // 5))
    return f"{text[: found.start()]}{found[1]}{number}{text[found.end() :]}", number


def _check_admin_socket(config_file: Path) -> None:
    """Raise RayIncompatible when other users could command HAProxy by the socket that the configuration names."""
    found = _ADMIN_SOCKET.search(config_file.read_text())
    if found is None:
        raise RayIncompatible(f"HAProxy's configuration {config_file} has no admin socket")
    mode = Path(found[1]).stat().st_mode
    if mode & 0o077:
        raise RayIncompatible(f"HAProxy's admin socket {found[1]} is open to other users (mode {mode & 0o777:o})")


PERIOD_S: Final = 1.0


def look_up_nodes_seldom(clock: Callable[[], float] = time.monotonic) -> None:
    """Let the controller, in whose process this is called, ask Ray for the nodes once in `PERIOD_S`.

    A Ray that has another name for it goes on as by itself.
    """
    if found := shims.problems(shims.NODE_LOOKS):
        _logger.warning(f"Serve asks Ray for all nodes at each of its steps: {found[0]}")
        return
    from ray.serve._private.cluster_node_info_cache import ClusterNodeInfoCache

    ClusterNodeInfoCache.update = seldom(ClusterNodeInfoCache.update, clock)


def seldom(update: Callable[[Any], None], clock: Callable[[], float]) -> Callable[[Any], None]:
    """Return a function that calls `update` unless it succeeded less than `PERIOD_S` ago; for a process's one cache."""
    due_s = -float("inf")

    def update_when_due(cache: Any) -> None:
        nonlocal due_s
        now_s = clock()
        if now_s >= due_s:
            update(cache)
            due_s = now_s + PERIOD_S

    return update_when_due
