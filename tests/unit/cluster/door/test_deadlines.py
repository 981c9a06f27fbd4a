"""A deadline passes Serve unseen, and the ingress reads it."""

from __future__ import annotations

from typing import Any

from ray.serve._private.http_util import parse_request_timeout_header
from starlette.types import Receive, Scope, Send

from cluster.door.deadlines import HideDeadline, ShowDeadline

HEADERS = [(b"host", b"a"), (b"x-request-timeout-seconds", b"0.1"), (b"x-priority", b"1")]


async def headers_behind(layer: Any, headers: list[tuple[bytes, bytes]], behind: Any = None) -> dict[bytes, bytes]:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    scope = {"type": "http", "headers": headers, "path": "/"}
    await layer(behind(app) if behind else app)(scope, None, None)
    assert scope["headers"] == headers
    assert seen[0]["path"] == "/"
    return dict(seen[0]["headers"])


async def test_serve_finds_no_deadline_and_its_own_one_stays() -> None:
    assert parse_request_timeout_header(dict(HEADERS), 300.0) == 0.1  # what would cut the request off
    hidden = await headers_behind(HideDeadline, HEADERS)
    assert parse_request_timeout_header(hidden, 300.0) == 300.0


async def test_the_ingress_reads_it_under_its_name() -> None:
    assert await headers_behind(HideDeadline, HEADERS, ShowDeadline) == dict(HEADERS)


async def test_a_request_without_one_stays_as_it_is() -> None:
    assert await headers_behind(HideDeadline, HEADERS[::2], ShowDeadline) == dict(HEADERS[::2])


async def test_a_websocket_lasts_as_long_as_its_client() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    for headers in (HEADERS, HEADERS[::2]):
        await HideDeadline(app)({"type": "websocket", "headers": headers, "path": "/"}, None, None)  # type: ignore[arg-type]
        assert parse_request_timeout_header(dict(seen.pop()["headers"]), 300.0) is None


async def test_a_scope_without_a_deadline_is_handed_on_itself() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    bare, timed = {"type": "http", "headers": HEADERS[::2]}, {"type": "http", "headers": HEADERS}
    for scope in (bare, timed, {"type": "lifespan"}):
        await HideDeadline(app)(scope, None, None)  # type: ignore[arg-type]
    assert [seen[0] is bare, seen[1] is timed, seen[2]] == [True, False, {"type": "lifespan"}]
