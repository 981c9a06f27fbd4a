"""An ASGI application behind a real server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from kit.waiting import until


@asynccontextmanager
async def served(app: Any, **config: Any) -> AsyncIterator[int]:
    """Run an application in uvicorn on this event loop; yields its port on 127.0.0.1."""
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, **config))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        running = asyncio.create_task(server.serve(sockets=[listening]))
        await until(lambda: server.started)
        yield listening.getsockname()[1]
        server.should_exit = True
        await running
