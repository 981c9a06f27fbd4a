"""HAProxy on one node: Serve's manager of it, made to listen only where it should and to restart HAProxy at once.

Imported by actors of Serve alone, which `door_plan.DoorPlan.environment` leads here: it needs Serve's private modules.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any, Final

import ray
from ray.serve._private import controller, haproxy
from ray.serve._private.haproxy import HAProxyApi, HAProxyManager

from cluster.door.door_plan import HTTP_ADDRESS, MAX_REQUESTS
from cluster.door.haproxy_rules import rewrite_config

_RESTART_PAUSE_S: Final = 0.5
_POLL_S: Final = 0.02
_SPARE_FILES: Final = 512  # beside the two and a half (splicing) of each connection: listeners, checks, logs
_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True)  # loaded before any fork

_logger = logging.getLogger("ray.serve")


def install() -> None:
    """Let the controller, in whose process this is called, start `_DoorManager` on every node, not Serve's."""
    controller.HAProxyManager = ray.remote(num_cpus=0)(_DoorManager)


class _DoorManager(HAProxyManager.__ray_actor_class__):
    """Serve's actor that keeps HAProxy running on a node and tells it of the ingress replicas."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        haproxy.HAProxyApi = _DoorProcess  # by that name, the constructor finds what runs HAProxy
        super().__init__(*arguments, **options)


class _DoorProcess(HAProxyApi):
    """HAProxy's processes on this node: the one that listens, and older ones that finish what they have."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard_limit != resource.RLIM_INFINITY:  # HAProxy does not start with more connections than it has files for
            self.cfg.maxconn = max(1, min(self.cfg.maxconn, (hard_limit - _SPARE_FILES) * 2 // 5))
        self._reloading = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._stopped = False

    def _generate_config_file_internal(self) -> None:
        super()._generate_config_file_internal()
        file = Path(self.config_file_path)
        host, _, port = os.environ[HTTP_ADDRESS].rpartition(":")
        file.write_text(rewrite_config(file.read_text(), host, int(port), int(os.environ[MAX_REQUESTS])))

    async def start(self) -> None:
        await super().start()
        self._watch = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        self._stopped = True
        if self._watch:
            self._watch.cancel()
        await super().stop()

    async def _graceful_reload(self) -> None:
        async with self._reloading:
            if self._is_running():
                await super()._graceful_reload()
            else:
                self._proc = await self._start_and_wait_for_haproxy()

    async def _keep_running(self) -> None:
        """Start HAProxy again whenever it has died. Serve would notice after 30 s."""
        while not self._stopped:
            watched = self._proc
            assert watched is not None  # since `start`, and until `stop`
            await watched.wait()
            async with self._reloading:
                if self._stopped or self._is_running():  # a reload has put another process in its place
                    continue
                _logger.warning(f"HAProxy ended with {watched.returncode}; starting it again.")
                try:
                    self._proc = await self._start_and_wait_for_haproxy()
                except Exception:
                    _logger.exception("HAProxy did not start again.")
                    await asyncio.sleep(_RESTART_PAUSE_S)

    async def _start_and_wait_for_haproxy(
        self, *extra_args: str, timeout_s: int = haproxy.RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S
    ) -> asyncio.subprocess.Process:
        """Start HAProxy as Serve does, but make it end with this process: an orphan would keep the port."""
        self._spawn_seq += 1
        log = f"{self.cfg.socket_path}.{self._log_id}.{self._spawn_seq}.stderr.log"
        command = [haproxy.get_haproxy_binary(), "-db", "-dR", "-f", self.config_file_path, *extra_args]
        with open(log, "wb", buffering=0) as output:  # noqa: ASYNC230  # an empty file in a folder of ours
            process: Any = await asyncio.create_subprocess_exec(
                *command, stdout=output, stderr=output, preexec_fn=_end_with_parent
            )
        process._stdout_path = process._stderr_path = log  # where Serve looks for them
        try:
            await self._wait_for_hap_availability(process, timeout_s)
        except BaseException:
            if process.returncode is None:
                process.kill()
                await process.wait()
            self._retire_log_files(process)
            raise
        return process

    async def _wait_for_hap_availability(
        self, proc: Any, timeout_s: int = haproxy.RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S
    ) -> None:
        """Wait until the admin socket is answered by this very process. Serve looks twice a second.

        Raises RuntimeError, with what HAProxy says, when it ends or does not answer in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while await self._get_running_pid() != proc.pid:
            if proc.returncode is not None or time.monotonic() > deadline_s:
                how = "does not answer" if proc.returncode is None else f"ended with {proc.returncode}"
                raise RuntimeError(f"HAProxy {how}: {haproxy._tail_file(proc._stderr_path)}")
            await asyncio.sleep(_POLL_S)


def _end_with_parent() -> None:
    """Make the kernel stop this process softly when its parent dies: it finishes what it has and takes nothing new."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
