"""POST /v1/images/generations: OpenAI's fields and the ones that diffusion users need."""

from __future__ import annotations

import asyncio
import base64
from functools import partial
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import Field, field_validator
from pydantic_core import to_json
from starlette.responses import Response

from deployments.errors import InvalidRequest
from deployments.ingress.errors import INFERENCE_ERRORS, documented
from deployments.ingress.openai.answers import ImageData, ImagesAnswer
from deployments.ingress.openai.image_files import ImageFormat, describe_image, encode_image
from deployments.ingress.openai.image_links import ImageLinks
from deployments.ingress.responses import call_aside, json_with_list, large_json_response, server_timing
from deployments.ingress.service import Service
from deployments.records import ImageOptions, ImageRequest, ImageResult, UserName, as_record


class ImagesBody(ImageOptions):
    """OpenAI's images request and more: `size` is "WIDTHxHEIGHT" or "auto"; `width` and `height` do as well."""

    size: str = "auto"
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: ImageFormat = "png"
    output_compression: int | None = Field(
        None, ge=0, le=100, description="quality of jpeg and webp; png loses nothing"
    )
    background: Literal["auto", "opaque"] = "auto"
    quality: Literal["auto", "standard"] = "auto"
    moderation: Literal["auto", "low"] = Field("auto", description="no image is moderated here")
    user: UserName | None = None
    safety_identifier: UserName | None = None

    @field_validator("background", mode="before")
    @classmethod
    def _is_opaque(cls, background: object) -> object:
        if background == "transparent":
            raise ValueError("diffusion models fill the whole picture; give auto or opaque, and cut it out afterwards")
        return background

    @field_validator("size")
    @classmethod
    def _is_a_size(cls, size: str) -> str:
        width, _, height = size.partition("x")
        if size != "auto" and not (width.isascii() and width.isdigit() and height.isascii() and height.isdigit()):
            raise ValueError('expected "WIDTHxHEIGHT" in pixels, such as "1024x1024", or "auto"')
        if len(size) > 16 or (size != "auto" and 0 in (int(width), int(height))):
            raise ValueError("out of range")
        return size

    def to_record(self) -> ImageRequest:
        """Return the request as the service takes it. Raises: InvalidRequest."""
        fields = {name: getattr(self, name) for name in ImageOptions.model_fields}
        if self.size != "auto":
            if self.width or self.height:
                raise InvalidRequest("size: give either size, or width and height", "size")
            width, _, height = self.size.partition("x")
            fields |= {"width": int(width), "height": int(height)}
        return as_record(ImageRequest, fields)


def create_images_router(service: Service, links: ImageLinks) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["images"])

    @router.post("/v1/images/generations", response_model=ImagesAnswer, responses=documented(*INFERENCE_ERRORS))
    async def generate(body: ImagesBody, request: Request) -> Response:
        """Make images from a prompt."""
        record = body.to_record()
        result = await service.generate(record)
        write = _ImageWriter(body, record, links, str(request.base_url))
        images = await asyncio.gather(*(write.json_of(result, index) for index in range(len(result.images))))
        answer = ImagesAnswer.without_data(result, body.output_format)
        whole = partial(json_with_list, answer, "data", images)
        return await large_json_response(sum(map(len, images)), whole, server_timing(result.timings_ms))

    return router


class _ImageWriter:
    """Writes the images of one request as its body asks for them."""

    def __init__(self, body: ImagesBody, record: ImageRequest, links: ImageLinks, base_url: str) -> None:
        self._body = body
        self._record = record
        self._links = links
        self._base_url = base_url

    async def json_of(self, result: ImageResult, index: int) -> bytes:
        """Return an item of the answer's `data`. Disks and large images are left to a thread."""
        if self._body.response_format == "url":
            return await asyncio.to_thread(self._write, result, index)
        return await call_aside(result.images[index].nbytes, self._write, result, index)

    def _write(self, result: ImageResult, index: int) -> bytes:
        body = self._body
        description = describe_image(self._record, result, index)
        file = encode_image(
            result.images[index], body.output_format, compression=body.output_compression, description=description
        )
        if body.response_format == "url":
            return to_json(ImageData(url=self._links.add(file, body.output_format, self._base_url)))
        return to_json(ImageData(b64_json=base64.b64encode(file).decode()))
