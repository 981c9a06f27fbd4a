"""Routes found by their path are the ones that a router finds by trying all in turn."""

from __future__ import annotations

import random
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from httpx import ASGITransport, AsyncClient
from kit.seeding import seeded_random
from starlette.routing import Match

from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.plain_routes import PlainRoutes
from deployments.ingress.service.service import Service

METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS")
PATHS = ("/", "/a", "/a/", "/a/b", "/b", "/{name}", "/a/{name}", "/{name:path}")
ASKED = [(method, path) for method in METHODS for path in ("/", "/a", "/a/", "/a/b", "/b", "/c", "/a/c", "/x/y")]


def numbered(number: int) -> Any:
    async def answer() -> int:
        return number

    return answer


def random_app(draws: random.Random) -> FastAPI:
    """Return an application of random routes, of which each answers with its number. Plain paths come first."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for path in sorted(draws.choices(PATHS, k=8), key=lambda path: "{" in path):
        methods = draws.sample(METHODS[:4], draws.randint(1, 3))
        app.add_api_route(path, numbered(len(app.routes)), methods=methods)
    return app


async def answers_of(app: FastAPI, root: str) -> list[tuple[int, str, str | None, str | None]]:
    found = []
    async with AsyncClient(transport=ASGITransport(app, root_path=root), base_url="http://test") as http:
        for method, path in ASKED:
            answer = await http.request(method, root + path)
            found.append((answer.status_code, answer.text, answer.headers.get("allow"), answer.headers.get("location")))
    return found


async def test_a_request_is_answered_as_by_all_routes_in_turn() -> None:
    draws, seen = seeded_random(), set[int]()
    for root in ("", "", "", "/here"):
        app = random_app(draws)
        in_turn = await answers_of(app, root)
        app.router.routes.insert(0, PlainRoutes(app.router.routes))
        for route in app.router.routes[1:]:
            if isinstance(route, APIRoute) and not route.param_convertors:
                app.router.routes.remove(route)  # it is found by its path, or not at all
        assert await answers_of(app, root) == in_turn
        seen.update(status for status, *_ in in_turn)
    assert seen >= {200, 404, 405}


def test_no_route_with_parameters_hides_a_plain_one_of_the_server() -> None:
    replicas: Any = object()  # nobody asks them
    config = ClusterConfig.model_validate({"models": [{"id": "flux", "path": "/f"}]})
    service = Service(config, RegistrySnapshot(NamedActor(lambda: replicas)), replicas, replicas)
    first, *others = create_http_app(service, config).routes
    paths = {route.path for route in others if isinstance(route, APIRoute) and not route.param_convertors}
    assert len(paths) > 50
    for scope in ({"type": "http", "method": method, "path": path} for method in METHODS for path in paths):
        matches = [(route, *route.matches(scope)) for route in others]
        wanted = max(matches, key=lambda match: match[1].value)  # the first of the best ones
        match, child_scope = first.matches(scope)
        assert (child_scope["route"], match) == wanted[:2], scope
        assert match is not Match.NONE
