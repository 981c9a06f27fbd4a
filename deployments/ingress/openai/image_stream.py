"""Server-sent events of an image in progress: OpenAI's partial and completed images, progress on request.

A stream outlives its connection: the image goes on, and a client that comes back gets the following events.
As for a browser's EventSource (HTML, section 9.2): every event has an id, a client that reconnects sends the last
one as `Last-Event-ID`, 204 tells it that the stream has ended, and any other status but 200 not to try again.
A stream lives in the process of one ingress replica, and ends with it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Header
from starlette.responses import Response

from cluster.admission.fair_slots import release_read_slot
from configs.cluster import ImageStreamsConfig
from deployments.ingress.access.callers import current_tenant
from deployments.ingress.messages.responses import (
    Answer,
    EventStream,
    Failure,
    TimesMs,
    begun_events,
    call_aside,
    documented,
    error_event,
    event_of,
    failure_response,
    json_text,
    rounded,
)
from deployments.ingress.messages.terms import Terms, current_terms
from deployments.ingress.openai.image_bodies import ImagesBody
from deployments.ingress.openai.image_files import ImageDescription, ImageFormat, describe_image, encode_image
from deployments.records import CacheUse, ImageProgress, ImageRequest, ImageResult, SwitchReport
from deployments.records.errors import InvalidRequest, Overloaded
from deployments.records.tasks import shared_task
from deployments.replicas.output_channel import OutputChannel

ImagePieces = OutputChannel[ImageProgress | ImageResult]
Task = Literal["image_generation", "image_edit"]
PATH: Final = "/v1/images/streams/"
LAST_EVENT_ID: Final = "last-event-id"
_MAX_SHOWN: Final = 64
_COLORS: Final = 3
_STATUSES: Final = documented(_404="no such stream: it was forgotten, or the ingress that had it has ended")


class ImageOrigin(Answer):
    """The origin of images: model, seed, steps and times. Pipelines have no `seed`, `switch` and step count."""

    model: str
    seed: int | None
    num_inference_steps: int | None
    timings_ms: TimesMs
    switch: SwitchReport | None
    encoder_cache: CacheUse
    warnings: tuple[str, ...]


def origin_of(result: ImageResult) -> dict[str, Any]:
    """Return the members of an `ImageOrigin`."""
    return {
        "model": result.model,
        "seed": result.seed,
        "num_inference_steps": result.num_inference_steps,
        "timings_ms": rounded(result.timings_ms),
        "switch": result.switch,
        "encoder_cache": result.cache,
        "warnings": result.warnings,
    }


class _ImageEvent(Answer):
    """The members that partial and completed images share. Source: OpenAI's API reference, "Image streaming"."""

    type: str
    b64_json: str
    created_at: int
    size: str
    quality: Literal["auto"]
    background: Literal["opaque", "transparent"]
    output_format: ImageFormat


class _PartialImage(_ImageEvent):
    """The final image as a step expects it."""

    partial_image_index: int
    step: int
    num_steps: int


