"""Images in chats of all protocols, fetched or decoded before the record of a chat is made.

Images are fetched from hosts that the config names, as `outer_hosts.py` calls them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import SplitResult

import httpx
import numpy as np
import numpy.typing as npt

from cluster.admission.fair_slots import FairSlots, SlotsFull
from configs.cluster import LimitsConfig
from deployments.ingress.access.callers import current_tenant
from deployments.ingress.messages.bodies import body_bytes
from deployments.ingress.messages.outer_hosts import OuterHosts, Resolve, resolve_host
from deployments.ingress.messages.terms import within_request_time
from deployments.ingress.openai.image_decoders import ImageReaders
from deployments.ingress.openai.uploads import decode_base64_image, decode_image
from deployments.ingress.service.service import Service
from deployments.records import ChatRequest, as_record
from deployments.records.errors import InvalidRequest, QueueFull, RequestTooLarge

SCHEMES: Final = ("http://", "https://")
_FETCH_S: Final = 10.0  # for one image
_MAX_FETCHING: Final = 8
_MAX_WAITING: Final = 64

_LOW_PIXELS: Final = 512 * 512  # of OpenAI's `detail: low`
Detail = Literal["auto", "low", "high"]
_Message = dict[str, Any]


def image_hosts(hosts: Collection[str], resolve: Resolve = resolve_host) -> OuterHosts:
    """Return the hosts ("host", or "host:port") that images may come from."""
    return OuterHosts(hosts, "ingress.image_hosts", "images are fetched from", resolve)


class ImageFetcher:
    """Fetches images from `hosts`, a few at a time, tenants in turn. On one event loop."""

    def __init__(self, hosts: OuterHosts, max_bytes: int) -> None:
        self._hosts = hosts
        self._max_bytes = max_bytes
        self._slots = FairSlots(_MAX_FETCHING, _MAX_WAITING)

    async def fetch(self, url: str, field: str) -> bytes:
        """Return the file at an address. Raises InvalidRequest naming `field`, or QueueFull."""
        parts = self._hosts.checked(url, field, "; send the image as a data URL")
        try:
            await self._slots.acquire(current_tenant.get())
        except SlotsFull as full:
            text = f"server busy: {full.num_waiting} images wait to be fetched, the maximum; try again"
            raise QueueFull(text) from None
        try:
            async with asyncio.timeout(_FETCH_S):
                return await self._read(parts, field)
        except (TimeoutError, httpx.TimeoutException):
            raise InvalidRequest(f"{field}: {parts.hostname} did not send the image in {_FETCH_S:g} s", field) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            why = str(error)[:200] or type(error).__name__
            raise InvalidRequest(f"{field}: no image could be fetched from {parts.hostname}: {why}", field) from None
        finally:
            self._slots.release()

    async def _read(self, parts: SplitResult, field: str) -> bytes:
        host, headers = parts.hostname or "", {"Accept": "image/png, image/jpeg, image/webp"}
        async with self._hosts.opened("GET", parts, field, headers, _FETCH_S) as answer:
            if answer.status_code != httpx.codes.OK:
                why = " (redirects are not followed)" if answer.is_redirect else ""
                raise InvalidRequest(f"{field}: {host} answered {answer.status_code}{why}", field)
            data = bytearray()
            async for piece in answer.aiter_raw():
                data += piece
                if len(data) > self._max_bytes:
                    most = f"at most {self._max_bytes} are allowed"
                    raise InvalidRequest(f"{field}: the image at {host} has more bytes, {most}", field)
            return bytes(data)


class ImageSource(NamedTuple):
    """A client's image in a list of contents: an address, a data URL or base64, from this field."""

    field: str
    text: str
    detail: Detail = "auto"


class ChatImages:
    """Makes records of chats whose messages may have images. Lives on one event loop."""

    def __init__(self, service: Service, readers: ImageReaders, limits: LimitsConfig, fetcher: ImageFetcher) -> None:
        self._service, self._readers, self._limits, self._fetcher = service, readers, limits, fetcher

    async def record_of(self, fields: Mapping[str, Any]) -> ChatRequest:
        """Return the record of a chat. In its messages, a content may be a list of texts and `ImageSource`s.

        Raises InvalidRequest for an unreadable image, and for a model without vision, RequestTooLarge when
        the rest of the chat is larger than a body may be; and the errors of `ImageReaders.read`.
        """
        sources = list(_sources_of(fields["messages"]))
        num_bytes = body_bytes.get() - sum(len(source.text) for source in sources)
        if num_bytes > self._limits.max_body_bytes:
            most = f"at most {self._limits.max_body_bytes} are allowed"
            raise RequestTooLarge(f"the body has {num_bytes} bytes beside its images, {most}")
        if not sources:
            return as_record(ChatRequest, fields)
        if len(sources) > self._limits.max_images:
            most = f"at most {self._limits.max_images} are allowed"
            raise InvalidRequest(f"messages: {len(sources)} images, {most}", "messages")
        await self._service.texts.check_sees(fields["model"])
        files = await self._fetched(sources)
        pixels = iter(await self._readers.read(self._decoded, sources, files))
        messages = [_with_pixels(message, pixels) for message in fields["messages"]]
        return as_record(ChatRequest, {**fields, "messages": messages})

    async def _fetched(self, sources: Sequence[ImageSource]) -> list[bytes | None]:
        """Return the files at addresses, one after the other, None of the other images."""
        if not any(source.text.startswith(SCHEMES) for source in sources):
            return [None] * len(sources)
        async with within_request_time("its images were fetched"):
            return [
                await self._fetcher.fetch(one.text, one.field) if one.text.startswith(SCHEMES) else None
                for one in sources
            ]

    def _decoded(self, sources: Sequence[ImageSource], files: Sequence[bytes | None]) -> list[npt.NDArray[np.uint8]]:
        found = []
        for source, file in zip(sources, files, strict=True):
            most = min(self._limits.max_pixels, _LOW_PIXELS) if source.detail == "low" else self._limits.max_pixels
            bounds = (source.field, most, self._limits.max_upload_pixels)
            image = decode_base64_image(source.text, *bounds) if file is None else decode_image(file, *bounds)
            found.append(image.pixels)
        return found


def _sources_of(messages: Sequence[_Message]) -> Iterator[ImageSource]:
    for message in messages:
        content = message.get("content")
        yield from (part for part in content if isinstance(part, ImageSource)) if isinstance(content, list) else ()


def _with_pixels(message: _Message, pixels: Iterator[npt.NDArray[np.uint8]]) -> _Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": tuple(next(pixels) if isinstance(part, ImageSource) else part for part in content)}


def content_of(parts: Sequence[str | ImageSource]) -> str | list[str | ImageSource]:
    """Return the content of parts: their text, if none of them is an image."""
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else list(parts)
