"""Accepting connections: as many as have come, at each look of the event loop at its sockets.

libuv, below uvloop, takes one connection from a listening socket at each look (since 1.45). Where requests are read
between two looks, ten milliseconds and more under load, the last of a thousand that HAProxy opens at once would wait
for seconds, and every probe behind them. Each further descriptor of the same socket is good for one more.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final

import uvicorn

_MOST_AT_ONCE: Final = 16


def accept_many(server: uvicorn.Server) -> None:
    """Let a server that has not started yet accept up to 16 connections at each look."""
    startup = server.startup

    async def start(sockets: Sequence[socket.socket] | None = None) -> None:
        further = [one.dup() for one in sockets or () for _ in range(_MOST_AT_ONCE - 1)]
        await startup([*sockets, *further] if sockets else None)

    server.startup = start  # type: ignore[method-assign]
