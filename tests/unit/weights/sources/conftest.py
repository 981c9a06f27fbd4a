"""A real S3-protocol server in a process of its own, and a proxy before it that counts requests and makes trouble."""

from __future__ import annotations

import http.client
import http.server
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import boto3
import pytest

ACCESS_KEY, SECRET = "AKIAEXAMPLE", "sEcReTsEcReT"
# What becomes of a request: a status, "cut" ends the connection within the body, "flip" damages the body's first byte.
Fault = int | Literal["cut", "flip", "ignore-if-match"] | None
OnRequest = Callable[[str, tuple[int, int] | None], Fault]


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """The server's URL. It takes a free port and says which."""
    command = [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    environment = {**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        url = next(found[0] for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        drain = threading.Thread(target=server.stderr.read)
        drain.start()
        yield url
        server.terminate()
        drain.join()


@dataclass
class Proxy:
    """Before the server. `ranges` lists (key, (first byte, end)) of every ranged request that came."""

    upstream: str
    url: str = ""
    ranges: list[tuple[str, tuple[int, int]]] = field(default_factory=list)
    num_requests: int = 0
    on_request: OnRequest = lambda _key, _range: None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def requested(self, key: str) -> list[tuple[int, int]]:
        return sorted(range_ for name, range_ in self.ranges if name == key)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def log_message(self, *_args: Any) -> None:
        pass

    def do_GET(self) -> None:
        key = unquote(urlsplit(self.path).path).split("/", 2)[-1]
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        range_ = (int(found[1]), int(found[2]) + 1) if found else None
        with self.proxy.lock:
            self.proxy.num_requests += 1
            if range_:
                self.proxy.ranges.append((key, range_))
        fault = self.proxy.on_request(key, range_)
        if isinstance(fault, int):
            self._answer(
                fault, {}, b"<Error><Code>Trouble</Code><AWSAccessKeyId>%s</AWSAccessKeyId></Error>" % SECRET.encode()
            )
            return
        drop = {"if-match"} if fault == "ignore-if-match" else set()
        upstream = http.client.HTTPConnection(urlsplit(self.proxy.upstream).netloc)
        upstream.request(
            self.command, self.path, headers={k: v for k, v in self.headers.items() if k.lower() not in drop}
        )
        response = upstream.getresponse()
        body = response.read()
        upstream.close()
        headers = {k: v for k, v in response.headers.items() if k.lower() not in ("connection", "transfer-encoding")}
        if fault == "flip":
            body = bytes([body[0] ^ 1]) + body[1:]
        self._answer(response.status, headers, body, body[: len(body) // 2] if fault == "cut" else body)

    do_HEAD = do_GET

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes, sent: bytes | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if sent is None else sent)
        self.close_connection = sent is not None and len(sent) < len(body)


@pytest.fixture
def proxy(s3_server: str) -> Iterator[Proxy]:
    proxy = Proxy(s3_server)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        proxy.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield proxy
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials as an operator gives them; one quick retry instead of patience."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setattr("weights.sources.bucket.MAX_RETRIES", 1)


@dataclass
class TestBucket:
    """A fresh bucket, written by an independent client."""

    __test__ = False
    name: str
    client: Any

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)

    def put_folder(self, folder: Path, prefix: str) -> None:
        for file in folder.rglob("*"):
            if file.is_file():
                self.put(f"{prefix}/{file.relative_to(folder)}", file.read_bytes())

    def url(self, prefix: str = "") -> str:
        return f"s3://{self.name}/{prefix}"


@pytest.fixture
def bucket(s3_server: str, environment: None) -> TestBucket:
    client = boto3.client("s3", endpoint_url=s3_server, region_name="us-east-1")
    name = f"bucket-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=name)
    return TestBucket(name, client)


@pytest.fixture
def options(proxy: Proxy) -> dict[str, str]:
    return {"endpoint": proxy.url, "region": "us-east-1"}
