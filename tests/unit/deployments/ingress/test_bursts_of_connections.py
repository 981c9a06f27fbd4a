"""Connections that come at once, at a server on uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from deployments.ingress.gate import _accept_many

NUM_CONNECTIONS = 120


async def _says_yes(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
    await send({"type": "http.response.body", "body": b"yes"})


def test_a_burst_of_connections_is_accepted_within_a_few_looks_and_the_port_is_free_after_the_end() -> None:
    async def run() -> None:
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        address = listening.getsockname()
        server = uvicorn.Server(uvicorn.Config(_says_yes, log_config=None, lifespan="off"))
        _accept_many(server)
        running = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.001)
        with contextlib.ExitStack() as clients:
            sockets = [clients.enter_context(socket.create_connection(address)) for _ in range(NUM_CONNECTIONS)]
            num_looks = 0
            while len(server.server_state.connections) < NUM_CONNECTIONS:
                await asyncio.sleep(0)  # an event loop's look
                num_looks += 1
            assert num_looks < NUM_CONNECTIONS / 2
            sockets[-1].sendall(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
            answer = b""
            while not answer.endswith(b"yes"):  # it may come in two pieces
                piece = await asyncio.to_thread(sockets[-1].recv, 4096)
                assert piece
                answer += piece
        server.should_exit = True
        await running
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)

    uvloop.run(run())
