"""Extents from peer to peer: the right bytes, from any peer that is left, and no traces of a failure."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from kit.waiting import wait_until
from unit.cluster.peers.served import Served

from cluster.peers import protocol
from cluster.peers import server as peer_server
from cluster.peers.client import FetchFailed, PeerClient
from cluster.peers.protocol import MAX_TRANSFERS, PeerAddress, Request, Status
from cluster.peers.server import MAX_STRANGERS, MIN_IDLE_S, PeerServer, ServerLimits, StoredBytes
from cluster.records.errors import PeerUnavailable
from weights.memory.host_pool import ByteArray
from weights.records.errors import ExtentCorrupt
from weights.records.manifest import ExtentRef

SECRET = random.randbytes(32)
KIB = 1024
WAIT_S = 10

Serve = Callable[..., PeerServer]
Connect = Callable[..., PeerClient]
Script = Callable[[socket.socket], None]


def random_bytes(nbytes: int) -> ByteArray:
    return np.frombuffer(random.randbytes(nbytes), np.uint8)  # read-only, as Ray's views are


def extent_of(data: ByteArray, id_: str = "e") -> ExtentRef:
    return ExtentRef(id=id_, pack="p", offset=0, nbytes=data.nbytes, checksum=xxhash.xxh3_128_hexdigest(data))


def peer_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("peer-")]


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Set up first, so it looks last: every server, client and scripted peer is closed by then."""
    process = psutil.Process()
    sockets = len(process.net_connections())
    yield
    assert peer_threads() == []
    wait_until(lambda: len(process.net_connections()) <= sockets)


@pytest.fixture
def serve(nothing_leaks: None) -> Iterator[Serve]:
    servers: list[PeerServer] = []

    def start(
        extents: dict[str, ByteArray] | Callable[[str], ByteArray | None],
        secret: bytes = SECRET,
        on_doubt: Callable[[str], object] = lambda id_: None,
        **options: float,
    ) -> PeerServer:
        port = int(options.pop("port", 0))
        limits = ServerLimits(**options)  # type: ignore[arg-type]
        servers.append(PeerServer(Served(extents, on_doubt), secret, host="127.0.0.1", port=port, limits=limits))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def connect(nothing_leaks: None) -> Iterator[Connect]:
    clients: list[PeerClient] = []

    def make(secret: bytes = SECRET, **options: float) -> PeerClient:
        clients.append(PeerClient(secret, **{"range_bytes": 64 * KIB, **options}))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def scripted(nothing_leaks: None) -> Iterator[Callable[[Script], PeerAddress]]:
    """A peer that listens, and does with each connection what the script says."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []
    connections: list[socket.socket] = []

    def start(script: Script) -> PeerAddress:
        def follow(connection: socket.socket) -> None:
            with connection:
                try:
                    script(connection)
                except OSError:
                    return  # the client gave up, as it should

        def accept() -> None:
            while True:
                try:
                    connections.append(listener.accept()[0])
                except OSError:
                    return
                threads.append(threading.Thread(target=follow, args=(connections[-1],)))
                threads[-1].start()

        threads.append(threading.Thread(target=accept))
        threads[0].start()
        return PeerAddress(*listener.getsockname())

    yield start
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def greet(connection: socket.socket, secret: bytes = SECRET) -> None:
    """A server's part of the handshake."""
    nonce = random.randbytes(32)
    connection.sendall(protocol.encode_greeting(Status.OK, nonce))
    client_nonce, _ = protocol.decode_hello(protocol.receive_frame(connection, protocol.HELLO_BYTES, WAIT_S))
    connection.sendall(protocol.encode_welcome(Status.OK, protocol.prove(secret, "server", nonce, client_nonce)))


def give_slot(connection: socket.socket) -> None:
    """The answer to a client that asks whether it may begin."""
    assert protocol.decode_request(protocol.receive_frame(connection, protocol.REQUEST_BYTES, WAIT_S)).nbytes == 0
    connection.sendall(protocol.encode_reply(Status.OK, 0, 1))


def log_in(server: PeerServer) -> socket.socket:
    """A client's part."""
    connection = socket.create_connection(server.address, WAIT_S)
    _, nonce = protocol.decode_greeting(protocol.receive_frame(connection, protocol.GREETING_BYTES, WAIT_S))
    connection.sendall(protocol.encode_hello(bytes(32), protocol.prove(SECRET, "client", nonce, bytes(32))))
    status, _ = protocol.decode_welcome(protocol.receive_frame(connection, protocol.WELCOME_BYTES, WAIT_S))
    assert status == Status.OK
    return connection


def closed_by_peer(connection: socket.socket) -> bool:
    """Waits for the end."""
    connection.settimeout(WAIT_S)
    try:
        while connection.recv(64 * KIB):
            pass
    except ConnectionError:
        pass
    return True


