"""The gate and its read slots: how many are read at once, who waits, who is refused, and which wait counts."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from kit.clock import Clock
from kit.waiting import until
from starlette.types import Receive, Scope, Send

from cluster.admission.dispatcher import Dispatcher, NotAdmitted
from cluster.admission.fair_slots import NUM_READ_SLOTS, ReadLimiter, release_read_slot
from cluster.door.haproxy_rules import RECEIVED, machine_clock
from configs.admission import AdmissionConfig
from deployments.ingress.gate import WAITED, Arrivals, ReadGate


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
            release_read_slot()
            release_read_slot()  # a second time does nothing
            self.reading -= 1
            await self.placed.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answered"})


def limiter_of(max_waiting: int, clock: Callable[[], float] = time.monotonic) -> ReadLimiter:
    return ReadLimiter(Dispatcher(AdmissionConfig().model_copy(update={"max_waiting": max_waiting}), clock))


def client(app: App, max_waiting: int = 10_000, clock: Callable[[], float] = time.monotonic) -> httpx.AsyncClient:
    gate = ReadGate(app, limiter_of(max_waiting, clock))
    transport = httpx.ASGITransport(gate, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def test_few_are_read_at_once_and_probes_never_wait() -> None:
    app = App()
    async with client(app) as http:
        calls = [asyncio.create_task(http.post("/v1/embeddings", content=b"{}")) for _ in range(5 * NUM_READ_SLOTS)]
        await until(lambda: app.reading == NUM_READ_SLOTS)
        for path in ("/healthz", "/v2/health/ready", "/v1/models", "/admin/cluster"):
            assert (await http.get(path)).status_code == 200
        app.let_go.set()
        await until(lambda: len(app.waited_s) == len(calls))  # all are read although nobody has an answer
        assert app.most == NUM_READ_SLOTS
        app.placed.set()
        assert {(await call).status_code for call in calls} == {200}


async def test_a_failed_and_a_cancelled_request_give_their_turns_back() -> None:
    app = App()
    async with client(app) as http:
        for _ in range(2 * NUM_READ_SLOTS):
            await http.post("/v1/embeddings", content=b"broken")
        calls = [asyncio.create_task(http.post("/v1/embeddings", content=b"{}")) for _ in range(2 * NUM_READ_SLOTS)]
        await until(lambda: app.reading == NUM_READ_SLOTS)
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
            for _ in range(2 * NUM_READ_SLOTS)
        ]
        await asyncio.sleep(0)
        assert (await http.post("/v1/embeddings", content=b"{}")).status_code == 200
        rest.set()
        assert {(await call).status_code for call in calls} == {200}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/models/m/infer"])
async def test_more_than_may_wait_are_refused(path: str) -> None:
    app = App()
    async with client(app, max_waiting=3) as http:
        calls = [asyncio.create_task(http.post(path, content=b"{}")) for _ in range(NUM_READ_SLOTS + 3)]
        await until(lambda: app.reading == NUM_READ_SLOTS)
        refused = await http.post(path, content=b"{}")
        assert refused.status_code == 429
        assert "3 requests wait" in refused.text
        assert int(refused.headers["retry-after"]) >= 1
        app.let_go.set()
        app.placed.set()
        assert {(await call).status_code for call in calls} == {200}


def received(ago_s: float, clock: str | None = None) -> str:
    """Return HAProxy's note of a request that it got that many seconds ago."""
    return f"{clock or machine_clock()}:{int((time.time() - ago_s) * 1e6)}"


@pytest.mark.parametrize(
    ("noted", "waited_s"),
    [
        (lambda: received(5.0), 5.0),
        (lambda: received(5.0, clock="of-another-machine"), 0.0),
        (lambda: received(5.0).partition(":")[2], 0.0),
        (lambda: "", 0.0),
        (lambda: f"{machine_clock()}:now", 0.0),
        (lambda: f"{machine_clock()}:{'9' * 30}", 0.0),
    ],
)
async def test_the_time_since_haproxy_got_the_request_counts(noted: Any, waited_s: float) -> None:
    app = App()
    app.let_go.set()
    app.placed.set()
    async with client(app) as http:
        await http.post("/v1/embeddings", content=b"{}", headers={RECEIVED: noted()})
    assert app.waited_s == [pytest.approx(waited_s, abs=2.0)]


