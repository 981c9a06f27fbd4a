"""Answers compared with the OpenAPI page, in every test that asks over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.routing import Match

Check = Callable[[httpx.Response], Awaitable[None]]


@pytest.fixture
def as_described() -> Callable[[FastAPI], dict[str, list[Check]]]:
    """Return event hooks for a client of an app: they fail the test when an answer is not as its route describes it."""

    def hooks(app: FastAPI) -> dict[str, list[Check]]:
        async def check(response: httpx.Response) -> None:
            if response.headers.get("content-type") != "application/json":
                return
            described = _described(app, response.request.method, response.request.url.path, response.status_code)
            if described is not None:
                TypeAdapter(described).validate_json(await response.aread(), strict=True)

        return {"response": [check]}

    return hooks


def _described(app: FastAPI, method: str, path: str, status: int) -> Any:
    """Return the class of an answer by its route; None where there is no such route, or it has many forms."""
    for route in _routes(app):
        matched, _ = route.matches({"type": "http", "method": method, "path": path})
        if matched == Match.FULL:
            if not route.include_in_schema:
                return None
            documented = route.responses.get(status, {}).get("model")
            if documented is None and status >= 400:
                raise AssertionError(f"{method} {path} answers {status}, which its route does not document")
            return documented or route.response_model
    return None


def _routes(app: FastAPI) -> list[APIRoute]:
    found: list[APIRoute] = []
    open_ = list(app.routes)
    while open_:
        route: Any = open_.pop(0)
        if isinstance(route, APIRoute):
            found.append(route)
        elif hasattr(route, "original_router"):  # how FastAPI keeps an included router
            open_ += route.original_router.routes
    return found
