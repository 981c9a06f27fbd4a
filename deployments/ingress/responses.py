"""Responses of every protocol: JSON written beside the event loop, phase times in a header, server-sent events.

An answer is an instance of the class that describes it on the OpenAPI page. Lists with many numbers or images in them
are the exception: their parts are written one by one and joined, so that Python's lock is free between the parts.
Measured with 2,048 vectors of 1,024 numbers: the standard library's encoder takes ten times as long as pydantic's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Final, Protocol, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from deployments.services.output_channel import OutputChannel

# Larger bodies are read and written in a thread: the event loop has other requests to pass on.
_MAX_INLINE_BYTES: Final = 2**16
ResultT = TypeVar("ResultT")
PieceT = TypeVar("PieceT")


TimesMs = dict[str, float]  # by phase


class Answer(BaseModel, extra="forbid", protected_namespaces=()):
    """A JSON object as it is sent and as the OpenAPI page shows it. Members that were not set are left out."""


def json_text(answer: object) -> str:
    """Return the JSON of an `Answer`, a record or a list of records, on one line."""
    return answer.model_dump_json(exclude_unset=True) if isinstance(answer, Answer) else to_json(answer).decode()


def json_with_list(answer: Answer, name: str, parts: Iterable[bytes]) -> bytes:
    """Return the JSON of `answer` with `parts`, which are JSON already, as the items of its member `name`.

    `answer` needs at least one more member that is set.
    """
    head = answer.model_dump_json(exclude_unset=True, exclude={name}).encode()
    return b"".join((head[:-1], b',"', name.encode(), b'":[', b",".join(parts), b"]}"))


def json_response(answer: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with the JSON of `answer`, which may be written already."""
    content = answer if isinstance(answer, bytes) else json_text(answer)
    return Response(content, status, headers, media_type="application/json")


async def call_aside(num_bytes: int, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Call `function`, in a thread when it works on more than `_MAX_INLINE_BYTES`, and return its result."""
    return function(*arguments) if num_bytes <= _MAX_INLINE_BYTES else await asyncio.to_thread(function, *arguments)


def server_timing(timings_ms: Mapping[str, float]) -> dict[str, str]:
    """Return the header `Server-Timing` (W3C Server Timing, section 3), which browsers show beside the request.

    `{"Server-Timing": "queue;dur=0.4, denoise;dur=212.0"}`
    """
    return {"Server-Timing": ", ".join(f"{phase};dur={ms:.2f}" for phase, ms in timings_ms.items())}


def rounded(timings_ms: Mapping[str, float]) -> dict[str, float]:
    """Return the times with two decimals."""
    return {phase: round(ms, 2) for phase, ms in timings_ms.items()}


class Closable(Protocol):
    """The parts of a response while it goes out."""

    async def aclose(self) -> None:
        """End it."""


EventsOf = Callable[[AsyncIterator[PieceT]], AsyncIterator[str]]


class EventStream(StreamingResponse):
    """Server-sent events, or lines of another type, that are made of `source`: closed when the client is gone.

    Starlette leaves that to the garbage collector, and until then a replica would go on writing for nobody.
    """

    def __init__(
        self,
        events: AsyncIterator[str],
        source: Closable,
        *,
        media_type: str = "text/event-stream",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(events, media_type=media_type, headers={"Cache-Control": "no-cache", **(headers or {})})
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


async def stream_events(
    pieces: OutputChannel[PieceT], events_of: EventsOf[PieceT], error_event: Callable[[Exception], str], **options: Any
) -> EventStream:
    """Answer with the events that `events_of` makes of pieces, once the first of them is there.

    So a refused request is a 4xx, and not an event in a 200. `options` are those of `EventStream`.
    """
    first = await anext(pieces)
    return EventStream(begun_events(first, pieces, events_of, error_event), pieces, **options)


async def begun_events(
    first: PieceT, rest: AsyncIterator[PieceT], events_of: EventsOf[PieceT], error_event: Callable[[Exception], str]
) -> AsyncIterator[str]:
    """Yield the events of pieces. An error that comes now is an event, since the status is sent."""

    async def pieces() -> AsyncIterator[PieceT]:
        yield first
        async for piece in rest:
            yield piece

    try:
        async for event in events_of(pieces()):
            yield event
    except Exception as error:
        yield error_event(error)


def event_of(data: str, name: str = "") -> str:
    """Return one server-sent event with `data`, a single line, and a name where it has one."""
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"
