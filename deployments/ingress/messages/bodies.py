"""Bodies of requests: the limits of their cost as they arrive (time, memory, values of their JSON), and their reading.

A parser of JSON holds Python's lock until it is done, in any thread. Texts and images in it cost next to
nothing, 20 million empty lists 20 s and 1.5 GB. So the values are counted as the bytes come, and large bodies are
joined and parsed beside the event loop, one at a time: FastAPI does both on it, with 64 MiB of images for 150 ms.

`LenientBody` is the base of bodies under /v1, which clients of other servers send as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Annotated, Any, Final, TypeVar

import numpy as np
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, Field
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cluster.door.haproxy_rules import UNREAD
from configs.cluster import LimitsConfig
from configs.http import FILE_PATHS, UPLOAD_PATHS
from configs.jobs import MAX_FILE_BYTES
from deployments.engines.llm.chat import NullIsDefault
from deployments.records import (
    LEAST_TOP_P,
    MAX_INT32,
    MAX_SEED,
    SEED_RULE,
    RequestModel,
)
from deployments.records.errors import InvalidRequest, Overloaded, RequestTooLarge, RequestTooSlow

SMALL_BYTES: Final = 2**16  # of a body that is kept while it waits for its turn, and never refused for its bytes
MAX_JSON_PARTS: Final = 2**16  # lists, objects and members of objects in one body
MAX_JSON_DEPTH: Final = 128  # of them within each other: pickle fails on records nested beyond some 400
_MAX_DIGITS: Final = 10  # of an announced size
_MAX_BODY_S: Final = 30.0  # for any body; a large one has more, the time of its bytes at the least rate
_LEAST_BYTES_PER_S: Final = 2**16
_MAX_LARGE: Final = 16  # bodies of the largest size that an ingress has in hand; half of them of one tenant
_MAX_LINGER_S: Final = 5.0  # for the rest of an unneeded body
_LINGER_BYTES_PER_S: Final = 2**24  # of all such bodies together: the largest upload is taken in, in that time
_MAX_PAUSE_S: Final = 0.25  # in it
_CLOSING_S: Final = 0.05  # in which HAProxy reads the answer: closing with unread bytes may lose it
_CLOSING: Final = ((b"connection", b"close"), (UNREAD.encode(), b"1"))
_NOT_JSON: Final = (b"multipart/form-data", b"application/octet-stream")
_LEVELS: Final = np.array([(byte in b"[{") - (byte in b"]}") for byte in range(256)], np.int8)  # by byte

_ArgumentT = TypeVar("_ArgumentT")
_ResultT = TypeVar("_ResultT")
body_bytes: ContextVar[int] = ContextVar("body_bytes", default=0)  # of the JSON of the request under way
# One: parsers hold Python's lock (joining does not), and several would only have more in memory at once.
_parser: Final = ThreadPoolExecutor(1, thread_name_prefix="json")


def announced_bytes(scope: Scope) -> float:
    """Return the size of the body that its client announces; infinity for none, or a senseless one."""
    announced: Any = dict(scope["headers"]).get(b"content-length", b"")
    return int(announced) if announced.isdigit() and len(announced) <= _MAX_DIGITS else math.inf


def _has_body(scope: Scope) -> bool:
    """Return whether a request announces a body."""
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


class _Rate:
    """A number of bytes a second, shared by all takers."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0  # when the time of all taken bytes has passed

    async def take(self, num_bytes: int) -> None:
        """Take more bytes, and wait until there is room for others."""
        now_s = time.monotonic()
        self._free_s = max(now_s, self._free_s) + num_bytes / self._bytes_per_s
        await asyncio.sleep(self._free_s - now_s)


_lingering: Final = _Rate(_LINGER_BYTES_PER_S)


