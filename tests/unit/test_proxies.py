"""Addresses of a cluster are asked directly, whatever proxies the environment names for the world outside."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest

from cluster.process.telemetry import Exporter
from cluster.ray_seam import handles
from deployments.console.client import Client
from deployments.console.running import _door_client, _health
from deployments.ingress.admin.metrics import NodeMetrics

ROOT = Path(__file__).parents[2]
ROOMS = ("configs", "weights", "cluster", "deployments", "infra")
VERBS = ("get", "post", "put", "delete", "request", "stream")
CLIENTS = {f"httpx.{name}" for name in ("Client", "AsyncClient", *VERBS)}
DEAD = "127.0.0.1:9"  # the port `discard`, where nothing listens


class Answering(BaseHTTPRequestHandler):
    """Answers as the paths of a cluster do that are asked below."""

    def do_GET(self) -> None:
        body = b"ray_x 1\n" if self.path == "/metrics" else b'{"status": "ready", "data": []}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=["http", "socks5"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server, in an environment whose proxies answer nothing."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"{request.param}://{DEAD}")
    server = HTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_the_command_line_asks_a_cluster_directly(url: str) -> None:
    assert Client(url).models() == []


def test_the_start_of_a_cluster_asks_for_its_health_directly(url: str) -> None:
    with _door_client(url) as door:
        assert [_health(door) for _ in range(2)] == ["ready"] * 2


def test_a_start_that_gets_no_answer_yet_has_no_health() -> None:
    with _door_client(f"http://{DEAD}") as door:
        assert _health(door) == ""


async def test_the_pages_of_nodes_are_fetched_directly(url: str) -> None:
    exporter = Exporter("127.0.0.1", int(url.rpartition(":")[2]))
    assert "ray_x 1" in await NodeMetrics(lambda: {"n": exporter}).page()


async def test_replicas_call_each_other_directly(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def echo(request: bytes, _: object) -> bytes:
        return request

    method = grpc.unary_unary_rpc_method_handler(echo)
    server = grpc.aio.server(handlers=[grpc.method_handlers_generic_handler("replica", {"work": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    for name in ("insecure_channel", "secure_channel"):
        monkeypatch.setattr(grpc.aio, name, getattr(grpc.aio, name))  # put back after the test
    handles.bound_connecting.__wrapped__()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await channel.unary_unary("/replica/work")(b"hello", timeout=20) == b"hello"
    await server.stop(None)


def proxied(source: str) -> Iterator[int]:
    """Yield the lines of calls that would ask by way of a proxy of the environment."""
    names_one = any(word in source for word in ("httpx", "openai", "urlopen"))  # few files: only these are parsed
    for node in ast.walk(ast.parse(source)) if names_one else ():
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
        is_client = name in CLIENTS and given.get("trust_env") != "False"
        is_openai = name.startswith("openai.") and node.func.attr.endswith("OpenAI") and "http_client" not in given
        if is_client or is_openai or name.endswith("urlopen"):
            yield node.lineno


def test_no_client_of_the_tree_takes_proxies_from_the_environment() -> None:
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    assert [f"{file.relative_to(ROOT)}:{line}" for file in files for line in proxied(file.read_text())] == []


@pytest.mark.parametrize(
    ("call", "is_proxied"),
    [
        ("httpx.get(url)", True),
        ("httpx.Client(trust_env=True)", True),
        ("openai.OpenAI(base_url=url)", True),
        ("urllib.request.urlopen(url)", True),
        ("httpx.AsyncClient(timeout=1, trust_env=False)", False),
        ("httpx.Limits()", False),
    ],
)
def test_a_client_that_takes_them_is_found(call: str, is_proxied: bool) -> None:
    assert bool([*proxied(call)]) == is_proxied
