"""A server that speaks the part of a model hub's protocol that downloads need.

Forms: GET /api/models/{id}/revision/{revision}?blobs=True (sha, siblings with size, blobId and lfs), GET
/{id}/resolve/{commit}/{path} with a range, errors by the X-Error-Code header. Large files redirect to another host, as
the hub's do, which must not be shown the token. Source: huggingface_hub's hf_api.py, utils/_http.py and errors.py.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote

LFS_BYTES = 1000  # a file of so many is kept as a large one
Fault = int | str | None  # a status; "cut": half of the body; "whole": no ranges; "flip": the first byte damaged
Files = dict[str, bytes]


@dataclass
class Hub:
    """`repositories` map name -> revision -> files. `token` None lets everybody in."""

    repositories: dict[str, dict[str, Files]] = field(default_factory=dict)
    token: str | None = None
    gated: set[str] = field(default_factory=set)
    headers: dict[str, str] = field(default_factory=dict)  # of refusals by `on_request`
    on_request: Callable[[str], Fault] = lambda path: None
    paths: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    ranges: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""
    storage_url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def commit(self, name: str, revision: str) -> str:
        files = self.repositories[name][revision]
        return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


def _describe(path: str, data: bytes) -> dict[str, object]:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    found: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": blob}
    if len(data) >= LFS_BYTES:
        found["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return found


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    is_storage = False

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(self.path.partition("?")[0])
        with hub.lock:
            hub.paths.append(path)
            if self.is_storage and "authorization" in self.headers:
                hub.leaked.append(self.headers["authorization"])
        fault = hub.on_request(path)
        if isinstance(fault, int):
            return self._refuse(fault, "", hub.headers)
        if not self.is_storage and hub.token and self.headers.get("authorization") != f"Bearer {hub.token}":
            return self._refuse(401, "RepoNotFound")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            return self._tell(match[1], match[2])
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)", path):
            return self._send(*match.groups(), fault)
        return self._refuse(404, "")

    def _tell(self, name: str, revision: str) -> None:
        if name not in self.hub.repositories:
            return self._refuse(401, "RepoNotFound")
        if name in self.hub.gated:
            return self._refuse(403, "GatedRepo")
        if revision not in self.hub.repositories[name]:
            return self._refuse(404, "RevisionNotFound")
        files = self.hub.repositories[name][revision]
        siblings = [_describe(path, data) for path, data in sorted(files.items())]
        answer = {"id": name, "modelId": name, "sha": self.hub.commit(name, revision), "siblings": siblings}
        return self._reply(200, json.dumps({**answer, "tags": [], "private": False, "downloads": 0}).encode())

    def _send(self, name: str, commit: str, path: str, fault: Fault) -> None:
        found = [
            files
            for revision, files in self.hub.repositories[name].items()
            if self.hub.commit(name, revision) == commit
        ]
        if not found or path not in found[0]:
            return self._refuse(404, "EntryNotFound")
        data = found[0][path]
        if len(data) >= LFS_BYTES and not self.is_storage:
            return self._reply(302, b"", {"Location": self.hub.storage_url + self.path})
        range_ = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        with self.hub.lock:
            self.hub.ranges.append((path, self.headers.get("range", "")))
        if fault == "flip":
            data = bytes([data[0] ^ 1]) + data[1:]
        if fault == "whole" or range_ is None:
            return self._reply(200, data)
        part = data[int(range_[1]) : int(range_[2]) + 1]
        if fault == "cut":
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
            return None
        return self._reply(206, part, {"Content-Range": f"bytes {range_[1]}-{range_[2]}/{len(data)}"})

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        named = {"X-Error-Code": code} if code else {}
        self._reply(status, b'{"error":"no"}', {**named, **(headers or {})})

    def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a hub, and the storage that it redirects to, on two ports of this machine."""
    servers = []
    for is_storage in (False, True):
        handler = type("Handler", (_Handler,), {"hub": hub, "is_storage": is_storage})
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
    hub.url, hub.storage_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()