def is_request(frame: bytes) -> bool:
    try:
        protocol.decode_request(frame)
    except ValueError:
        return False
    return True


class TestTheBytes:
    @pytest.mark.parametrize("nbytes", [0, 1, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 3_000_001])
    @pytest.mark.parametrize("num_connections", [1, 4])
    def test_arrive_as_they_were(self, serve: Serve, connect: Connect, nbytes: int, num_connections: int) -> None:
        data, out = random_bytes(nbytes), np.empty(nbytes, np.uint8)
        server = serve({"e": data})
        shares = (
            connect(num_connections=num_connections).fetch_extent([server.address], extent_of(data), lambda: out).shares
        )
        assert out.tobytes() == data.tobytes()
        assert [(share.address, share.nbytes) for share in shares] == ([(server.address, nbytes)] if nbytes else [])
        # The server counts a range when it is sent, which the client may notice first.
        wait_until(lambda: server.stats().served_bytes == nbytes)

    def test_arrive_in_their_place_and_nowhere_else(self, serve: Serve, connect: Connect) -> None:
        data, around = random_bytes(1_000_000), np.full(1_000_200, 7, np.uint8)
        connect().fetch_extent([serve({"e": data}).address], extent_of(data), lambda: around[100:-100])
        assert around[100:-100].tobytes() == data.tobytes()
        assert set(around[:100]) | set(around[-100:]) == {7}

    def test_come_from_storage_too(self, serve: Serve, connect: Connect, tmp_path: Path) -> None:
        data, out = random_bytes(1_000_000), np.empty(1_000_000, np.uint8)
        pack = tmp_path / "pack"
        pack.write_bytes(bytes(4096) + data.tobytes())
        stored = StoredBytes(pack, 4096, data.nbytes)
        server = serve({"e": stored})  # type: ignore[dict-item]
        connect().fetch_extent([server.address], extent_of(data), lambda: out)
        assert out.tobytes() == data.tobytes()
        wait_until(lambda: server.stats().served_bytes == data.nbytes)
        os.truncate(pack, 500_000)
        with pytest.raises(PeerUnavailable, match="UNKNOWN_EXTENT"):
            connect().fetch_extent([server.address], extent_of(data), lambda: out)
        pack.unlink()
        assert stored.read(0, 1) is None
        pack.symlink_to(tmp_path)
        assert stored.read(0, 1) is None

    def test_that_are_not_the_manifest_s_name_peer_and_extent(self, serve: Serve, connect: Connect) -> None:
        data = random_bytes(1_000_000)
        damaged = data.copy()
        damaged[777_777] ^= 16
        server = serve({"e": damaged})
        with pytest.raises(
            FetchFailed, match=rf"extent e: .*; peer {server.address}: its bytes have checksum"
        ) as found:
            connect().fetch_extent([server.address], extent_of(data), lambda: np.empty(1_000_000, np.uint8))
        assert (found.value.fetched.corrupt, found.value.fetched.failed) == ([server.address], [])
        with pytest.raises(ExtentCorrupt, match="extent e: no bytes have checksum"):
            connect().fetch_extent([], extent_of(data).model_copy(update={"nbytes": 0}), lambda: np.empty(0, np.uint8))

    def test_of_a_damaged_copy_are_made_up_for_by_the_next_peer_and_only_that_one_is_told(
        self, serve: Serve, connect: Connect
    ) -> None:
        data, told = random_bytes(5 * 64 * KIB), list[str]()
        damaged = data.copy()
        damaged[-1] ^= 1
        bad = serve({"e": damaged}, on_doubt=lambda id_: told.append(f"bad {id_}"))
        good = serve({"e": data}, on_doubt=lambda id_: told.append(f"good {id_}"))
        places: list[ByteArray] = []

        def place() -> ByteArray:
            places.append(np.empty_like(data))
            return places[-1]

        fetched = connect().fetch_extent([bad.address, good.address], extent_of(data), place)
        assert [one.tobytes() for one in places] == [data.tobytes()]
        assert (fetched.corrupt, fetched.failed, fetched.busy, told) == ([bad.address], [], [], ["bad e"])
        assert [share.address for share in fetched.shares] == [bad.address, good.address]

    @pytest.mark.parametrize("is_first_sound", [True, False])
    def test_of_two_peers_that_are_wrong_are_asked_of_the_last_alone(
        self, scripted: Callable[[Script], PeerAddress], serve: Serve, connect: Connect, is_first_sound: bool
    ) -> None:
        data = random_bytes(4 * 64 * KIB)
        damaged, come = data ^ np.uint8(1), list[socket.socket]()

        def half(connection: socket.socket) -> None:
            come.append(connection)
            if len(come) > 1:
                return
            greet(connection)
            for _ in range(3):  # the slot, and two ranges
                request = protocol.decode_request(protocol.receive_frame(connection, protocol.REQUEST_BYTES, WAIT_S))
                sent = data if is_first_sound else damaged
                connection.sendall(protocol.encode_reply(Status.OK, request.nbytes, 1))
                connection.sendall(sent[request.offset : request.offset + request.nbytes])

        first, last, third = scripted(half), serve({"e": damaged if is_first_sound else data}), serve({"e": data})
        out, client = np.empty_like(data), connect(num_connections=1)
        fetched = client.fetch_extent([first, last.address, third.address], extent_of(data), lambda: out)
        assert out.tobytes() == data.tobytes()
        assert (fetched.failed, fetched.corrupt) == ([first], [last.address] if is_first_sound else [])

    def test_go_to_many_at_once(self, serve: Serve, connect: Connect) -> None:
        extents = {f"e{index}": random_bytes(200_000 + 40_000 * index) for index in range(8)}
        server = serve(extents, max_transfers=64)
        clients = [connect(num_connections=2) for _ in range(4)]

        def fetch(index: int) -> bool:
            id_ = f"e{index % 8}"
            out = np.empty_like(extents[id_])
            clients[index % 4].fetch_extent([server.address], extent_of(extents[id_], id_), lambda: out)
            return out.tobytes() == extents[id_].tobytes()

        with ThreadPoolExecutor(16) as threads:
            assert list(threads.map(fetch, range(64))) == [True] * 64
        assert server.stats().num_connections <= 8
        wait_until(lambda: server.stats().active_transfers == 0)

    def test_need_a_place_that_fits(self, serve: Serve, connect: Connect) -> None:
        data = random_bytes(100)
        extent, server = extent_of(data), serve({"e": data}, max_transfers=64)
        readonly = np.empty(100, np.uint8)
        readonly.flags.writeable = False
        for out in [
            np.empty(99, np.uint8),
            np.empty(101, np.uint8),
            np.empty(25, np.int32),
            np.empty((10, 10), np.uint8),
            np.empty(200, np.uint8)[::2],
            readonly,
        ]:
            with pytest.raises(ValueError, match="extent e needs 100 writable, contiguous bytes"):
                connect().fetch_extent([server.address], extent, lambda out=out: out)


