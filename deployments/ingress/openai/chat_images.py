"""Images in chats, whatever protocol they came by: fetched or decoded before the record of a chat is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from configs.cluster import LimitsConfig
from deployments.errors import InvalidRequest, RequestTooLarge
from deployments.ingress.json_route import body_bytes
from deployments.ingress.openai.fetched_images import SCHEMES, ImageFetcher
from deployments.ingress.openai.image_decoders import ImageReaders
from deployments.ingress.openai.image_uploads import decode_base64_image, decode_image
from deployments.ingress.service import Service
from deployments.ingress.terms import within_request_time
from deployments.records import ChatRequest, as_record

_LOW_PIXELS: Final = 512 * 512  # of OpenAI's `detail: low`
Detail = Literal["auto", "low", "high"]
Message = dict[str, Any]


class ImageSource(NamedTuple):
    """An image as a client sends it, in a content's list: an address, a data URL, or base64, from this field."""

    field: str
    text: str
    detail: Detail = "auto"


class ChatImages:
    """Makes records of chats whose messages may have images. Lives on one event loop."""

    def __init__(self, service: Service, readers: ImageReaders, limits: LimitsConfig, fetcher: ImageFetcher) -> None:
        self._service, self._readers, self._limits, self._fetcher = service, readers, limits, fetcher

    async def record_of(self, fields: Mapping[str, Any]) -> ChatRequest:
        """Return the record of a chat. In its messages, a content may be a list of texts and `ImageSource`s.

        Raises InvalidRequest for an image that cannot be read, and for a model that sees none, RequestTooLarge where
        all but the images is larger than a body may be; and what `ImageReaders.read` raises.
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
        await self._service.check_sees(fields["model"])
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


def _sources_of(messages: Sequence[Message]) -> Iterator[ImageSource]:
    for message in messages:
        content = message.get("content")
        yield from (part for part in content if isinstance(part, ImageSource)) if isinstance(content, list) else ()


def _with_pixels(message: Message, pixels: Iterator[npt.NDArray[np.uint8]]) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": tuple(next(pixels) if isinstance(part, ImageSource) else part for part in content)}


def content_of(parts: Sequence[str | ImageSource]) -> str | list[str | ImageSource]:
    """Return the content of parts: their text, where none of them is an image."""
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else list(parts)