class _TokenUsage(Answer):
    """OpenAI's token counts. Diffusion models have none: all are 0."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]


class _CompletedImage(ImageOrigin, _ImageEvent):
    """The image itself, and its origin."""

    usage: _TokenUsage


class _Progress(Answer):
    """The done steps. `eta_s` is the time of the others at the pace so far; None after the first."""

    type: str
    step: int
    num_steps: int
    eta_s: float | None


class ImageEvents:
    """The events of one request, made of the pieces of its stream."""

    def __init__(
        self, task: Task, body: ImagesBody, record: ImageRequest, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._task: Final = task
        self._body = body
        self._record = record
        self._clock = clock
        self._first: tuple[int, float] | None = None  # the first reported step, and its time

    async def events_of(self, pieces: AsyncIterator[ImageProgress | ImageResult]) -> AsyncIterator[str]:
        """Yield the events of all pieces."""
        async for piece in pieces:
            if isinstance(piece, ImageResult):
                yield await self._completed(piece)
                continue
            if self._body.progress:
                yield self._progress(piece)
            if piece.previews and piece.preview_index is not None:
                shared = await self._shared("partial_image", piece.previews[0], None)
                partial = _PartialImage(
                    partial_image_index=piece.preview_index, step=piece.step, num_steps=piece.num_steps, **shared
                )
                yield event_of(json_text(partial), partial.type)

    async def _completed(self, result: ImageResult) -> str:
        result = result.opaque("a JPEG") if self._body.output_format == "jpeg" else result
        shared = await self._shared("completed", result.images[0], describe_image(self._record, result, 0))
        completed = _CompletedImage(
            usage=_TokenUsage(
                input_tokens=0,
                output_tokens=0,
                total_tokens=0,
                input_tokens_details={"image_tokens": 0, "text_tokens": 0},
            ),
            **origin_of(replace(result, warnings=(*result.warnings, *self._body.warnings()))),
            **shared,
        )
        return event_of(json_text(completed), completed.type)

    def _progress(self, piece: ImageProgress) -> str:
        now = self._clock()
        if self._first is None:
            self._first = piece.step, now
        steps, seconds = piece.step - self._first[0], now - self._first[1]
        eta_s = round((piece.num_steps - piece.step) * seconds / steps, 3) if steps else None
        type_ = f"{self._task}.progress"
        progress = _Progress(type=type_, step=piece.step, num_steps=piece.num_steps, eta_s=eta_s)
        return event_of(json_text(progress), type_)

    async def _shared(
        self, kind: str, image: npt.NDArray[np.uint8], description: ImageDescription | None
    ) -> dict[str, Any]:
        body, (height, width, _) = self._body, image.shape
        return {
            "type": f"{self._task}.{kind}",
            "b64_json": await call_aside(image.nbytes, _encoded, image, body, description),
            "created_at": int(time.time()),
            "size": f"{width}x{height}",
            "quality": "auto",
            "background": "opaque" if image.shape[-1] == _COLORS else "transparent",
            "output_format": body.output_format,
        }


def _encoded(image: npt.NDArray[np.uint8], body: ImagesBody, description: ImageDescription | None) -> str:
    file = encode_image(image, body.output_format, compression=body.output_compression, description=description)
    return base64.b64encode(file).decode()


@dataclass(eq=False, slots=True)
class _Stream:
    """One stream. `num_gone` events went before the kept ones; `readers` counts the events read by each."""

    name: str
    tenant: str
    num_gone: int = 0
    kept: deque[str] = field(default_factory=deque)
    readers: dict[object, int] = field(default_factory=dict)
    error: Exception | None = None
    has_begun: bool = False
    has_ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # replaced at every change
    expiry: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None

    @property
    def num_events(self) -> int:
        return self.num_gone + len(self.kept)

    def tell(self) -> None:
        """Wake all waiting readers."""
        self.changed.set()
        self.changed = asyncio.Event()


class ResumableStreams:
    """The streams of one ingress replica, bounded by their number, their bytes and their time without readers.

    Lives on one event loop. Only its own tenant finds a stream.
    """

    def __init__(self, config: ImageStreamsConfig, num_replicas: int = 1) -> None:
        self._config = config
        self._num_replicas = num_replicas
        self._streams: dict[str, _Stream] = {}  # the oldest first
        self.num_bytes = 0  # of the kept events

    async def begin(self, pieces: ImagePieces, events: ImageEvents) -> Response:
        """Answer with a new stream, once its first piece is there. Until then it ends with its caller.

        Raises errors of `pieces` before that; Overloaded when there are too many streams; InvalidRequest
        if another ingress replica may get the request for the rest.
        """
        if self._num_replicas > 1:
            raise InvalidRequest(
                f"resumable: a stream lives in one ingress, and this cluster has {self._num_replicas}: a client "
                "that reconnects may reach another",
                "resumable",
            )
        if len(self._streams) >= self._config.max_streams and not self._forget_unread(only_ended=True):
            raise Overloaded(f"{len(self._streams)} resumable streams are kept, the maximum; ask without resumable")
        stream = _Stream(secrets.token_hex(16), current_tenant.get())
        self._streams[stream.name] = stream
        stream.task = shared_task(self._fill(stream, pieces, events, current_terms.get()))
        release_read_slot()  # the place in the queue is that task's
        try:
            with self._reading(stream, 0):
                while not stream.has_begun:
                    await stream.changed.wait()
            if stream.error:
                raise stream.error
        except BaseException:
            self._forget(stream)
            raise
        return self._answer(stream, 0)

    def resume(self, last_id: str, name: str = "") -> Response:
        """Answer with the events after the one of that id, "" for all. With a `name` the event must be that stream's.

        204 when the stream has ended with that event, 404 for an unknown stream or event.
        """
        release_read_slot()  # nothing is computed for it
        found, _, number = last_id.rpartition(".")
        stream = self._find(name or found)
        if last_id and not (number.isascii() and number.isdigit() and len(number) < 10 and found == (name or found)):
            stream = None
        position = int(number) if stream and last_id else 0
        if stream is None or not stream.num_gone <= position <= stream.num_events:
            return _unknown(last_id or name)
        if stream.has_ended and position == stream.num_events:
            return Response(status_code=204)
        return self._answer(stream, position)

    def end_stream(self, name: str) -> Response:
        """Forget a stream, and stop its image."""
        if (stream := self._find(name)) is None:
            return _unknown(name)
        self._forget(stream)
        return Response(status_code=204)

    def _find(self, name: str) -> _Stream | None:
        stream = self._streams.get(name)
        return stream if stream and stream.tenant == current_tenant.get() else None

    def _answer(self, stream: _Stream, position: int) -> Response:
        reader = self._read(stream, position)
        return EventStream(reader, reader, headers={"Content-Location": PATH + stream.name})

    async def _fill(self, stream: _Stream, pieces: ImagePieces, events: ImageEvents, terms: Terms) -> None:
        """Take in the events of a stream. A task of its own, which goes on when its readers are gone."""
        current_terms.set(terms)
        try:
            async with pieces:
                first = await anext(pieces)
                stream.has_begun = True
                stream.tell()
                async for event in begun_events(first, pieces, events.events_of, error_event):
                    self._keep(stream, event)
        except Exception as error:  # before the first piece: later ones are events
            stream.error = error
        finally:
            stream.has_begun = stream.has_ended = True
            stream.tell()
            self._expire_unread(stream)

    def _keep(self, stream: _Stream, event: str) -> None:
        if stream.name not in self._streams:  # its task is being cancelled
            return
        stream.kept.append(f"id: {stream.name}.{stream.num_events + 1}\n{event}")
        self.num_bytes += len(stream.kept[-1])
        stream.tell()
        while self.num_bytes > self._config.max_bytes and (self._forget_unread() or self._forget_read_event()):
            pass

    async def _read(self, stream: _Stream, position: int) -> AsyncGenerator[str]:
        """Yield the events after the first `position` ones, future ones included."""
        with self._reading(stream, position) as reader:
            while True:
                while stream.readers[reader] < stream.num_events:
                    event = stream.kept[stream.readers[reader] - stream.num_gone]
                    yield event
                    stream.readers[reader] += 1  # only now: the client may have left before it got the event
                if stream.has_ended:
                    return
                await stream.changed.wait()

    @contextlib.contextmanager
    def _reading(self, stream: _Stream, position: int) -> Iterator[object]:
        reader = object()
        stream.readers[reader] = position
        if stream.expiry:
            stream.expiry.cancel()
        try:
            yield reader
        finally:
            del stream.readers[reader]
            self._expire_unread(stream)

    def _expire_unread(self, stream: _Stream) -> None:
        """Forget the stream after a while, if it has no readers then."""
        if stream.expiry:
            stream.expiry.cancel()
        if not stream.readers and stream.name in self._streams:
            loop = asyncio.get_running_loop()
            stream.expiry = loop.call_later(self._config.keep_s, self._forget, stream)

    def _forget_unread(self, *, only_ended: bool = False) -> bool:
        """Forget a stream without readers: the oldest ended one, or else the oldest of all."""
        unread = [stream for stream in self._streams.values() if not stream.readers]
        ended = [stream for stream in unread if stream.has_ended]
        for stream in ended or ([] if only_ended else unread):
            self._forget(stream)
            return True
        return False

    def _forget_read_event(self) -> bool:
        """Forget the first event of the oldest stream whose readers all have read it; never an unread one."""
        for stream in self._streams.values():
            if stream.kept and stream.readers and min(stream.readers.values()) > stream.num_gone:
                self.num_bytes -= len(stream.kept.popleft())
                stream.num_gone += 1
                return True
        return False

    def _forget(self, stream: _Stream) -> None:
        if self._streams.pop(stream.name, None) is None:
            return
        self.num_bytes -= sum(map(len, stream.kept))
        if stream.expiry:
            stream.expiry.cancel()
        if stream.task:
            stream.task.cancel()  # closes the pieces, and with them the request


def create_streams_router(streams: ResumableStreams) -> APIRouter:
    """Return the routes of begun streams."""
    router = APIRouter(tags=["images"])
    nothing = {204: {"description": "there are no more events"}}

    @router.get(
        PATH + "{name}",
        response_class=Response,
        responses=_STATUSES | nothing | {200: {"content": {"text/event-stream": {}}}},
    )
    async def read(name: str, last_event_id: Annotated[str, Header()] = "") -> Response:
        """Events of a `resumable` stream: all, or those after the one of `Last-Event-ID`."""
        return streams.resume(last_event_id, name)

    @router.delete(PATH + "{name}", status_code=204, responses=_STATUSES)
    async def end(name: str) -> Response:
        """End a stream and its image."""
        return streams.end_stream(name)

    return router


def _unknown(asked: str) -> Response:
    shown = repr(asked[:_MAX_SHOWN])
    message = f"no image stream knows {shown}: unread streams end after a while, and with their ingress"
    return failure_response(Failure(404, message, "invalid_request_error", "stream_not_found", LAST_EVENT_ID))
