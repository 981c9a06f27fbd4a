"""A real HAProxy, as Serve starts it and Atelier changes it, before small servers that stand in for replicas.

Run as a script, it is a manager that starts HAProxy, prints its process id and waits.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from ray.serve._private.haproxy import BackendConfig, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from cluster.door.haproxy_rules import MAX_RETRIES, RETRY_ON
from cluster.door.places import HTTP_ADDRESS, MAX_REQUESTS
from cluster.ray_seam.haproxy import _DoorProcess
from infra.ports import free_port

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Replica:
    """A server that counts what reaches it. Health checks are answered and not counted."""

    def __init__(self, answer: Answer) -> None:
        self.port = 0  # until it listens
        self.seen: list[str] = []
        self._answer = answer

    async def __aenter__(self) -> Replica:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def die(self) -> None:
        """End as a process that is killed: nobody listens, and every connection is closed, also those in use."""
        server = self._runner.server
        assert server is not None
        await next(iter(self._runner.sites)).stop()
        for connection in server.connections:
            if connection.transport:
                connection.transport.abort()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/-/healthz":
            return web.Response(text="success")
        self.seen.append(f"{request.method} {request.path}")
        return await self._answer(request)


async def says_yes(request: web.Request) -> web.Response:
    return web.Response(text=f"yes {len(await request.read())}")


async def dies(request: web.Request) -> web.Response:
    """End as a replica does that is killed: the connection closes, and nothing was said."""
    await request.read()
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@asynccontextmanager
async def door(
    *replicas: Replica | int,
    fallback: Replica | None = None,
    max_requests: int = 1024,
    prefix: str = "/",
    **settings: Any,
) -> AsyncIterator[tuple[str, _DoorProcess]]:
    """HAProxy before the replicas of an application, or before ports where nobody listens."""
    ports = [replica if isinstance(replica, int) else replica.port for replica in replicas]
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="d") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(HTTP_ADDRESS, f"127.0.0.1:{port}")
        patch.setenv(MAX_REQUESTS, str(max_requests))
        config = HAProxyConfig(
            socket_path=f"{folder}/admin",
            server_state_base=folder,
            server_state_file=f"{folder}/servers",
            metrics_socket_path=f"{folder}/log",
            http_options=HTTPOptions(host="127.0.0.1", port=port),
            retry_on=RETRY_ON,
            retries=MAX_RETRIES,
            observe_error_limit=1,
            nbthread=1,
            is_head=True,
            **settings,
        )
        servers = [ServerConfig(name=f"r{index}", host="127.0.0.1", port=port) for index, port in enumerate(ports)]
        backend = BackendConfig("app", prefix, servers=servers)
        if fallback:
            backend.fallback_server = ServerConfig("fallback", "127.0.0.1", fallback.port)
        process = _DoorProcess(config, {"app": backend}, f"{folder}/haproxy.cfg")
        await process.start()
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            await process.stop()


async def _manage(folder: str, port: int) -> None:
    """Stand in for the manager that is killed."""
    config = HAProxyConfig(
        socket_path=f"{folder}/admin",
        server_state_base=folder,
        server_state_file=f"{folder}/servers",
        metrics_socket_path=f"{folder}/log",
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        nbthread=1,
    )
    process = _DoorProcess(config, {}, f"{folder}/haproxy.cfg")
    await process.start()
    assert process._proc is not None
    print(process._proc.pid, flush=True)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(_manage(sys.argv[1], int(sys.argv[2])))