class TestConnections:
    def test_ranges_travel_at_the_same_time(self, serve: Serve, connect: Connect) -> None:
        data, first = random_bytes(8 * 64 * KIB), threading.Lock()
        together = threading.Barrier(4, timeout=WAIT_S)  # opens only for four requests that are there at once

        def lookup(_: str) -> ByteArray:
            if not first.acquire(blocking=False):  # the first asks for a slot, alone
                together.wait()
            return data

        connect(num_connections=4).fetch_extent([serve(lookup).address], extent_of(data), lambda: np.empty_like(data))

    def test_are_kept_and_bounded_however_many_fetch(self, serve: Serve, connect: Connect) -> None:
        data = random_bytes(10 * 64 * KIB)
        serving: set[threading.Thread] = set()

        def lookup(_: str) -> ByteArray:
            serving.add(threading.current_thread())
            return data

        server, client = serve(lookup, max_transfers=8), connect(num_connections=3)
        with ThreadPoolExecutor(8) as threads:
            for _ in range(3):
                list(threads.map(lambda _: client.fetch_extent([server.address], extent_of(data), data.copy), range(8)))
        assert len(serving) == 3

    def test_that_the_peer_let_go_are_opened_again(self, serve: Serve, connect: Connect) -> None:
        data = random_bytes(100_000)
        server, client = serve({"e": data}, idle_timeout_s=0.02), connect()
        for _ in range(3):
            client.fetch_extent([server.address], extent_of(data), data.copy)
            wait_until(lambda: server.stats().num_connections == 0)

    def test_a_peer_that_takes_only_one_is_used_over_one(self, serve: Serve, connect: Connect) -> None:
        data, client = random_bytes(1_000_000), connect(num_connections=4)
        server = serve({"e": data}, max_connections=1)
        client.fetch_extent([server.address], extent_of(data), data.copy)
        assert server.stats().num_connections == 1

    def test_a_busy_peer_says_so(self, serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peer_server, "MIN_IDLE_S", WAIT_S)  # or the first connection is idle beside a busy core
        data = random_bytes(100)
        server = serve({"e": data}, max_connections=1)
        with log_in(server), pytest.raises(PeerUnavailable, match=f"peer {server.address}: .*BUSY"):
            connect().fetch_extent([server.address], extent_of(data), data.copy)
        wait_until(lambda: server.stats().num_connections == 0)
        connect().fetch_extent([server.address], extent_of(data), data.copy)

    def test_a_peer_without_threads_says_that_it_is_busy(
        self, serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data, start = random_bytes(100), threading.Thread.start
        server = serve({"e": data})

        def start_others(thread: threading.Thread) -> None:
            if thread.name.startswith("peer-serve"):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_others)
        with pytest.raises(PeerUnavailable, match=f"peer {server.address}: .*BUSY"):
            connect().fetch_extent([server.address], extent_of(data), data.copy)
        assert server.stats().num_connections == 0

    def test_closing_the_client_ends_fetches_under_way(self, serve: Serve, connect: Connect) -> None:
        data, gate, asked = random_bytes(1_000_000), threading.Event(), threading.Event()

        def lookup(_: str) -> ByteArray:
            asked.set()
            assert gate.wait(WAIT_S)
            return data

        server, client = serve(lookup), connect(num_connections=2)
        with ThreadPoolExecutor(1) as threads:
            fetching = threads.submit(client.fetch_extent, [server.address], extent_of(data), data.copy)
            assert asked.wait(WAIT_S)
            client.close()
            with pytest.raises(PeerUnavailable):
                fetching.result(WAIT_S)
        gate.set()
        with pytest.raises(PeerUnavailable, match="client is closed"):
            client.fetch_extent([server.address], extent_of(data), data.copy)


