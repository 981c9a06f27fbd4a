"""Clients that misbehave on their connections: others are served meanwhile, and nothing stays behind.

Raw sockets, because no client library does what these do.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from integration.harness import Cluster, replica_processes
from kit.seeding import seeded_random
from kit.waiting import wait_until

HEALTH_S = 2.0  # on two cores that others use, too
BOUND_S = 15.0  # for an answer, or the end of a connection
NUM_SLOW = 200
NUM_IDLE = 1000
CHAT = {"model": "adder", "messages": [{"role": "user", "content": "What is 12 + 7?"}]}
LONG_IMAGE = {"model": "digits-flux", "prompt": "a handwritten two", "num_inference_steps": 200, "n": 4}
MANY_FLOATS = {"model": "minilm", "input": ["who stays when others go?"] * 2048}


class Raw:
    """A connection whose every byte is ours. `receive_bytes`: of the kernel's buffer, small for who does not read."""

    def __init__(self, cluster: Cluster, receive_bytes: int | None = None) -> None:
        where = urlsplit(cluster.url)
        assert where.hostname is not None
        assert where.port is not None
        self.socket = socket.socket()
        self.socket.settimeout(BOUND_S)
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect((where.hostname, where.port))

    def send(self, data: bytes) -> bool:
        """Return whether the server still takes bytes."""
        try:
            self.socket.sendall(data)
        except (ConnectionError, TimeoutError):
            return False
        return True

    def answer(self) -> tuple[int, bytes] | None:
        """Return status and body, or None when the server closed the connection without an answer."""
        response = http.client.HTTPResponse(self.socket)
        try:
            response.begin()
            return response.status, response.read()
        except (ConnectionError, http.client.HTTPException):
            return None

    def is_open(self) -> bool:
        readable, _, _ = select.select([self.socket], [], [], 0)
        try:
            return not readable or bool(self.socket.recv(1, socket.MSG_PEEK))
        except ConnectionError:
            return False

    def reset(self) -> None:
        """Close with RST, as a client that crashed."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


@pytest.fixture
def connections(cluster: Cluster) -> Iterator[Any]:
    """Open connections that are closed after the test, and then wait until nothing of their work is left."""
    with contextlib.ExitStack() as stack:

        def connect(receive_bytes: int | None = None) -> Raw:
            raw = Raw(cluster, receive_bytes)
            stack.callback(raw.socket.close)
            return raw

        yield connect
    wait_until(lambda: not work(cluster), "an idle cluster", BOUND_S)


def head(path: str, length: int, headers: Mapping[str, str] | None = None) -> bytes:
    fields = {"host": "localhost", "content-type": "application/json", "content-length": str(length), **(headers or {})}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def request(path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    data = json.dumps(body).encode()
    return head(path, len(data), headers) + data


def chat(headers: Mapping[str, str] | None = None) -> bytes:
    return request("/v1/chat/completions", CHAT, headers)


def work(cluster: Cluster) -> dict[str, int]:
    """Return the workers' counts of work for requests, without those that are 0."""
    workers = httpx.get(f"{cluster.url}/admin/cluster", timeout=BOUND_S).json()["workers"]
    sums = {name: sum(worker[name] for worker in workers) for name in ("denoising", "num_waiting", "leased_bytes")}
    return {name: count for name, count in sums.items() if count}


def num_open_files() -> int:
    return sum(process.num_fds() for process in replica_processes("ingress"))


def num_ingress_bytes() -> int:
    return sum(process.memory_info().rss for process in replica_processes("ingress"))


def assert_others_are_served(cluster: Cluster, times: int = 3) -> None:
    with httpx.Client(base_url=cluster.url, timeout=BOUND_S) as others:
        for _ in range(times):
            for path in ("/healthz", "/v2/health/ready"):
                start = time.monotonic()
                assert others.get(path).status_code == 200
                assert time.monotonic() - start < HEALTH_S
            answer = others.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200, answer.text
            assert "19" in answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("what", ["one header", "many headers", "a path"])
def test_a_head_beyond_all_bounds_is_refused(cluster: Cluster, connections: Any, what: str) -> None:
    megabyte = "x" * 2**20
    heads = {
        "one header": head("/v1/chat/completions", 0, {"x-long": megabyte}),
        "many headers": head("/v1/chat/completions", 0, {f"x-{number}": "y" * 50 for number in range(20_000)}),
        "a path": head(f"/v1/{megabyte}", 0),
    }
    client = connections()
    client.send(heads[what])  # it may be cut off in the middle
    answered = client.answer()
    assert answered is None or 400 <= answered[0] < 500, answered
    assert_others_are_served(cluster, 1)


