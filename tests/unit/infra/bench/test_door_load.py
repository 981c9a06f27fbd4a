"""The load generator of `infra.bench door`, against a server that says what it saw."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
from aiohttp import web
from kit.waiting import until

from infra.bench.door_load import CANCELLED, GONE, TIMEOUT_HEADER, Ask, LoadGenerator, Outcome, _run_order


@dataclass
class Seen:
    """Everything that the server was asked, the most at a time, and how many of them were given up."""

    bodies: list[Any] = field(default_factory=list)
    timeouts: list[str | None] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    now: int = 0
    most: int = 0
    given_up: int = 0


@asynccontextmanager
async def server(open_after_s: float = 0.0) -> AsyncIterator[tuple[str, Seen]]:
    """`/echo` takes 5 ms, `/slow` a minute, `/stream` three pieces 20 ms apart, `/break` breaks the connection, and
    `/full` refuses with `Retry-After: 1` until `open_after_s` after the first question.
    """
    seen, loop = Seen(), asyncio.get_running_loop()

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.bodies.append(await request.json() if request.can_read_body else None)
        seen.timeouts.append(request.headers.get(TIMEOUT_HEADER))
        seen.at_s.append(loop.time())
        seen.now += 1
        seen.most = max(seen.most, seen.now)
        try:
            return await kinds[request.path](request)
        except asyncio.CancelledError:
            seen.given_up += 1
            raise
        finally:
            seen.now -= 1

    async def echo(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.005)
        return web.json_response({})

    async def slow(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.json_response({})

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(3):
            await asyncio.sleep(0.02)
            await response.write(b"data: piece\n\n")
        return response

    async def broken(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def full(_: web.Request) -> web.StreamResponse:
        is_open = loop.time() - seen.at_s[0] >= open_after_s
        return web.json_response({}) if is_open else web.Response(status=429, headers={"retry-after": "1"})

    kinds = {"/echo": echo, "/slow": slow, "/stream": stream, "/break": broken, "/full": full}
    app = web.Application()
    app.router.add_route("*", "/{kind}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    finally:
        await runner.cleanup()


async def load(do: str, url: str, asks: list[Ask], **options: Any) -> list[Outcome]:
    order = {"do": do, "url": url, "asks": [asdict(ask) for ask in asks], **options}
    return await _run_order(order, asyncio.Event())


@pytest.mark.parametrize("num_callers", [1, 4])
async def test_a_closed_loop_sends_every_request_once_by_so_many_callers(num_callers: int) -> None:
    async with server() as (url, seen):
        outcomes = await load("closed", url, [Ask("k", "/echo", {"n": n}) for n in range(12)], num_callers=num_callers)
    assert sorted(body["n"] for body in seen.bodies) == list(range(12))
    assert seen.most == num_callers
    assert [one.status for one in outcomes] == [200] * 12
    assert min(one.latency_s for one in outcomes) >= 0.005
    assert all(one.is_good for one in outcomes)


async def test_a_closed_loop_ends_with_its_time() -> None:
    async with server() as (url, _):
        outcomes = await load("closed", url, [Ask("k", "/echo")] * 100_000, num_callers=2, max_s=0.2)
    assert 2 < len(outcomes) <= 2 * 0.2 / 0.005 + 2


async def test_an_open_loop_waits_for_nobody() -> None:
    times_s = [0.0, 0.05, 0.05, 0.15, 0.3]
    async with server() as (url, seen):
        asks = [Ask("k", "/slow" if index == 0 else "/echo", {}, at_s, 2.5, 0.6) for index, at_s in enumerate(times_s)]
        outcomes = await load("open", url, asks, probe_every=0)
    assert all(one.sent_s >= at_s for one, at_s in zip(outcomes, times_s, strict=True))
    assert [one.status for one in outcomes] == [CANCELLED, 200, 200, 200, 200]
    assert seen.timeouts == ["2.5"] * 5


async def test_who_gives_up_closes_the_connection() -> None:
    async with server() as (url, seen):
        outcomes = await load("closed", url, [Ask("k", "/slow", {}, cancel_s=0.05)] * 3, num_callers=3)
        await until(lambda: seen.given_up >= 3)
    assert [one.status for one in outcomes] == [CANCELLED] * 3
    assert not any(one.is_good for one in outcomes)


async def test_a_broken_connection_is_an_outcome() -> None:
    async with server() as (url, _):
        (outcome,) = await load("closed", url, [Ask("k", "/break", {})], num_callers=1)
    assert outcome.status == GONE
    assert "disconnected" in outcome.problem


async def test_a_stream_has_a_first_piece_and_gaps() -> None:
    async with server() as (url, _):
        (outcome,) = await load("closed", url, [Ask("k", "/stream", {})], num_callers=1)
    assert outcome.sent_s < outcome.first_s < outcome.done_s
    assert 1 <= len(outcome.gaps_s) <= 2  # pieces may arrive together on a busy machine
    assert 0.005 < sum(outcome.gaps_s) <= outcome.done_s - outcome.first_s


async def test_probers_ask_again_until_they_are_admitted() -> None:
    async with server(open_after_s=0.35) as (url, seen):
        outcomes = await load("open", url, [Ask("k", "/full", {"n": n}) for n in range(4)], probe_every=2)
    assert [one.status for one in outcomes] == [429] * 4
    assert [one.retry_after_s for one in outcomes] == [1.0] * 4
    admitted_s = [one.admitted_after_s for one in outcomes if one.admitted_after_s is not None]
    assert len(admitted_s) == 2
    assert all(0.3 <= after_s < 1.0 for after_s in admitted_s)
    asked = [body["n"] for body in seen.bodies]
    assert sorted(asked.count(n) > 1 for n in range(4)) == [False, False, True, True]


async def test_the_process_runs_orders_and_ends_a_watch_when_told() -> None:
    async with server() as (url, seen):
        generator = LoadGenerator()
        try:
            asks = [Ask("k", "/echo", {"n": n}) for n in range(3)]
            outcomes = await asyncio.to_thread(generator.run, "closed", url, asks, num_callers=1)
            assert [one.status for one in outcomes] == [200] * 3
            generator.begin_order("watch", url, [Ask("health", "/echo")], period_s=0.02)
            await until(lambda: len(seen.bodies) >= 3 + 4)
            watched = await asyncio.to_thread(generator.stop)
            assert len(watched) >= 4
            sent_s = [one.sent_s for one in watched]
            assert all(after - before >= 0.015 for before, after in itertools.pairwise(sent_s))
            (again,) = await asyncio.to_thread(generator.run, "closed", url, asks[:1], num_callers=1)
            assert again.status == 200
        finally:
            generator.close()


async def test_a_generator_that_dies_is_said() -> None:
    generator = LoadGenerator()
    generator.close()
    with pytest.raises((RuntimeError, BrokenPipeError)):
        generator.run("closed", "http://127.0.0.1:1", [Ask("k", "/echo")], num_callers=1)