class TestTheSecret:
    def test_another_one_gets_nothing(self, serve: Serve, connect: Connect) -> None:
        data = random_bytes(100)
        server = serve({"e": data})
        with pytest.raises(PeerUnavailable, match=f"{server.address}: refuses the connection: NOT_ALLOWED"):
            connect(random.randbytes(32)).fetch_extent([server.address], extent_of(data), data.copy)
        stats = server.stats()
        assert (stats.served_bytes, stats.num_refused) == (0, 1)
        connect().fetch_extent([server.address], extent_of(data), data.copy)

    def test_a_proof_is_worth_nothing_on_another_connection(self, serve: Serve) -> None:
        server = serve({})
        with log_in(server):
            stale = protocol.encode_hello(bytes(32), protocol.prove(SECRET, "client", bytes(32), bytes(32)))
            with socket.create_connection(server.address, WAIT_S) as other:
                protocol.receive_frame(other, protocol.GREETING_BYTES, WAIT_S)
                other.sendall(stale)
                status, _ = protocol.decode_welcome(protocol.receive_frame(other, protocol.WELCOME_BYTES, WAIT_S))
                assert status == Status.NOT_ALLOWED
                assert closed_by_peer(other)

    def test_a_server_must_know_it_too(self, scripted: Callable[[Script], PeerAddress], connect: Connect) -> None:
        address = scripted(lambda connection: greet(connection, secret=bytes(32)))
        with pytest.raises(PeerUnavailable, match=f"{address}: does not know the cluster's secret"):
            connect().fetch_extent([address], extent_of(random_bytes(9)), lambda: np.empty(9, np.uint8))

    def test_must_be_one(self) -> None:
        with pytest.raises(ValueError, match="a secret of 5 bytes, expected at least 16"):
            PeerClient(b"12345")
        with pytest.raises(ValueError, match="a secret of 0 bytes"):
            PeerServer(Served({}), b"", host="127.0.0.1")


class TestRefusals:
    def test_an_unknown_extent_costs_no_connection(self, serve: Serve, connect: Connect) -> None:
        data, serving = random_bytes(100), set()

        def lookup(id_: str) -> ByteArray | None:
            serving.add(threading.current_thread())
            return data if id_ == "e" else None

        server, client = serve(lookup), connect(num_connections=1)
        with log_in(server) as connection:
            for id_, expected in [("gone", Status.UNKNOWN_EXTENT), ("e", Status.OK)]:
                connection.sendall(protocol.encode_request(Request(id_, 0, 0, 1)))
                reply = protocol.decode_reply(protocol.receive_frame(connection, protocol.REPLY_BYTES, WAIT_S))
                assert reply[:2] == (expected, 0)
        assert len(serving) == 1
        with pytest.raises(PeerUnavailable, match=f"peer {server.address}: .*'gone'.*UNKNOWN_EXTENT"):
            client.fetch_extent([server.address], extent_of(data, "gone"), data.copy)

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [
            (0, protocol.MAX_RANGE_BYTES + 1),
            (protocol.MAX_RANGE_BYTES + 1, 1),
            (protocol.MAX_RANGE_BYTES + 2, 0),
            (100, protocol.MAX_RANGE_BYTES),
            (2**64 - 1, 2**64 - 1),
        ],
    )
    def test_bytes_outside_of_the_extent_or_too_many(self, serve: Serve, offset: int, nbytes: int) -> None:
        with log_in(serve({"e": np.zeros(protocol.MAX_RANGE_BYTES + 1, np.uint8)})) as connection:
            connection.sendall(protocol.encode_request(Request("e", offset, nbytes, 1)))
            reply = protocol.decode_reply(protocol.receive_frame(connection, protocol.REPLY_BYTES, WAIT_S))
            assert reply == (Status.OUT_OF_RANGE, 0, 0)

    def test_a_peer_with_less_of_the_extent(self, serve: Serve, connect: Connect) -> None:
        data = random_bytes(1000)
        with pytest.raises(PeerUnavailable, match="OUT_OF_RANGE"):
            connect().fetch_extent([serve({"e": data[:999]}).address], extent_of(data), data.copy)

    def test_no_peer_was_offered(self, connect: Connect) -> None:
        with pytest.raises(PeerUnavailable, match="extent e: 10 of 10 bytes are missing; no peer was offered"):
            connect().fetch_extent([], extent_of(random_bytes(10)), lambda: np.empty(10, np.uint8))

    def test_ranges_that_no_server_would_send(self) -> None:
        for range_bytes in (0, -1, protocol.MAX_RANGE_BYTES + 1):
            with pytest.raises(ValueError, match="expected 1 to"):
                PeerClient(SECRET, range_bytes=range_bytes)