@pytest.mark.parametrize("step_s", [7200.0, 600.0, -600.0, -7200.0])
def test_a_step_of_the_wall_clock_makes_no_request_older(step_s: float) -> None:
    def scope(noted_s: float) -> Scope:
        return {"type": "http", "headers": [(RECEIVED.encode(), f"here:{int(noted_s * 1e6)}".encode())]}

    subject, wall_s = Arrivals(b"here"), 1.7e9
    assert subject.arrived_s(scope(wall_s - 2), wall_s, 100.0) == pytest.approx(98.0, abs=0.01)
    before = scope(wall_s + 10 - 3)  # the clock steps while it waits
    wall_s += step_s
    assert subject.arrived_s(before, wall_s + 10, 110.0) == pytest.approx(107.0, abs=0.01)
    assert subject.arrived_s(scope(wall_s + 11 - 1), wall_s + 11, 111.0) == pytest.approx(110.0, abs=0.01)
    drifted = scope(wall_s + 50 - 1)
    assert subject.arrived_s(drifted, wall_s + 50.1, 150.0) == pytest.approx(149.0, abs=0.2)


async def test_what_is_too_late_when_its_turn_comes_is_not_read() -> None:
    app, clock = App(), Clock(1000.0)
    async with client(app, clock=clock) as http:
        first = [asyncio.create_task(http.post("/v1/embeddings", content=b"{}")) for _ in range(NUM_READ_SLOTS)]
        await until(lambda: app.reading == NUM_READ_SLOTS)
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
        assert "timed out before it could be read" in short.text
        assert (await waiting["long"]).status_code == 200
        assert {(await call).status_code for call in first} == {200}
        assert len(app.waited_s) == NUM_READ_SLOTS + 1


async def test_a_request_that_spent_most_of_its_time_on_waiting_is_not_read() -> None:
    read, held, clock = list[bytes](), asyncio.Event(), Clock(1000.0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        read.append(dict(scope["headers"])[b"x-request-timeout-seconds"])
        await held.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    limiter = limiter_of(10_000, clock)
    transport = httpx.ASGITransport(ReadGate(app, limiter))

    def ask(http: httpx.AsyncClient, timeout_s: str) -> asyncio.Task[httpx.Response]:
        headers = {"x-request-timeout-seconds": timeout_s}
        return asyncio.create_task(http.post("/v1/embeddings", content=b"{}", headers=headers))

    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        first = [ask(http, "1000") for _ in range(NUM_READ_SLOTS)]
        await until(lambda: len(read) == NUM_READ_SLOTS)
        late = [ask(http, "8"), ask(http, "80")]
        await until(lambda: limiter.num_waiting == 2)
        clock.now_s += 5.0  # more than half the time of one
        held.set()
        assert {(await call).status_code for call in first} == {200}
        short, long = [await call for call in late]
    assert (short.status_code, short.json()["error"]["code"]) == (429, "queue_full")
    assert "most of its timeout queued" in short.text
    assert long.status_code == 200
    assert b"8" not in read


async def test_a_slow_body_of_its_own_takes_time_but_refuses_nobody() -> None:
    """HAProxy waits for a body; where nobody else is read, what is left of the request's time is its own."""
    app = App()
    app.let_go.set()
    app.placed.set()
    headers = {RECEIVED: received(5.0), "x-request-timeout-seconds": "8"}
    async with client(app) as http:
        assert (await http.post("/v1/embeddings", content=b"{}", headers=headers)).status_code == 200


async def test_what_could_not_be_read_in_time_is_refused_at_once() -> None:
    """Reading takes a tenth of a second; with forty before it, a request with one second has no chance."""
    gate, clock = asyncio.Event(), Clock(1000.0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await gate.wait()
        clock.now_s += 0.1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    limiter = limiter_of(10_000, clock)
    transport = httpx.ASGITransport(ReadGate(app, limiter))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for number in (80, 40 + NUM_READ_SLOTS):
            calls = [asyncio.create_task(http.post("/v1/embeddings", content=b"{}")) for _ in range(number)]
            await until(lambda number=number: limiter.num_waiting == number - NUM_READ_SLOTS)
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


async def test_a_request_passes_one_gate_and_the_other_one_lets_it_through() -> None:
    """Before Serve and within: the same limiter, and one slot."""
    app, limiter = App(), limiter_of(2)
    gates = ReadGate(ReadGate(app, limiter_of(0)), limiter, before_serve=True)
    app.let_go.set()
    app.placed.set()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gates), base_url="http://test") as http:
        assert (await http.post("/v1/embeddings", content=b"{}")).status_code == 200  # the inner one would refuse it
        app.let_go.clear()
        calls = [asyncio.create_task(http.post("/v1/embeddings", content=b"{}")) for _ in range(NUM_READ_SLOTS + 2)]
        await until(lambda: app.reading == NUM_READ_SLOTS and limiter.num_waiting == 2)
        assert (await http.post("/v1/embeddings", content=b"{}")).status_code == 429
        app.let_go.set()
        assert {(await call).status_code for call in calls} == {200}


