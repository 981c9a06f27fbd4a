"""POST /v1/images/generations: OpenAI's fields and the ones that diffusion users need."""

from __future__ import annotations

import asyncio
import base64
import io
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from PIL import Image
from pydantic import field_validator
from pydantic_core import to_json
from starlette.responses import Response

from deployments.errors import InvalidRequest
from deployments.ingress.errors import INFERENCE_ERRORS, documented
from deployments.ingress.openai.answers import ImageData, ImageFormat, ImagesAnswer
from deployments.ingress.responses import call_aside, json_with_list, large_json_response, server_timing
from deployments.ingress.service import Service
from deployments.records import ImageOptions, ImageRequest, UserName, as_record


class ImagesBody(ImageOptions):
    """OpenAI's images request and more: `size` is "WIDTHxHEIGHT" or "auto"; `width` and `height` do as well."""

    size: str = "auto"
    response_format: Literal["b64_json"] = "b64_json"
    output_format: ImageFormat = "png"
    quality: Literal["auto", "standard"] = "auto"
    user: UserName | None = None

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


def create_images_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["images"])

    @router.post("/v1/images/generations", response_model=ImagesAnswer, responses=documented(*INFERENCE_ERRORS))
    async def generate(body: ImagesBody) -> Response:
        """Make images from a prompt."""
        result = await service.generate(body.to_record())
        images = await asyncio.gather(
            *(call_aside(image.nbytes, _image_json, image, body.output_format) for image in result.images)
        )
        answer = ImagesAnswer.without_data(result, body.output_format)
        write = partial(json_with_list, answer, "data", images)
        return await large_json_response(sum(map(len, images)), write, server_timing(result.timings_ms))

    return router


def encode_image(image: npt.NDArray[np.uint8], format_: ImageFormat) -> bytes:
    """Return an image, (height, width, 3) uint8, as a file of that format."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format_.upper())
    return buffer.getvalue()


def _image_json(image: npt.NDArray[np.uint8], format_: ImageFormat) -> bytes:
    data: ImageData = {"b64_json": base64.b64encode(encode_image(image, format_)).decode()}
    return to_json(data)