KILLED_PEER = """
import os, signal, sys, threading
import numpy as np
from cluster.peers.server import PeerServer, ServerLimits
data = np.fromfile(sys.argv[1], np.uint8)
lock, asked = threading.Lock(), 0
class Memory:
    def lookup(self, _):
        global asked
        with lock:
            asked += 1
            if asked > 7:
                os.kill(os.getpid(), signal.SIGKILL)
        return data
print(PeerServer(Memory(), bytes.fromhex(sys.argv[2]), host="127.0.0.1").address.port, flush=True)
sys.stdin.read()
"""


class TestFailures:
    def test_a_killed_peer_is_followed_by_the_next_and_no_range_travels_twice(
        self, serve: Serve, connect: Connect, tmp_path: Path
    ) -> None:
        data = random_bytes(40 * 64 * KIB)
        data.tofile(tmp_path / "data")
        command = [sys.executable, "-c", KILLED_PEER, str(tmp_path / "data"), SECRET.hex()]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            killed = PeerAddress("127.0.0.1", int(process.stdout.readline()))
            second, out = serve({"e": data}), np.empty_like(data)
            shares = connect().fetch_extent([killed, second.address], extent_of(data), lambda: out).shares
            assert process.wait(WAIT_S) == -signal.SIGKILL
        assert out.tobytes() == data.tobytes()
        assert [share.address for share in shares] == [killed, second.address]
        assert 0 < shares[0].nbytes <= 7 * 64 * KIB
        assert shares[0].nbytes + shares[1].nbytes == data.nbytes
        wait_until(lambda: second.stats().active_transfers == 0)
        assert second.stats().served_bytes == shares[1].nbytes

    def test_a_peer_that_closes_in_the_middle_ends_without_the_next(self, serve: Serve, connect: Connect) -> None:
        data, asked = random_bytes(40 * 64 * KIB), threading.Semaphore(0)

        def lookup(_: str) -> ByteArray:
            asked.release()
            return data

        server = serve(lookup)
        closing = threading.Thread(target=lambda: (asked.acquire(timeout=WAIT_S), server.close()))
        closing.start()
        client = connect(range_bytes=KIB)
        with pytest.raises(PeerUnavailable, match=rf"bytes are missing; peer {server.address}: "):
            client.fetch_extent([server.address], extent_of(data), data.copy)
        closing.join()
        with pytest.raises(PeerUnavailable, match="refused"):
            client.fetch_extent([server.address], extent_of(data), data.copy)

    def test_one_connection_that_breaks_is_made_up_for_by_the_others(
        self, scripted: Callable[[Script], PeerAddress], connect: Connect
    ) -> None:
        data, first = random_bytes(30 * 64 * KIB), threading.Lock()

        def script(connection: socket.socket) -> None:
            greet(connection)
            while True:
                frame = protocol.receive_frame(connection, protocol.REQUEST_BYTES, WAIT_S)
                request = protocol.decode_request(frame)
                part = data.data[request.offset : request.offset + request.nbytes]
                connection.sendall(protocol.encode_reply(Status.OK, request.nbytes, 1))
                if first.acquire(blocking=False):
                    connection.sendall(part[:100])
                    return
                connection.sendall(part)

        out = np.empty_like(data)
        connect().fetch_extent([scripted(script)], extent_of(data), lambda: out)
        assert out.tobytes() == data.tobytes()

    def test_a_slow_peer_is_given_up_for_the_next(
        self, scripted: Callable[[Script], PeerAddress], serve: Serve, connect: Connect
    ) -> None:
        data = random_bytes(4 * 64 * KIB)

        def trickle(connection: socket.socket) -> None:
            greet(connection)
            frame = protocol.receive_frame(connection, protocol.REQUEST_BYTES, WAIT_S)
            if not protocol.decode_request(frame).nbytes:  # only whether it may begin
                connection.sendall(protocol.encode_reply(Status.OK, 0, 1))
                protocol.receive_frame(connection, protocol.REQUEST_BYTES, WAIT_S)
            connection.sendall(protocol.encode_reply(Status.OK, 64 * KIB, 1))
            while True:
                connection.sendall(b"x")
                assert select.select([connection], [], [], 0.01)[0] == [] or not connection.recv(1)

        slow, client, out = (
            scripted(trickle),
            connect(grace_s=0.1, timeout_s=WAIT_S, min_gbps=0.02),
            np.empty_like(data),
        )
        start_s = time.monotonic()
        with pytest.raises(PeerUnavailable, match=f"peer {slow}: too slow: .*expected 5.000 MB/s per connection"):
            client.fetch_extent([slow], extent_of(data), lambda: out)
        shares = client.fetch_extent([slow, serve({"e": data}).address], extent_of(data), lambda: out).shares
        assert time.monotonic() - start_s < WAIT_S / 2
        assert out.tobytes() == data.tobytes()
        assert [share.nbytes for share in shares] == [data.nbytes]

    def test_the_floor_of_a_fetch_is_the_caller_s(self, serve: Serve, connect: Connect) -> None:
        data = random_bytes(64 * KIB)
        with pytest.raises(PeerUnavailable, match="too slow"):
            connect(grace_s=0.0).fetch_extent([serve({"e": data}).address], extent_of(data), data.copy, min_gbps=1e6)

    def test_a_silent_peer_is_given_up(self, scripted: Callable[[Script], PeerAddress], connect: Connect) -> None:
        address = scripted(closed_by_peer)
        with pytest.raises(PeerUnavailable, match=f"peer {address}: .*timed out"):
            connect(timeout_s=0.05).fetch_extent([address], extent_of(random_bytes(9)), lambda: np.empty(9, np.uint8))

    def test_all_threads_that_wait_for_a_silent_peer_fail_together(
        self, scripted: Callable[[Script], PeerAddress], connect: Connect
    ) -> None:
        extent, address = extent_of(random_bytes(9)), scripted(closed_by_peer)
        client = connect(num_connections=1, timeout_s=0.3)

        def fetch(_: int) -> str:
            with pytest.raises(PeerUnavailable) as caught:
                client.fetch_extent([address], extent, lambda: np.empty(9, np.uint8))
            return str(caught.value)

        start_s = time.monotonic()
        with ThreadPoolExecutor(16) as threads:
            reasons = list(threads.map(fetch, range(16)))
        assert time.monotonic() - start_s < 16 * 0.3 / 2
        assert any("timed out" in reason for reason in reasons)
        assert any("could not be reached a moment ago" in reason for reason in reasons)

    @pytest.mark.parametrize(
        ("reply", "reason"),
        [
            (b"HTTP/1.1 400 Bad Request\r\n", "b'HTTP' is not the beginning of a frame"),
            (protocol.encode_reply(Status.OK, 2**63, 1), "announces 9223372036854775808 bytes as OK, 9 were asked for"),
            (protocol.encode_reply(Status.UNKNOWN_EXTENT, 9, 1), "announces 9 bytes as UNKNOWN_EXTENT"),
            (protocol.MAGIC + b"\0\1" + bytes(12), "protocol version 1, this node speaks version 3"),
            (protocol.MAGIC + b"\0\3\0\x63" + bytes(10), "99 is not a valid Status"),
        ],
    )
    def test_a_peer_that_speaks_otherwise(
        self, scripted: Callable[[Script], PeerAddress], connect: Connect, reply: bytes, reason: str
    ) -> None:
        def script(connection: socket.socket) -> None:
            greet(connection)
            give_slot(connection)
            protocol.receive_frame(connection, protocol.REQUEST_BYTES, WAIT_S)
            connection.sendall(reply)
            closed_by_peer(connection)

        with pytest.raises(PeerUnavailable, match=reason):
            connect().fetch_extent([scripted(script)], extent_of(random_bytes(9)), lambda: np.empty(9, np.uint8))

    def test_a_load_that_no_server_has_makes_a_peer_no_faster(
        self, scripted: Callable[[Script], PeerAddress], connect: Connect
    ) -> None:
        data = random_bytes(1000)

        def script(connection: socket.socket) -> None:
            greet(connection)
            while True:
                frame = protocol.receive_frame(connection, protocol.REQUEST_BYTES, WAIT_S)
                nbytes = protocol.decode_request(frame).nbytes
                connection.sendall(protocol.encode_reply(Status.OK, nbytes, 65535) + data.tobytes()[:nbytes])

        (share,) = connect().fetch_extent([scripted(script)], extent_of(data), data.copy).shares
        assert share.load == MAX_TRANSFERS

    def test_a_host_that_does_not_exist(self, connect: Connect) -> None:
        with pytest.raises(PeerUnavailable, match=r"peer host\.\.invalid:1: "):
            connect().fetch_extent(
                [PeerAddress("host..invalid", 1)], extent_of(random_bytes(9)), lambda: np.empty(9, np.uint8)
            )


