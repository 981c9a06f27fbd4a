"""Turns of reading: how many at once, the ones that wait for theirs, and the part of the wait that counts."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from cluster.control.lanes import Ask
from cluster.door.haproxy_rules import RECEIVED
from deployments.ingress.gate import WAITED, OuterGate
from deployments.ingress.turns import MAX_TURNS, Turns, end_turn

ASK = Ask("worker", "m", 1.0, 1.0, 2, "default", 60.0)


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
            end_turn(ASK)
            end_turn(ASK)  # a second time does nothing
            self.reading -= 1
            await self.placed.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answered"})


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def client(app: App, max_waiting: int = 10_000, clock: Callable[[], float] = time.monotonic) -> httpx.AsyncClient:
    gate = OuterGate(app, Turns(lambda: max_waiting, clock=clock))
    transport = httpx.ASGITransport(gate, raise_app_exceptions=False)
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


class Clock:
    """A clock that only a test moves on."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def test_what_is_too_late_when_its_turn_comes_is_not_read() -> None:
    app, clock = App(), Clock()
    async with client(app, clock=clock) as http:
        first = [asyncio.create_task(http.post("/v1/embeddings", content=b"{}")) for _ in range(MAX_TURNS)]
        await until(lambda: app.reading == MAX_TURNS)
        limits = {"short": "2", "long": "20"}
        waiting = {
            name: asyncio.create_task(
                http.post("/v1/embeddings", content=b"{}", headers={"x-request-timeout-seconds": limit})
            )
            for name, limit in limits.items()
        }
        for _ in range(10):
            await asyncio.sleep(0)
        clock.now_s += 5.0
        app.let_go.set()
        app.placed.set()
        short = await waiting["short"]
        assert short.status_code == 504
        assert "before the request could be read" in short.text
        assert (await waiting["long"]).status_code == 200
        assert {(await call).status_code for call in first} == {200}
        assert len(app.waited_s) == MAX_TURNS + 1


@pytest.mark.parametrize("status", [200, 429])
async def test_who_waited_long_is_not_read_while_most_of_those_that_are_read_are_refused(status: int) -> None:
    read, gate, clock = list[bytes](), asyncio.Event(), Clock()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        read.append(dict(scope["headers"])[b"x-request-timeout-seconds"])
        await gate.wait()
        clock.now_s += 0.01
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    http_turns = Turns(lambda: 10_000, clock=clock)
    transport = httpx.ASGITransport(OuterGate(app, http_turns))

    def ask(http: httpx.AsyncClient, timeout_s: str) -> asyncio.Task[httpx.Response]:
        headers = {"x-request-timeout-seconds": timeout_s}
        return asyncio.create_task(http.post("/v1/embeddings", content=b"{}", headers=headers))

    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        first = [ask(http, "1000") for _ in range(40 + MAX_TURNS)]  # forty of them tell what becomes of those
        await until(lambda: http_turns.num_waiting == 40)
        late = [ask(http, "8"), ask(http, "80")]
        await until(lambda: http_turns.num_waiting == 42)
        clock.now_s += 5.0  # more than half the time of one
        gate.set()
        assert {(await call).status_code for call in first} == {status}
        short, long = [await call for call in late]
        assert (b"8" in read, b"80" in read) == (status == 200, True)
        assert (short.status_code, long.status_code) == (status, status)
        if status == 429:
            assert short.json()["error"]["code"] == "queue_full"


