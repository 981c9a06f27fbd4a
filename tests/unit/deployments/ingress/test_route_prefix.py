"""Paths that are served as others: a cluster's own prefix is taken off, and put back for Serve; clients have theirs."""

from __future__ import annotations

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.ingress.paths import BELOW_API, UNPREFIXED, OtherPath, OtherPaths, WithPrefix

BELOW = OtherPath("/two", "")
TABLE = (BELOW, UNPREFIXED, BELOW_API)


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
    assert await ask(OtherPaths(seen, (BELOW,)), path) == expected
    assert await ask(OtherPaths(WithPrefix(seen, "/two"), (BELOW,)), path) == whole


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/models/a%20b", "/v1/models/a b"),
        ("/chat", "/chat"),
        ("/chatter", "/chatter"),
        ("/v1/models", "/v1/models"),
        ("/api/prompt", "/prompt"),
        ("/api/history/7", "/history/7"),
        ("/api/chat", "/api/chat"),
        ("/api", "/api"),
        ("/apiary/prompt", "/apiary/prompt"),
        ("/api/embeddings", "/embeddings"),
        ("/two/models", "/v1/models"),
        ("/two/api/prompt", "/prompt"),
    ],
)
async def test_each_line_of_the_table_changes_its_own_paths_alone(path: str, expected: str) -> None:
    path_seen, raw = (await ask(OtherPaths(seen, TABLE), path)).rsplit(" ", 1)
    assert path_seen == expected
    assert raw == expected.replace(" ", "%20")


async def test_a_path_may_stay_for_one_method_alone() -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(OtherPaths(seen, TABLE)), base_url="http://h") as http:
        assert (await http.post("/api/embeddings")).text == "/api/embeddings /api/embeddings"


async def test_links_of_answers_lead_below_it() -> None:
    async def base(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(str(Request(scope).base_url))(scope, receive, send)

    async def as_serve_calls_it(scope: Scope, receive: Receive, send: Send) -> None:
        await OtherPaths(base, (BELOW,))({**scope, "root_path": "/two"}, receive, send)

    assert await ask(as_serve_calls_it, "/two/v1/images") == "http://h/two/"
