"""A path below which a cluster answers: applications see theirs without it, Serve the whole one."""

from __future__ import annotations

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.ingress.gate import WithoutPrefix, WithPrefix


async def seen(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(f"{scope['path']} {scope['raw_path'].decode()}")(scope, receive, send)


async def ask(app: ASGIApp, path: str) -> str:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://h") as http:
        return (await http.get(path)).text


@pytest.mark.parametrize(
    ("path", "expected", "whole"),
    [
        ("/two/v1/models", "/v1/models /v1/models", "/two/v1/models /two/v1/models"),
        ("/two", "/ /", "/two/ /two/"),
        ("/two/", "/ /", "/two/ /two/"),
        ("/two/m%20n", "/m n /m%20n", "/two/m n /two/m%20n"),
        ("/twofold/v1", "/twofold/v1 /twofold/v1", "/twofold/v1 /twofold/v1"),
        ("/v1/two/x", "/v1/two/x /v1/two/x", "/v1/two/x /v1/two/x"),
        ("/-/healthz", "/-/healthz /-/healthz", "/-/healthz /-/healthz"),
    ],
)
async def test_only_what_is_below_it_is_taken_off_and_serve_gets_it_back(path: str, expected: str, whole: str) -> None:
    assert await ask(WithoutPrefix(seen, "/two"), path) == expected
    assert await ask(WithoutPrefix(WithPrefix(seen, "/two"), "/two"), path) == whole


async def test_links_of_answers_lead_below_it() -> None:
    async def base(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(str(Request(scope).base_url))(scope, receive, send)

    async def as_serve_calls_it(scope: Scope, receive: Receive, send: Send) -> None:
        await WithoutPrefix(base, "/two")({**scope, "root_path": "/two"}, receive, send)

    assert await ask(as_serve_calls_it, "/two/v1/images") == "http://h/two/"