async def test_who_has_left_when_its_turn_comes_costs_nothing() -> None:
    app, left = App(), asyncio.Event()
    limiter = limiter_of(10)
    wrapped = ReadGate(app, limiter)

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
    first = [asyncio.create_task(ask(False)) for _ in range(NUM_READ_SLOTS)]
    await until(lambda: app.reading == NUM_READ_SLOTS)
    rest = [asyncio.create_task(ask(leaves)) for leaves in (True, False)]
    await until(lambda: limiter.num_waiting == 2)
    left.set()
    app.let_go.set()
    await asyncio.gather(*first, *rest)
    assert len(app.waited_s) == NUM_READ_SLOTS + 1


async def learned(interval_s: float, clock: Clock, max_waiting: int = 10_000) -> ReadLimiter:
    """A limiter that has given out a slot every `interval_s`."""
    limiter = limiter_of(max_waiting, clock)

    async def ask() -> None:
        async with limiter.slot("", math.inf):
            await asyncio.sleep(0)
            clock.now_s += interval_s

    for _ in range(6):
        await asyncio.gather(*[ask() for _ in range(70)])
    return limiter


@pytest.mark.parametrize(("timeout_s", "num_waiting"), [(8.0, 2000), (3.0, 900), (0.4, 700)])
async def test_who_is_refused_is_told_when_it_could_wait(timeout_s: float, num_waiting: int) -> None:
    """Slots come every 10 ms. Nobody else comes: then it is known when one gets in."""
    clock, step = Clock(1000.0), asyncio.Semaphore(0)
    limiter = await learned(0.01, clock)

    async def ask() -> None:
        async with limiter.slot("", math.inf):
            await step.acquire()
            clock.now_s += 0.01

    async def told() -> float | None:
        with pytest.raises(NotAdmitted) as refused:
            async with asyncio.timeout(20), limiter.slot("", clock.now_s + timeout_s):
                pass
        return refused.value.refusal.retry_after_s

    tasks = [asyncio.create_task(ask()) for _ in range(num_waiting + NUM_READ_SLOTS)]
    await until(lambda: limiter.num_waiting == num_waiting)
    told_s, refused_s = await told(), clock.now_s
    assert told_s == pytest.approx(num_waiting * 0.01 - max(0.25, timeout_s / 2), rel=0.1)
    for _ in range(round(0.8 * told_s / 0.01)):
        step.release()
    await until(lambda: clock.now_s >= refused_s + 0.75 * told_s)
    assert await told() is not None  # too early
    for _ in tasks:
        step.release()
    await asyncio.gather(*tasks)
    async with limiter.slot("", clock.now_s + timeout_s):
        pass


async def test_tenants_have_slots_in_turn_whatever_each_sends() -> None:
    limiter, order, held = limiter_of(1000), list[str](), asyncio.Event()

    async def ask(tenant: str) -> None:
        async with limiter.slot(tenant, math.inf):
            order.append(tenant)
            await held.wait()

    first = [asyncio.create_task(ask("first")) for _ in range(NUM_READ_SLOTS)]
    await asyncio.sleep(0)
    flood = [asyncio.create_task(ask("many")) for _ in range(200)]
    await until(lambda: limiter.num_waiting == 200)
    flood[150].cancel()
    few = [asyncio.create_task(ask(tenant)) for tenant in ("one", "other", "one")]
    await until(lambda: limiter.num_waiting == 202)
    held.set()
    await asyncio.gather(*first, *flood, *few, return_exceptions=True)
    assert len(order) == NUM_READ_SLOTS + 199 + 3
    assert order[NUM_READ_SLOTS : NUM_READ_SLOTS + 6] == ["many", "one", "other", "many", "one", "many"]
    assert order.count("many") == 199
    assert limiter.num_waiting == 0


async def test_a_tenant_is_told_its_own_wait_and_makes_room_for_others() -> None:
    clock, held = Clock(1000.0), asyncio.Event()
    limiter = await learned(0.1, clock, max_waiting=75)

    async def ask(tenant: str, timeout_s: float) -> None:
        async with asyncio.timeout(20), limiter.slot(tenant, clock.now_s + timeout_s):
            await held.wait()

    first = [asyncio.create_task(ask("many", math.inf)) for _ in range(NUM_READ_SLOTS + 75)]
    await until(lambda: limiter.num_waiting == 75)
    with pytest.raises(NotAdmitted) as full:
        await ask("many", math.inf)
    assert (full.value.refusal.reason, full.value.refusal.limit) == ("queue_full", 75)
    with pytest.raises(NotAdmitted) as late:
        await ask("many", 1.0)
    assert late.value.refusal.reason == "unread"
    other = asyncio.create_task(ask("other", 1.0))  # 0.2 s: its slot comes after one of the others'
    with pytest.raises(NotAdmitted):
        await first[-1]  # the newest of the tenant that has the most
    held.set()
    await asyncio.gather(*first[:-1], other)