async def test_what_could_not_be_read_in_time_is_refused_at_once() -> None:
    """Reading takes a tenth of a second; with forty before it, a request with one second has no chance."""
    gate, clock = asyncio.Event(), Clock()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await gate.wait()
        clock.now_s += 0.1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    http_turns = Turns(lambda: 10_000, clock=clock)
    transport = httpx.ASGITransport(OuterGate(app, http_turns))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for number in (80, 40 + MAX_TURNS):
            calls = [asyncio.create_task(http.post("/v1/embeddings", content=b"{}")) for _ in range(number)]
            await until(lambda number=number: http_turns.num_waiting == number - MAX_TURNS)
            if number == 80:  # it learns how long turns take
                gate.set()
                assert {(await call).status_code for call in calls} == {200}
                gate.clear()
        asked = {
            limit: asyncio.create_task(
                http.post("/v1/embeddings", content=b"{}", headers={"x-request-timeout-seconds": limit})
            )
            for limit in ("1", "100", "0", "soon")
        }
        refused = await asked.pop("1")
        assert refused.status_code == 429
        assert 3 <= int(refused.headers["retry-after"]) <= 6
        gate.set()
        assert {(await call).status_code for call in [*calls, *asked.values()]} == {200}


@pytest.mark.parametrize("refuses", [False, True])
async def test_who_stands_at_two_places_gives_one_turn_and_one_answer(refuses: bool) -> None:
    app, seen = App(), list[int]()
    inner = OuterGate(app, Turns(lambda: 0))

    async def between(scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Any) -> None:
            seen.append(message.get("status", 0))
            await send(message)

        await inner(scope, receive, noted)

    app.let_go.set()
    app.placed.set()
    transport = httpx.ASGITransport(OuterGate(between, Turns(lambda: 2), refuses=refuses))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.post("/v1/embeddings", content=b"{}")).status_code == 200  # the inner one would refuse it
        app.let_go.clear()
        calls = [asyncio.create_task(http.post("/v1/embeddings", content=b"{}")) for _ in range(MAX_TURNS + 2)]
        await until(lambda: app.reading == MAX_TURNS)
        for _ in range(10):
            await asyncio.sleep(0)
        assert (await http.post("/v1/embeddings", content=b"{}")).status_code == 429
        assert (429 in seen) is not refuses
        app.let_go.set()
        assert {(await call).status_code for call in calls} == {200}


async def test_who_has_left_when_its_turn_comes_costs_nothing() -> None:
    app, left = App(), asyncio.Event()
    turns = Turns(lambda: 10)
    wrapped = OuterGate(app, turns)

    async def ask(leaves: bool) -> None:
        messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await (left.wait() if leaves else asyncio.Event().wait())
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "headers": [(b"content-length", b"2")]}
        await wrapped(scope, receive, send)

    app.placed.set()
    first = [asyncio.create_task(ask(False)) for _ in range(MAX_TURNS)]
    await until(lambda: app.reading == MAX_TURNS)
    rest = [asyncio.create_task(ask(leaves)) for leaves in (True, False)]
    await until(lambda: turns.num_waiting == 2)
    left.set()
    app.let_go.set()
    await asyncio.gather(*first, *rest)
    assert len(app.waited_s) == MAX_TURNS + 1


@pytest.mark.parametrize("status", [200, 429])
@pytest.mark.parametrize(("timeout_s", "num_waiting"), [(8.0, 2000), (3.0, 900), (0.4, 700)])
def test_who_is_refused_is_told_when_it_could_wait(timeout_s: float, num_waiting: int, status: int) -> None:
    """Turns take between 2 and 18 ms, drawn anew for each. Nobody else comes: then it is known when one gets in."""
    clock, drawn = Clock(), random.Random(num_waiting)
    turns = Turns(lambda: 10_000, clock=clock)
    waiting = [turns.waiting() for _ in range(num_waiting + 200)]
    for one in waiting:
        one.__enter__()

    def read_next() -> None:
        waiting.pop().__exit__(None, None, None)
        clock.now_s += drawn.uniform(0.002, 0.018)
        turns.note_begin(is_crowded=True)
        turns.note_status(status)

    turns.note_begin(is_crowded=False)
    for _ in range(200):
        read_next()
    refusal, refused_s = turns.why_not_wait(timeout_s), clock.now_s
    assert refusal is not None
    assert refusal.retry_after_s is not None
    while turns.why_not_wait(timeout_s):
        read_next()
    assert refusal.retry_after_s == pytest.approx(clock.now_s - refused_s, rel=0.25)
