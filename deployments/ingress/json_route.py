"""The route whose bodies are joined, and their JSON parsed, beside the event loop when they are large, one at a time.

FastAPI does both on the loop, with 64 MiB of images for 150 ms and more. `bodies.py` has bounded what is in it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import InvalidRequest
from deployments.ingress.bodies import SMALL_BYTES, check_json_size

ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")
body_bytes: ContextVar[int] = ContextVar("body_bytes", default=0)  # of the JSON of the request under way
# One: parsers hold Python's lock (joining does not), and several would only have more in memory at once.
_parser: Final = ThreadPoolExecutor(1, thread_name_prefix="json")


class JsonRoute(APIRoute):
    """A route of FastAPI, to be given to a router as `route_class`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answered(request: Request) -> Response:
            return await handler(_Request(request.scope, request.receive))

        return answered


class _Request(Request):
    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            pieces = [piece async for piece in self.stream()]
            is_small = sum(map(len, pieces)) <= SMALL_BYTES
            self._body = _joined(pieces) if is_small else await _beside(_joined, pieces)
        return self._body

    async def json(self) -> Any:
        body = await self.body()
        body_bytes.set(len(body))
        if len(body) <= SMALL_BYTES:
            check_json_size(body)
            return _loaded(body)
        return await _beside(_parsed, body)


async def _beside(work: Callable[[ArgumentT], ResultT], argument: ArgumentT) -> ResultT:
    return await asyncio.get_running_loop().run_in_executor(_parser, work, argument)


def _joined(pieces: list[bytes]) -> bytes:
    return b"".join(pieces)


def _parsed(body: bytes) -> Any:
    """Return the value of a large JSON text. Raises ValueError, InvalidRequest."""
    try:
        return from_json(body)
    except ValueError:  # the standard library says where it is wrong, and lets pass what it has always let pass
        return _loaded(body)


def _loaded(body: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, InvalidRequest for a text that nobody can write again."""
    value = json.loads(body)
    if b"\\" in body or not body.isascii():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            why = "a text of the body has half of a surrogate pair, which is no character"
            raise InvalidRequest(why, _field_with_half_a_pair(value)) from None
    return value


def _field_with_half_a_pair(value: Any) -> str | None:
    """Return the first field of the body with such a text in its value; None where it is a field's own name."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        try:
            json.dumps(inner, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return name if name.isascii() else None
    return None
