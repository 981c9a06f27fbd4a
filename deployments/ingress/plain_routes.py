"""Routes whose path has no parameters, found by their path."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send


class PlainRoutes(BaseRoute):
    """All routes without parameters in their path, as one that stands before the others.

    A router tries its routes in turn: a hundred of them take as long as the rest of a small answer.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._by_path: dict[str, list[Route]] = {}
        for route in routes:
            if isinstance(route, Route) and not route.param_convertors:
                self._by_path.setdefault(route.path, []).append(route)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return how well a route of the path matches, as a router does: the first one of the method, or the first."""
        found: tuple[Match, Scope] = Match.NONE, {}
        for route in self._by_path.get(scope["path"].removeprefix(scope.get("root_path", "")), ()):
            match, child_scope = route.matches(scope)
            if match.value > found[0].value:
                found = match, {**child_scope, "route": route}
        return found

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by the route that matched."""
        await scope["route"].handle(scope, receive, send)
