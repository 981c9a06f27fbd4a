"""Connections that end when the other node falls silent: which ones, among a process's files."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest

from cluster.ray_seam import handles
from cluster.ray_seam.placed_router import IDLE_S, INTERVAL_S, SILENT_S, end_with_peers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the files of a process are looked up in /proc")
OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
)


def options(connection: socket.socket) -> tuple[int, ...]:
    return tuple(connection.getsockopt(*option) for option in OPTIONS)


@pytest.fixture
def listeners() -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]


def test_connections_to_the_addresses_end_and_no_others(listeners: list[socket.socket]) -> None:
    asked, other = (listener.getsockname() for listener in listeners)
    with ExitStack() as stack:
        mine = [stack.enter_context(socket.create_connection(asked)) for _ in range(2)]
        mine.append(stack.enter_context(socket.socket(socket.AF_INET6)))
        mine[2].connect((f"::ffff:{asked[0]}", asked[1]))  # as gRPC connects
        elsewhere = stack.enter_context(socket.create_connection(other))
        for end in socket.socketpair():  # of this machine alone
            stack.enter_context(end)
        before = options(elsewhere)
        assert end_with_peers({asked}) == 3
        assert {options(one) for one in mine} == {(1, IDLE_S, INTERVAL_S, SILENT_S * 1000)}
        assert options(elsewhere) == before
        assert end_with_peers(()) == 0
        mine[0].sendall(b"still open")


async def test_calls_by_grpc_are_found() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        assert end_with_peers({("127.0.0.1", port)}) == 1
    await server.stop(None)


async def test_a_connection_that_nobody_answers_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a node is gone: the kernel answers no more connections than fit into a listener's queue."""
    monkeypatch.setattr(handles, "CONNECT_S", 0.2)
    for name in ("insecure_channel", "secure_channel"):
        monkeypatch.setattr(grpc.aio, name, getattr(grpc.aio, name))  # put back after the test
    handles.bound_connecting.__wrapped__()
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{silent.getsockname()[1]}") as channel:
            async with asyncio.timeout(15):  # gRPC itself waits for 20 s
                with pytest.raises(grpc.aio.AioRpcError, match="failed to connect"):
                    await channel.unary_unary("/replica/work")(b"")