async def closing_unless_whole(scope: Scope, receive: Receive, send: Send) -> Send:
    """Return the `send` for an answer that does not need the body: it closes the connection unless the body is here.

    The rest of the body is read first: a client still sending when the connection closes may lose the answer (RFC
    9112, 9.6), as clients of asyncio do. At a bounded rate: at full speed, 57 MiB cost others more than the refusal had
    saved. A body too large for that is not waited for. HAProxy passes on the rest of a body as slowly as it
    comes, so that the request counts for as long; by the header `UNREAD` it does not.
    """
    is_more = _has_body(scope)
    can_end = not _LINGER_BYTES_PER_S * _MAX_LINGER_S < announced_bytes(scope) < math.inf
    with contextlib.suppress(Exception):  # in time, or of a client that has gone
        async with asyncio.timeout(_MAX_LINGER_S):
            while is_more and can_end:
                async with asyncio.timeout(_MAX_PAUSE_S):
                    message = await receive()
                is_more = message.get("more_body", False)
                if is_more:
                    await _lingering.take(len(message["body"]))
    if not is_more:
        return send

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *_CLOSING]}
        elif not message.get("more_body"):
            await send({**message, "more_body": True})
            await asyncio.sleep(_CLOSING_S)
            message = {"type": "http.response.body", "body": b""}
        await send(message)

    return closing


async def receive_small(receive: Receive) -> list[Message]:
    """Return the messages of a whole small body. Raises RequestTooSlow after the longest time of any body."""
    try:
        async with asyncio.timeout(_MAX_BODY_S):
            messages = [await receive()]
            while messages[-1].get("more_body"):
                messages.append(await receive())
    except TimeoutError:
        raise _too_slow() from None
    return messages


class LargeBodies:
    """The bytes of all large bodies that one ingress has in hand, by tenant."""

    def __init__(self, limits: LimitsConfig) -> None:
        self.max_bytes = _MAX_LARGE * max(limits.max_upload_bytes, limits.max_body_bytes)
        self.held: Counter[str] = Counter()


class LargeBody:
    """One of all large bodies, of a tenant; its bytes count until the context ends.

    With `has_others`, there may be other tenants, and this one has half of the memory at most.
    """

    def __init__(self, bodies: LargeBodies, tenant: str, *, has_others: bool) -> None:
        self._bodies = bodies
        self._tenant = tenant
        self._share_bytes = bodies.max_bytes // 2 if has_others else bodies.max_bytes
        self._num_bytes = 0

    def __enter__(self) -> LargeBody:
        return self

    def __exit__(self, *_: object) -> None:
        held = self._bodies.held
        held[self._tenant] -= self._num_bytes
        if not held[self._tenant]:
            del held[self._tenant]

    def hold(self, num_bytes: int) -> None:
        """Count more bytes of it. Raises Overloaded when there is no room for them."""
        held, most = self._bodies.held, self._bodies.max_bytes
        if held.total() + num_bytes > most or held[self._tenant] + num_bytes > self._share_bytes:
            raise Overloaded("server busy: no memory for another large body; try again")
        held[self._tenant] += num_bytes
        self._num_bytes += num_bytes


class BoundedBody:
    """ASGI's `receive` and `send` of one request whose body may be large, with all bounds.

    `receive` raises RequestTooLarge behind `max_bytes`, or with JSON that has too many values, RequestTooSlow, and
    Overloaded. If an answer begins before the body has ended, `send` closes the connection after it, without waiting
    for the rest of the body.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        limits: LimitsConfig,
        large: LargeBody,
        clock: Callable[[], float] = time.monotonic,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        headers = dict(scope["headers"])
        is_upload = scope["path"].startswith(UPLOAD_PATHS)
        self._is_file = scope["path"].startswith(FILE_PATHS)
        self._max_bytes = limits.max_upload_bytes if is_upload else limits.max_body_bytes
        if self._is_file:
            self._max_bytes = max_file_bytes + SMALL_BYTES  # of the form around the file
        if self._max_bytes < (announced := announced_bytes(scope)) < math.inf:
            raise _too_large(announced, self._max_bytes)
        is_json = not headers.get(b"content-type", b"").startswith(_NOT_JSON) and not scope["path"].startswith("/v2")
        self._size = JsonSize(limits.max_body_bytes) if is_json and not self._is_file else None
        self._scope, self._receive, self._send, self._large, self._clock = scope, receive, send, large, clock
        self._begun_s = clock()
        self._num_bytes = 0
        self._has_ended = not _has_body(scope)

    async def receive(self) -> Message:
        """Return the next message."""
        if self._has_ended:
            return await self._receive()
        late_s = self._begun_s + _MAX_BODY_S + self._num_bytes / _LEAST_BYTES_PER_S - self._clock()
        try:
            async with asyncio.timeout(late_s):
                message = await self._receive()
        except TimeoutError:
            raise _too_slow() from None
        body = message.get("body", b"")
        self._has_ended = not message.get("more_body")
        self._num_bytes += len(body)
        if self._num_bytes > self._max_bytes:
            raise _too_large(self._num_bytes, self._max_bytes)
        if not self._is_file:  # of a file there is one piece at a time
            self._large.hold(len(body))
        if self._size is not None:
            self._size.add(body)
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the answer."""
        if not self._has_ended:
            self._has_ended = True
            self._send = await closing_unless_whole(self._scope, self._receive, self._send)
        await self._send(message)


