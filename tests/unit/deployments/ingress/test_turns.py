"""Turns of reading: how many at once, the ones that wait for theirs, and the part of the wait that counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from cluster.door.haproxy_rules import RECEIVED
from deployments.ingress.turns import MAX_TURNS, WAITED, Turns, end_turn


class App:
    """An app whose requests stay where `steps` leave them until they are let go."""

    def __init__(self) -> None:
        self.reading = 0
        self.most = 0
        self.waited_s: list[float] = []
        self.let_go = asyncio.Event()
        self.placed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            self.reading += 1
            self.most = max(self.most, self.reading)
            body = b""
            while True:
                message = await receive()
                body += message.get("body", b"")
                if not message.get("more_body"):
                    break
            self.waited_s.append(scope.get(WAITED, -1.0))
            if body == b"broken":
                self.reading -= 1
                raise ValueError(body)
            await self.let_go.wait()
            end_turn()
            end_turn()  # a second time does nothing
            self.reading -= 1
            await self.placed.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answered"})


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def client(app: App, max_waiting: int = 10_000) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(Turns(app, lambda: max_waiting), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def test_few_are_read_at_once_and_probes_never_wait() -> None:
    app = App()
    async with client(app) as http:
        calls = [asyncio.create_task(http.post("/v1/embeddings", content=b"{}")) for _ in range(5 * MAX_TURNS)]
        await until(lambda: app.reading == MAX_TURNS)
        for path in ("/healthz", "/v2/health/ready", "/v1/models", "/admin/cluster"):
            assert (await http.get(path)).status_code == 200
        app.let_go.set()
        await until(lambda: len(app.waited_s) == len(calls))  # all are read although nobody has an answer
        assert app.most == MAX_TURNS
        app.placed.set()
        assert {(await call).status_code for call in calls} == {200}


async def test_a_failed_and_a_cancelled_request_give_their_turns_back() -> None:
    app = App()
    async with client(app) as http:
        for _ in range(2 * MAX_TURNS):
            await http.post("/v1/embeddings", content=b"broken")
        calls = [asyncio.create_task(http.post("/v1/embeddings", content=b"{}")) for _ in range(2 * MAX_TURNS)]
        await until(lambda: app.reading == MAX_TURNS)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        app.reading = 0
        app.let_go.set()
        app.placed.set()
        assert (await http.post("/v1/embeddings", content=b"{}")).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"content-length": "2"}, {"content-length": str(2**30)}])
async def test_slow_bodies_hold_no_turn(headers: dict[str, str]) -> None:
    app = App()
    app.let_go.set()
    app.placed.set()
    rest = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await rest.wait()
        yield b"}"

    async with client(app) as http:
        calls = [
            asyncio.create_task(http.post("/v1/embeddings", content=slow(), headers=headers))
            for _ in range(2 * MAX_TURNS)
        ]
        await asyncio.sleep(0)
        assert (await http.post("/v1/embeddings", content=b"{}")).status_code == 200
        rest.set()
        assert {(await call).status_code for call in calls} == {200}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/models/m/infer"])
async def test_more_than_may_wait_are_refused(path: str) -> None:
    app = App()
    async with client(app, max_waiting=3) as http:
        calls = [asyncio.create_task(http.post(path, content=b"{}")) for _ in range(MAX_TURNS + 3)]
        await until(lambda: app.reading == MAX_TURNS)
        refused = await http.post(path, content=b"{}")
        assert refused.status_code == 429
        assert "wait to be read" in refused.text
        assert int(refused.headers["retry-after"]) >= 1
        app.let_go.set()
        app.placed.set()
        assert {(await call).status_code for call in calls} == {200}


@pytest.mark.parametrize(
    ("noted", "waited_s"),
    [
        (lambda: str(int((time.time() - 5) * 1e6)), 5.0),
        (lambda: "", 0.0),
        (lambda: "now", 0.0),
        (lambda: "9" * 30, 0.0),
    ],
)
async def test_the_time_since_haproxy_got_the_request_counts(noted: Any, waited_s: float) -> None:
    app = App()
    app.let_go.set()
    app.placed.set()
    async with client(app) as http:
        await http.post("/v1/embeddings", content=b"{}", headers={RECEIVED: noted()})
    assert app.waited_s == [pytest.approx(waited_s, abs=2.0)]
