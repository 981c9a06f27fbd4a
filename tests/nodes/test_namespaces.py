"""The nodes by themselves, without Ray: who reaches whom, and that nothing stays."""

from __future__ import annotations

import errno
import math
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import psutil
import pytest
from integration.harness import ROOT
from kit.waiting import wait_until
from nodes.namespaces import Network, Node, missing

from cluster.ray_seam.handles import CONNECT_S
from cluster.ray_seam.placed_router import SILENT_S

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(missing()), reason=missing())]


THERE_AND_BACK_S: Final = 0.1  # over the slow link; a plain one takes a thousandth of it
# A server whose calls begin and never end, and a client that says how its call ended, and the next one, once told to.
HOLDING = """
import asyncio, sys, grpc
class Handler(grpc.GenericRpcHandler):
    def service(self, call):
        return grpc.unary_stream_rpc_method_handler(hold)
async def hold(request, context):
    yield b"begun"
    await asyncio.Event().wait()
async def serve():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    server.add_insecure_port(sys.argv[1])
    await server.start()
    print("listens", flush=True)
    await server.wait_for_termination()
asyncio.run(serve())
"""
ASKING = """
import asyncio, sys, grpc
from cluster.ray_seam.handles import bound_connecting
from cluster.ray_seam.placed_router import end_with_peers
from deployments.replicas.replica_calls import _NOT_REACHED
async def say_end(call):
    code = await call.code()
    print(code.name, bool(_NOT_REACHED.search(await call.details())), await call.details(), flush=True)
async def ask():
    bound_connecting()
    channel = grpc.aio.insecure_channel(sys.argv[1])
    call = channel.unary_stream("/replica/work")(b"")
    await call.read()
    host, _, port = sys.argv[1].rpartition(":")
    print(end_with_peers({(host, int(port))}), flush=True)
    await say_end(call)
    sys.stdin.readline()
    await say_end(channel.unary_stream("/replica/work")(b""))
asyncio.run(ask())
"""


def refused_s(one: Node, other: Node) -> float:
    """Return the seconds until the other refuses a connection, at once if it hears of it; infinite where it does not.

    Asked from a thread, whose start takes no time, rather than from a process of the node's.
    """

    def connect() -> float:
        with socket.socket() as asking:
            asking.settimeout(3)
            start_s = time.monotonic()
            is_refused = asking.connect_ex((other.address, 9)) == errno.ECONNREFUSED
            return time.monotonic() - start_s if is_refused else math.inf

    with ThreadPoolExecutor(1, initializer=one.enter_network) as pool:
        return pool.submit(connect).result()


def reaches(one: Node, other: Node) -> bool:
    """Return whether one can open a connection to the other."""
    return refused_s(one, other) < math.inf


def test_nodes_see_each_other_and_only_their_own_processes(tmp_path: Path) -> None:
    with Network(tmp_path) as network:
        one, other = network.add("one"), network.add("other")
        wait_until(lambda: reaches(one, other))
        wait_until(lambda: reaches(network.switch, one))
        sleeper = one.start("sleep", "1000")
        (process,) = wait_until(lambda: one.processes("sleep 1000"))
        assert other.processes("sleep 1000") == []
        one.run("bash", "-c", "echo here > /dev/shm/mine; echo here > /tmp/mine")
        assert other.run("ls", "/dev/shm", "/tmp").split() == ["/dev/shm:", "/tmp:"]
        assert one.run("hostname") == "one\n"
        one.kill()
        assert sleeper.wait(10) != 0
        assert not process.is_running()
        assert not reaches(other, one)
        another = network.add("one")
        wait_until(lambda: reaches(other, another))


def test_a_cut_link_is_silent_until_it_is_healed_and_a_slow_one_takes_its_time(tmp_path: Path) -> None:
    """Wait for an answer: a kernel that has looked for the other's MAC in vain refuses one more connection."""
    with Network(tmp_path) as network:
        one, other = network.add("one"), network.add("other")
        wait_until(lambda: refused_s(other, one) < THERE_AND_BACK_S)
        network.cut(one)
        assert not reaches(other, one)
        network.heal(one)
        wait_until(lambda: refused_s(other, one) < THERE_AND_BACK_S)
        network.plug(one, delay_s=THERE_AND_BACK_S / 2, loss=0.01)
        wait_until(lambda: reaches(other, one))
        assert min(refused_s(other, one) for _ in range(5)) >= THERE_AND_BACK_S
        network.plug(one)
        wait_until(lambda: refused_s(other, one) < THERE_AND_BACK_S)


@pytest.mark.parametrize("ends", ["silence", "death", "death of its node"])
def test_a_call_of_a_node_that_falls_silent_ends_and_is_told_from_a_death(tmp_path: Path, ends: str) -> None:
    """The next call ends soon as well, though nobody is there to refuse its connection."""
    with Network(tmp_path) as network:
        one, other = network.add("one"), network.add("other")
        address, path = f"{other.address}:7000", {"PYTHONPATH": str(ROOT)}
        server = other.start(sys.executable, "-c", HOLDING, address, stdout=subprocess.PIPE)
        assert server.stdout is not None
        assert server.stdout.readline() == "listens\n"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        client = one.start(sys.executable, "-c", ASKING, address, env=path, **pipes)
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "1\n"
        start_s = time.monotonic()
        if ends == "silence":
            network.cut(other)
        elif ends == "death":
            (process,) = other.processes(sys.executable)
            process.kill()
            server.wait(CONNECT_S)  # until then its socket may take one more connection
        else:
            other.kill()
        code, was_not_reached, *details = client.stdout.readline().split(maxsplit=2)
        assert (code, was_not_reached) == ("UNAVAILABLE", str(ends == "silence")), details
        assert (SILENT_S - 5 if ends == "silence" else 0) < time.monotonic() - start_s < 3 * SILENT_S
        start_s = time.monotonic()
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.readline().split()[:2] == ["UNAVAILABLE", "True"]
        assert time.monotonic() - start_s < 4 * CONNECT_S  # gRPC itself waits for 20 s
        client.wait(30)


def test_nothing_stays_whatever_happens(tmp_path: Path) -> None:
    before = _left()
    first: list[int] = []
    with pytest.raises(RuntimeError, match="in the middle"), Network(tmp_path) as network:  # noqa: PT012
        node = network.add("one")
        node.start("sleep", "1000")
        wait_until(lambda: node.processes("sleep 1000"))
        first = [node.pid, network.switch.pid, *(process.pid for process in node.processes())]
        raise RuntimeError("in the middle")
    assert len(first) > 3
    assert not any(psutil.pid_exists(pid) for pid in first)
    assert _left() == before


def _left() -> str:
    listed = [["ip", "-o", "link"], ["ip", "netns"], ["cat", "/proc/self/mountinfo"]]
    return "".join(subprocess.run(one, capture_output=True, text=True, check=True).stdout for one in listed)