class JsonSize:
    """The size of a JSON text that comes piece by piece: its lists, objects and members, how deep they nest in each
    other, and its bytes without texts.

    A number or a text counts one byte more than its own bytes: its comma.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_parts = self._num_bytes = self._depth = 0
        self._in_text = False
        self._rest = b""  # a backslash, whose character is in the next piece

    def add(self, piece: bytes) -> None:
        """Count the next piece. Raises RequestTooLarge, InvalidRequest for one that is too deep."""
        if self._in_text and not self._rest and b'"' not in piece and b"\\" not in piece:
            return  # the middle of an image
        piece, self._rest = self._rest + piece, b""
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece, self._rest = piece[:-1], b"\\"
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[self._in_text :: 2])
        self._in_text ^= len(parts) % 2 == 0
        self._num_bytes += len(outside)
        self._num_parts += outside.count(b"[") + outside.count(b"{") + outside.count(b":")
        if self._num_parts > MAX_JSON_PARTS:
            most = f"at most {MAX_JSON_PARTS} are allowed"
            raise RequestTooLarge(f"the body's JSON has more lists, objects and members than are read: {most}")
        if self._num_bytes > self._max_bytes:
            most = f"at most {self._max_bytes} are allowed"
            raise RequestTooLarge(f"the body's JSON has {self._num_bytes} bytes or more besides its texts, {most}")
        if outside:
            depths = self._depth + np.cumsum(_LEVELS[np.frombuffer(outside, np.uint8)], dtype=np.int64)
            if depths.max() > MAX_JSON_DEPTH:
                raise InvalidRequest(f"the body's JSON is nested deeper than {MAX_JSON_DEPTH} levels")
            self._depth = int(depths[-1])


def check_json_size(body: bytes) -> None:
    """Raise RequestTooLarge for JSON with too many values, InvalidRequest for one nested too deeply."""
    size = JsonSize(len(body))
    for start in range(0, len(body), SMALL_BYTES):
        size.add(body[start : start + SMALL_BYTES])


def _too_large(nbytes: float, most: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body has {nbytes} bytes or more, at most {most} are allowed")


def _too_slow() -> RequestTooSlow:
    return RequestTooSlow(
        f"the body did not come in time: {_MAX_BODY_S:g} s, and for large ones at least {_LEAST_BYTES_PER_S} bytes a "
        "second, are what a client may take"
    )


class JsonRoute(APIRoute):
    """A route of FastAPI, to be given to a router as `route_class`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answered(request: Request) -> Response:
            return await handler(_Request(request.scope, request.receive))

        return answered