class TestTheServer:
    def test_closes_at_once_while_clients_take_nothing_in(self, serve: Serve) -> None:
        data = np.zeros(protocol.MAX_RANGE_BYTES, np.uint8)
        server = serve({"e": data})
        stalled = [log_in(server) for _ in range(4)]
        for connection in stalled:
            connection.sendall(protocol.encode_request(Request("e", 0, data.nbytes, 1)))
        wait_until(lambda: server.stats().active_ranges == 4)
        start_s = time.monotonic()
        server.close()
        assert time.monotonic() - start_s < 1
        assert peer_threads() == []
        assert server.stats().num_connections == server.stats().served_bytes == 0
        for connection in stalled:
            with connection:
                assert closed_by_peer(connection)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.address, WAIT_S)
        server.close()

    def test_drops_a_peer_that_does_not_receive(self, serve: Serve) -> None:
        data = np.zeros(protocol.MAX_RANGE_BYTES, np.uint8)
        server = serve({"e": data}, timeout_s=0.05)
        with log_in(server) as connection:
            connection.sendall(protocol.encode_request(Request("e", 0, data.nbytes, 1)))
            wait_until(lambda: server.stats().num_connections == 0)

    def test_drops_a_peer_that_sends_nothing(self, serve: Serve) -> None:
        server = serve({}, hello_timeout_s=0.05)
        with socket.create_connection(server.address, WAIT_S) as connection:
            assert closed_by_peer(connection)

    def test_silent_strangers_do_not_keep_peers_out(self, serve: Serve, connect: Connect) -> None:
        data = random_bytes(300_000)
        server = serve({"e": data}, hello_timeout_s=60.0)
        silent = [socket.create_connection(server.address, WAIT_S) for _ in range(256)]
        wait_until(lambda: server.stats().num_refused == 256 - MAX_STRANGERS)
        assert (server.stats().num_connections, server.stats().num_strangers) == (0, MAX_STRANGERS)
        out = np.empty_like(data)
        # None of them leaves by itself within the time that the client waits for an answer.
        connect(timeout_s=5.0).fetch_extent([server.address], extent_of(data), lambda: out)
        assert out.tobytes() == data.tobytes()
        for connection in silent:
            connection.close()

    def test_a_host_that_floods_loses_its_own_connections(self, serve: Serve) -> None:
        server = serve({}, hello_timeout_s=60.0, max_strangers=8)
        with socket.create_connection(server.address, WAIT_S, source_address=("127.0.0.2", 0)) as quiet:
            _, nonce = protocol.decode_greeting(protocol.receive_frame(quiet, protocol.GREETING_BYTES, WAIT_S))
            flood = [socket.create_connection(server.address, WAIT_S) for _ in range(40)]
            wait_until(lambda: server.stats().num_refused == 33)
            quiet.sendall(protocol.encode_hello(bytes(32), protocol.prove(SECRET, "client", nonce, bytes(32))))
            status, _ = protocol.decode_welcome(protocol.receive_frame(quiet, protocol.WELCOME_BYTES, WAIT_S))
            assert status == Status.OK
            for connection in flood:
                connection.close()

    @pytest.mark.parametrize("first_bytes", [b"", protocol.MAGIC, bytes(protocol.HELLO_BYTES - 1)])
    def test_half_a_hello_is_not_waited_for_long(self, serve: Serve, first_bytes: bytes) -> None:
        server = serve({}, hello_timeout_s=0.05, timeout_s=60.0, idle_timeout_s=60.0)
        with socket.create_connection(server.address, WAIT_S) as connection:
            connection.sendall(first_bytes)
            assert closed_by_peer(connection)
        assert server.stats().num_strangers == 0

    def test_half_a_request_is_idleness(self, serve: Serve) -> None:
        server = serve({}, idle_timeout_s=0.05)
        with log_in(server) as connection:
            connection.sendall(protocol.encode_request(Request("e", 0, 0, 1))[:-1])
            assert closed_by_peer(connection)

    def test_an_idle_connection_yields_to_a_new_one(self, serve: Serve, connect: Connect) -> None:
        data = random_bytes(100)
        server = serve({"e": data}, max_connections=2, idle_timeout_s=60.0)
        with log_in(server) as oldest:
            wait_until(lambda: server.stats().num_connections == 1)  # it is known before the other one comes
            with log_in(server) as other:
                wait_until(lambda: server.stats().num_connections == 2)
                threading.Event().wait(2 * MIN_IDLE_S)  # idle is a matter of time
                connect(num_connections=1).fetch_extent([server.address], extent_of(data), data.copy)
                assert closed_by_peer(oldest)
                other.sendall(protocol.encode_request(Request("e", 0, 0, 1)))
                assert (
                    protocol.decode_reply(protocol.receive_frame(other, protocol.REPLY_BYTES, WAIT_S)).status
                    == Status.OK
                )

    def test_a_client_whose_connection_had_to_yield_opens_another(self, serve: Serve, connect: Connect) -> None:
        data = random_bytes(100)
        server, client = serve({"e": data}), connect(num_connections=1)
        client.fetch_extent([server.address], extent_of(data), data.copy)
        (kept,) = client._connections._idle[server.address]
        ended = 0

        class Unlucky:
            """Is ended by the server in the moment between the look whether it is open and the request."""

            def __getattr__(self, name: str) -> Any:
                return getattr(stream, name)

            def sendall(self, frame: bytes) -> None:
                nonlocal ended
                for connection in list(server._open):
                    connection.end()
                wait_until(lambda: server.stats().num_connections == 0)
                ended += 1
                stream.sendall(frame)

        stream, kept._socket = kept._socket, Unlucky()
        client.fetch_extent([server.address], extent_of(data), data.copy)
        assert ended == 1

    def test_sends_a_bounded_number_of_extents_at_once_and_says_how_many(self, serve: Serve, connect: Connect) -> None:
        data = random_bytes(10)
        here = {"a": data, "b": data, "c": data}
        server, other = serve(here, max_transfers=2, linger_s=60.0), serve(here)
        with log_in(server) as first, log_in(server) as second:
            for load, connection in enumerate((first, second), 1):
                connection.sendall(protocol.encode_request(Request("ab"[load - 1], 0, 4, load)))
                reply = protocol.decode_reply(protocol.receive_frame(connection, protocol.REPLY_BYTES, WAIT_S))
                assert reply == (Status.OK, 4, load)
                protocol.receive_frame(connection, 4, WAIT_S)
            assert server.active_transfers == 2
            client, places = connect(), []

            def place() -> ByteArray:
                places.append(np.empty(10, np.uint8))
                return places[-1]

            with pytest.raises(FetchFailed, match=f"{server.address}: has no slot for extent c: BUSY") as caught:
                client.fetch_extent([server.address], extent_of(data, "c"), place)
            assert (caught.value.fetched.busy, caught.value.fetched.failed) == ([server.address], [])
            assert places == []  # nothing was made for a peer without a slot
            fetched = client.fetch_extent([server.address, other.address], extent_of(data, "c"), place)
            assert [len(made) for made in places] == [10]
            assert (fetched.busy, [share.address for share in fetched.shares]) == ([server.address], [other.address])
            # What has begun goes on, and makes room when its last byte is sent.
            first.sendall(protocol.encode_request(Request("a", 4, 6, 1)))
            protocol.receive_frame(first, protocol.REPLY_BYTES + 6, WAIT_S)
            wait_until(lambda: server.active_transfers < 2)
            client.fetch_extent([server.address], extent_of(data, "c"), data.copy)

    @given(st.binary(max_size=300))
    def test_survives_any_bytes_of_strangers(self, noise: bytes) -> None:
        with PeerServer(Served({}), SECRET, host="127.0.0.1") as server:
            with socket.create_connection(server.address, WAIT_S) as connection:
                connection.sendall(noise)
                connection.shutdown(socket.SHUT_WR)
                assert closed_by_peer(connection)
            log_in(server).close()

    @given(
        st.binary(min_size=protocol.REQUEST_BYTES, max_size=protocol.REQUEST_BYTES)
        | st.builds(
            lambda version, length, id_: protocol.MAGIC + version + length + bytes(24) + id_.ljust(64, b"\0"),
            st.sampled_from([b"\0\0", b"\0\2", b"\0\3"]),
            st.binary(min_size=2, max_size=2),
            st.binary(max_size=64),
        ).filter(lambda frame: not is_request(frame))
    )
    def test_ends_a_connection_that_sends_no_frame(self, noise: bytes) -> None:
        data = random_bytes(10)
        with PeerServer(Served({"e": data}), SECRET, host="127.0.0.1") as server, PeerClient(SECRET) as client:
            with log_in(server) as connection:
                connection.sendall(noise)
                assert closed_by_peer(connection)
            client.fetch_extent([server.address], extent_of(data), data.copy)

    def test_outlives_a_lookup_that_fails_and_says_so(
        self, serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
    ) -> None:
        data = random_bytes(10)

        def lookup(id_: str) -> ByteArray:
            return {"e": data}[id_]

        server, client = serve(lookup), connect()
        with pytest.raises(PeerUnavailable, match="closed after 0"):
            client.fetch_extent([server.address], extent_of(data, "other"), data.copy)
        wait_until(lambda: any(record.exc_info and record.exc_info[0] is KeyError for record in caplog.records))
        client.fetch_extent([server.address], extent_of(data), data.copy)

    def test_says_when_its_port_is_taken(self, serve: Serve) -> None:
        taken = serve({}).address.port
        with pytest.raises(OSError, match="in use"):
            serve({}, port=taken)
