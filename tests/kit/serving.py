"""An ASGI application behind a real server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any

import uvicorn
from kit.waiting import until


class _Server(uvicorn.Server):
    """uvicorn's server, which ends at once: its own looks every tenth of a second, three times until its end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.end = asyncio.Event()

    def capture_signals(self) -> AbstractContextManager[None]:
        """Leave signals alone. A fixture ends in another run of an event loop than it began in, whose handlers uvicorn
        would put back.
        """
        return nullcontext()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.end.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        for server in self.servers:
            server.close()
        for connection in list(state.connections):
            connection.shutdown()
        await until(lambda: not state.connections and not state.tasks, "the end of what the server does")


@asynccontextmanager
async def served(app: Any, **config: Any) -> AsyncIterator[int]:
    """Run an application in uvicorn on this event loop; yields its port on 127.0.0.1."""
    server = _Server(uvicorn.Config(app, lifespan="off", log_config=None, **config))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        running = asyncio.create_task(server.serve(sockets=[listening]))
        await until(lambda: server.started)
        yield listening.getsockname()[1]
        server.end.set()
        await running