def test_slow_heads_hold_nobody_up(cluster: Cluster, connections: Any) -> None:
    """Slowloris: a byte now and then, of a head that never ends."""
    clients = [connections() for _ in range(NUM_SLOW)]
    for client in clients:
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n")
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.1):
            for client in clients:
                client.send(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        assert_others_are_served(cluster)
    finally:
        stop.set()
        dripping.join()


def test_slow_bodies_take_no_place_of_others(cluster: Cluster, connections: Any) -> None:
    """Send half a body as often as the ingress has places: nobody waits for it but its sender."""
    body = json.dumps(CHAT).encode()
    clients = [connections() for _ in range(cluster.config.ingress.max_ongoing_requests)]
    for client in clients:
        client.send(head("/v1/chat/completions", len(body)) + body[:10])
    assert_others_are_served(cluster)
    slow = clients[0]
    slow.send(body[10:])
    status, answer = slow.answer()
    assert status == 200, answer


def test_a_half_closed_connection_is_answered_or_closed(cluster: Cluster, connections: Any) -> None:
    """Nothing hangs on a client that has said its last word."""
    whole, half = connections(), connections()
    whole.send(chat())
    half.send(chat()[:-5])
    for client in (whole, half):
        client.socket.shutdown(socket.SHUT_WR)
    answered = whole.answer()
    assert answered is None or answered[0] in (200, 400, 499), answered
    refused = half.answer()
    assert refused is None or 400 <= refused[0] < 500, refused
    assert not half.is_open()
    assert_others_are_served(cluster, 1)


def test_who_does_not_read_holds_up_nobody(cluster: Cluster, connections: Any) -> None:
    """Answers of megabytes that nobody takes, and streams: the models are free, and memory is bounded."""
    httpx.post(f"{cluster.url}/v1/embeddings", json=MANY_FLOATS, timeout=60).raise_for_status()  # is cached now
    before = num_ingress_bytes()
    clients = [connections(receive_bytes=4096) for _ in range(4 + 20)]
    for client in clients[:4]:
        client.send(request("/v1/embeddings", MANY_FLOATS))
    for client in clients[4:]:
        client.send(request("/v1/chat/completions", CHAT | {"stream": True}))
    assert_others_are_served(cluster)
    wait_until(lambda: not work(cluster), "leases that end although nobody reads", BOUND_S)
    assert num_ingress_bytes() - before < 256 * 2**20
    for client in clients[4:6]:
        status, stream = client.answer()
        assert (status, stream.endswith(b"data: [DONE]\n\n")) == (200, True)


def test_idle_connections_are_cheap(cluster: Cluster, connections: Any) -> None:
    before = num_open_files()
    clients = [connections() for _ in range(NUM_IDLE)]
    for client in clients[::20]:
        client.send(b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answered = client.answer()
        assert answered is not None
        assert answered[0] == 200
    assert_others_are_served(cluster)
    for client in clients:
        client.socket.close()
    wait_until(lambda: num_open_files() <= before + 20, "files of the ingress that are closed", BOUND_S)


@pytest.mark.parametrize("headers", [{}, {"x-request-disconnect-disabled": "?1"}])
def test_the_work_of_a_client_that_is_gone_ends(cluster: Cluster, connections: Any, headers: dict[str, str]) -> None:
    """Serve has a header with which a client can ask it to go on; it is not for clients of ours."""
    clients = [connections() for _ in range(4)]
    for client in clients:
        client.send(request("/v1/images/generations", LONG_IMAGE, headers))
    wait_until(lambda: work(cluster).get("denoising", 0) == 4, "images in the making", BOUND_S)
    for number, client in enumerate(clients):
        client.reset() if number % 2 else client.socket.close()
    wait_until(lambda: not work(cluster), "an end of their work", 5.0)


@pytest.mark.parametrize("num_rounds", [10, pytest.param(334, marks=pytest.mark.long)])
def test_random_cancels_leave_nothing(cluster: Cluster, connections: Any, num_rounds: int) -> None:
    rng = seeded_random()
    before = num_open_files()
    bodies = {
        "/v1/chat/completions": CHAT,
        "/v1/embeddings": {"model": "digits-clip", "input": "a handwritten four"},
        "/v1/images/generations": LONG_IMAGE | {"n": 1, "num_inference_steps": 20},
    }
    for _ in range(num_rounds):
        clients = [connections() for _ in range(30)]
        for client in clients:
            path, body = rng.choice(list(bodies.items()))
            data = request(path, body | ({"stream": True} if "chat" in path and rng.random() < 0.5 else {}))
            client.send(data[: rng.randrange(1, len(data))] if rng.random() < 0.2 else data)
        rng.shuffle(clients)
        for client in clients:
            time.sleep(rng.expovariate(200))
            client.reset() if rng.random() < 0.5 else client.socket.close()
    wait_until(lambda: not work(cluster), "an end of all work", BOUND_S)
    wait_until(lambda: num_open_files() <= before + 20, "files of the ingress that are closed", BOUND_S)
    assert_others_are_served(cluster, 1)


# Serve reads the first two itself, before the ingress does.
@pytest.mark.parametrize("name", ["x-request-timeout-seconds", "x-request-id", "x-anything"])
@pytest.mark.parametrize("value", ["\xff\xfe", "nan", "-1", "", "1e400"])
def test_a_strange_header_is_no_fault_of_the_server(cluster: Cluster, connections: Any, name: str, value: str) -> None:
    client = connections()
    client.send(chat({name: value}))
    status, answer = client.answer()
    assert status == 200 or 400 <= status < 500, answer