class AnyTypeRoute(JsonRoute):
    """A route whose bodies are JSON whatever their content type says: `curl -d` calls all of them a form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answered(request: Request) -> Response:
            headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
            scope = {**request.scope, "headers": [*headers, (b"content-type", b"application/json")]}
            return await handler(Request(scope, request.receive))

        return answered


class _Request(Request):
    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            pieces = [piece async for piece in self.stream()]
            is_small = sum(map(len, pieces)) <= SMALL_BYTES
            self._body = _join_pieces(pieces) if is_small else await _in_parser_thread(_join_pieces, pieces)
        return self._body

    async def json(self) -> Any:
        body = await self.body()
        body_bytes.set(len(body))
        if len(body) <= SMALL_BYTES:
            check_json_size(body)
            return _loaded(body)
        return await _in_parser_thread(_parsed, body)


async def _in_parser_thread(work: Callable[[_ArgumentT], _ResultT], argument: _ArgumentT) -> _ResultT:
    return await asyncio.get_running_loop().run_in_executor(_parser, work, argument)


def _join_pieces(pieces: list[bytes]) -> bytes:
    return b"".join(pieces)


def _parsed(body: bytes) -> Any:
    """Return the value of a large JSON text. Raises ValueError, InvalidRequest."""
    try:
        return from_json(body)
    except ValueError:  # the standard library names the place of the error, and accepts what it has always accepted
        return _loaded(body)


def _loaded(body: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, InvalidRequest for a text that cannot be written again."""
    value = json.loads(body)
    if b"\\" in body or not body.isascii():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            why = "a text of the body contains an unpaired surrogate"
            raise InvalidRequest(why, _field_with_half_a_pair(value)) from None
    return value


def _field_with_half_a_pair(value: Any) -> str | None:
    """Return the first field of the body with such a text in its value; None if it is in a field's own name."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        try:
            json.dumps(inner, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return name if name.isascii() else None
    return None


class LeftOut(BaseModel):
    """A part of a body that has no meaning here: it is left out, and a warning says so."""

    type: str


def _ignored_fields(part: BaseModel, place: str = "") -> list[str]:
    """Return the paths of the unknown fields of a body and all its parts."""
    if isinstance(part, LeftOut):
        return [f"{place}{part.type[:64]}"]
    extra = part.model_extra or {}
    found = [f"{place}{name}" for name in extra]
    for name in part.model_fields_set - extra.keys():  # defaults have no unknown fields
        value = getattr(part, name)
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, BaseModel):
                found += _ignored_fields(one, f"{place}{name}.")
    return found


def warning_header(warnings: Sequence[str]) -> dict[str, str]:
    """Return the header with the warnings of a request, in printable ASCII."""
    text = "".join(character if " " <= character <= "~" else "?" for character in "; ".join(warnings))[:512]
    return {"X-Atelier-Warning": text} if text else {}


def _none_if_negative(value: int | None) -> int | None:
    return None if value == -1 else value


def _as_seed(value: int | None) -> int | None:
    """Return a seed that generators take: a negative number becomes one of them."""
    return None if value in (None, -1) else value % (MAX_SEED + 1)


def _not_zero(value: int | None) -> int | None:
    if value == 0:
        raise ValueError("expected 1 or more, or -1 for as many as the model may")
    return value


# -1 means no value, as llama.cpp's clients send it.
Seed = Annotated[
    int | None,
    Field(ge=-1, le=MAX_SEED, description=f"-1 draws one, or {SEED_RULE}"),
    AfterValidator(_none_if_negative),
]
# Texts are asked for with any number.
TextSeed = Annotated[
    int | None,
    Field(ge=-MAX_SEED, le=MAX_SEED, description=f"-1 draws one, or {SEED_RULE}"),
    AfterValidator(_as_seed),
]
# 0 allows the likeliest token alone.
TopP = Annotated[float | None, Field(ge=0, le=1), AfterValidator(lambda value: LEAST_TOP_P if value == 0 else value)]
NoneOrTokens = Annotated[
    int | None,
    Field(ge=-1, le=MAX_INT32, description="-1, or none: as many as the model may"),
    AfterValidator(_none_if_negative),
]
MaxTokens = Annotated[NoneOrTokens, AfterValidator(_not_zero)]


class LenientBody(RequestModel, extra="allow"):
    """A body whose unknown fields are ignored: OpenAI adds some now and then, and its clients send them."""

    def warnings(self) -> tuple[str, ...]:
        """Return warnings of fields that have no effect."""
        shown = ", ".join(repr(name[:64]) for name in sorted(set(_ignored_fields(self)))[:8])
        return (f"unknown fields were ignored: {shown}",) if shown else ()


class ClientPart(LenientBody, NullIsDefault):
    """A body or a part of one, where null counts as absent."""
